"""The plain-torch twins against fp64 and autograd: they define what the kernels must compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from loka_compile.kernels import reference as ref

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = [(1, 384, 13), (199, 3456, 48), (7, 256, 64), (33, 512, 16), (3, 100, 20)]


def norm64(x: torch.Tensor, block: int = 256, eps: float = 1e-5) -> torch.Tensor:
    parts = x.split(block, 1)
    return torch.cat([p / (p.square().mean(1, keepdim=True) + eps).sqrt() for p in parts], 1)


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_gemm_block_norm_is_the_norm_of_the_product(m: int, n: int, k: int) -> None:
    a, b = torch.randn(m, k), torch.randn(k, n)
    y, rstd = ref.gemm_block_norm_ref(a, b, torch.tensor(2.0), torch.tensor(0.5), 256, 1e-5, torch.float32)
    expected = norm64(a.double() @ b.double())
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-5)
    assert rstd.shape == (m, -(-n // 256))
    # rstd is what turns the product into y.
    first = (a @ b)[:, : min(n, 256)]
    torch.testing.assert_close(first * rstd[:, :1], y[:, : min(n, 256)], rtol=1e-4, atol=1e-5)


def test_rowwise_scales_multiply_rows_and_columns() -> None:
    a, b = torch.randn(5, 32), torch.randn(32, 48)
    sa, sb = torch.rand(5, 1) + 0.5, torch.rand(1, 48) + 0.5
    out = ref.scaled_product(a, b, sa, sb)
    torch.testing.assert_close(
        out.double(), (a.double() * sa.double()) @ (b.double() * sb.double()), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(("m", "n"), [(1, 384), (199, 3456), (33, 256), (4, 100)])
@pytest.mark.parametrize("activation", ["", "hardswish", "silu"])
def test_backward_is_the_gradient_by_autograd(m: int, n: int, activation: str) -> None:
    x = torch.randn(m, n, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(m, n, dtype=torch.float64)
    y = norm64(x)
    {"": lambda y: y, "hardswish": F.hardswish, "silu": F.silu}[activation](y).backward(grad)
    rstd = ref.block_norm(x.detach(), 256, 1e-5)[1]
    found = ref.block_norm_backward_ref(grad, y.detach(), rstd, 256, activation)
    torch.testing.assert_close(found, x.grad, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("magnitude", [0.0, 1e-30, 1.0, 1e30])
def test_cast_transpose_brings_x_back(dtype: torch.dtype, magnitude: float) -> None:
    x = torch.randn(37, 21) * magnitude
    q, qt, scale = ref.cast_transpose_ref(x, x.abs().amax(0), dtype)
    back = q.double() * scale.double()
    step = 2.0**-4 if dtype is E4M3 else 2.0**-3
    largest = max(x.abs().max().item(), ref.AMAX_FLOOR)
    assert ((back - x.double()).abs() <= step * x.double().abs() + largest * 2.0**-17).all()
    assert qt.shape == (21, 37)
    assert qt.is_contiguous()
    assert torch.equal(qt.float(), q.float().t())


@pytest.mark.parametrize(("activation", "function"), [("hardswish", F.hardswish), ("silu", F.silu)])
def test_activations_stay_inside_e4m3(activation: str, function: Any) -> None:
    y = torch.linspace(-16, 16, 1001)
    q = ref.activation_fp8_ref(y, activation)
    torch.testing.assert_close(q.float() / 16, function(y), rtol=2.0**-4, atol=2.0**-13)
