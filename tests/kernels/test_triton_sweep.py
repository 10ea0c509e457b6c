"""The sweep's logic on a CPU: broken and wrong arms are named and left out, the fastest right one is shipped."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import triton_sweep as sweep

from loka_compile.kernels.config import GemmConfig
from loka_compile.lowering.providers import triton_configs
from loka_compile.lowering.providers.triton_gemm import TritonGemm


def pretend(broken: str, wrong: str) -> Any:
    def ours(t: dict[str, Any], config: GemmConfig) -> torch.Tensor:
        if sweep.short(config).startswith(broken):
            raise RuntimeError("out of resource: shared memory")
        out = sweep.reference(t)
        return out * 1.1 if sweep.short(config).startswith(wrong) else out

    return ours


def timer(arms: dict[str, Any]) -> dict[str, float]:
    for calls in arms.values():
        calls[0]()
    return {name: 100.0 - i for i, name in enumerate(arms)}


@pytest.mark.parametrize("mode", sweep.MODES)
def test_sweep(mode: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    m, n, k = 64, 256, 2048
    wrong, broken = "64x128", "128x128"
    monkeypatch.setattr(sweep, "ours", pretend(broken, wrong))
    row = sweep.sweep_shape(mode, (m, n, k), 132, timer, device="cpu")
    names = [sweep.short(c) for c in sweep.candidates(mode, m, n, k, 132)]
    assert any(name.startswith(wrong) for name in names)
    for name in names:
        if name.startswith((wrong, broken)):
            assert ("relative error 0.1" if name.startswith(wrong) else "out of resource") in row["broken"][name]
            assert name not in row["times_us"]
        else:
            assert name in row["times_us"]
    ours = {name: us for name, us in row["times_us"].items() if name != "torch"}
    assert row["us"] == min(ours.values()) == ours[row["best"]]
    data = sweep.points([row], {"gpu": "NVIDIA H200"}, "the command")
    path = tmp_path / "points.json"
    path.write_text(json.dumps(data))
    found = triton_configs.config_for(mode, m + 1, n, k, 132, path)
    assert sweep.short(found) == row["best"]
    alike = {"rowwise_fast": "tensorwise_fast", "rowwise": "tensorwise", "blockwise": "blockwise_128x128"}[mode]
    assert triton_configs.config_for(alike, m, n, k, 132, path) == found
    assert mode in sweep.line(row)


@pytest.mark.parametrize("mode", sweep.MODES)
def test_every_candidate_fits_and_a_narrow_output_is_cut(mode: str) -> None:
    for shape in sweep.SHAPES:
        found = list(sweep.candidates(mode, *shape, 132))
        assert found
        for c in found:
            assert c.stages * (c.block_m + c.block_n) * c.block_k <= 227 * 1024
    cuts = {c.splits for c in sweep.candidates(mode, 1024, 256, 7680, 132)}
    assert cuts >= {1, 4}


def test_shapes_are_the_27_and_one_more() -> None:
    assert len(set(sweep.SHAPES)) == len(sweep.SHAPES) == 28


@pytest.mark.parametrize("recipe", TritonGemm.recipes)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 13), (2048, 384, 479), (1024, 256, 7680), (8192, 8192, 8192)])
def test_there_is_a_shipped_configuration_for_every_shape(recipe: str, m: int, n: int, k: int) -> None:
    config = triton_configs.config_for(recipe, m, n, k, 132)
    assert config.stages * (config.block_m + config.block_n) * config.block_k <= 227 * 1024
    assert config.splits == 1 or config.splits * -(-m // config.block_m) * -(-n // config.block_n) <= 132


def test_a_point_counts_for_its_mode_and_near_shapes_only() -> None:
    config = {"block_m": 64, "block_n": 64}
    points = [
        {"mode": "rowwise", "m": 1024, "n": 256, "k": 4096, "config": config},
        {"mode": "rowwise", "m": 4096, "n": 256, "k": 4096, "config": {}},
    ]
    nearest = triton_configs.nearest
    assert nearest(points, "rowwise", 1100, 256, 8192)["config"] is config
    assert nearest(points, "rowwise", 2900, 256, 4096) is points[1]
    assert nearest(points, "rowwise", 1024, 256, 8193) is None
    assert nearest(points, "blockwise", 1024, 256, 4096) is None
    assert nearest([], "rowwise", 1, 1, 1) is None
