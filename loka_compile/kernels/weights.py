"""All weights of a model in FP8 in one launch: programs find the maximum of each, meet, and cast."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from loka_compile.kernels import device as dev
from loka_compile.kernels import grid_barrier as grid
from loka_compile.kernels import turned
from loka_compile.kernels.cast import results_for
from loka_compile.kernels.config import MeetingConfig
from loka_compile.kernels.reference import AMAX_FLOOR, LIMITS

#: Weights per launch: each adds a branch to the kernel's code, and a maximum to the state.
GROUP = grid.MAXIMA
BLOCK_N = 128
CONFIG = MeetingConfig(block_m=64, warps=4, resident=4)


@triton.jit
def _load(X, local, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A tile as four tiles (see kernels/turned.py), and its rows of words and columns."""
    grid_n = tl.cdiv(N, BLOCK_N)
    rw = (local // grid_n) * (BLOCK_M // 4) + tl.arange(0, BLOCK_M // 4)
    rn = (local % grid_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = X + (4 * rw).to(tl.int64)[:, None] * N + rn[None, :]
    inside = rn[None, :] < N
    x0 = tl.load(at, mask=(4 * rw[:, None] < M) & inside, other=0.0).to(tl.float32)
    x1 = tl.load(at + N, mask=(4 * rw[:, None] + 1 < M) & inside, other=0.0).to(tl.float32)
    x2 = tl.load(at + 2 * N, mask=(4 * rw[:, None] + 2 < M) & inside, other=0.0).to(tl.float32)
    x3 = tl.load(at + 3 * N, mask=(4 * rw[:, None] + 3 < M) & inside, other=0.0).to(tl.float32)
    return (x0, x1, x2, x3), rw, rn


@triton.jit
def _weights_kernel(
    XS, QS, QTS, SCALES, STATE, starts, ms, ns, COUNT: tl.constexpr, MAXIMA: tl.constexpr, LIMIT: tl.constexpr,
    FLOOR: tl.constexpr, TRANSPOSED: tl.constexpr, WORDS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PTX: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0)
    step = tl.num_programs(0)
    which = tl.arange(0, MAXIMA)
    if PHASE != 2:
        best = tl.zeros((MAXIMA,), dtype=tl.int32)
        for tile in range(first, starts[COUNT], step):
            for i in tl.static_range(COUNT):
                if (tile >= starts[i]) & (tile < starts[i + 1]):
                    x, rw, rn = _load(XS[i], tile - starts[i], ms[i], ns[i], BLOCK_M, BLOCK_N)
                    best = tl.maximum(best, tl.where(which == i, turned.largest_of4(x), 0))
        tl.atomic_max(STATE + 2 + which, best, sem="relaxed")
    if PHASE == 0:
        grid.meet(STATE)
    if PHASE != 1:
        for tile in range(first, starts[COUNT], step):
            for i in tl.static_range(COUNT):
                if (tile >= starts[i]) & (tile < starts[i + 1]):
                    amax = tl.maximum(grid.largest(STATE, i), FLOOR, propagate_nan=tl.PropagateNan.ALL)
                    if tile == starts[i]:
                        tl.store(SCALES[i], amax / LIMIT)
                    x, rw, rn = _load(XS[i], tile - starts[i], ms[i], ns[i], BLOCK_M, BLOCK_N)
                    turned.write4(
                        x, LIMIT / amax, QS[i], QTS[i], rw, rn, ms[i], ns[i], ms[i] // 4, LIMIT, True,
                        ((TRANSPOSED >> i) & 1) == 1, ((WORDS >> i) & 1) == 1, PTX,
                    )  # fmt: skip
        grid.leave(STATE, MAXIMA)


@torch.no_grad()
def quantize_weights(
    weights: list[Tensor], state: Tensor, dtype: torch.dtype, with_qt: list[bool], config: MeetingConfig = CONFIG
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Every weight [N, K] tensorwise in FP8, the transposes [K, N] (empty where not asked for), the scales (shape []).

    One launch for each group of up to eight weights. state: int32 [grid_barrier.STATE], zero before and afterwards.
    """
    q, qt, scales = results_for(weights, dtype, with_qt)
    chosen = [i for i, w in enumerate(weights) if w.numel()]
    for first in range(0, len(chosen), GROUP):
        group = chosen[first : first + GROUP]
        ws = tuple(weights[i].contiguous() for i in group)
        device = ws[0].device
        starts = [0]
        for w in ws:
            starts.append(starts[-1] + triton.cdiv(w.shape[0], config.block_m) * triton.cdiv(w.shape[1], BLOCK_N))
        room = config.resident * torch.cuda.get_device_properties(device).multi_processor_count
        scale = tuple(torch.empty((), dtype=torch.float32, device=device) for _ in ws)
        ms, ns = tuple(w.shape[0] for w in ws), tuple(w.shape[1] for w in ws)
        for phase in grid.phases(device):
            _weights_kernel[(min(starts[-1], room),)](
                ws, tuple(q[i] for i in group), tuple(qt[i] for i in group), scale, state, tuple(starts), ms, ns,
                COUNT=len(ws), MAXIMA=grid.MAXIMA, LIMIT=LIMITS[dtype], FLOOR=AMAX_FLOOR,
                TRANSPOSED=sum(with_qt[i] << at for at, i in enumerate(group)),
                WORDS=sum((m % 4 == 0) << at for at, m in enumerate(ms)), BLOCK_M=config.block_m, BLOCK_N=BLOCK_N,
                PTX=dev.ptx(device), PHASE=phase, num_warps=config.warps, num_stages=1,
                **grid.together(device, config.registers),
            )  # fmt: skip
        for i, s in zip(group, scale, strict=True):
            scales[i] = s
    return q, qt, scales
