"""Concatenations in front of FP8 GEMMs are written once: where, and with which numbers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from fused_graphs import relative

from loka_compile.plan import Decision, Plan
from loka_compile.report import Report, reports

pytestmark = [pytest.mark.usefixtures("_emit_on_cpu"), pytest.mark.filterwarnings("ignore::loka_compile.ModsWarning")]


class Joined(nn.Module):
    def __init__(self, join: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.join, self.linear = join, nn.Linear(48, 64, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.linear(self.join(x, y)).relu()


def side_by_side(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([x * y, y], 1)


def trained(join: Callable[[Tensor, Tensor], Tensor], recipe: str, **options: object) -> tuple[float, Report]:
    """Relative error of the output of a training step, and the report of its compile."""
    torch.manual_seed(0)
    model = Joined(join).bfloat16()
    plan = Plan(tuple(
        Decision("linear#0", role, "torch", recipe, "test", None, None, ())
        for role in ("forward", "grad_input", "grad_weight")
    ))  # fmt: skip
    x, y = torch.randn(64, 24).bfloat16().requires_grad_(), torch.randn(64, 24).bfloat16()
    compiled = torch.compile(model, backend="loka", options={"plan": plan, "mods": "none", "inspect": True, **options})
    out = compiled(x, y)
    out.sum().backward()
    exact = (join(x.double(), y.double()) @ model.linear.weight.double().t()).relu()
    return relative(out.detach(), exact.detach()), reports()[-1]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("join", [side_by_side, lambda x, y: torch.cat([x[:, None], (x * y)[:, None]], 1).flatten(1)])
def test_a_quantised_cat_is_written_once(join: Callable[[Tensor, Tensor], Tensor], recipe: str) -> None:
    error, report = trained(join, recipe)
    assert report.graph("forward").count("loka.materialise.default(") == 1
    assert sum("written to memory before it is quantised" in line for line in report.fusions) >= 1
    assert error < 0.026 * 2**0.5 * 1.2  # two operands rounded to e4m3


@pytest.mark.parametrize(
    "join",
    [lambda x, y: torch.addcmul(y, x, y).repeat(1, 2), lambda x, y: torch.cat([x, y], 1) * torch.cat([y, x], 1)],
)
def test_nothing_else_is(join: Callable[[Tensor, Tensor], Tensor]) -> None:
    """What is made of a cat is computed where it is quantised: one more pass would be all that is won."""
    _, report = trained(join, "tensorwise")
    assert "materialise" not in report.graph("forward") + report.graph("backward")


def test_without_fusion_nothing_is() -> None:
    _, report = trained(side_by_side, "rowwise", fuse=False)
    assert "materialise" not in report.graph("forward") + report.graph("backward")


def test_a_gemm_in_high_precision_writes_it_anyway() -> None:
    torch.manual_seed(0)
    model = Joined(side_by_side).bfloat16()
    x, y = torch.randn(64, 24).bfloat16(), torch.randn(64, 24).bfloat16()
    torch.compile(model, backend="loka", options={"table": "off", "inspect": True})(x, y)
    assert "materialise" not in reports()[-1].graph("forward")
