"""Gradient through an activation and BlockNorm and its FP8 cast in both layouts, in one kernel.

What :mod:`loka_compile.kernels.block_norm_backward` and :func:`loka_compile.kernels.cast.cast_transpose` do in two: the
programs find the largest |dx| of the whole tensor, meet, and cast. The scale is tensorwise, so the GEMMs behind it stay
those of the plan. A program that has one tile keeps it in registers over the meeting, up to ``keep`` of them rounded to
16 bits, as words of two. With more, or with more than one in fp32, it computes them again from what it just read. dx
itself is not written unless asked for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from loka_compile.kernels import device as dev
from loka_compile.kernels import gradient_tile as tiles_of
from loka_compile.kernels import grid_barrier as grid
from loka_compile.kernels import turned
from loka_compile.kernels.config import BackwardConfig
from loka_compile.kernels.reference import AMAX_FLOOR, LIMITS
from loka_compile.kernels.running import run_kernel

CONFIG = BackwardConfig()


@triton.jit
def _pair(
    rm, pid_n, G, Y, RSTD, M, N, BLOCK_N: tl.constexpr, NORM: tl.constexpr, ACT: tl.constexpr, PTX: tl.constexpr
):  # fmt: skip
    """dx of the rows ``rm`` and ``rm + 1`` halved, and their activations as FP8 in the low halves of words."""
    d0, y0 = tiles_of.gradient(rm, pid_n, G, Y, RSTD, M, N, BLOCK_N, NORM, ACT, PTX)
    d1, y1 = tiles_of.gradient(rm + 1, pid_n, G, Y, RSTD, M, N, BLOCK_N, NORM, ACT, PTX)
    x = turned.pack2(dev.activated(y0, ACT, PTX), dev.activated(y1, ACT, PTX), 16.0, tl.float8e4nv, 448.0, PTX)
    return turned.halved(d0, d1, G.dtype.element_ty, PTX), x


@triton.jit
def _halved_gradients(
    tile, G, Y, RSTD, XT, M, N, words, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NORM: tl.constexpr,
    ACT: tl.constexpr, WRITE_XT: tl.constexpr, WORDS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """As :func:`loka_compile.kernels.gradient_tile.gradients`, rounded and halved pair by pair:
    no more than a pair is ever held in fp32."""
    grid_n = tl.cdiv(N, BLOCK_N)
    pid_m, pid_n = tile // grid_n, tile % grid_n
    rw = pid_m * (BLOCK_M // 4) + tl.arange(0, BLOCK_M // 4)
    low, x = _pair(4 * rw, pid_n, G, Y, RSTD, M, N, BLOCK_N, NORM, ACT, PTX)
    tl.debug_barrier()  # else the loads of the second pair are put in front of the first, and spill
    high, above = _pair(4 * rw + 2, pid_n, G, Y, RSTD, M, N, BLOCK_N, NORM, ACT, PTX)
    if WRITE_XT:
        turned.store_turned(XT, x | (above << 16), rw, pid_n * BLOCK_N + tl.arange(0, BLOCK_N), M, N, words, WORDS)
    return low, high


@triton.jit
def _write(
    tile, d, inverse, DX, Q, QT, M, N, words, LIMIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WRITE_DX: tl.constexpr, WRITE_Q: tl.constexpr, WRITE_QT: tl.constexpr, WORDS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    grid_n = tl.cdiv(N, BLOCK_N)
    rw = (tile // grid_n) * (BLOCK_M // 4) + tl.arange(0, BLOCK_M // 4)
    rn = (tile % grid_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    if WRITE_DX:
        for i in tl.static_range(4):
            rm = 4 * rw + i
            at = DX + rm.to(tl.int64)[:, None] * N + rn[None, :]
            tl.store(at, d[i].to(DX.dtype.element_ty), mask=(rm[:, None] < M) & (rn[None, :] < N))
    turned.write4(d, inverse, Q, QT, rw, rn, M, N, words, LIMIT, WRITE_Q, WRITE_QT, WORDS, PTX)


@triton.jit
def _zeros(KEEP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """What a program keeps before it has any: two tiles of words for each tile."""
    one = (tl.zeros((ROWS, COLUMNS), dtype=tl.int32), tl.zeros((ROWS, COLUMNS), dtype=tl.int32))
    kept = one
    for _ in tl.static_range(KEEP - 1):
        kept = kept + one  # type: ignore[assignment]
    return kept


@triton.jit
def _backward_fp8_kernel(
    G, Y, RSTD, DX, Q, QT, XT, SCALE, STATE, M, N, words, tiles, LIMIT: tl.constexpr, FLOOR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NORM: tl.constexpr, ACT: tl.constexpr, WRITE_DX: tl.constexpr,
    WRITE_Q: tl.constexpr, WRITE_QT: tl.constexpr, WRITE_XT: tl.constexpr, WORDS: tl.constexpr, PTX: tl.constexpr,
    KEEP: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0)
    step = tl.num_programs(0)
    TYPE: tl.constexpr = G.dtype.element_ty
    if KEEP == 1:
        d = tiles_of.gradients(
            first, G, Y, RSTD, XT, M, N, words, BLOCK_M, BLOCK_N, NORM, ACT, WRITE_XT and PHASE != 2, WORDS, PTX
        )  # fmt: skip
        best = turned.largest_of4(d)
    elif KEEP > 1:
        # Loops, not unrolled: else the compiler moves work between tiles, and what it holds meanwhile is spilled.
        kept = _zeros(KEEP, BLOCK_M // 4, BLOCK_N)
        largest = tl.zeros((BLOCK_M // 4, BLOCK_N), dtype=tl.int32)
        for tile in range(first, tiles, step):
            low, high = _halved_gradients(
                tile, G, Y, RSTD, XT, M, N, words, BLOCK_M, BLOCK_N, NORM, ACT, WRITE_XT and PHASE != 2, WORDS, PTX
            )  # fmt: skip
            largest = turned.largest_halves(largest, low, high)
            kept = kept[2:] + (low, high)  # noqa: RUF005  (Triton knows no starred values)
        # Of the rounded values, so that none exceeds it.
        best = turned.largest_of_halves(largest, TYPE)
    elif PHASE != 2:
        best = tl.zeros((), dtype=tl.int32)
        for tile in range(first, tiles, step):
            d = tiles_of.gradients(tile, G, Y, RSTD, XT, M, N, words, BLOCK_M, BLOCK_N, NORM, ACT, WRITE_XT, WORDS, PTX)
            best = tl.maximum(best, turned.largest_of4(d))
    if PHASE != 2:
        grid.report(STATE, best)
    if PHASE == 0:
        grid.meet(STATE)
    if PHASE != 1:
        amax = tl.maximum(grid.largest(STATE), FLOOR, propagate_nan=tl.PropagateNan.ALL)
        grid.leave(STATE)
        inverse = LIMIT / amax
        if first == 0:
            tl.store(SCALE, amax / LIMIT)
        if KEEP == 1:
            _write(
                first, d, inverse, DX, Q, QT, M, N, words, LIMIT, BLOCK_M, BLOCK_N, WRITE_DX, WRITE_Q, WRITE_QT, WORDS,
                PTX,
            )  # fmt: skip
        elif KEEP > 1:
            for back in range(0, tiles - first, step):  # the one kept last is the first to go
                tile = first + (tiles - first - 1) // step * step - back
                d = turned.doubled(kept[2 * KEEP - 2], kept[2 * KEEP - 1], TYPE)
                _write(
                    tile, d, inverse, DX, Q, QT, M, N, words, LIMIT, BLOCK_M, BLOCK_N, WRITE_DX, WRITE_Q, WRITE_QT,
                    WORDS, PTX,
                )  # fmt: skip
                kept = kept[2 * KEEP - 2 :] + kept[: 2 * KEEP - 2]
        else:
            for tile in range(first, tiles, step):
                d = tiles_of.gradients(
                    tile, G, Y, RSTD, XT, M, N, words, BLOCK_M, BLOCK_N, NORM, ACT, False, WORDS, PTX
                )
                _write(
                    tile, d, inverse, DX, Q, QT, M, N, words, LIMIT, BLOCK_M, BLOCK_N, WRITE_DX, WRITE_Q, WRITE_QT,
                    WORDS, PTX,
                )  # fmt: skip


@torch.no_grad()
def block_norm_backward_fp8(
    grad: Tensor, y: Tensor, rstd: Tensor, state: Tensor, *, block: int, activation: str, dtype: torch.dtype,
    with_dx: bool = False, with_q: bool = True, with_qt: bool = True, with_xt: bool = False,
    config: BackwardConfig = CONFIG,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``(dx, q, qt, scale, xt)`` for contiguous grad and y [M, N] (not empty), rstd fp32 [M, ceil(N/block)].

    y in e4m3 stands for y / 16. activation: one of kernels.reference.ACTIVATIONS, or "" for none.

    state: int32 [grid_barrier.STATE], all zero, and zero again afterwards. dx [M, N] in grad's dtype; q [M, N] and qt
    [N, M] in FP8 ``dtype`` with ``scale`` (fp32, shape []) that multiplies them back; xt e4m3 [N, M],
    ``fp8(act(y) * 16)`` transposed. What is not asked for is empty. block at most 256.
    """
    (m, n), device = grad.shape, grad.device
    norm = dev.norm_tile(n, block)
    block_n = max(norm, min(256, triton.next_power_of_2(n)))
    tiles = triton.cdiv(m, config.block_m) * triton.cdiv(n, block_n)
    room = config.resident * torch.cuda.get_device_properties(device).multi_processor_count
    dx = torch.empty((m, n) if with_dx else (0,), dtype=grad.dtype, device=device)
    q = torch.empty((m, n) if with_q else (0,), dtype=dtype, device=device)
    qt = torch.empty((n, m) if with_qt else (0,), dtype=dtype, device=device)
    xt = torch.empty((n, m) if with_xt else (0,), dtype=torch.float8_e4m3fn, device=device)
    scale = torch.empty((), dtype=torch.float32, device=device)
    keep = triton.cdiv(tiles, room)
    if keep > (config.keep if grad.element_size() == 2 else 1):
        keep = 0
    for phase in grid.phases(device):
        run_kernel(
            _backward_fp8_kernel, (min(tiles, room),),
            grad, y, rstd, dx, q, qt, xt, scale, state, m, n, m // 4, tiles,
            LIMIT=LIMITS[dtype], FLOOR=AMAX_FLOOR, BLOCK_M=config.block_m, BLOCK_N=block_n, NORM=norm, ACT=activation,
            WRITE_DX=with_dx, WRITE_Q=with_q, WRITE_QT=with_qt, WRITE_XT=with_xt, WORDS=m % 4 == 0,
            PTX=dev.ptx(device), KEEP=keep, PHASE=phase,
            num_warps=config.warps, num_stages=1, **grid.together(device, config.registers),
        )  # fmt: skip
    return dx, q, qt, scale, xt
