"""Unusual values on real hardware: a fused kernel's error against fp64 is not larger
than that of the same GEMM unfused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from loka_compile.kernels import reference as ref

pytestmark = pytest.mark.gpu
E4M3 = torch.float8_e4m3fn


def heavy_tailed(rows: int, columns: int) -> torch.Tensor:
    """Student's t with 1.5 degrees of freedom: no variance."""
    return torch.randn(rows, columns, device="cuda") / torch.rand(rows, columns, device="cuda").pow(1 / 1.5)


def mostly_zero(rows: int, columns: int) -> torch.Tensor:
    x = torch.zeros(rows, columns, device="cuda")
    x[::7, ::3] = torch.randn(len(range(0, rows, 7)), len(range(0, columns, 3)), device="cuda")
    return x


KINDS: dict[str, Callable[[int, int], torch.Tensor]] = {
    "normal": lambda rows, columns: torch.randn(rows, columns, device="cuda"),
    "heavy-tailed": heavy_tailed,
    "mostly zero": mostly_zero,
    "zero": lambda rows, columns: torch.zeros(rows, columns, device="cuda"),
    "tiny": lambda rows, columns: torch.randn(rows, columns, device="cuda") * 1e-11,
    "denormal": lambda rows, columns: torch.randn(rows, columns, device="cuda") * 1e-40,
    # The squares of its products are just finite in fp32.
    "huge": lambda rows, columns: torch.randn(rows, columns, device="cuda") * 1e16,
}


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = x.abs().amax().clamp_min(1e-12) / 448
    return (x / scale).clamp(-448, 448).to(E4M3), scale


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()


@pytest.mark.parametrize(("m", "n", "k"), [(1, 256, 64), (199, 384, 448), (2048, 512, 1024)])
@pytest.mark.parametrize("kind", KINDS)
def test_gemm_block_norm_is_no_less_accurate_than_its_parts(kind: str, m: int, n: int, k: int) -> None:
    from loka_compile.kernels.gemm_block_norm import launch
    from loka_compile.lowering.fused.configs import config_for

    torch.manual_seed(0)
    a, scale_a = quantised(KINDS[kind](m, k))
    b, scale_b = quantised(torch.randn(n, k, device="cuda"))
    y = torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)
    rstd = torch.full((m, -(-n // 256)), float("nan"), device="cuda")
    config = config_for("gemm_block_norm", m, n, k, 1, True)
    launch(a, b, scale_a, scale_b, y, rstd, None, block=256, eps=1e-5, fast=True, config=config)
    parts = torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=True)
    unfused = ref.block_norm(parts, 256, 1e-5)[0].bfloat16()
    product = a.double() @ b.double().t() * scale_a.double() * scale_b.double()
    expected, expected_rstd = ref.block_norm(product, 256, 1e-5)
    assert torch.isfinite(y).all()
    assert error(y, expected) <= 1.02 * error(unfused, expected) + 1e-4
    assert error(rstd, expected_rstd) < 2e-3
    assert not y[~product.any(1)].any(), "a row of zeros stays one"


@pytest.mark.parametrize(("m", "n"), [(1, 256), (199, 384), (2048, 512)])
@pytest.mark.parametrize("kind", KINDS)
def test_backward_is_no_less_accurate_than_its_parts(kind: str, m: int, n: int) -> None:
    from loka_compile.kernels.block_norm_backward import block_norm_backward

    torch.manual_seed(0)
    # A gradient of 1e16 times rstd is finite; its products with y are, too.
    grad = KINDS[kind](m, n).bfloat16()
    y, rstd = ref.block_norm(torch.randn(m, n, device="cuda"), 256, 1e-5)
    y = y.bfloat16()
    dx, amax, _ = block_norm_backward(grad, y, rstd, block=256, activation="hardswish", with_xt=False)
    expected = ref.block_norm_backward_ref(grad.double(), y.double(), rstd.double(), 256, "hardswish")
    unfused = ref.block_norm_backward_ref(grad, y, rstd, 256, "hardswish").bfloat16()
    assert torch.isfinite(dx).all()
    assert error(dx, expected) <= 1.02 * error(unfused, expected) + 1e-4
    assert amax.max().item() == dx.float().abs().max().item()
