"""What stands between FP8 GEMMs of a recommendation model, together: layers over tokens, a norm, a concatenation.

On a GPU the kernels that a fused graph calls; on a CPU their twins.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from loka_compile.plan import Decision, Plan
from loka_compile.report import reports

N, D = 24, 32


class Layer(nn.Module):
    """Tokens [B, 24, 32] -> [B, 64]: mixed, normalised and flattened beside a projection of them."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.project = nn.Linear(N, N, bias=False), nn.Linear(N, 4, bias=False)
        self.norm, self.first = nn.LayerNorm(4 * N), nn.Linear(4 * N, 64, bias=False)
        self.second = nn.Linear(N * D + 64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.bmm(x, self.project(x.mT)).flatten(1)
        left = self.first(self.norm(inner))
        mixed = self.mix(x.mT).mT + x
        return self.second(torch.cat([mixed.flatten(1), left.tanh()], 1))


def check(device: str, batch: int) -> None:
    """Output and gradients of a step in FP8 against fp64."""
    torch.manual_seed(0)
    model = Layer().to(device, torch.bfloat16)
    exact = copy.deepcopy(model).double()
    x = torch.randn(batch, N, D, device=device).bfloat16().requires_grad_()
    wide = x.detach().double().requires_grad_()
    plan = Plan(tuple(
        Decision(f"{site}#0", role, "torch", "tensorwise", "test", None, None, ())
        for site in ("first", "second") for role in ("forward", "grad_input", "grad_weight")
    ))  # fmt: skip
    out = torch.compile(model, backend="loka", options={"plan": plan, "mods": "none"}, fullgraph=True)(x)
    grad = torch.randn(batch, 64, device=device).bfloat16()
    out.backward(grad)
    want = exact(wide)
    want.backward(grad.double())
    report = reports()[-1]
    assert report.counts() == {"torch:tensorwise": 6}
    lines = "\n".join(report.fusions)
    assert "2 FP8 activations turned for the backward" in lines
    assert "written to memory before it is quantised" in lines
    found = {"output": (out, want), "x": (x.grad, wide.grad)}
    found |= {n: (p.grad, q.grad) for (n, p), q in zip(model.named_parameters(), exact.parameters(), strict=True)}
    for name, (got, expected) in found.items():
        error = float((got.double() - expected).norm() / expected.norm())
        # An e4m3 rounding is 2.6 %; a value passes four of them forward, a gradient up to four more, all independent.
        assert error < 0.026 * 8**0.5 * 1.5, (name, error)


@pytest.mark.usefixtures("_emit_on_cpu")
@pytest.mark.filterwarnings("ignore::loka_compile.ModsWarning")
@pytest.mark.parametrize("batch", [16, 208])
def test_on_a_cpu(batch: int) -> None:
    check("cpu", batch)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::loka_compile.ModsWarning")
@pytest.mark.parametrize("batch", [16, 2048])
def test_on_a_gpu(batch: int) -> None:
    check("cuda", batch)
