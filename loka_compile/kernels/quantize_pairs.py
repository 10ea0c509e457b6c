"""Maxima of rows and of columns at once, for the quantisers: 16-bit numbers are compared two at a time.

A pair is an int32 that holds two neighbours of a row of x; without their signs, integers order 16-bit floats, NaN above
infinity. One by one, the two kinds of maxima are more instructions than an H200 has time for while the memory moves.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loka_compile.kernels import device as dev
from loka_compile.kernels import turned
from loka_compile.kernels.quantize_kernels import _scale_of, _store_q


@triton.jit
def _low(pairs, TYPE: tl.constexpr):
    """The first number of each pair, in fp32."""
    if tl.bfloat16 == TYPE:
        return (pairs << 16).to(tl.float32, bitcast=True)
    else:
        return pairs.to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)


@triton.jit
def _high(pairs, TYPE: tl.constexpr):
    """The second number of each pair, in fp32."""
    if tl.bfloat16 == TYPE:
        return (pairs & -65536).to(tl.float32, bitcast=True)
    else:
        return (pairs >> 16).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)


@triton.jit
def _both_halves(a, b):
    return tl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _max_pairs(a, b, PTX: tl.constexpr):
    """The larger of two magnitudes, in each half. Integers order 16-bit floats, NaN above infinity."""
    if PTX:
        return _both_halves(a, b)
    return tl.maximum(a & 0xFFFF, b & 0xFFFF) | (tl.maximum(a >> 16, b >> 16) << 16)


@triton.jit
def _largest_pairs(size, AXIS: tl.constexpr, PTX: tl.constexpr):
    if PTX:
        return tl.reduce(size, AXIS, _both_halves)
    return tl.max(size & 0xFFFF, axis=AXIS) | (tl.max(size >> 16, axis=AXIS) << 16)


@triton.jit
def _of_row(pairs, TYPE: tl.constexpr):
    """Maxima of rows from those of each half, as :func:`device.bits`."""
    return tl.maximum(dev.bits(_low(pairs, TYPE)), dev.bits(_high(pairs, TYPE)))


@triton.jit
def _of_columns(pairs, COUNT: tl.constexpr, TYPE: tl.constexpr):
    """Maxima of columns, as :func:`device.bits`."""
    return tl.reshape(tl.join(dev.bits(_low(pairs, TYPE)), dev.bits(_high(pairs, TYPE))), (COUNT,))


@triton.jit
def _turn_pairs(
    x, QT, ST, pid_m, rn, M, N, words, WORDS: tl.constexpr, TYPE: tl.constexpr, LIMIT: tl.constexpr,
    X_TYPE: tl.constexpr, PTX: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """x.T in 1x128 of 128 rows and WIDTH columns; returns the maxima of the rows, in pairs,
    as :func:`loka_compile.kernels.turned.load4` has them."""
    a, b, c, d = x[0] & 0x7FFF7FFF, x[1] & 0x7FFF7FFF, x[2] & 0x7FFF7FFF, x[3] & 0x7FFF7FFF
    largest = _max_pairs(_max_pairs(a, b, PTX), _max_pairs(c, d, PTX), PTX)
    # Before x is unpacked, so that its magnitudes need no registers then.
    rows = (
        _largest_pairs(a, 1, PTX), _largest_pairs(b, 1, PTX), _largest_pairs(c, 1, PTX), _largest_pairs(d, 1, PTX)
    )  # fmt: skip
    scale, inverse = _scale_of(_of_columns(_largest_pairs(largest, 0, PTX), WIDTH, X_TYPE), LIMIT, PTX)
    tl.store(ST + pid_m.to(tl.int64) * N + rn, scale, mask=rn < N)
    first, second = tl.split(tl.reshape(inverse, (WIDTH // 2, 2)))
    low = dev.pack4(
        _low(x[0], X_TYPE), _low(x[1], X_TYPE), _low(x[2], X_TYPE), _low(x[3], X_TYPE), first[None, :], TYPE, LIMIT, PTX
    )
    high = dev.pack4(
        _high(x[0], X_TYPE), _high(x[1], X_TYPE), _high(x[2], X_TYPE), _high(x[3], X_TYPE), second[None, :], TYPE,
        LIMIT, PTX,
    )  # fmt: skip
    rw = pid_m * 32 + tl.arange(0, 32)
    turned.store_turned(QT, tl.reshape(tl.join(low, high), (32, WIDTH)), rw, rn, M, N, words, WORDS)
    return rows


@triton.jit
def _both_1x128_kernel(
    X, Q, S, QT, ST, M, N, stride, words, zero, WORDS: tl.constexpr, TYPE: tl.constexpr, LIMIT: tl.constexpr,
    X_TYPE: tl.constexpr, PTX: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x and x.T in 1x128 of 128 rows and 128 columns, BLOCK_N of these at a time. X and stride count pairs."""
    dev.wait(PDL)
    pid_m, pid_n = dev.tile_of(tl.program_id(0), M, N, 128, 128, GROUP)
    PARTS: tl.constexpr = 128 // BLOCK_N
    rw = pid_m * 32 + tl.arange(0, 32)
    for part in tl.static_range(PARTS):
        at = pid_n * PARTS + part
        x = turned.load4(X, rw, at * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2), M, N // 2, stride)
        rn = at * BLOCK_N + tl.arange(0, BLOCK_N)
        found = _turn_pairs(x, QT, ST, pid_m, rn, M, N, words, WORDS, TYPE, LIMIT, X_TYPE, PTX, BLOCK_N)
        if part == 0:
            a, b, c, d = found
        else:
            a, b = _max_pairs(a, found[0], PTX), _max_pairs(b, found[1], PTX)
            c, d = _max_pairs(c, found[2], PTX), _max_pairs(d, found[3], PTX)
    largest = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (128,))
    scale, _ = _scale_of(_of_row(largest, X_TYPE), LIMIT, PTX)
    rm = pid_m * 128 + tl.arange(0, 128)
    tl.store(S + pid_n.to(tl.int64) * M + rm, scale, mask=rm < M)
    rows = (a, b, c, d)
    for part in tl.static_range(PARTS):
        at = pid_n * PARTS + PARTS - 1 - part
        rn = at * BLOCK_N + tl.arange(0, BLOCK_N)
        if part > 0:
            # From the L1 cache; the last part is still in registers.
            x = turned.load4(X, rw, at * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2), M, N // 2, stride)
        # Eight numbers a thread, as it has them: more in a store would mean to exchange them first.
        rn = tl.max_contiguous(tl.multiple_of(rn, 8), 8)
        for i in tl.static_range(4):
            _, inverse = _scale_of(_of_row(rows[i], X_TYPE), LIMIT, PTX)
            # zero is 0, which the compiler does not know: it would keep x in fp32 from the first use to the last.
            y = x[i] ^ zero
            y = tl.reshape(tl.join(_low(y, X_TYPE), _high(y, X_TYPE)), (32, BLOCK_N))
            _store_q(Q, y, inverse[:, None], 4 * rw + i, rn, M, N, TYPE, LIMIT, PTX)


@triton.jit
def _amax_pairs_kernel(
    X, ROWS, COLUMNS, M, N, stride, X_TYPE: tl.constexpr, PTX: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Maxima of rows and of columns from pairs; N, stride and BLOCK_N count those."""
    dev.wait(PDL)
    pid_m, pid_n = dev.tile_of(tl.program_id(0), M, N, BLOCK_M * STEPS, BLOCK_N, GROUP)
    rm = pid_m * (BLOCK_M * STEPS) + tl.arange(0, BLOCK_M)
    rp = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rn = pid_n * (2 * BLOCK_N) + tl.arange(0, 2 * BLOCK_N)
    largest = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    for _ in tl.static_range(STEPS):
        size = turned.load(X, rm, rp, M, N, stride) & 0x7FFF7FFF
        tl.atomic_max(ROWS + rm, _of_row(_largest_pairs(size, 1, PTX), X_TYPE), mask=rm < M, sem="relaxed")
        largest = _max_pairs(largest, size, PTX)
        rm += BLOCK_M
    columns = _of_columns(_largest_pairs(largest, 0, PTX), 2 * BLOCK_N, X_TYPE)
    tl.atomic_max(COLUMNS + rn, columns, mask=rn < 2 * N, sem="relaxed")
