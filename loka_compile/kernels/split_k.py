"""GEMM cut along the contraction, for outputs with too few tiles to fill the device (narrow layers with long inputs).

The partial sums are fp32 and are added in a fixed order by the consumer, so results do not vary from run to run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from loka_compile.kernels import device as dev
from loka_compile.kernels.config import GemmConfig
from loka_compile.kernels.gemm_block_norm import can_use_tma


@triton.jit
def _split_kernel(
    A, B, SA, SB, P, M, N, K, stride_a, stride_b, steps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr, TMA: tl.constexpr, FAST: tl.constexpr, SCALING: tl.constexpr,
):  # fmt: skip
    pid_m, pid_n = dev.tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    split = tl.program_id(1)
    last = tl.minimum((split + 1) * steps, tl.cdiv(K, BLOCK_K))
    acc = dev.accumulate(
        A, B, pid_m, pid_n, split * steps, last, M, N, K, stride_a, stride_b, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, TMA,
        FAST,
    )  # fmt: skip
    rm = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if SCALING == 1:
        acc = acc * (tl.load(SA) * tl.load(SB))
    elif SCALING == 2:
        sa = tl.load(SA + rm, mask=rm < M, other=0.0)
        sb = tl.load(SB + rn, mask=rn < N, other=0.0)
        acc = acc * sa[:, None] * sb[None, :]
    offset = (split * M + rm).to(tl.int64)[:, None] * N + rn[None, :]
    tl.store(P + offset, acc, mask=(rm[:, None] < M) & (rn[None, :] < N))


@torch.no_grad()
def gemm_split_k(
    a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, splits: int, *, fast: bool,
    config: GemmConfig,
) -> Tensor:  # fmt: skip
    """fp32 [splits, M, N]; the sum over the first dimension is ``a @ b.T``. a [M, K], b [N, K], K contiguous."""
    (m, k), n = a.shape, b.shape[0]
    p = torch.empty((splits, m, n), dtype=torch.float32, device=a.device)
    tma = config.tma and can_use_tma(a, b)
    args: list[Any] = [a, b]
    if tma:
        args = [
            TensorDescriptor.from_tensor(a, [config.block_m, config.block_k]),
            TensorDescriptor.from_tensor(b, [config.block_n, config.block_k]),
        ]
    scaling = 0 if scale_a is None or scale_b is None else (1 if scale_a.numel() == scale_b.numel() == 1 else 2)
    _split_kernel[(triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n), splits)](
        *args, p if scale_a is None else scale_a, p if scale_b is None else scale_b, p, m, n, k,
        a.stride(0), b.stride(0), triton.cdiv(triton.cdiv(k, config.block_k), splits),
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP_M=config.group_m,
        EVEN_K=k % config.block_k == 0, TMA=tma, FAST=fast, SCALING=scaling,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return p
