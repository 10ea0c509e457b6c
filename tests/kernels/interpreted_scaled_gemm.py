"""The FP8 GEMM with every scaling, in Triton's interpreter, on fp32 operands (the kernel does not mind)."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the interpreter must be chosen before the first kernel is defined", allow_module_level=True)

from loka_compile.kernels.config import GemmConfig
from loka_compile.kernels.scaled_gemm import scaled_gemm

POINTERS = GemmConfig(block_m=32, block_n=32, block_k=128, group_m=2)
CONFIGS = {
    "pointers": POINTERS,
    "tma": GemmConfig(block_m=32, block_n=64, block_k=128, tma=True),
    "persistent": GemmConfig(block_m=32, block_n=32, block_k=128, tma=True, persistent=True),
    "split": GemmConfig(block_m=32, block_n=32, block_k=128, splits=3),
    "split-persistent": GemmConfig(block_m=32, block_n=32, block_k=128, tma=True, persistent=True, splits=2),
}
#: One row, one column; rows and columns of several blocks of 128, each with several tiles and a ragged last one.
SHAPES = [(1, 40, 13), (37, 1, 256), (130, 33, 260), (33, 140, 700)]


@pytest.fixture(autouse=True)
def _two_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=2))


def positive(*shape: int) -> torch.Tensor:
    return torch.rand(*shape) + 0.25


def spread(scale: torch.Tensor, rows: int, m: int, k: int) -> torch.Tensor:
    return scale.double().repeat_interleave(rows, 0)[:m].repeat_interleave(128, 1)[:, :k]


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("rows_a", "rows_b"), [(1, 128), (1, 1), (128, 128)])
def test_blocks(m: int, n: int, k: int, config: str, rows_a: int, rows_b: int) -> None:
    a, b = torch.randn(m, k), torch.randn(n, k)
    sa, sb = positive(-(-m // rows_a), -(-k // 128)), positive(-(-n // rows_b), -(-k // 128))
    sa = sa.t().contiguous().t() if rows_a == 1 else sa
    out = scaled_gemm(
        a, b, sa, sb, torch.float32, fast=False, config=CONFIGS[config], rows_a=rows_a, rows_b=rows_b
    )  # fmt: skip
    expected = (a.double() * spread(sa, rows_a, m, k)) @ (b.double() * spread(sb, rows_b, n, k)).t()
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
@pytest.mark.parametrize("config", CONFIGS)
def test_scales_outside(m: int, n: int, k: int, config: str) -> None:
    a, b = torch.randn(m, k), torch.randn(n, k)
    scales = (torch.tensor(0.5), torch.tensor(3.0)), (positive(m, 1), positive(n, 1))
    # How the sum is made and what multiplies it at its end do not know of each other; odd and even m have all four.
    for fast, (sa, sb) in zip((m % 2 == 0, m % 2 == 1), scales, strict=True):
        out = scaled_gemm(a, b, sa, sb, torch.float32, fast=fast, config=CONFIGS[config])
        expected = (a.double() * sa.double()) @ (b.double() * sb.double()).t()
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)


def test_a_cut_contraction_adds_up_in_one_order() -> None:
    a, b, one = torch.randn(40, 1500), torch.randn(33, 1500), torch.tensor(1.0)
    first, again = (
        scaled_gemm(a, b, one, one, torch.bfloat16, fast=True, config=CONFIGS["split"]) for _ in range(2)
    )  # fmt: skip
    assert torch.equal(first, again)
    assert first.dtype == torch.bfloat16


@pytest.mark.parametrize("splits", [2, 5, 16])
def test_more_parts_than_blocks(splits: int) -> None:
    a, b, one = torch.randn(5, 300), torch.randn(7, 300), torch.tensor(1.0)
    config = GemmConfig(block_m=32, block_n=32, block_k=128, splits=splits)
    out = scaled_gemm(a, b, one, one, torch.float32, fast=True, config=config)
    torch.testing.assert_close(out.double(), a.double() @ b.double().t(), rtol=1e-4, atol=1e-4)


def test_fp8_operands() -> None:
    """Products of e4m3 numbers are exact, so that only the order of the sums differs."""
    a, b = (torch.randn(r, 256).to(torch.float8_e4m3fn) for r in (20, 40))
    sa, sb = positive(20, 2), positive(1, 2)
    out = scaled_gemm(a, b, sa, sb, torch.float32, fast=False, config=POINTERS, rows_a=1, rows_b=128)
    expected = (a.double() * spread(sa, 1, 20, 256)) @ (b.double() * spread(sb, 128, 40, 256)).t()
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
