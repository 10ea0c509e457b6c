"""An input that the fused GEMM quantises itself: which it is, that the graph says the same, and that a backward which
computes the forward again has its bits. No shipped rule asks for it, so that rules stand in here."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from fused_graphs import E4M3, aten, loka, targets, trace
from test_checkpointing import Checkpointed, Layers

from loka_compile.gemm import Scaling
from loka_compile.lowering.fused import configs, gradients, grouped, inputs, joint, product
from loka_compile.lowering.fused.forward import fuse, will_fuse
from loka_compile.lowering.fused.product import choose_quantising
from loka_compile.lowering.providers import get_provider
from loka_compile.lowering.quantize import Quantized, quantize
from loka_compile.plan import Decision, Plan
from loka_compile.report import Report, reports
from tests.backend.helpers_backend import Interpreted

BF16, F32 = torch.bfloat16, torch.float32
FUSED = "loka.gemm_block_norm.default"


def by_rows(x: Tensor, scale: Tensor, w: Tensor) -> Tensor:
    """A layer whose input is quantised by rows, and whose weight was."""
    return after_rows(quantize(x, Scaling.ROWWISE), scale, w)


def twice_by_rows(x: Tensor, scale: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    q = quantize(x, Scaling.ROWWISE)
    return after_rows(q, scale, w), after_rows(q, scale * 2, w)


def doubled(q: Quantized) -> Quantized:
    """Whose scale is not the one that its numbers were made with."""
    return Quantized(q.data, q.scale * 2)


def after_rows(q: Quantized, scale: Tensor, w: Tensor) -> Tensor:
    z = aten._scaled_mm.default(q.data, w.t(), q.scale, scale, None, None, BF16, True)
    return F.hardswish(loka.block_norm(z, 256, 1e-5)[0])


QUANTISING = {
    "gemm_block_norm_quantising": [{"when": {"m": [1, 512], "itemsize": [1, 1]}, "config": {"splits": 2}}],
    "gemm_block_norm": [{"when": {"m": [513, 1024]}}],
}


def of_rows(m: int, n: int, k: int, dtype: torch.dtype = BF16) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [((m, k), dtype), ((1, n), F32), ((n, k), E4M3)]


def test_an_input_quantised_by_rows_is_quantised_by_the_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "_rules", lambda: QUANTISING)
    gm, report = trace(by_rows, *of_rows(64, 512, 448)), Report()
    norm = next(node for node in gm.graph.nodes if str(node.target) == "loka.block_norm.default")
    assert not will_fuse(norm)
    choose_quantising(gm.graph)
    assert will_fuse(norm)
    for node in gm.graph.nodes:  # by now it may be a backward that computes the forward again, from what was saved
        if node.op == "placeholder":
            node.meta["partitioner_tag"] = "is_backward"
    assert fuse(gm.graph, report) == 1
    assert "FP8 quantisation (1x128) + FP8 GEMM + BlockNorm(256) + HardSwish in one kernel" in report.fusions[0]
    assert report.fusions[0].endswith("K in 2 parts")
    found = targets(gm)
    assert found[FUSED] == 1
    assert not {t for t in found if "amax" in t or "clamp" in t}
    x, scale, _ = (n for n in gm.graph.nodes if n.op == "placeholder")
    (node,) = [n for n in gm.graph.nodes if str(n.target) == FUSED]
    assert (node.args[0], node.args[2], node.args[3]) == (x, None, scale)


@pytest.mark.parametrize(
    ("fn", "shape", "dtype"),
    [
        (by_rows, (1024, 512, 448), BF16),  # no rule
        (lambda x, s, w: after_rows(doubled(quantize(x, Scaling.ROWWISE)), s, w), (64, 512, 448), BF16),
        (by_rows, (64, 512, 448), F32),  # an input that is not in 16 bits
        (lambda x, s, w: by_rows(x * 2, s, w), (64, 512, 448), BF16),  # a kernel of the graph makes it
        (lambda x, s, w: twice_by_rows(x, s, w), (64, 512, 448), BF16),  # two GEMMs read it
    ],
)
def test_other_inputs_are_quantised_in_front_of_the_gemm(
    fn: Any, shape: tuple[int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = {**QUANTISING, "gemm_block_norm": [{}]}
    monkeypatch.setattr(configs, "_rules", lambda: rules)
    gm = trace(fn, *of_rows(*shape, dtype))
    choose_quantising(gm.graph)
    assert fuse(gm.graph, Report()) >= 1
    for node in [n for n in gm.graph.nodes if str(n.target) == FUSED]:
        assert node.args[0].meta["val"].dtype == E4M3
        assert node.args[2] is not None


def test_a_gemm_that_quantises_is_at_least_as_accurate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales of blocks instead of rows: smaller values lose less. Against the layer in fp64, whose weight is FP8."""
    monkeypatch.setattr(product, "on_this_device", lambda value: "")
    monkeypatch.setattr(configs, "_rules", lambda: QUANTISING)
    for m, n, k in ((37, 640, 448), (3, 384, 13), (16, 256, 1000)):
        before, after = (trace(by_rows, *of_rows(m, n, k), device="cpu") for _ in range(2))
        choose_quantising(after.graph)
        assert fuse(after.graph, Report()) == 1
        after.recompile()
        x = (torch.randn(m, k) * torch.logspace(-4, 2, m)[:, None] * torch.randn(k).exp() ** 3).to(BF16)
        w, scale = (torch.randn(n, k) * 4).to(E4M3), torch.rand(1, n) + 0.5
        z = (x.double() @ (w.double() * scale.double().t()).t()).split(256, 1)
        y = torch.cat([p * torch.rsqrt(p.square().mean(1, keepdim=True) + 1e-5) for p in z], 1)
        expected = F.hardswish(y)
        errors = [((fn(x, scale, w).double() - expected).norm() / expected.norm()).item() for fn in (after, before)]
        assert errors[0] < 1.02 * errors[1] < 0.05


@pytest.mark.filterwarnings("ignore::loka_compile.ModsWarning")
def test_the_backend_and_what_it_computes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer's GEMM, in the forward and where the backward computes it again, and no other: the input of the
    second is given to that backward as well."""
    provider = get_provider("torch")
    if reason := provider.supported(provider.recipe("rowwise"), "cpu"):
        pytest.skip(reason)
    for module in (product, gradients, grouped, inputs, joint):
        monkeypatch.setattr(module, "on_this_device", lambda value: "")
    rules = {**configs._rules(), "gemm_block_norm_quantising": [{}]}
    monkeypatch.setattr(configs, "_rules", lambda: rules)
    Interpreted().install(monkeypatch)
    torch.manual_seed(0)
    plain = Layers().bfloat16()
    recomputed = copy.deepcopy(plain)
    recomputed.__class__ = Checkpointed
    x, grad = torch.randn(64, 256).bfloat16(), torch.randn(64, 256).bfloat16() / 64
    plan = Plan([Decision(f"linears.{i}#0", "forward", "torch", "rowwise") for i in range(3)])
    found = []
    for model, times in ((plain, 1), (recomputed, 2)):
        torch._dynamo.reset()
        out = torch.compile(model, backend="loka", options={"plan": plan, "inspect": True})(x)
        out.backward(grad)
        said = reports()[-1].fusions
        assert sum("FP8 quantisation (1x128) + FP8 GEMM + BlockNorm(256)" in line for line in said) == times, said
        assert sum("FP8 GEMM + BlockNorm(256)" in line for line in said) == 3 * times, said
        found.append([out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(found[0]) > 3
    for again, first in zip(found[1], found[0], strict=True):
        assert torch.equal(again, first)
