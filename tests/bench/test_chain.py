"""benchmarks/chain.py without a GPU: what it writes, when it stops, and that a broken arm does not end it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import chain
import compile_times
import figure13

US = {"original": 40.0, "no bias": 40.0, "BlockNorm": 50.0, "HardSwish": 25.0,
      "FP8 + fusion, tensorwise": 30.0, "FP8 + fusion, rowwise": 20.0, "fusion alone": 22.0}  # fmt: skip


def test_contributions_stack_up_to_the_whole() -> None:
    parts = figure13.contributions(US)
    assert list(parts) == ["no bias", "BlockNorm", "HardSwish", "FP8 + fusion"]
    assert parts == pytest.approx({"no bias": 0.0, "BlockNorm": -0.2, "HardSwish": 0.8, "FP8 + fusion": 0.4})
    assert 1 + sum(parts.values()) == pytest.approx(40 / 20)


def test_figure_13_is_written_pair_by_pair_and_plotted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def pair(k: int, n: int) -> dict[str, float]:
        if k == 4096:
            raise RuntimeError("no kernel")
        return US

    monkeypatch.setattr(figure13, "pair", pair)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    chain.main(["--only", "fig13", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "chain.json").read_text())
    assert len(found["fig13"]) == len(figure13.PAIRS) - 2
    assert (tmp_path / "figure13.png").stat().st_size > 5000
    late = tmp_path / "late"
    chain.main(["--only", "fig13", "--out", str(late), "--seconds", "0"])
    assert json.loads((late / "chain.json").read_text())["fig13"] == []


def test_the_pairs_are_the_papers() -> None:
    assert len(set(figure13.PAIRS)) == 9
    assert {(256, 256), (7680, 256), (256, 7680)} <= set(figure13.PAIRS)


def test_a_broken_arm_is_noted_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def arms(model: torch.nn.Module, *_: Any) -> dict[str, Any]:
        return {"A": lambda: model, "B": lambda: model, "C": lambda: 1 / 0, "E": lambda: model}

    monkeypatch.setattr(chain, "arms", arms)
    for name, value in {"synchronize": None, "reset_peak_memory_stats": None, "empty_cache": None,
                        "memory_allocated": 0, "max_memory_allocated": 2**21}.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(chain, "capture", lambda steps: [step() for step in steps])
    monkeypatch.setattr(chain, "measure_graphs", lambda calls, rounds: dict.fromkeys(calls, 7.0))
    monkeypatch.setattr(chain, "LAYERS", 1)
    chain.main(["--only", "inference", "--only", "training", "--widths", "16", "--out", str(tmp_path)])
    cases = json.loads((tmp_path / "chain.json").read_text())["cases"]
    assert [case["case"] for case in cases] == ["inference 4096x16", "training 4096x16"]
    for case in cases:
        assert case["us"] == {"A": 7.0, "B": 7.0, "E": 7.0}
        assert "ZeroDivisionError" in case["extra"]["C"]["error"]
        assert case["extra"]["E"] == {
            "first_call_s": case["extra"]["E"]["first_call_s"],
            "peak_mb": 2.0,
            "output_vs_B": 0.0,
        }


def test_compile_times_are_of_processes_with_the_same_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the first two of each arm, which write the bytecode that all read, have other caches and no say."""
    started: list[tuple[str, Path, Path]] = []

    def start(arm: str, batch: int, width: int, layers: int, caches: Path, bytecode: Path) -> subprocess.Popen[str]:
        started.append((arm, caches, bytecode))
        broken = arm == "E" and len(started) == 8
        code = "raise SystemExit('broken')" if broken else f"print('noise'); print({11 - len(started)}.5)"
        return subprocess.Popen([sys.executable, "-c", code], stdout=-1, stderr=-1, text=True)

    monkeypatch.setattr(compile_times, "_start", start)
    with pytest.raises(RuntimeError, match="E warm: broken"):
        compile_times.measure()
    assert [arm for arm, *_ in started] == ["A", "E"] * 4
    assert len({bytecode for *_, bytecode in started}) == 1
    folders = [caches for _, caches, _ in started]
    assert folders[:2] == folders[2:4]
    assert folders[4:6] == folders[6:]
    assert len(set(folders)) == 4
    started.clear()
    monkeypatch.setattr(compile_times, "ARMS", {"A": "A"})
    found = compile_times.measure()
    assert found == {"A": {"cold": [8.5], "warm": [7.5, 6.5, 5.5, 4.5, 3.5, 2.5, 1.5]}}
    assert compile_times.medians(found) == {"A": {"cold": 8.5, "warm": 4.5}}


def test_caches_are_filled_by_processes_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(chain, "prewarm", lambda commands, processes, seconds: asked.extend(commands) or len(commands))
    monkeypatch.setattr(chain.Run, "cases", lambda self: None)
    monkeypatch.setenv("TORCHINDUCTOR_FX_GRAPH_CACHE", "0")
    chain.main(["--only", "training", "--widths", "512", "--arms", "A", "A'", "C", "--torchao", "rowwise", "tensorwise",
                "--large", "--prewarm", "3", "--out", str(tmp_path)])  # fmt: skip
    assert [command[2:] for command in asked] == [
        ["--compile-only", "--only", "training", *which, *arm]
        for which in (["--widths", "512"], ["--widths", "--large"])
        for arm in (
            ["--arms", "A"],
            ["--arms", "C", "--torchao", "rowwise"],
            ["--arms", "C", "--torchao", "tensorwise"],
        )
    ]


def test_prewarm_counts_what_ended_well_and_keeps_to_its_time() -> None:
    from prewarm import prewarm

    python = [sys.executable, "-c"]
    assert prewarm([[*python, "pass"], [*python, "raise SystemExit(1)"], [*python, "pass"]], 2, 20.0) == 2
    start = time.monotonic()
    assert prewarm([[*python, "import time; time.sleep(30)"]] * 3, 2, 0.5) == 0
    assert time.monotonic() - start < 5
