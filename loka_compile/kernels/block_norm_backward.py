"""Gradient through HardSwish and BlockNorm in one pass that also writes what the next GEMMs read.

For the gradient ``d`` [M, N] of a layer's output and what the forward kept (y [M, N], rstd [M, blocks])::

    g  = d * HardSwish'(y)
    dx = rstd * (g - y * mean_block(g * y))

Written in the same pass: the largest |dx| of every tile (so that no kernel has to look for the amax), where asked
``fp8(HardSwish(y) * 16)`` transposed, which the grad_weight GEMM of the layer above wants with the batch contiguous, and
dx itself: either as it is, for an exact tensorwise scale in :mod:`loka_compile.kernels.cast`, or at once as e5m2 in both
layouts. e5m2 has 31 octaves; the scale then comes from the maxima of the layer above and leaves room for growth.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from loka_compile.kernels import device as dev
from loka_compile.kernels.gemm_block_norm import norm_tile
from loka_compile.kernels.reference import AMAX_FLOOR, E5M2_TARGET

#: Rows per tile, and warps: best of five on an H200 (benchmarks/fused_sweep.py).
BLOCK_M, WARPS = 32, 8


@triton.jit
def _backward_kernel(
    G, Y, RSTD, PARTS, DX, Q, QT, SCALE, AMAX, XT, M, N, count,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NORM: tl.constexpr, ACT: tl.constexpr, WRITE_DX: tl.constexpr,
    WRITE_Q: tl.constexpr, WRITE_XT: tl.constexpr, TARGET: tl.constexpr, FLOOR: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    pid_m, pid_n = tl.program_id(0), tl.program_id(1)
    rm = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rb = pid_n * (BLOCK_N // NORM) + tl.arange(0, BLOCK_N // NORM)
    blocks = tl.cdiv(N, NORM)
    mask = (rm[:, None] < M) & (rn[None, :] < N)
    offset = rm.to(tl.int64)[:, None] * N + rn[None, :]
    g = tl.load(G + offset, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(Y + offset, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.load(
        RSTD + rm[:, None] * blocks + rb[None, :], mask=(rm[:, None] < M) & (rb[None, :] < blocks), other=0.0
    )  # fmt: skip
    if ACT:
        g = g * dev.hardswish_derivative(y)
    mean = dev.block_mean(g * y, pid_n * BLOCK_N, N, BLOCK_M, BLOCK_N, NORM)
    dx = dev.over_block(g - dev.over_block(y, mean, BLOCK_M, BLOCK_N, NORM), rstd, BLOCK_M, BLOCK_N, NORM)
    tl.store(AMAX + pid_m * tl.num_programs(1) + pid_n, dev.amax(dx))
    transposed = rn.to(tl.int64)[:, None] * M + rm[None, :]
    mask_t = (rn[:, None] < N) & (rm[None, :] < M)
    if WRITE_DX:
        tl.store(DX + offset, dx.to(DX.dtype.element_ty), mask=mask)
    if WRITE_Q:
        factor = tl.exp2(tl.floor(tl.log2(TARGET / dev.amax_of(PARTS, count, FLOOR, CHUNK))))
        if (pid_m == 0) & (pid_n == 0):
            tl.store(SCALE, 1.0 / factor)
        q = dev.to_fp8(dx, factor, tl.float8e5, 57344.0)
        tl.store(Q + offset, q, mask=mask)
        # Transposes are stored as bytes: Triton 3.6 miscompiles some transposed FP8 stores (triton-lang/triton #11111).
        tl.store(QT + transposed, tl.trans(q.to(tl.uint8, bitcast=True)), mask=mask_t)
    if WRITE_XT:
        x = dev.to_fp8(dev.hardswish(y), 16.0, tl.float8e4nv, 448.0)
        tl.store(XT + transposed, tl.trans(x.to(tl.uint8, bitcast=True)), mask=mask_t)


@torch.no_grad()
def block_norm_backward(
    grad: Tensor, y: Tensor, rstd: Tensor, *, block: int, hardswish: bool, with_xt: bool, parts: Tensor | None = None,
    with_dx: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``(dx, q, qt, scale, amax, xt)`` for contiguous grad and y [M, N] and rstd fp32 [M, ceil(N/block)].

    dx [M, N] in grad's dtype (empty unless with_dx); amax fp32 [tiles]; xt e4m3 [N, M] (empty unless with_xt). With
    ``parts`` (fp32, maxima of the gradient of the layer above): q e5m2 [M, N], qt [N, M], and the scale of both; else
    these three are empty. block at most 256.
    """
    m, n = grad.shape
    norm = norm_tile(n, block)
    block_n = max(norm, min(256, triton.next_power_of_2(n)))
    grid = (triton.cdiv(m, BLOCK_M), triton.cdiv(n, block_n))
    device, fp8 = grad.device, parts is not None
    dx = torch.empty((m, n) if with_dx else (0,), dtype=grad.dtype, device=device)
    q = torch.empty((m, n) if fp8 else (0,), dtype=torch.float8_e5m2, device=device)
    qt = torch.empty((n, m) if fp8 else (0,), dtype=torch.float8_e5m2, device=device)
    scale = torch.empty((), dtype=torch.float32, device=device)
    amax = torch.empty((grid[0] * grid[1],), dtype=torch.float32, device=device)
    xt = torch.empty((n, m) if with_xt else (0,), dtype=torch.float8_e4m3fn, device=device)
    count = parts.numel() if parts is not None else 1
    _backward_kernel[grid](
        grad, y, rstd, amax if parts is None else parts, dx, q, qt.view(torch.uint8), scale, amax,
        xt.view(torch.uint8), m, n, count, BLOCK_M=BLOCK_M, BLOCK_N=block_n, NORM=norm, ACT=hardswish,
        WRITE_DX=with_dx, WRITE_Q=fp8, WRITE_XT=with_xt, TARGET=E5M2_TARGET, FLOOR=AMAX_FLOOR,
        CHUNK=min(1024, triton.next_power_of_2(count)), num_warps=WARPS, num_stages=1,
    )  # fmt: skip
    return dx, q, qt, scale, amax, xt
