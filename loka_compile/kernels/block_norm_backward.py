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

#: Rows per tile (four subtiles of a quarter), and warps: best of those tried on an H200 (benchmarks/fused_sweep.py).
BLOCK_M, WARPS = 32, 4


@triton.jit
def _rows(
    G, Y, RSTD, rm, rn, rb, n0, M, N, blocks,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, NORM: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """dx and y in fp32 for the given rows; zeros outside the matrix."""
    mask = (rm[:, None] < M) & (rn[None, :] < N)
    offset = rm.to(tl.int64)[:, None] * N + rn[None, :]
    g = tl.load(G + offset, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(Y + offset, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.load(
        RSTD + rm[:, None] * blocks + rb[None, :], mask=(rm[:, None] < M) & (rb[None, :] < blocks), other=0.0
    )  # fmt: skip
    if ACT:
        g = g * dev.hardswish_derivative(y)
    mean = dev.block_mean(g * y, n0, N, ROWS, BLOCK_N, NORM)
    dx = dev.over_block(g - dev.over_block(y, mean, ROWS, BLOCK_N, NORM), rstd, ROWS, BLOCK_N, NORM)
    return dx, y


@triton.jit
def _pack(q0, q1, q2, q3):
    """Four FP8 tiles, one per row of each group of four, as one tile of 32-bit words."""
    w0 = q0.to(tl.uint8, bitcast=True).to(tl.uint32)
    w1 = q1.to(tl.uint8, bitcast=True).to(tl.uint32)
    w2 = q2.to(tl.uint8, bitcast=True).to(tl.uint32)
    w3 = q3.to(tl.uint8, bitcast=True).to(tl.uint32)
    return w0 | (w1 << 8) | (w2 << 16) | (w3 << 24)


@triton.jit
def _store_transposed(P, q0, q1, q2, q3, r4, rn, M, N, ALIGNED: tl.constexpr):
    """Column n of the tile to row n of P [N, M]. Four rows at a time where M allows it: transposing bytes one by one
    costs four times the shared-memory traffic. As integers: Triton 3.6 miscompiles some transposed FP8 stores
    (triton-lang/triton #11111)."""
    row = rn.to(tl.int64)[:, None] * M
    inside = rn[:, None] < N
    if ALIGNED:
        words = P.to(tl.pointer_type(tl.uint32), bitcast=True)
        tl.store(words + row // 4 + r4[None, :], tl.trans(_pack(q0, q1, q2, q3)), mask=inside & (r4[None, :] * 4 < M))
    else:
        for j in tl.static_range(4):
            q = q0 if j == 0 else (q1 if j == 1 else (q2 if j == 2 else q3))
            at = r4[None, :] * 4 + j
            tl.store(P + row + at, tl.trans(q.to(tl.uint8, bitcast=True)), mask=inside & (at < M))


@triton.jit
def _backward_kernel(
    G, Y, RSTD, PARTS, DX, Q, QT, SCALE, AMAX, XT, M, N, count,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NORM: tl.constexpr, ACT: tl.constexpr, WRITE_DX: tl.constexpr,
    WRITE_Q: tl.constexpr, WRITE_XT: tl.constexpr, ALIGNED: tl.constexpr, TARGET: tl.constexpr, FLOOR: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = BLOCK_M // 4
    pid_m, pid_n = tl.program_id(0), tl.program_id(1)
    n0 = pid_n * BLOCK_N
    r4 = pid_m * ROWS + tl.arange(0, ROWS)
    rn = n0 + tl.arange(0, BLOCK_N)
    rb = pid_n * (BLOCK_N // NORM) + tl.arange(0, BLOCK_N // NORM)
    blocks = tl.cdiv(N, NORM)
    d0, y0 = _rows(G, Y, RSTD, r4 * 4, rn, rb, n0, M, N, blocks, ROWS, BLOCK_N, NORM, ACT)
    d1, y1 = _rows(G, Y, RSTD, r4 * 4 + 1, rn, rb, n0, M, N, blocks, ROWS, BLOCK_N, NORM, ACT)
    d2, y2 = _rows(G, Y, RSTD, r4 * 4 + 2, rn, rb, n0, M, N, blocks, ROWS, BLOCK_N, NORM, ACT)
    d3, y3 = _rows(G, Y, RSTD, r4 * 4 + 3, rn, rb, n0, M, N, blocks, ROWS, BLOCK_N, NORM, ACT)
    offset = (r4 * 4).to(tl.int64)[:, None] * N + rn[None, :]
    inside = rn[None, :] < N
    m4 = r4[:, None] * 4
    if WRITE_DX:
        TYPE: tl.constexpr = DX.dtype.element_ty
        tl.store(DX + offset, d0.to(TYPE), mask=inside & (m4 < M))
        tl.store(DX + offset + N, d1.to(TYPE), mask=inside & (m4 + 1 < M))
        tl.store(DX + offset + 2 * N, d2.to(TYPE), mask=inside & (m4 + 2 < M))
        tl.store(DX + offset + 3 * N, d3.to(TYPE), mask=inside & (m4 + 3 < M))
    if WRITE_XT:
        E4M3: tl.constexpr = tl.float8e4nv
        x0 = dev.to_fp8(dev.hardswish(y0), 16.0, E4M3, 448.0)
        x1 = dev.to_fp8(dev.hardswish(y1), 16.0, E4M3, 448.0)
        x2 = dev.to_fp8(dev.hardswish(y2), 16.0, E4M3, 448.0)
        x3 = dev.to_fp8(dev.hardswish(y3), 16.0, E4M3, 448.0)
        _store_transposed(XT, x0, x1, x2, x3, r4, rn, M, N, ALIGNED)
    if WRITE_Q:
        E5M2: tl.constexpr = tl.float8e5
        factor = tl.exp2(tl.floor(tl.log2(TARGET / dev.amax_of(PARTS, count, FLOOR, CHUNK))))
        if (pid_m == 0) & (pid_n == 0):
            tl.store(SCALE, 1.0 / factor)
        q0 = dev.to_fp8(d0, factor, E5M2, 57344.0)
        q1 = dev.to_fp8(d1, factor, E5M2, 57344.0)
        q2 = dev.to_fp8(d2, factor, E5M2, 57344.0)
        q3 = dev.to_fp8(d3, factor, E5M2, 57344.0)
        tl.store(Q + offset, q0, mask=inside & (m4 < M))
        tl.store(Q + offset + N, q1, mask=inside & (m4 + 1 < M))
        tl.store(Q + offset + 2 * N, q2, mask=inside & (m4 + 2 < M))
        tl.store(Q + offset + 3 * N, q3, mask=inside & (m4 + 3 < M))
        _store_transposed(QT, q0, q1, q2, q3, r4, rn, M, N, ALIGNED)
    # The largest of four absolute values, as integers so that a NaN wins.
    largest = tl.maximum(
        tl.maximum(dev.bits(d0), dev.bits(d1)), tl.maximum(dev.bits(d2), dev.bits(d3))
    )  # fmt: skip
    tl.store(AMAX + pid_m * tl.num_programs(1) + pid_n, dev.largest_of(largest))


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
        ALIGNED=m % 4 == 0, CHUNK=max(32, min(1024, triton.next_power_of_2(count))), num_warps=WARPS, num_stages=1,
    )  # fmt: skip
    return dx, q, qt, scale, amax, xt
