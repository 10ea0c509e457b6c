"""What runs on the GPU for the FP8 quantisers of :mod:`loka_compile.kernels.quantize`.

They should wait for memory alone, and an H200 has time for about 20 instructions an element while it moves it (14 in a
pass that only reads). So:

* x is held in registers from the maxima to the casts, the cast itself saturates, and nothing is divided;
* x.T is turned as words. A program loads the rows 4i, 4i + 1, 4i + 2 and 4i + 3 as four tiles, so that a thread has
  four neighbours of a row of x.T. It packs them into an int32, and threads exchange those, not bytes. That also keeps
  clear of Triton 3.6's wrong code for transposed FP8 stores next to min.NaN and max.NaN (triton-lang/triton #11111),
  for which maxima are compared as integers, too.

Where maxima of rows and of columns are both wanted: :mod:`loka_compile.kernels.quantize_pairs`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loka_compile.kernels import device as dev
from loka_compile.kernels import turned

#: Bits of the smallest amax, 1e-12, as an integer that orders like the number.
_FLOOR = tl.constexpr(0x2B8CBCCC)


@triton.jit
def _scale_of(largest, LIMIT: tl.constexpr, PTX: tl.constexpr):
    """From maxima as :func:`device.bits`: the scale that multiplies FP8 data, and what x is multiplied by.

    No division, which is ten instructions for each column in each thread: no scale is subnormal, nor its inverse.
    """
    scale = tl.maximum(largest, _FLOOR).to(tl.float32, bitcast=True) * (1.0 / LIMIT)
    if PTX:
        return scale, tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [scale], dtype=tl.float32, is_pure=True, pack=1
        )
    return scale, 1.0 / scale


@triton.jit
def _held(x, HELD: tl.constexpr):
    """x, of which the compiler cannot know that it was converted before: so it keeps 16 bits a number meanwhile."""
    if HELD:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=True, pack=2)
    return x


@triton.jit
def _bits4(x):
    """Element by element, the largest |x| of four tiles."""
    return tl.maximum(tl.maximum(dev.bits(x[0]), dev.bits(x[1])), tl.maximum(dev.bits(x[2]), dev.bits(x[3])))


@triton.jit
def _store_q(Q, x, inverse, rm, rn, M, N, TYPE: tl.constexpr, LIMIT: tl.constexpr, PTX: tl.constexpr):
    q = dev.to_fp8(x, inverse, TYPE, LIMIT, PTX)
    tl.store(Q + rm.to(tl.int64)[:, None] * N + rn[None, :], q, mask=(rm[:, None] < M) & (rn[None, :] < N))


@triton.jit
def _store_qt(
    QT, x, inverse, rw, rn, M, N, words, WORDS: tl.constexpr, TYPE: tl.constexpr, LIMIT: tl.constexpr, PTX: tl.constexpr
):
    """Four tiles of rows as x.T."""
    packed = dev.pack4(x[0], x[1], x[2], x[3], inverse, TYPE, LIMIT, PTX)
    turned.store_turned(QT, packed, rw, rn, M, N, words, WORDS)


@triton.jit
def _blocks(
    X, Q, S, pid_m, pid_n, M, N, stride, TYPE: tl.constexpr, LIMIT: tl.constexpr, SQUARE: tl.constexpr,
    PTX: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """x of a tile that holds whole blocks, side by side."""
    COUNT: tl.constexpr = BLOCK_N // 128
    rm = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rb = pid_n * COUNT + tl.arange(0, COUNT)
    blocks = tl.cdiv(N, 128)
    x = turned.load(X, rm, rn, M, N, stride)
    if SQUARE:
        tiles = tl.reshape(x, (BLOCK_M // 128, 128, COUNT, 128))
        scale, inverse = _scale_of(tl.max(tl.max(dev.bits(tiles), axis=3), axis=1), LIMIT, PTX)
        rs = pid_m * (BLOCK_M // 128) + tl.arange(0, BLOCK_M // 128)
        tl.store(S + rs[:, None] * blocks + rb[None, :], scale, mask=(rs[:, None] * 128 < M) & (rb[None, :] < blocks))
        x = tl.reshape(_held(tiles, HELD).to(tl.float32) * inverse[:, None, :, None], (BLOCK_M, BLOCK_N))
    else:
        tiles = tl.reshape(x, (BLOCK_M, COUNT, 128))
        scale, inverse = _scale_of(tl.max(dev.bits(tiles), axis=2), LIMIT, PTX)
        mask = (rm[:, None] < M) & (rb[None, :] < blocks)
        tl.store(S + rb.to(tl.int64)[None, :] * M + rm[:, None], scale, mask=mask)
        x = tl.reshape(_held(tiles, HELD).to(tl.float32) * inverse[:, :, None], (BLOCK_M, BLOCK_N))
    _store_q(Q, x, 1.0, rm, rn, M, N, TYPE, LIMIT, PTX)


@triton.jit
def _blocks_t(
    X, Q, S, QT, ST, pid_m, pid_n, M, N, stride, words, WORDS: tl.constexpr, TYPE: tl.constexpr, LIMIT: tl.constexpr,
    SQUARE: tl.constexpr, WRITE_Q: tl.constexpr, PTX: tl.constexpr, BLOCK_N: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """x.T of a tile of 128 rows, and x too if asked for."""
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rw = pid_m * 32 + tl.arange(0, 32)
    x = turned.load4(X, rw, rn, M, N, stride)
    if SQUARE:
        scale, inverse = _scale_of(tl.max(_bits4(x)), LIMIT, PTX)
        x = (_held(x[0], HELD), _held(x[1], HELD), _held(x[2], HELD), _held(x[3], HELD))
        tl.store(ST + pid_n * tl.cdiv(M, 128) + pid_m, scale)
        _store_qt(QT, x, inverse, rw, rn, M, N, words, WORDS, TYPE, LIMIT, PTX)
        if WRITE_Q:
            tl.store(S + pid_m * tl.cdiv(N, BLOCK_N) + pid_n, scale)
            for i in tl.static_range(4):
                _store_q(Q, x[i], inverse, 4 * rw + i, rn, M, N, TYPE, LIMIT, PTX)
    else:
        scale, inverse = _scale_of(tl.max(_bits4(x), axis=0), LIMIT, PTX)
        x = (_held(x[0], HELD), _held(x[1], HELD), _held(x[2], HELD), _held(x[3], HELD))
        tl.store(ST + pid_m.to(tl.int64) * N + rn, scale, mask=rn < N)
        _store_qt(QT, x, inverse[None, :], rw, rn, M, N, words, WORDS, TYPE, LIMIT, PTX)
        if WRITE_Q:
            for i in tl.static_range(4):
                rm = 4 * rw + i
                scale, inverse = _scale_of(tl.max(dev.bits(x[i]), axis=1), LIMIT, PTX)
                tl.store(S + pid_n.to(tl.int64) * M + rm, scale, mask=rm < M)
                _store_q(Q, x[i], inverse[:, None], rm, rn, M, N, TYPE, LIMIT, PTX)


@triton.jit
def _blocks_kernel(
    X, Q, S, QT, ST, M, N, stride, words, WORDS: tl.constexpr, TYPE: tl.constexpr, LIMIT: tl.constexpr,
    SQUARE: tl.constexpr, WRITE_Q: tl.constexpr, WRITE_QT: tl.constexpr, PTX: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, GROUP: tl.constexpr, HELD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    dev.wait(PDL)
    pid_m, pid_n = dev.tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP)
    if WRITE_QT:
        _blocks_t(
            X, Q, S, QT, ST, pid_m, pid_n, M, N, stride, words, WORDS, TYPE, LIMIT, SQUARE, WRITE_Q, PTX, BLOCK_N, HELD
        )
    else:
        _blocks(X, Q, S, pid_m, pid_n, M, N, stride, TYPE, LIMIT, SQUARE, PTX, BLOCK_M, BLOCK_N, HELD)


@triton.jit
def _rows_kernel(
    X, Q, S, M, N, stride, TYPE: tl.constexpr, LIMIT: tl.constexpr, ONCE: tl.constexpr, PTX: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Whole rows: held, or with a loop read twice."""
    dev.wait(PDL)
    rm = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = tl.arange(0, BLOCK_N)
    if ONCE:
        x = turned.load(X, rm, rn, M, N, stride)
        scale, inverse = _scale_of(tl.max(dev.bits(x), axis=1), LIMIT, PTX)
        _store_q(Q, x, inverse[:, None], rm, rn, M, N, TYPE, LIMIT, PTX)
    else:
        largest = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
        for start in range(0, N, BLOCK_N):
            largest = tl.maximum(largest, dev.bits(turned.load(X, rm, start + rn, M, N, stride)))
        scale, inverse = _scale_of(tl.max(largest, axis=1), LIMIT, PTX)
        for start in range(0, N, BLOCK_N):
            x = turned.load(X, rm, start + rn, M, N, stride)
            _store_q(Q, x, inverse[:, None], rm, start + rn, M, N, TYPE, LIMIT, PTX)
    tl.store(S + rm, scale, mask=rm < M)


