"""The program that measures what the probe costs: its logic, on the CPU and with made-up times."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from benchmarks import probe_overhead
from benchmarks.probe_overhead import Arm, arm, summary


def test_every_arm_is_run_and_a_broken_case_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "overhead.json"
    rows = probe_overhead.main(
        ["--device", "cpu", "--cases", "chain16", "chain-1", "wukong:tiny", "--modes", "eager", "--batch", "16",
         "--every", "7", "--rounds", "3", "--arms", "probe", "all", "--seconds", "1000", "--out", str(out)]
    )  # fmt: skip
    assert [(r["case"], r["arm"]) for r in rows] == [
        (case, arm) for case in ("chain16", "wukong:tiny") for arm in ("probe", "all")
    ]
    written = json.loads(out.read_text())
    assert written["rows"] == json.loads(json.dumps(rows))
    assert list(written["failed"]) == ["chain-1 eager probe", "chain-1 eager all"]
    assert {"gpu", "torch", "triton", "command"} <= set(written)
    for row in rows:
        assert row["rounds"] == 3
        assert row["steps"] == 7
        if row["arm"] == "all":  # each of three windows, every layer
            assert row["windows"] == 3
            layers = 4 if row["case"] == "chain16" else 15
            assert (row["calls_taken"], row["weights_taken"]) == (3 * layers, 3 * layers)
        assert len(row["window_extra_ms"]) == row["windows"]
        if row["arm"] == "probe":  # without grace, only what the time has earned
            assert row["calls_taken"] < 3 * 4
    for found in written["estimates"]:
        assert 0 < found["hook_us"] < 10_000
        assert found["cost_per_worker_second_low"] < found["cost_per_worker_second"]
        assert found["by_windows_budget_low"] < found["by_windows_budget"] < found["by_windows_budget_high"]
    assert [(e["case"], e["mode"]) for e in written["estimates"]] == [("chain16", "eager"), ("wukong:tiny", "eager")]
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("chain16", "wukong:tiny", "chain-1", "in the long run"))


def test_no_time_left_is_said(tmp_path: Path) -> None:
    out = tmp_path / "o.json"
    assert not probe_overhead.main(["--device", "cpu", "--cases", "chain8", "--seconds", "0", "--out", str(out)])
    written = json.loads(out.read_text())
    assert set(written["failed"].values()) == {"no time was left"}
    assert written["estimates"] == []


def test_the_overhead_is_the_mean_of_the_rounds_ratios() -> None:
    made = Arm("probe", lambda: None, None)  # type: ignore[arg-type]
    made.without.block_s, made.with_probe.block_s = [1.0, 2.0, 1.0], [1.01, 2.04, 1.03]
    made.without.step_s = [[0.1] * 10, [0.2] * 10, [0.1] * 10]
    made.with_probe.step_s = [[u] * 5 + [1.5 * u] + [u] * 4 for u in (0.1, 0.2, 0.1)]
    row = summary("c", "eager", made, None, None)
    assert row["overhead"] == pytest.approx(0.02)
    # t(0.975, 2) = 4.3027; the ratios' standard deviation is 0.01
    assert row["overhead_high"] - row["overhead"] == pytest.approx(4.3027 * 0.01 / 3**0.5, rel=1e-4)
    assert row["throughput_ratio"] == pytest.approx(1 / 1.02)
    assert row["sampled_step_ms"] == pytest.approx(150)
    assert row["worst_step_ms_with"] == pytest.approx(300)
    assert row["worst_step_ms_without"] == pytest.approx(200)
    assert row["step_ms_with"] == pytest.approx(100)
    assert row["by_halves"] == pytest.approx(0.02)
    assert row["window_extra_ms"] == []
    made.opened = [True, False, True]
    row = summary("c", "eager", made, None, None)
    assert row["window_extra_ms"] == pytest.approx([50, 50])
    # A machine that is 10 % slower while a block with the probe runs is no cost of the probe.
    made.with_probe.block_s = [1.1 * t for t in made.with_probe.block_s]
    made.with_probe.step_s = [[1.1 * s for s in block] for block in made.with_probe.step_s]
    row = summary("c", "eager", made, None, None)
    assert row["overhead"] == pytest.approx(0.122)
    assert row["by_halves"] == pytest.approx(0.02)


def test_a_block_without_the_probe_has_no_tap_and_no_tick() -> None:
    options = argparse.Namespace(device="cpu", batch=16, every=6, backend="inductor")
    with arm("all", "chain16", "eager", options) as one:
        steps, windows = one.probe.steps, one.probe.windows
        one.block(False, 6, torch.device("cpu"))
        assert (one.probe.steps, one.probe.windows, one.probe._intake.sampling) == (steps, windows, False)
        for number in (1, 2):
            one.block(True, 6, torch.device("cpu"))
            assert (one.probe.steps, one.probe.windows) == (steps + 6 * number, windows + number)
            assert not one.probe._intake.sampling, "a block must not end in a window"


@pytest.mark.parametrize("every", [6, 7])
def test_the_sampled_step_is_the_one_that_is_called_so(every: int) -> None:
    options = argparse.Namespace(device="cpu", batch=16, every=every, backend="inductor")
    with arm("all", "chain16", "eager", options) as one:
        plain, seen = one.step, []

        def step() -> None:
            seen.append(one.probe._intake.sampling)
            plain()

        one.step = step
        one.block(False, every, torch.device("cpu"))
        seen.clear()
        one.block(True, every, torch.device("cpu"))
        one.with_probe.step_s = [[1.0 + sampled for sampled in seen]]
        assert summary("c", "eager", one, None, None)["sampled_step_ms"] == 2000
