"""Gradient through HardSwish and BlockNorm in one pass that also prepares what the next GEMMs read.

For the gradient ``d`` [M, N] of a layer's output and what the forward kept (y [M, N], rstd [M, blocks])::

    g  = d * HardSwish'(y)
    dx = rstd * (g - y * mean_block(g * y))

Written in the same pass: the largest |dx| of every tile, so that the FP8 cast (:mod:`loka_compile.kernels.cast`) needs
no pass to find its scale, and, where asked, ``fp8(HardSwish(y) * 16)`` transposed, which the grad_weight GEMM of the
layer above wants with the batch contiguous.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from loka_compile.kernels import device as dev
from loka_compile.kernels.gemm_block_norm import norm_tile

#: Rows per tile, and warps: best of those tried on an H200 (benchmarks/fused_sweep.py).
BLOCK_M, WARPS = 32, 8


@triton.jit
def _backward_kernel(
    G, Y, RSTD, DX, AMAX, XT, M, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NORM: tl.constexpr, ACT: tl.constexpr, WRITE_XT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    dev.wait(PDL)
    pid_m, pid_n = tl.program_id(0), tl.program_id(1)
    rm = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rb = pid_n * (BLOCK_N // NORM) + tl.arange(0, BLOCK_N // NORM)
    blocks = tl.cdiv(N, NORM)
    mask = (rm[:, None] < M) & (rn[None, :] < N)
    offset = rm.to(tl.int64)[:, None] * N + rn[None, :]
    g = tl.load(G + offset, mask=mask, other=0.0).to(tl.float32)
    y = dev.saved(tl.load(Y + offset, mask=mask, other=0.0), Y.dtype.element_ty)
    rstd = tl.load(
        RSTD + rm[:, None] * blocks + rb[None, :], mask=(rm[:, None] < M) & (rb[None, :] < blocks), other=0.0
    )  # fmt: skip
    if ACT:
        g = g * dev.hardswish_derivative(y)
    mean = dev.block_mean(g * y, pid_n * BLOCK_N, N, BLOCK_M, BLOCK_N, NORM)
    dx = dev.over_block(g - dev.over_block(y, mean, BLOCK_M, BLOCK_N, NORM), rstd, BLOCK_M, BLOCK_N, NORM)
    dx = dx.to(DX.dtype.element_ty)
    tl.store(DX + offset, dx, mask=mask)
    # After the store, and of the rounded values, so that no element exceeds it.
    tl.store(AMAX + pid_m * tl.num_programs(1) + pid_n, dev.amax(dx.to(tl.float32)))
    if WRITE_XT:
        # As bytes: Triton 3.6 miscompiles some transposed FP8 stores (triton-lang/triton #11111).
        x = dev.to_fp8(dev.hardswish(y), 16.0, tl.float8e4nv, 448.0).to(tl.uint8, bitcast=True)
        tl.store(
            XT + rn.to(tl.int64)[:, None] * M + rm[None, :], tl.trans(x), mask=(rn[:, None] < N) & (rm[None, :] < M)
        )  # fmt: skip


@torch.no_grad()
def block_norm_backward(
    grad: Tensor, y: Tensor, rstd: Tensor, *, block: int, hardswish: bool, with_xt: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dx, amax, xt)`` for contiguous grad and y [M, N] and rstd fp32 [M, ceil(N/block)]; block at most 256.

    y in e4m3 stands for y / 16.

    dx [M, N] in grad's dtype; amax fp32 [tiles]; xt e4m3 [N, M] (empty unless with_xt).
    """
    m, n = grad.shape
    norm = norm_tile(n, block)
    block_n = max(norm, min(256, triton.next_power_of_2(n)))
    grid = (triton.cdiv(m, BLOCK_M), triton.cdiv(n, block_n))
    dx = torch.empty_like(grad)
    amax = torch.empty((grid[0] * grid[1],), dtype=torch.float32, device=grad.device)
    xt = torch.empty((n, m) if with_xt else (0,), dtype=torch.float8_e4m3fn, device=grad.device)
    _backward_kernel[grid](
        grad, y, rstd, dx, amax, xt.view(torch.uint8), m, n, BLOCK_M=BLOCK_M, BLOCK_N=block_n, NORM=norm,
        ACT=hardswish, WRITE_XT=with_xt, num_warps=WARPS, num_stages=1, **dev.early(grad.device),
    )  # fmt: skip
    return dx, amax, xt
