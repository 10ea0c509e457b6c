"""The grad_weight GEMMs of narrow layers in one launch: what is put together, and what is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from fused_graphs import E4M3, aten, fp8_linear, relative, targets, trace
from test_fused_models import FP8, fp64_gradients, layers, plan_of

from loka_compile.lowering.fused import grouped
from loka_compile.lowering.fused.match import sort_topologically
from loka_compile.report import Report, reports

BF16, F32 = torch.bfloat16, torch.float32


@pytest.mark.usefixtures("_emit_on_cpu")
def test_grad_weights_of_one_shape_are_one_launch() -> None:
    def weights(a: Tensor, b: Tensor, c: Tensor, sa: Tensor, sb: Tensor) -> tuple[Tensor, ...]:
        first, second = fp8_linear(a, b, sa, sb), fp8_linear(b, a, sb, sb).view(64, 64)
        other = fp8_linear(a, c, sa, sb)  # another shape
        read = fp8_linear(a, a, sa, sa)  # read by a further product
        return first, second.to(F32), other, aten.mm(read, first)

    shapes = ((64, 128), E4M3), ((64, 128), E4M3), ((32, 128), E4M3), ((), F32), ((), F32)
    gm, report = trace(weights, *shapes, device="cpu"), Report()
    assert grouped.group_grad_weights(gm.graph, report) == 0  # not of a backward
    for node in gm.graph.nodes:
        node.meta["partitioner_tag"] = "is_backward"
    assert grouped.group_grad_weights(gm.graph, report) == 0  # first is read by the last product
    gm.graph.output_node().args = (tuple(gm.graph.output_node().args[0][:3]),)
    gm.graph.eliminate_dead_code()
    assert grouped.group_grad_weights(gm.graph, report) == 1
    sort_topologically(gm.graph)
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    found = targets(gm)
    assert (found["loka.grouped_scaled_mm.default"], found["aten._scaled_mm.default"]) == (1, 1)
    assert report.fusions == ["2 grad_weight GEMMs of 64x64x128 in one launch"]
    gm.recompile()
    a, b, c = (torch.randn(n, 128).to(E4M3) for n in (64, 64, 32))
    results = gm(a, b, c, torch.tensor(0.5), torch.tensor(2.0))
    assert [r.dtype for r in results] == [BF16, F32, BF16]
    assert relative(results[0], a.double() @ b.double().t()) < 4e-3
    assert relative(results[1], 4 * b.double() @ a.double().t()) < 4e-3


@pytest.mark.usefixtures("_emit_on_cpu")
@pytest.mark.filterwarnings("ignore::loka_compile.ModsWarning")
def test_a_padded_batch_is_in_no_group() -> None:
    """Its operands are Inductor's, which keeps no strides for a list:
    on an H200 a grad_weight was wrong by a factor."""
    torch.manual_seed(0)
    model = layers(512)
    x, grad = torch.randn(199, 512).bfloat16(), torch.randn(199, 512).bfloat16() / 64
    _, gradients = fp64_gradients(model, x, grad)
    torch.compile(model, backend="loka", options={"plan": plan_of(model, FP8, FP8)})(x).backward(grad)
    assert not [line for line in reports()[-1].fusions if "in one launch" in line]
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            assert relative(parameter.grad, gradients[name]) < 0.026 * 10**0.5 * 1.5
