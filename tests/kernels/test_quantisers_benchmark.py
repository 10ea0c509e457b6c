"""The arithmetic of the quantisers' benchmark, and that every arm runs: on a CPU, with a pretended clock."""

from __future__ import annotations

import json
import sys
import weakref
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import quantisers

from loka_compile.gemm import Scaling
from loka_compile.lowering import quantize_op


def timer(arms):
    for calls in arms.values():
        calls[0]()
    return dict.fromkeys(arms, 10.0)


@pytest.mark.parametrize("output", quantisers.OUTPUTS)
@pytest.mark.parametrize("scaling", quantisers.SCALINGS)
def test_every_arm_runs(scaling, output, monkeypatch):
    monkeypatch.setattr(quantisers, "launch_quantize_fp8", quantize_op.quantize_fp8_ref)
    monkeypatch.setattr(quantisers, "copies_past_l2", lambda *_, **__: 2)
    row = quantisers.one(256, 384, scaling, output, timer, copy_gbs=100.0, device="cpu")
    # 10 us at 100 GB/s are a million bytes.
    assert row["triton_of_copy"] == pytest.approx(row["bytes"] / 1e6)
    assert "10.0 us" in quantisers.line(row)


def test_bytes():
    size = 256 * 384
    assert quantisers.moved(256, 384, Scaling.BLOCK_1X128, "x") == size * 3 + 4 * 256 * 3
    assert quantisers.moved(256, 384, Scaling.BLOCK_1X128, "x.T") == size * 3 + 4 * 384 * 2
    assert quantisers.moved(256, 384, Scaling.TENSORWISE, "both") == size * 6 + 8
    assert quantisers.moved(256, 384, Scaling.ROWWISE, "x") == size * 3 + 4 * 256
    assert quantisers.moved(256, 384, Scaling.ROWWISE, "x.T") == size * 5 + 4 * 384
    assert quantisers.moved(256, 384, Scaling.BLOCK_128X128, "both") == size * 4 + 8 * 6


def test_bandwidth_of_a_copy(monkeypatch):
    monkeypatch.setattr(quantisers, "copies_past_l2", lambda *_, **__: 2)
    # 4 bytes for each of 250,000 elements in 10 us.
    assert quantisers.copy_bandwidth(500, 500, timer, device="cpu") == pytest.approx(100.0)


def test_every_input_keeps_its_own_result():
    """Each result lives until its input is quantised again, so no two can share memory."""
    alive = []

    def call(x):
        result = x + 1
        alive.append(weakref.ref(result))
        return result

    calls = quantisers.keeping(call, [torch.zeros(3), torch.ones(3)])
    for run in calls * 2:
        run()
    assert [ref() is not None for ref in alive] == [False, False, True, True]


def test_table(capsys, tmp_path):
    rows = [
        {"m": m, "n": 4096, "scaling": "rowwise", "output": "x.T", "triton_of_copy": share, **more}
        for m, share, more in ((4096, 0.951, {}), (8192, 0.9, {}), (1024, 0.1, {}), (4096, 0.2, {"inductor_us": 1.0}))
    ]
    file = tmp_path / "quantisers.json"
    file.write_text(json.dumps({"rows": rows}))
    quantisers.main(["--table", str(file)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert "| rowwise | not measured | 90 to 95 % | not measured |" in lines
    with pytest.raises(SystemExit):
        quantisers.main([])
