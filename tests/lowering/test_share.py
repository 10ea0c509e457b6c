"""Equal operators that lowering emitted become one; nobody else's do, and none that are not quite equal."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, fx

sys.path.insert(0, str(Path(__file__).parent))
from fused_graphs import targets, trace

from loka_compile.lowering.inline import _INLINED
from loka_compile.lowering.share import merge_equal

SHAPE = (8, 16)


def emitted(fn, *shapes) -> fx.GraphModule:
    gm = trace(fn, *((shape, torch.float32) for shape in shapes), device="cpu")
    for node in gm.graph.nodes:
        node.meta[_INLINED] = True
    return gm


def test_chains_that_are_equal_become_one() -> None:
    def twice(x: Tensor) -> tuple[Tensor, ...]:
        def quantised() -> Tensor:
            scale = x.abs().amax().clamp(min=1e-12) / 448.0
            return (x * scale.reciprocal()).clamp(-448.0, 448.0)

        return quantised(), quantised().t().contiguous()

    gm = emitted(twice, SHAPE)
    x = torch.randn(SHAPE)
    expected = gm(x)
    assert merge_equal(gm.graph) == 7
    gm.graph.lint()
    gm.recompile()
    assert targets(gm)["aten.amax.default"] == targets(gm)["aten.mul.Tensor"] == 1
    for got, want in zip(gm(x), expected, strict=True):
        assert torch.equal(got, want)
        assert got.stride() == want.stride()


def test_what_differs_in_anything_stays() -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x * 2, x * 2.0, y * 2, x * 0.0, x * -0.0, x.amax([0]), x.amax([1]), x.amax([1], keepdim=True)

    gm = emitted(fn, SHAPE, SHAPE)
    assert merge_equal(gm.graph) == 0


def test_random_numbers_and_writes_stay() -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        return (
            torch.rand_like(x),
            torch.rand_like(x),
            torch.ops.aten.add_.Tensor(x, 1),
            torch.ops.aten.add_.Tensor(x, 1),
        )

    gm = emitted(fn, SHAPE)
    assert merge_equal(gm.graph) == 0


def test_the_users_own_operators_stay() -> None:
    gm = trace(lambda x: (x.abs(), x.abs()), (SHAPE, torch.float32), device="cpu")
    assert merge_equal(gm.graph) == 0
