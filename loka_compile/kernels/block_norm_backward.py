"""Gradient through an activation and BlockNorm in one pass that also prepares what the next GEMMs read.

For the gradient ``d`` [M, N] of a layer's output and what the forward kept (y [M, N], rstd [M, blocks])::

    g  = d * act'(y)          (HardSwish, SiLU or none)
    dx = rstd * (g - y * mean_block(g * y))

Written in the same pass: the largest |dx| of every tile, so that the FP8 cast (:mod:`loka_compile.kernels.cast`) needs
no pass to find its scale, and, where asked, ``fp8(act(y) * 16)`` transposed, which the grad_weight GEMM of the
layer above wants with the batch contiguous.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from loka_compile.kernels import device as dev
from loka_compile.kernels.gradient_tile import gradients
from loka_compile.kernels.running import run_kernel

#: Rows per tile, and warps: best of those tried on an H200 (benchmarks/fused_sweep.py).
BLOCK_M, WARPS = 32, 8


@triton.jit
def _backward_kernel(
    G, Y, RSTD, DX, AMAX, XT, M, N, words,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NORM: tl.constexpr, ACT: tl.constexpr, WRITE_XT: tl.constexpr,
    WORDS: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    dev.wait(PDL)
    pid_m, pid_n = tl.program_id(0), tl.program_id(1)
    tile = pid_m * tl.num_programs(1) + pid_n
    d = gradients(tile, G, Y, RSTD, XT, M, N, words, BLOCK_M, BLOCK_N, NORM, ACT, WRITE_XT, WORDS, PTX)
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    best = tl.zeros((BLOCK_M // 4, BLOCK_N), dtype=tl.int32)
    for i in tl.static_range(4):
        rm = pid_m * BLOCK_M + 4 * tl.arange(0, BLOCK_M // 4) + i
        dx = d[i].to(DX.dtype.element_ty)
        at = DX + rm.to(tl.int64)[:, None] * N + rn[None, :]
        tl.store(at, dx, mask=(rm[:, None] < M) & (rn[None, :] < N))
        # Of the rounded values, so that no element exceeds it.
        best = tl.maximum(best, dev.bits(dx))
    tl.store(AMAX + tile, dev.largest_of(best))


@torch.no_grad()
def block_norm_backward(
    grad: Tensor, y: Tensor, rstd: Tensor, *, block: int, activation: str, with_xt: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dx, amax, xt)`` for contiguous grad and y [M, N] and rstd fp32 [M, ceil(N/block)]; block at most 256.

    y in e4m3 stands for y / 16. activation: one of kernels.reference.ACTIVATIONS, or "" for none.

    dx [M, N] in grad's dtype; amax fp32 [tiles]; xt e4m3 [N, M] (empty unless with_xt).
    """
    m, n = grad.shape
    norm = dev.norm_tile(n, block)
    block_n = max(norm, min(256, triton.next_power_of_2(n)))
    grid = (triton.cdiv(m, BLOCK_M), triton.cdiv(n, block_n))
    dx = torch.empty_like(grad)
    amax = torch.empty((grid[0] * grid[1],), dtype=torch.float32, device=grad.device)
    xt = torch.empty((n, m) if with_xt else (0,), dtype=torch.float8_e4m3fn, device=grad.device)
    run_kernel(
        _backward_kernel, grid,
        grad, y, rstd, dx, amax, xt, m, n, m // 4, BLOCK_M=BLOCK_M, BLOCK_N=block_n, NORM=norm, ACT=activation,
        WRITE_XT=with_xt, WORDS=m % 4 == 0, PTX=dev.ptx(grad.device), num_warps=WARPS, num_stages=1,
        **dev.early(grad.device),
    )  # fmt: skip
    return dx, amax, xt
