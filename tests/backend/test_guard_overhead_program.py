"""The program that measures what the drift guard costs: its logic, on the CPU."""

import json

from benchmarks import guard_overhead


def test_both_runs_take_turns_and_a_broken_case_is_reported(tmp_path, no_codegen):
    out = tmp_path / "deep" / "guard.json"
    rows = guard_overhead.main(
        ["--device", "cpu", "--cases", "chain32", "chain-1", "--batch", "32", "--every", "7", "--rounds", "3",
         "--target", "h200", "--max-mere", "1e3", "--min-speedup", "1e-3", "--seconds", "1000", "--out", str(out)]
    )  # fmt: skip
    (row,) = rows
    assert (row["case"], row["rounds"], row["departed"]) == ("chain32", 3, [])
    assert row["looks"] <= 3  # as many as tiny steps have earned
    assert row["gemms"] >= 8
    assert row["overhead_low"] <= row["overhead"] <= row["overhead_high"]
    assert all(limit == 1e3 and live < 1e3 for live, _, limit in row["errors"].values())
    written = json.loads(out.read_text())
    assert list(written["failed"]) == ["chain-1"]
    assert {"gpu", "torch", "triton", "command"} <= set(written)


def test_nothing_to_guard_is_said(tmp_path, no_codegen):
    out = tmp_path / "guard.json"
    assert not guard_overhead.main(["--device", "cpu", "--cases", "chain16", "--batch", "16", "--out", str(out)])
    assert "nothing to guard" in json.loads(out.read_text())["failed"]["chain16"]
