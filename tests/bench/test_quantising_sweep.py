"""benchmarks/quantising_sweep.py on a CPU: every arm computes the layer, and a wrong one is left out."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import quantising_sweep

from loka_compile.lowering.fused import lowerings


def test_every_arm_is_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_the_cpu(make):  # type: ignore[no-untyped-def]
        return lambda *size, device=None, **more: make(*size, **more)

    monkeypatch.setattr(torch, "randn", on_the_cpu(torch.randn))
    monkeypatch.setattr(torch, "compile", lambda fn: fn)
    monkeypatch.setattr(quantising_sweep, "capture", lambda calls, warmup: [call() for call in calls])
    monkeypatch.setattr(quantising_sweep, "copies_past_l2", lambda size: 2)
    known, lines = lowerings.config_for, list[str]()
    found = quantising_sweep.graphs_of(64, 200, 256, lines.append)
    assert lines == []
    assert list(found)[:4] == ["bf16 apart", "bf16 fused", "rows", "itself, 16 rows"]
    assert len(found) == 4 + sum(1 for _ in quantising_sweep.candidates(64, 256)) - 1
    monkeypatch.setattr(quantising_sweep, "rows", lambda x, w, q, s: x @ w.t())
    found = quantising_sweep.graphs_of(64, 200, 256, lines.append)
    assert "rows" not in found
    assert "rows: AssertionError: error" in lines[0]
    assert lowerings.config_for is known


def test_parts_run_at_the_same_time() -> None:
    for m, _, n in quantising_sweep.SHAPES:
        for _, config in quantising_sweep.candidates(m, n):
            programs = -(-m // config.block_m) * -(-n // 256) * config.splits
            assert config.splits == 1 or programs <= quantising_sweep.SMS
