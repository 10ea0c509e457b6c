"""grad_input GEMM with the previous layer's HardSwish' and BlockNorm' in its epilogue.

One launch computes, for the gradient ``d`` [M, K] of a layer's output and its weight ``w`` [K, N]::

    g  = (d @ w) * HardSwish'(y)              y [M, N]: what BlockNorm of the layer before gave
    dx = rstd * (g - y * mean_block(g * y))   the gradient of that layer's GEMM output

and, on the way, the largest |dx| of every tile (the next quantisation needs no pass of its own to find it) and, where
asked, ``fp8(HardSwish(y) * 16)`` transposed, which the layer's grad_weight GEMM wants with the batch contiguous.
Both halves of a block are in one tile because the tile is 256 wide.
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
from loka_compile.kernels.gemm_block_norm import can_use_tma, norm_tile


@triton.jit
def _epilogue(
    g, pid_m, pid_n, Y, RSTD, DX, AMAX, XT, M, N, stride_xt,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NORM: tl.constexpr, ACT: tl.constexpr,
    WRITE_AMAX: tl.constexpr, WRITE_XT: tl.constexpr, X_SCALE: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    rm = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rb = pid_n * (BLOCK_N // NORM) + tl.arange(0, BLOCK_N // NORM)
    blocks = tl.cdiv(N, NORM)
    mask = (rm[:, None] < M) & (rn[None, :] < N)
    offset = rm.to(tl.int64)[:, None] * N + rn[None, :]
    if TMA:
        y = Y.load([pid_m * BLOCK_M, pid_n * BLOCK_N]).to(tl.float32)
    else:
        y = tl.load(Y + offset, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.load(
        RSTD + rm[:, None] * blocks + rb[None, :], mask=(rm[:, None] < M) & (rb[None, :] < blocks), other=0.0
    )  # fmt: skip
    if ACT:
        g = g * dev.hardswish_derivative(y)
    if not EVEN:
        # What the GEMM made past the edges repeats valid rows and columns; it must not reach the mean or the maximum.
        g = tl.where(mask, g, 0.0)
    mean = dev.block_mean(g * y, pid_n * BLOCK_N, N, BLOCK_M, BLOCK_N, NORM)
    dx = dev.over_block(g - dev.over_block(y, mean, BLOCK_M, BLOCK_N, NORM), rstd, BLOCK_M, BLOCK_N, NORM)
    if TMA:
        dx = dx.to(DX.dtype)
        DX.store([pid_m * BLOCK_M, pid_n * BLOCK_N], dx)
    else:
        dx = dx.to(DX.dtype.element_ty)
        tl.store(DX + offset, dx, mask=mask)
    if WRITE_AMAX:
        amax = tl.max(tl.max(tl.abs(dx.to(tl.float32)), axis=1), axis=0)
        tl.store(AMAX + pid_m * tl.cdiv(N, BLOCK_N) + pid_n, amax)
    if WRITE_XT:
        # Transposed and stored as bytes: Triton 3.6 miscompiles some transposed FP8 stores (triton-lang/triton #11111).
        x = tl.trans(dev.to_fp8(dev.hardswish(y), X_SCALE, tl.float8e4nv, 448.0).to(tl.uint8, bitcast=True))
        if TMA:
            XT.store([pid_n * BLOCK_N, pid_m * BLOCK_M], x)
        else:
            tl.store(
                XT + rn.to(tl.int64)[:, None] * stride_xt + rm[None, :], x,
                mask=(rn[:, None] < N) & (rm[None, :] < M),
            )  # fmt: skip


@triton.jit
def _gemm_kernel(
    A, B, SA, SB, Y, RSTD, DX, AMAX, XT, M, N, K, stride_a, stride_b, stride_xt,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, NORM: tl.constexpr,
    EVEN_K: tl.constexpr, TMA: tl.constexpr, FAST: tl.constexpr, SCALING: tl.constexpr, ACT: tl.constexpr,
    WRITE_AMAX: tl.constexpr, WRITE_XT: tl.constexpr, X_SCALE: tl.constexpr, EVEN: tl.constexpr, TMA_EPILOGUE: tl.constexpr,
):  # fmt: skip
    pid_m, pid_n = dev.tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    acc = dev.accumulate(
        A, B, pid_m, pid_n, 0, tl.cdiv(K, BLOCK_K), M, N, K, stride_a, stride_b, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K,
        TMA, FAST,
    )  # fmt: skip
    if SCALING == 1:
        acc = acc * (tl.load(SA) * tl.load(SB))
    elif SCALING == 2:
        rm = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
        rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        sa = tl.load(SA + rm, mask=rm < M, other=0.0)
        sb = tl.load(SB + rn, mask=rn < N, other=0.0)
        acc = acc * sa[:, None] * sb[None, :]
    _epilogue(
        acc, pid_m, pid_n, Y, RSTD, DX, AMAX, XT, M, N, stride_xt,
        BLOCK_M, BLOCK_N, NORM, ACT, WRITE_AMAX, WRITE_XT, X_SCALE, EVEN, TMA_EPILOGUE,
    )  # fmt: skip


@triton.jit
def _elementwise_kernel(
    G, Y, RSTD, DX, AMAX, XT, M, N, stride_xt,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NORM: tl.constexpr, ACT: tl.constexpr,
    WRITE_AMAX: tl.constexpr, WRITE_XT: tl.constexpr, X_SCALE: tl.constexpr,
):  # fmt: skip
    pid_m = tl.program_id(0)
    pid_n = tl.program_id(1)
    rm = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rm[:, None] < M) & (rn[None, :] < N)
    g = tl.load(G + rm.to(tl.int64)[:, None] * N + rn[None, :], mask=mask, other=0.0).to(tl.float32)
    _epilogue(
        g, pid_m, pid_n, Y, RSTD, DX, AMAX, XT, M, N, stride_xt,
        BLOCK_M, BLOCK_N, NORM, ACT, WRITE_AMAX, WRITE_XT, X_SCALE, False, False,
    )  # fmt: skip


@torch.no_grad()
def gemm_block_norm_backward(
    a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, y: Tensor, rstd: Tensor, *,
    block: int, act: bool, fast: bool, out_dtype: torch.dtype, with_xt: bool, config: GemmConfig,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``(dx, amax, xt)``: dx [M, N] in out_dtype, amax fp32 [tiles], xt fp8 [N, M] (empty unless with_xt).

    a [M, K] is the incoming gradient, b [N, K] the weight with the contraction contiguous; scales fp32, both scalar
    or [M, 1] with [1, N].
    """
    (m, k), n = a.shape, b.shape[0]
    norm = norm_tile(n, block)
    block_n = max(norm, min(config.block_n, triton.next_power_of_2(n)))
    grid_m, grid_n = triton.cdiv(m, config.block_m), triton.cdiv(n, block_n)
    dx = torch.empty((m, n), dtype=out_dtype, device=a.device)
    amax = torch.empty((grid_m * grid_n,), dtype=torch.float32, device=a.device)
    xt = torch.empty((n, m) if with_xt else (0,), dtype=torch.float8_e4m3fn, device=a.device)
    tma = config.tma and can_use_tma(a, b)
    args: list[Any] = [a, b]
    if tma:
        args = [
            TensorDescriptor.from_tensor(a, [config.block_m, config.block_k]),
            TensorDescriptor.from_tensor(b, [block_n, config.block_k]),
        ]
    tma_epilogue = config.tma_epilogue and can_use_tma(y, dx) and m % 16 == 0
    outs: list[Any] = [y, rstd, dx, amax, xt.view(torch.uint8)]
    if tma_epilogue:
        outs[0] = TensorDescriptor.from_tensor(y, [config.block_m, block_n])
        outs[2] = TensorDescriptor.from_tensor(dx, [config.block_m, block_n])
        if with_xt:
            outs[4] = TensorDescriptor.from_tensor(outs[4], [block_n, config.block_m])
    scaling = 0 if scale_a is None or scale_b is None else (1 if scale_a.numel() == scale_b.numel() == 1 else 2)
    _gemm_kernel[(grid_m * grid_n,)](
        *args, amax if scale_a is None else scale_a, amax if scale_b is None else scale_b, *outs,
        m, n, k, a.stride(0), b.stride(0), m,
        BLOCK_M=config.block_m, BLOCK_N=block_n, BLOCK_K=config.block_k, GROUP_M=config.group_m, NORM=norm,
        EVEN_K=k % config.block_k == 0, TMA=tma, FAST=fast, SCALING=scaling, ACT=act, WRITE_AMAX=True,
        WRITE_XT=with_xt, X_SCALE=16.0, EVEN=m % config.block_m == 0 and n % block_n == 0, TMA_EPILOGUE=tma_epilogue,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return dx, amax, xt


@torch.no_grad()
def block_norm_backward(
    g: Tensor, y: Tensor, rstd: Tensor, *, block: int, act: bool, out_dtype: torch.dtype, with_xt: bool,
    block_m: int = 32, warps: int = 8,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The same epilogue without a GEMM in front: the last layer of a chain, whose gradient comes from outside."""
    m, n = g.shape
    norm = norm_tile(n, block)
    block_n = max(norm, min(256, triton.next_power_of_2(n)))
    grid_m, grid_n = triton.cdiv(m, block_m), triton.cdiv(n, block_n)
    dx = torch.empty((m, n), dtype=out_dtype, device=g.device)
    amax = torch.empty((grid_m * grid_n,), dtype=torch.float32, device=g.device)
    xt = torch.empty((n, m) if with_xt else (0,), dtype=torch.float8_e4m3fn, device=g.device)
    _elementwise_kernel[(grid_m, grid_n)](
        g, y, rstd, dx, amax, xt.view(torch.uint8), m, n, m, BLOCK_M=block_m, BLOCK_N=block_n, NORM=norm, ACT=act, WRITE_AMAX=True,
        WRITE_XT=with_xt, X_SCALE=16.0, num_warps=warps, num_stages=1,
    )  # fmt: skip
    return dx, amax, xt
