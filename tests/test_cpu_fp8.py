"""The FP8 product that the CPU tests multiply with, torch's own or the one that stands in for it: against fp64."""

from __future__ import annotations

import pytest
import torch

from tests import cpu_fp8

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize("shape", [(64, 512, 512), (1, 1024, 512), (199, 128, 384)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("kinds", [(E4M3, E4M3), (E5M2, E4M3)])
def test_large_products(shape: tuple[int, int, int], with_bias: bool, kinds: tuple[torch.dtype, torch.dtype]) -> None:
    m, k, n = shape
    a, b = torch.randn(m, k).to(kinds[0]), torch.randn(n, k).to(kinds[1])
    sa, sb = torch.tensor(0.5), torch.tensor(0.03)
    bias = torch.randn(n).bfloat16() if with_bias else None
    exact = a.double() @ b.double().t() * 0.5 * sb.double()
    exact = exact if bias is None else exact + bias.double()
    found = torch._scaled_mm(a, b.t(), sa, sb, bias, out_dtype=torch.bfloat16)
    assert (found.dtype, found.shape) == (torch.bfloat16, (m, n))
    assert float((found.double() - exact).norm() / exact.norm()) < 2**-8
    out = torch.empty(m, n, dtype=torch.bfloat16)
    torch._scaled_mm(a, b.t(), sa, sb, bias, out_dtype=torch.bfloat16, out=out)
    assert torch.equal(out, found)


def test_what_torch_refuses_is_refused() -> None:
    a, b = torch.zeros(16, 16).to(E4M3), torch.zeros(32, 16).to(E4M3)
    with pytest.raises((RuntimeError, ValueError)):
        torch._scaled_mm(a, b, torch.ones(()), torch.ones(()), out_dtype=torch.bfloat16)


def test_a_cpu_is_asked_once_how_fast_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced: list[bool] = []
    monkeypatch.setattr(cpu_fp8, "_replace", lambda: replaced.append(True))
    monkeypatch.setattr(cpu_fp8, "SLOW", 0.0)
    assert cpu_fp8.speed_up()
    monkeypatch.setattr(cpu_fp8, "SLOW", 1e9)
    assert not cpu_fp8.speed_up()
    assert replaced == [True]