@triton.jit
def _zero_kernel(OUT, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Zeros for the maxima. Unlike torch's, it begins early and lets the next kernel do so."""
    dev.wait(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(OUT + at, 0, mask=at < count)


@triton.jit
def _amax_kernel(
    X, ROWS, COLUMNS, M, N, stride, ALL: tl.constexpr, BY_ROW: tl.constexpr, BY_COLUMN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first pass: maxima as :func:`device.bits`, of everything or of rows and columns, into zeros.

    By atomics on integers, whose order does not matter. A program reads STEPS tiles below each other, and finds the
    maxima of columns once for all of them.
    """
    dev.wait(PDL)
    pid_m, pid_n = dev.tile_of(tl.program_id(0), M, N, BLOCK_M * STEPS, BLOCK_N, GROUP)
    rm = pid_m * (BLOCK_M * STEPS) + tl.arange(0, BLOCK_M)
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    largest = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    for _ in tl.static_range(STEPS):
        size = dev.bits(turned.load(X, rm, rn, M, N, stride))
        if BY_ROW:
            tl.atomic_max(ROWS + rm, tl.max(size, axis=1), mask=rm < M, sem="relaxed")
        largest = tl.maximum(largest, size)
        rm += BLOCK_M
    if ALL:
        tl.atomic_max(ROWS, tl.max(largest), sem="relaxed")
    if BY_COLUMN:
        tl.atomic_max(COLUMNS + rn, tl.max(largest, axis=0), mask=rn < N, sem="relaxed")


@triton.jit
def _cast_kernel(
    X, ROWS, COLUMNS, Q, S, QT, ST, M, N, stride, words, WORDS: tl.constexpr, TYPE: tl.constexpr,
    LIMIT: tl.constexpr, ALL: tl.constexpr, WRITE_Q: tl.constexpr, WRITE_QT: tl.constexpr, PTX: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The second pass, from the maxima of rows and columns; with ALL from the one of everything."""
    dev.wait(PDL)
    # Backwards: what the pass before read last is still in L2.
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    pid_m, pid_n = dev.tile_of(pid, M, N, BLOCK_M, BLOCK_N, GROUP)
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if ALL:
        scale, inverse = _scale_of(tl.load(ROWS), LIMIT, PTX)
        if WRITE_Q:
            tl.store(S, scale, mask=pid == 0)
        if WRITE_QT:
            tl.store(ST, scale, mask=pid == 0)
    if WRITE_QT:
        rw = pid_m * (BLOCK_M // 4) + tl.arange(0, BLOCK_M // 4)
        x = turned.load4(X, rw, rn, M, N, stride)
        if WRITE_Q:
            for i in tl.static_range(4):
                rm = 4 * rw + i
                if ALL:
                    _store_q(Q, x[i], inverse, rm, rn, M, N, TYPE, LIMIT, PTX)
                else:
                    scale, inverse = _scale_of(tl.load(ROWS + rm, mask=rm < M, other=0), LIMIT, PTX)
                    tl.store(S + rm, scale, mask=(rm < M) & (pid_n == 0))
                    _store_q(Q, x[i], inverse[:, None], rm, rn, M, N, TYPE, LIMIT, PTX)
        if ALL:
            _store_qt(QT, x, inverse, rw, rn, M, N, words, WORDS, TYPE, LIMIT, PTX)
        else:
            scale, inverse = _scale_of(tl.load(COLUMNS + rn, mask=rn < N, other=0), LIMIT, PTX)
            tl.store(ST + rn, scale, mask=(rn < N) & (pid_m == 0))
            _store_qt(QT, x, inverse[None, :], rw, rn, M, N, words, WORDS, TYPE, LIMIT, PTX)
    else:
        rm = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
        _store_q(Q, turned.load(X, rm, rn, M, N, stride), inverse, rm, rn, M, N, TYPE, LIMIT, PTX)
