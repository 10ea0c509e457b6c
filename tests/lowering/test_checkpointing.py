"""Activation checkpointing with FP8: what is recomputed has the bits of what was computed, and FP8 is what is kept."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from loka_compile.lowering.fused import gradients, grouped, inputs, joint, product
from loka_compile.lowering.providers import get_provider
from loka_compile.plan import Decision, Plan
from loka_compile.report import reports
from tests.backend.helpers_backend import Interpreted

pytestmark = pytest.mark.filterwarnings("ignore::loka_compile.ModsWarning")


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(256, 256) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(256) for _ in range(3))

    def layer(self, index: int, x: Tensor) -> Tensor:
        return F.silu(self.norms[index](self.linears[index](x)))

    def forward(self, x: Tensor) -> Tensor:
        for index in range(3):
            x = self.layer(index, x)
        return x


class Checkpointed(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for index in range(3):
            x = checkpoint(lambda x, index=index: self.layer(index, x), x, use_reentrant=False)
        return x


def gradients_of(model: nn.Module, x: Tensor, grad: Tensor, recipe: str) -> tuple[Tensor, dict[str, Tensor], str]:
    decisions = [
        Decision(f"linears.{i}#0", role, "torch", recipe)
        for i in range(3)
        for role in ("forward", "grad_input", "grad_weight")
    ]
    torch._dynamo.reset()
    out = torch.compile(model, backend="loka", options={"plan": Plan(decisions), "inspect": True})(x)
    out.backward(grad)
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return out.detach(), found, reports()[-1].graph("backward")


# How products are summed is an argument of the same operators: fast accumulation once.
@pytest.mark.parametrize(
    ("recipe", "fused", "batch"),
    [("tensorwise", fused, batch) for fused in (False, True) for batch in ((64,), (4, 16))]
    + [("tensorwise_fast", True, (64,))],
)
def test_recomputing_changes_no_bit(
    recipe: str, fused: bool, batch: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = get_provider("torch")
    if reason := provider.supported(provider.recipe(recipe), "cpu"):
        pytest.skip(reason)
    if fused:  # Emit the operators; on a CPU Inductor calls their twins.
        for module in (product, gradients, grouped, inputs, joint):
            monkeypatch.setattr(module, "on_this_device", lambda value: "")
    # Which bits are kept is decided before code generation; generated C++, which takes long, runs fused and plain once.
    if (recipe, len(batch)) != ("tensorwise_fast" if fused else "tensorwise", 1 if fused else 2):
        Interpreted().install(monkeypatch)
    torch.manual_seed(0)
    plain = Layers().bfloat16()
    recomputed = copy.deepcopy(plain)
    recomputed.__class__ = Checkpointed
    x, grad = torch.randn(*batch, 256).bfloat16(), torch.randn(*batch, 256).bfloat16() / 64
    out, expected, _ = gradients_of(plain, x, grad, recipe)
    again, found, code = gradients_of(recomputed, x, grad, recipe)
    assert torch.equal(again, out)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name]), name
    arguments = code.split("def forward")[1].split("\n")[0]
    # Kept are the operands of the second and third layer in FP8; in bf16 there are the input and the gradient alone.
    assert arguments.count('"f8e4m3fn[64, 256]"') == 2
    assert arguments.count(f'"bf16[{", ".join(map(str, (*batch, 256)))}]"') == 2
