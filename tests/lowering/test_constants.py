"""Fixed scales that GEMMs read are held by the compiled graph."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from fused_graphs import E4M3, fp8_linear, targets, trace

from loka_compile.lowering import constants
from loka_compile.lowering.constants import hold_constants
from loka_compile.lowering.fused import lowerings
from loka_compile.plan import Decision, Plan
from loka_compile.report import reports

loka = torch.ops.loka
F32 = torch.float32
OPERANDS = ((32, 64), E4M3), ((16, 64), E4M3), ((), F32)


def sixteenth(x: Tensor) -> Tensor:
    return torch.full((), 1 / 16, dtype=F32, device=x.device)


def test_what_a_gemm_reads_is_held_and_what_others_read_is_a_number() -> None:
    def both(x: Tensor, w: Tensor, sw: Tensor) -> tuple[Tensor, Tensor]:
        scale = sixteenth(x)
        return fp8_linear(x, w, scale, sw), x.float() * scale

    gm = trace(both, *OPERANDS)
    assert hold_constants(gm.graph) == 1
    gm.graph.lint()
    found = targets(gm)
    assert found["loka.constant.default"] == 1
    assert found["aten.full.default"] == 1
    (constant,) = [n for n in gm.graph.nodes if n.target is loka.constant.default]
    assert constant.args == (1 / 16, torch.device("cuda:0"))
    assert [str(user.target) for user in constant.users] == ["aten._scaled_mm.default"]
    (full,) = [n for n in gm.graph.nodes if n.target is torch.ops.aten.full.default]
    assert [str(user.target) for user in full.users] == ["aten.mul.Tensor"]


def test_nothing_of_the_number_is_left_where_only_gemms_read_it() -> None:
    gm = trace(lambda x, w, sw: fp8_linear(x, w, sixteenth(x), sw), *OPERANDS)
    assert hold_constants(gm.graph) == 1
    assert targets(gm)["aten.full.default"] == 0


def test_what_a_graph_returns_is_made_in_each_call() -> None:
    gm = trace(lambda x: (sixteenth(x), x), ((4,), F32))
    assert hold_constants(gm.graph) == 0
    assert targets(gm)["aten.full.default"] == 1


@pytest.mark.parametrize("size", [(1,), (3,)])
def test_only_numbers(size: tuple[int, ...]) -> None:
    def read(x: Tensor, w: Tensor, sw: Tensor) -> Tensor:
        return fp8_linear(x, w, torch.full(size, 2.0, device=x.device).sum(), sw)

    assert hold_constants(trace(read, *OPERANDS).graph) == 0


def test_a_cpu_writes_a_number_for_nothing() -> None:
    gm = trace(lambda x, w, sw: fp8_linear(x, w, sixteenth(x), sw), *OPERANDS, device="cpu")
    assert hold_constants(gm.graph) == 0


class Chain(nn.Module):
    """Three layers, as they are or in a branch."""

    def __init__(self, in_branch: bool) -> None:
        super().__init__()
        parts = [m for _ in range(3) for m in (nn.Linear(256, 256), nn.LayerNorm(256), nn.SiLU())]
        self.layers, self.in_branch = nn.Sequential(*parts), in_branch

    def forward(self, x: Tensor) -> Tensor:
        if self.in_branch:
            return torch.cond(x.sum() > -1e9, self.layers, lambda x: x * 1.0, (x,))
        return self.layers(x)


@pytest.mark.parametrize("in_branch", [False, True])
@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16])
def test_whatever_the_default_dtype_and_in_a_branch(
    in_branch: bool, default: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales are fp32, or torch's GEMM refuses them; and there, where torch 2.11 to 2.13 forgot them."""
    monkeypatch.setattr(constants, "on_this_device", lambda value: "")
    torch.manual_seed(0)
    model, x = Chain(in_branch).bfloat16().eval().requires_grad_(False), torch.randn(64, 256, dtype=torch.bfloat16)
    sites = [f"layers.{i}#0" for i in (0, 3, 6)]
    options = {"plan": Plan([Decision(site, "forward", "torch", "tensorwise") for site in sites]), "inspect": True}
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        with torch.no_grad():
            found = torch.compile(model, backend="loka", options=options)(x)
    finally:
        torch.set_default_dtype(before)
    assert in_branch or "loka.constant" in reports()[-1].graph("forward")
    h = x.double()
    for layer in model.layers:
        if isinstance(layer, nn.Linear):
            z = h @ layer.weight.double().t()
            h = F.hardswish(z / (z.square().mean(1, keepdim=True) + 1e-5).sqrt())
    assert ((found.double() - h).norm() / h.norm()).item() < 0.12  # three layers; tests/test_gpu_backend.py says why


@pytest.mark.parametrize("cached", [False, True])
def test_compiled_code_has_its_own_value_from_the_cache_too(cached: bool) -> None:
    lowerings.register()
    x = torch.randn(5)

    def fn(x: Tensor, value: float) -> tuple[Tensor, Tensor]:
        return x * loka.constant(value, x.device), x + loka.constant(0.25, x.device) + loka.constant(0.25, x.device)

    for value in (0.5, 3.0, 0.5):
        torch._dynamo.reset()
        found = torch.compile(fn, dynamic=False, options={"fx_graph_cache": cached})(x, value)
        torch.testing.assert_close(found[0], x * value, rtol=0, atol=0)
        torch.testing.assert_close(found[1], x + 0.5)
