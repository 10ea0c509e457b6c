"""FP8 transposes turned as words, which costs a quarter of the exchanges between threads that bytes cost.

A tile is held as four tiles, of the rows 4i, 4i + 1, 4i + 2 and 4i + 3: a thread then has four neighbours of a row of
the transpose, packs them into an int32 (:func:`loka_compile.kernels.device.pack4`), and threads exchange those. That
also keeps clear of Triton 3.6's wrong code for some transposed FP8 stores (triton-lang/triton #11111).
"""

from __future__ import annotations

import triton
import triton.language as tl

from loka_compile.kernels import device as dev


@triton.jit
def load(X, rm, rn, M, N, stride):
    """Rows ``rm`` and columns ``rn`` of X, whose rows are ``stride`` apart; zero outside [M, N]."""
    mask = (rm[:, None] < M) & (rn[None, :] < N)
    return tl.load(X + rm.to(tl.int64)[:, None] * stride + rn[None, :], mask=mask, other=0)


@triton.jit
def load4(X, rw, rn, M, N, stride):
    """Rows 4 * rw to 4 * rw + 3, as four tiles: a thread has the same element of each."""
    return (
        load(X, 4 * rw, rn, M, N, stride), load(X, 4 * rw + 1, rn, M, N, stride),
        load(X, 4 * rw + 2, rn, M, N, stride), load(X, 4 * rw + 3, rn, M, N, stride),
    )  # fmt: skip


@triton.jit
def store_turned(T, packed, rw, rn, M, N, words, WORDS: tl.constexpr):
    """Words of four FP8 rows each as rows of the transpose, which are ``words`` long;
    M bytes if 4 does not divide M."""
    packed = tl.trans(packed)
    row = rn.to(tl.int64)[:, None]
    if WORDS:
        at = T.to(tl.pointer_type(tl.int32), bitcast=True) + row * words + rw[None, :]
        tl.store(at, packed, mask=(rn[:, None] < N) & (rw[None, :] < words))
    else:
        at = T.to(tl.pointer_type(tl.uint8), bitcast=True) + row * M + 4 * rw[None, :]
        for i in tl.static_range(4):
            tl.store(at + i, (packed >> (8 * i)).to(tl.uint8), mask=(rn[:, None] < N) & (4 * rw[None, :] + i < M))


@triton.jit
def halved(a, b, TYPE: tl.constexpr, PTX: tl.constexpr):
    """Two fp32 tiles in half of the registers: rounded to the 16 bits of TYPE, a in the low half of a word."""
    if PTX:
        NAME: tl.constexpr = "bf16x2" if tl.bfloat16 == TYPE else "f16x2"
        return tl.inline_asm_elementwise(
            "cvt.rn." + NAME + ".f32 $0, $2, $1;", "=r,f,f", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    low = a.to(TYPE).to(tl.uint16, bitcast=True).to(tl.int32)
    return low | (b.to(TYPE).to(tl.uint16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def largest_halves(largest, low, high):
    """Element by element the largest of ``largest`` and what :func:`halved` made: the upper 16 bits are those of a
    number without its sign, and the others do not matter."""
    low = tl.maximum(low & 0x7FFFFFFF, (low << 16) & 0x7FFFFFFF)
    high = tl.maximum(high & 0x7FFFFFFF, (high << 16) & 0x7FFFFFFF)
    return tl.maximum(largest, tl.maximum(low, high))


@triton.jit
def largest_of_halves(largest, TYPE: tl.constexpr):
    """Of a tile that :func:`largest_halves` made, as :func:`loka_compile.kernels.device.bits`."""
    best = tl.max(tl.max(largest, axis=1), axis=0) >> 16
    return dev.bits(best.to(tl.int16).to(TYPE, bitcast=True))


@triton.jit
def pack2(a, b, scale, TYPE: tl.constexpr, LIMIT: tl.constexpr, PTX: tl.constexpr):
    """Half of :func:`loka_compile.kernels.device.pack4`: two tiles times scale as FP8 in the low half of an int32."""
    if PTX:
        NAME: tl.constexpr = "e4m3x2" if tl.float8e4nv == TYPE else "e5m2x2"
        return tl.inline_asm_elementwise(
            "{ .reg .b16 two; cvt.rn.satfinite." + NAME + ".f32 two, $2, $1; cvt.u32.u16 $0, two; }",
            "=r,f,f", [a.to(tl.float32) * scale, b.to(tl.float32) * scale], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    word = dev.to_fp8(a, scale, TYPE, LIMIT).to(tl.uint8, bitcast=True).to(tl.int32)
    return word | (dev.to_fp8(b, scale, TYPE, LIMIT).to(tl.uint8, bitcast=True).to(tl.int32) << 8)


@triton.jit
def doubled(low, high, TYPE: tl.constexpr):
    """What :func:`halved` made of four tiles, as those in TYPE."""
    return (
        low.to(tl.int16).to(TYPE, bitcast=True), (low >> 16).to(tl.int16).to(TYPE, bitcast=True),
        high.to(tl.int16).to(TYPE, bitcast=True), (high >> 16).to(tl.int16).to(TYPE, bitcast=True),
    )  # fmt: skip


@triton.jit
def largest_of4(x):
    """The largest of four tiles, as :func:`loka_compile.kernels.device.bits`."""
    best = tl.maximum(tl.maximum(dev.bits(x[0]), dev.bits(x[1])), tl.maximum(dev.bits(x[2]), dev.bits(x[3])))
    return tl.max(tl.max(best, axis=1), axis=0)


@triton.jit
def write4(
    x, inverse, Q, QT, rw, rn, M, N, words, LIMIT: tl.constexpr, WRITE_Q: tl.constexpr, WRITE_QT: tl.constexpr,
    WORDS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Four tiles times ``inverse`` in FP8: as the rows 4 * rw + i of Q [M, N], and as columns of QT [N, M]."""
    if WRITE_Q:
        for i in tl.static_range(4):
            rm = 4 * rw + i
            q = dev.to_fp8(x[i], inverse, Q.dtype.element_ty, LIMIT, PTX)
            tl.store(Q + rm.to(tl.int64)[:, None] * N + rn[None, :], q, mask=(rm[:, None] < M) & (rn[None, :] < N))
    if WRITE_QT:
        packed = dev.pack4(x[0], x[1], x[2], x[3], inverse, QT.dtype.element_ty, LIMIT, PTX)
        store_turned(QT, packed, rw, rn, M, N, words, WORDS)
