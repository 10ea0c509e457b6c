"""A layer's grad_input GEMM with the gradient of the layer below in its epilogue: act', BlockNorm' and the FP8
cast in both layouts, in one kernel.

The gradient never leaves the registers: every program has one tile, finds its largest value, meets the others
(kernels/grid_barrier.py) and casts. So all tiles must be resident at once, which narrow layers are; what is wider is
faster in two kernels (docs/fused_configurations.md).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from loka_compile.kernels import device as dev
from loka_compile.kernels import grid_barrier as grid
from loka_compile.kernels import turned
from loka_compile.kernels.config import GemmConfig
from loka_compile.kernels.gradient_tile import store_activation, through
from loka_compile.kernels.reference import AMAX_FLOOR, LIMITS
from loka_compile.kernels.running import run_kernel
from loka_compile.kernels.scaled_gemm import can_use_tma


@triton.jit
def _split4(x, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    """The rows 4i, 4i + 1, 4i + 2 and 4i + 3 of a tile as four tiles."""
    x = tl.permute(tl.reshape(x, (ROWS, 4, BLOCK_N)), (0, 2, 1))
    even, odd = tl.split(tl.reshape(x, (ROWS, BLOCK_N, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _grad_input_fp8_kernel(
    A, B, SA, SB, Y, RSTD, Q, QT, XT, SCALE, STATE, M, N, K, stride_a, stride_b, words, LIMIT: tl.constexpr,
    FLOOR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    NORM: tl.constexpr, EVEN_K: tl.constexpr, TMA: tl.constexpr, FAST: tl.constexpr, ACT: tl.constexpr,
    WRITE_Q: tl.constexpr, WRITE_QT: tl.constexpr, WRITE_XT: tl.constexpr, WORDS: tl.constexpr, PTX: tl.constexpr,
    PHASE: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    pid_m, pid_n = dev.tile_of(pid, M, N, BLOCK_M, BLOCK_N, GROUP_M)
    acc = dev.accumulate(
        A, B, pid_m, pid_n, 0, tl.cdiv(K, BLOCK_K), M, N, K, stride_a, stride_b, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K,
        TMA, FAST,
    )  # fmt: skip
    acc = acc * (tl.load(SA) * tl.load(SB))
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rw = pid_m * (BLOCK_M // 4) + tl.arange(0, BLOCK_M // 4)
    # Rows and columns past the end repeat valid ones in the product.
    acc = tl.where(((pid_m * BLOCK_M + tl.arange(0, BLOCK_M)) < M)[:, None] & (rn < N)[None, :], acc, 0.0)
    g0, g1, g2, g3 = _split4(acc, BLOCK_M // 4, BLOCK_N)
    d0, y0 = through(g0, 4 * rw, pid_n, Y, RSTD, M, N, BLOCK_N, NORM, ACT, PTX)
    d1, y1 = through(g1, 4 * rw + 1, pid_n, Y, RSTD, M, N, BLOCK_N, NORM, ACT, PTX)
    d2, y2 = through(g2, 4 * rw + 2, pid_n, Y, RSTD, M, N, BLOCK_N, NORM, ACT, PTX)
    d3, y3 = through(g3, 4 * rw + 3, pid_n, Y, RSTD, M, N, BLOCK_N, NORM, ACT, PTX)
    if WRITE_XT and PHASE != 2:
        store_activation(XT, y0, y1, y2, y3, rw, rn, M, N, words, ACT, WORDS, PTX)
    d = (d0, d1, d2, d3)
    if PHASE != 2:
        grid.report(STATE, turned.largest_of4(d))
    if PHASE == 0:
        grid.meet(STATE)
    if PHASE != 1:
        amax = tl.maximum(grid.largest(STATE), FLOOR, propagate_nan=tl.PropagateNan.ALL)
        grid.leave(STATE)
        if pid == 0:
            tl.store(SCALE, amax / LIMIT)
        turned.write4(d, LIMIT / amax, Q, QT, rw, rn, M, N, words, LIMIT, WRITE_Q, WRITE_QT, WORDS, PTX)


@torch.no_grad()
def grad_input_fp8(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, y: Tensor, rstd: Tensor, state: Tensor, *, block: int,
    activation: str, dtype: torch.dtype, fast: bool, config: GemmConfig, with_q: bool = True, with_qt: bool = True,
    with_xt: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``(q, qt, scale, xt)``: as ``block_norm_backward_fp8`` of the gradient ``a @ b.T * scale_a * scale_b`` [M, N].

    a [M, K] and b [N, K] in FP8, rows contiguous, scales fp32 of one element; y [M, N] and rstd [M, ceil(N/block)] of
    the layer below, contiguous. The tiles of ``config`` must not be more than the device's multiprocessors.
    """
    (m, k), n, device = a.shape, b.shape[0], a.device
    norm = dev.norm_tile(n, block)
    block_n = max(norm, min(config.block_n, triton.next_power_of_2(n)))
    q = torch.empty((m, n) if with_q else (0,), dtype=dtype, device=device)
    qt = torch.empty((n, m) if with_qt else (0,), dtype=dtype, device=device)
    xt = torch.empty((n, m) if with_xt else (0,), dtype=torch.float8_e4m3fn, device=device)
    scale = torch.empty((), dtype=torch.float32, device=device)
    tma = config.tma and can_use_tma(a, b)
    operands = (a, b)
    if tma:
        operands = (
            TensorDescriptor.from_tensor(a, [config.block_m, config.block_k]),
            TensorDescriptor.from_tensor(b, [block_n, config.block_k]),
        )
    for phase in grid.phases(device):
        run_kernel(
            _grad_input_fp8_kernel, (triton.cdiv(m, config.block_m) * triton.cdiv(n, block_n),),
            *operands, scale_a, scale_b, y, rstd, q, qt, xt, scale, state, m, n, k, a.stride(0), b.stride(0), m // 4,
            LIMIT=LIMITS[dtype], FLOOR=AMAX_FLOOR, BLOCK_M=config.block_m, BLOCK_N=block_n, BLOCK_K=config.block_k,
            GROUP_M=config.group_m, NORM=norm, EVEN_K=k % config.block_k == 0, TMA=tma, FAST=fast, ACT=activation,
            WRITE_Q=with_q, WRITE_QT=with_qt, WRITE_XT=with_xt, WORDS=m % 4 == 0, PTX=dev.ptx(device), PHASE=phase,
            num_warps=config.warps, num_stages=config.stages, **grid.together(device),
        )  # fmt: skip
    return q, qt, scale, xt
