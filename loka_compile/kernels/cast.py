"""Casts to FP8 that write a tensor and its transpose in one launch, and all weights of a model in two launches."""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from loka_compile.kernels import device as dev
from loka_compile.kernels import turned
from loka_compile.kernels.reference import AMAX_FLOOR, LIMITS
from loka_compile.kernels.running import run_kernel


@triton.jit
def _cast_transpose_kernel(
    X, PARTS, Q, QT, SCALE, M, N, words, count, LIMIT: tl.constexpr, FLOOR: tl.constexpr, CHUNK: tl.constexpr,
    WRITE_Q: tl.constexpr, WRITE_QT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WORDS: tl.constexpr,
    PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    dev.wait(PDL)
    # Backwards: what the kernel in front wrote last is still in L2.
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    grid_n = tl.cdiv(N, BLOCK_N)
    rw = (pid // grid_n) * (BLOCK_M // 4) + tl.arange(0, BLOCK_M // 4)
    rn = (pid % grid_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    x = turned.load4(X, rw, rn, M, N, N)
    amax = dev.amax_of(PARTS, count, FLOOR, CHUNK)
    if pid == 0:
        tl.store(SCALE, amax / LIMIT)
    turned.write4(x, LIMIT / amax, Q, QT, rw, rn, M, N, words, LIMIT, WRITE_Q, WRITE_QT, WORDS, PTX)


@torch.no_grad()
def cast_transpose(
    x: Tensor, parts: Tensor, dtype: torch.dtype, *, with_q: bool = True, with_qt: bool = True,
    block_m: int = 64, block_n: int = 128, warps: int = 4,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``(q, qt, scale)``: x [M, N] in FP8 [M, N], the same transposed [N, M], and the scale that multiplies it back.

    ``parts`` (fp32, any length) holds maxima of |x| that together cover x. Outputs not asked for are empty.
    """
    m, n = x.shape
    q = torch.empty((m, n) if with_q else (0,), dtype=dtype, device=x.device)
    qt = torch.empty((n, m) if with_qt else (0,), dtype=dtype, device=x.device)
    scale = torch.empty((), dtype=torch.float32, device=x.device)
    count = parts.numel()
    grid = (triton.cdiv(m, block_m) * triton.cdiv(n, block_n),)
    run_kernel(
        _cast_transpose_kernel, grid,
        x, parts, q, qt, scale, m, n, m // 4, count, LIMIT=LIMITS[dtype], FLOOR=AMAX_FLOOR,
        CHUNK=max(32, min(1024, triton.next_power_of_2(max(count, 1)))), WRITE_Q=with_q, WRITE_QT=with_qt,
        BLOCK_M=block_m, BLOCK_N=block_n, WORDS=m % 4 == 0, PTX=dev.ptx(x.device), num_warps=warps, num_stages=1,
        **dev.early(x.device),
    )  # fmt: skip
    return q, qt, scale


@triton.jit
def _of(pid, starts, values, COUNT: tl.constexpr):
    """What belongs to the weight that tile ``pid`` is of. One value is chosen and the kernel's code is there once: with
    a branch for each weight, its compilation took seconds."""
    zero = pid * 0  # a size of one is a constant for Triton, which must become a number like the others
    value = values[0] + zero
    for i in tl.static_range(1, COUNT):
        if pid >= starts[i]:
            value = values[i] + zero
    return value


@triton.jit
def _amax_weights_kernel(
    XS, PARTS, starts, ms, ns, COUNT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    dev.wait(PDL)
    pid = tl.program_id(0)
    local = pid - _of(pid, starts, starts, COUNT)
    M = _of(pid, starts, ms, COUNT)
    N = _of(pid, starts, ns, COUNT)
    grid_n = tl.cdiv(N, BLOCK_N)
    rm = (local // grid_n) * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = (local % grid_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rm[:, None] < M) & (rn[None, :] < N)
    at = _of(pid, starts, XS, COUNT) + rm.to(tl.int64)[:, None] * N + rn[None, :]
    tl.store(PARTS + pid, dev.amax(tl.load(at, mask=mask, other=0.0).to(tl.float32)))


@triton.jit
def _cast_weights_kernel(
    XS, QS, QTS, PARTS, SCALES, starts, ends, ms, ns, turned_too, COUNT: tl.constexpr,
    LIMIT: tl.constexpr, FLOOR: tl.constexpr, CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    dev.wait(PDL)
    pid = tl.program_id(0)
    first = _of(pid, starts, starts, COUNT)
    amax = dev.amax_of(PARTS + first, _of(pid, starts, ends, COUNT) - first, FLOOR, CHUNK)
    if pid == first:
        tl.store(_of(pid, starts, SCALES, COUNT), amax / LIMIT)
    M = _of(pid, starts, ms, COUNT)
    N = _of(pid, starts, ns, COUNT)
    grid_n = tl.cdiv(N, BLOCK_N)
    rw = (pid - first) // grid_n * (BLOCK_M // 4) + tl.arange(0, BLOCK_M // 4)
    rn = (pid - first) % grid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    x = turned.load4(_of(pid, starts, XS, COUNT), rw, rn, M, N, N)
    Q, QT = _of(pid, starts, QS, COUNT), _of(pid, starts, QTS, COUNT)
    turned.write4(x, LIMIT / amax, Q, QT, rw, rn, M, N, M // 4, LIMIT, True, False, WORDS, PTX)
    # Whether a weight is turned is a number here, and a constant for write4.
    if _of(pid, starts, turned_too, COUNT) != 0:
        turned.write4(x, LIMIT / amax, Q, QT, rw, rn, M, N, M // 4, LIMIT, False, True, WORDS, PTX)


#: Weights per launch: a program looks for its own among so many, and a launch has 4 KiB for its arguments.
GROUP = 32


def results_for(
    weights: list[Tensor], dtype: torch.dtype, with_qt: list[bool]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Memory for FP8 weights [N, K] and transposes [K, N] (empty where not asked for), and the scales: an empty
    weight's is there already, another's place holds the weight."""
    q = [torch.empty(w.shape, dtype=dtype, device=w.device) for w in weights]
    qt = [
        torch.empty((w.shape[1], w.shape[0]) if t else (0,), dtype=dtype, device=w.device)
        for w, t in zip(weights, with_qt, strict=True)
    ]
    # What an empty weight gets, and a placeholder for the others.
    scales = [torch.full((), AMAX_FLOOR / LIMITS[dtype], device=w.device) if not w.numel() else w for w in weights]
    return q, qt, scales


@torch.no_grad()
def quantize_weights(
    weights: list[Tensor], dtype: torch.dtype, with_qt: list[bool], *, block_m: int = 64, block_n: int = 128,
    warps: int = 4,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:  # fmt: skip
    """Every weight [N, K] tensorwise in FP8, the transposes [K, N] (empty where not asked for), the scales (shape []).

    Two launches (maxima of tiles, then the cast) for each group of up to 32 weights (see :func:`_groups`).
    """
    q, qt, scales = results_for(weights, dtype, with_qt)
    for group in _groups(weights):
        ws = tuple(weights[i].contiguous() for i in group)
        tiles = [triton.cdiv(w.shape[0], block_m) * triton.cdiv(w.shape[1], block_n) for w in ws]
        ends = tuple(itertools.accumulate(tiles))
        starts = (0, *ends[:-1])
        parts = torch.empty((ends[-1],), dtype=torch.float32, device=ws[0].device)
        scale = tuple(torch.empty((), dtype=torch.float32, device=w.device) for w in ws)
        ms, ns = tuple(w.shape[0] for w in ws), tuple(w.shape[1] for w in ws)
        how = {"COUNT": len(ws), "BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": warps, "num_stages": 1}
        how |= dev.early(ws[0].device)
        run_kernel(_amax_weights_kernel, (ends[-1],), ws, parts, starts, ms, ns, **how)
        run_kernel(
            _cast_weights_kernel, (ends[-1],),
            ws, tuple(q[i] for i in group), tuple(qt[i] for i in group), parts, scale, starts, ends, ms, ns,
            tuple(int(with_qt[i]) for i in group), LIMIT=LIMITS[dtype], FLOOR=AMAX_FLOOR, CHUNK=256,
            WORDS=all(m % 4 == 0 for m in ms), PTX=dev.ptx(ws[0].device), **how,
        )  # fmt: skip
        for i, s in zip(group, scale, strict=True):
            scales[i] = s
    return q, qt, scales


def _groups(weights: list[Tensor]) -> list[list[int]]:
    """Those that are not empty, for one pair of launches each: of one dtype, and those with rows and columns of a
    multiple of 16 by themselves, as what is true of all is what memory is read and written by."""
    alike: dict[tuple[torch.dtype, bool, bool], list[int]] = {}
    for i, weight in enumerate(weights):
        if weight.numel():
            m, n = weight.shape
            alike.setdefault((weight.dtype, m % 16 == 0, n % 16 == 0), []).append(i)
    return [group[at : at + GROUP] for group in alike.values() for at in range(0, len(group), GROUP)]
