"""FP8 activations that the backward reads transposed: what the forward keeps, and the numbers."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parent))
from fused_graphs import relative

from loka_compile.plan import Decision, Plan
from loka_compile.report import Report, reports

pytestmark = [pytest.mark.usefixtures("_emit_on_cpu"), pytest.mark.filterwarnings("ignore::loka_compile.ModsWarning")]

#: One e4m3 rounding is 2.6 % of a value on average.
ROUNDING = 0.026


class NormFirst(nn.Module):
    """linear(norm(x)): nothing of ours computes the norm, so nothing of ours writes the GEMM's operand."""

    def __init__(self, n: int, k: int, checkpointed: bool = False) -> None:
        super().__init__()
        self.norm, self.linear, self.checkpointed = nn.LayerNorm(k), nn.Linear(k, n, bias=False), checkpointed

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed:
            return checkpoint(lambda x: self.linear(self.norm(x)), x, use_reentrant=False)
        return self.linear(self.norm(x))


def trained(model: nn.Module, x: Tensor, grad: Tensor, recipe: str, **options: object) -> Report:
    """One step under a plan that sends every GEMM to ``recipe``."""
    decisions = [Decision("linear#0", r, "torch", recipe, "test", None, None, ()) for r in
                 ("forward", "grad_input", "grad_weight")]  # fmt: skip
    options = {"plan": Plan(tuple(decisions)), "mods": "none", "inspect": True, **options}
    torch.compile(model, backend="loka", options=options)(x).backward(grad)
    return reports()[-1]


def halves(report: Report) -> tuple[str, str]:
    """What the backward is given, and what it does."""
    given, _, body = report.graph("backward").partition("def forward(")[2].partition("):")
    return given, body


@pytest.mark.parametrize(("m", "n", "k"), [(64, 48, 32), (32, 16, 400), (208, 64, 48)])
def test_the_forwards_operand_is_turned_and_kept(m: int, n: int, k: int) -> None:
    torch.manual_seed(0)
    model = NormFirst(n, k).bfloat16()
    x, grad = torch.randn(m, k).bfloat16(), torch.randn(m, n).bfloat16()
    exact = copy.deepcopy(model).double()
    exact(x.double()).backward(grad.double())
    report = trained(model, x, grad, "tensorwise")
    assert any("1 FP8 activations turned for the backward" in line for line in report.fusions)
    assert report.graph("forward").count("loka.turn_fp8.default(") == 1
    # The backward is given what was turned, a view of it, and quantises no activation again.
    given, body = halves(report)
    assert f'f8e4m3fn[{m}, {k}]"' in given
    assert f'f8e4m3fn[{m}, {k}]" = torch.ops.prims' not in body
    # Two operands are rounded, and the result to bf16.
    assert relative(model.linear.weight.grad, exact.linear.weight.grad) < ROUNDING * 2**0.5 * 1.2
    assert relative(model.norm.weight.grad, exact.norm.weight.grad) < ROUNDING * 2**0.5 * 1.5


def test_operands_with_a_scale_per_row_are_not_turned() -> None:
    """The transpose has a scale per column: other values."""
    model = NormFirst(48, 32).bfloat16()
    report = trained(model, torch.randn(64, 32).bfloat16(), torch.randn(64, 48).bfloat16(), "rowwise")
    assert "turn_fp8" not in report.graph("joint")
    assert not any("turned for" in line for line in report.fusions)


def test_without_fusion_nothing_is_turned() -> None:
    model = NormFirst(48, 32).bfloat16()
    report = trained(model, torch.randn(64, 32).bfloat16(), torch.randn(64, 48).bfloat16(), "tensorwise", fuse=False)
    assert "turn_fp8" not in report.graph("joint")


def test_a_checkpointed_operand_is_not_kept() -> None:
    """It is what the user asked to compute again; turned it is all the same, with the same gradients."""
    torch.manual_seed(0)
    plain, again = NormFirst(48, 32).bfloat16(), NormFirst(48, 32, checkpointed=True).bfloat16()
    again.load_state_dict(plain.state_dict())
    x, grad = torch.randn(64, 32).bfloat16(), torch.randn(64, 48).bfloat16()
    trained(plain, x, grad, "tensorwise")
    report = trained(again, x, grad, "tensorwise")
    assert "f8e4m3fn" not in halves(report)[0].replace("f8e4m3fn[32, 48]", "")  # the weight
    assert report.graph("backward").count("loka.turn_fp8.default(") == 1
    assert torch.equal(plain.linear.weight.grad, again.linear.weight.grad)


def test_what_several_products_read_is_turned_once() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(32)
            self.linear, self.other = nn.Linear(32, 48, bias=False), nn.Linear(32, 64, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(x)
            return torch.cat([self.linear(h), self.other(h)], 1)

    model = Two().bfloat16()
    plan = Plan(tuple(
        Decision(f"{site}#0", role, "torch", "tensorwise", "test", None, None, ())
        for site in ("linear", "other") for role in ("forward", "grad_input", "grad_weight")
    ))  # fmt: skip
    x = torch.randn(64, 32).bfloat16()
    torch.compile(model, backend="loka", options={"plan": plan, "mods": "none", "inspect": True})(x).sum().backward()
    assert reports()[-1].graph("forward").count("loka.turn_fp8.default(") == 1
    exact = F.layer_norm(x.double(), (32,)).sum(0)
    for layer in (model.linear, model.other):
        assert relative(layer.weight.grad, exact.expand(layer.weight.shape)) < 0.2  # sums of both signs
