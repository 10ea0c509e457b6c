"""Device functions that several kernels share: tile order, the GEMM's main loop, BlockNorm, activations, FP8 casts."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


def early(device: torch.device) -> dict[str, Any]:
    """Arguments of a launch that begins while the kernel in front ends (programmatic dependent launch), where that can
    be: on sm_90 and later. Its kernel must call :func:`wait` before it touches memory."""
    able = device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if able else {"PDL": False}


def bounded(registers: int | None) -> dict[str, Any]:
    """Arguments of a launch whose threads have so many ``registers`` at most; no bound on AMD, which has none."""
    return {"maxnreg": registers} if registers is not None and torch.version.hip is None else {}


def ptx(device: torch.device) -> bool:
    """Whether kernels can use NVIDIA's own instructions: conversions to FP8, which saturate, fused steps with a clamp,
    pairs of 16-bit numbers (sm_89 and later)."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def norm_tile(n: int, block: int) -> int:
    """Columns that one reduction of the kernels covers: the block, or the whole row (rounded up) when N is narrower."""
    return min(block, triton.next_power_of_2(n))


@triton.jit
def wait(PDL: tl.constexpr):
    """Wait for the kernel in front, and let the next one begin once all programs of this one run."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def tile_of(pid, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Row and column tile of a program. GROUP_M row tiles share a column tile before the next column: L2 keeps B."""
    grid_m = tl.cdiv(M, BLOCK_M)
    grid_n = tl.cdiv(N, BLOCK_N)
    width = GROUP_M * grid_n
    group = pid // width
    size = min(grid_m - group * GROUP_M, GROUP_M)
    return group * GROUP_M + (pid % width) % size, (pid % width) // size


@triton.jit
def _in_blocks(product, SA, SB, rm, rn, k, row_a, step_a, row_b, step_b, ROWS_A: tl.constexpr, ROWS_B: tl.constexpr):
    """A partial product over K-block k times its scales: of ROWS_A rows of A and ROWS_B rows of B each."""
    sa = tl.load(SA + (rm // ROWS_A) * row_a + k * step_a)
    sb = tl.load(SB + (rn // ROWS_B) * row_b + k * step_b)
    return product * sa[:, None] * sb[None, :]


@triton.jit
def accumulate(
    A, B, pid_m, pid_n, first, last, M, N, K, stride_a, stride_b,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, TMA: tl.constexpr, FAST: tl.constexpr,
    SA=None, SB=None, row_a=0, step_a=0, row_b=0, step_b=0, ROWS_A: tl.constexpr = 0, ROWS_B: tl.constexpr = 0,
):  # fmt: skip
    """fp32 tile of ``A[M, K] @ B[N, K].T`` over the K-blocks first to last - 1; both operands hold K contiguously.

    With TMA, A and B are tensor descriptors (which read zeros out of bounds), else pointers. Rows and columns past the
    end repeat valid ones; the caller masks what it stores. Without FAST, sums are promoted to fp32 after each K-block.

    ROWS_A > 0: the operands are scaled in blocks of BLOCK_K by SA [ceil(M/ROWS_A), ceil(K/BLOCK_K)] and SB likewise;
    row_a and step_a are SA's strides. Sums are then always promoted.
    """
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    rm = (pid_m * BLOCK_M + tl.arange(0, BLOCK_M)) % M
    rn = (pid_n * BLOCK_N + tl.arange(0, BLOCK_N)) % N
    if TMA:
        for k in range(first, last):
            a = A.load([pid_m * BLOCK_M, k * BLOCK_K])
            b = B.load([pid_n * BLOCK_N, k * BLOCK_K])
            if ROWS_A > 0:
                acc += _in_blocks(tl.dot(a, b.T), SA, SB, rm, rn, k, row_a, step_a, row_b, step_b, ROWS_A, ROWS_B)
            elif FAST:
                acc = tl.dot(a, b.T, acc)
            else:
                acc += tl.dot(a, b.T)
    else:
        rk = first * BLOCK_K + tl.arange(0, BLOCK_K)
        a_ptr = A + rm.to(tl.int64)[:, None] * stride_a + rk[None, :]
        b_ptr = B + rn.to(tl.int64)[None, :] * stride_b + rk[:, None]
        for k in range(first, last):
            if EVEN_K:
                a = tl.load(a_ptr)
                b = tl.load(b_ptr)
            else:
                left = K - (k - first) * BLOCK_K
                a = tl.load(a_ptr, mask=rk[None, :] < left, other=0.0)
                b = tl.load(b_ptr, mask=rk[:, None] < left, other=0.0)
            if ROWS_A > 0:
                acc += _in_blocks(tl.dot(a, b), SA, SB, rm, rn, k, row_a, step_a, row_b, step_b, ROWS_A, ROWS_B)
            elif FAST:
                acc = tl.dot(a, b, acc)
            else:
                acc += tl.dot(a, b)
            a_ptr += BLOCK_K
            b_ptr += BLOCK_K
    return acc


@triton.jit
def block_mean(x, n0, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NORM: tl.constexpr):
    """Mean of each block of NORM columns, [BLOCK_M, BLOCK_N // NORM]; the last block may be short. x is 0 past N."""
    width = tl.minimum(NORM, tl.maximum(N - n0 - tl.arange(0, BLOCK_N // NORM) * NORM, 1)).to(tl.float32)
    if BLOCK_N == NORM:  # no reshape, which costs registers
        total = tl.sum(x, axis=1, keep_dims=True)
    else:
        total = tl.sum(tl.reshape(x, (BLOCK_M, BLOCK_N // NORM, NORM)), axis=2)
    return total / width[None, :]


@triton.jit
def over_block(x, s, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NORM: tl.constexpr):
    """x [BLOCK_M, BLOCK_N] times one factor per row and block, s [BLOCK_M, BLOCK_N // NORM]."""
    if BLOCK_N == NORM:
        return x * s
    else:
        parts = tl.reshape(x, (BLOCK_M, BLOCK_N // NORM, NORM)) * s[:, :, None]
        return tl.reshape(parts, (BLOCK_M, BLOCK_N))


@triton.jit
def saved(y, TYPE: tl.constexpr, PTX: tl.constexpr):
    """A normalised value as it was kept for the backward, in fp32: in e4m3 it was multiplied by 16."""
    y = wide(y, PTX)
    return y * 0.0625 if tl.float8e4nv == TYPE else y


@triton.jit
def hardsigmoid(x, PTX: tl.constexpr = False):
    """``relu6(x + 3) / 6`` in fp32. By comparisons with the result, which let a NaN through and need no registers.

    With PTX in one instruction, which makes 0 of a NaN: for who multiplies by x afterwards.
    """
    if PTX:
        # kernels.config.GATE_PTX, word for word: with a global a launch does not find what a worker built.
        return tl.inline_asm_elementwise(
            "fma.rn.sat.f32 $0, $1, 0f3E2AAAAB, 0f3F000000;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    x = x * (1.0 / 6.0) + 0.5
    x = tl.where(x < 0.0, 0.0, x)
    return tl.where(x > 1.0, 1.0, x)


@triton.jit
def hardswish_derivative(x, PTX: tl.constexpr):
    """Derivative as aten.hardswish_backward has it: 0 at and below -3, 1 at and above 3. With PTX from the gate, which
    the activation itself needs too, and 0 for a NaN."""
    if PTX:
        gate = hardsigmoid(x, PTX)
        return tl.where(tl.abs(x) < 3.0, 2.0 * gate - 0.5, gate)
    return tl.where(x <= -3.0, 0.0, tl.where(x < 3.0, x * (1.0 / 3.0) + 0.5, 1.0))


@triton.jit
def silu_derivative(x):
    """Derivative of ``x * sigmoid(x)``."""
    gate = tl.sigmoid(x)
    return gate * (1.0 + x * (1.0 - gate))


@triton.jit
def activated(x, ACT: tl.constexpr, PTX: tl.constexpr):
    """The activation ACT in fp32: "hardswish", "silu" or none. None of them exceeds its input."""
    if ACT == "hardswish":
        return x * hardsigmoid(x, PTX)
    return x * tl.sigmoid(x) if ACT == "silu" else x


@triton.jit
def derivative(x, ACT: tl.constexpr, PTX: tl.constexpr):
    """That of the activation ACT, "hardswish" or "silu"."""
    return silu_derivative(x) if ACT == "silu" else hardswish_derivative(x, PTX)


@triton.jit
def to_fp8(x, scale, TYPE: tl.constexpr, LIMIT: tl.constexpr, PTX: tl.constexpr = False):
    """x * scale, saturated at the format's largest number, as FP8. NaN stays NaN.

    By comparisons and not by a NaN-propagating clamp: next to min.NaN and max.NaN Triton 3.6 miscompiles transposed
    FP8 stores (triton-lang/triton #11111). With PTX (see :func:`ptx`) the cast itself saturates.
    """
    x = x.to(tl.float32) * scale
    if not PTX:
        x = tl.where(x > LIMIT, LIMIT, x)
        x = tl.where(x < -LIMIT, -LIMIT, x)
    return x.to(TYPE)


@triton.jit
def pack4(a, b, c, d, scale, TYPE: tl.constexpr, LIMIT: tl.constexpr, PTX: tl.constexpr):
    """Four tiles times scale as one of int32: saturated, as FP8, a's in the lowest byte.
    With PTX in few instructions."""
    if PTX:
        a, b, c, d = (
            a.to(tl.float32) * scale, b.to(tl.float32) * scale, c.to(tl.float32) * scale, d.to(tl.float32) * scale
        )  # fmt: skip
        NAME: tl.constexpr = "e4m3x2" if tl.float8e4nv == TYPE else "e5m2x2"
        return tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; cvt.rn.satfinite." + NAME + ".f32 low, $2, $1; cvt.rn.satfinite." + NAME
            + ".f32 high, $4, $3; mov.b32 $0, {low, high}; }",
            "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    word = to_fp8(a, scale, TYPE, LIMIT).to(tl.uint8, bitcast=True).to(tl.int32)
    word |= to_fp8(b, scale, TYPE, LIMIT).to(tl.uint8, bitcast=True).to(tl.int32) << 8
    word |= to_fp8(c, scale, TYPE, LIMIT).to(tl.uint8, bitcast=True).to(tl.int32) << 16
    return word | (to_fp8(d, scale, TYPE, LIMIT).to(tl.uint8, bitcast=True).to(tl.int32) << 24)


@triton.jit
def bits(x):
    """|x| as integers that order like the numbers, NaN above infinity."""
    return tl.abs(x.to(tl.float32)).to(tl.int32, bitcast=True)


@triton.jit
def larger(a, b, PTX: tl.constexpr):
    """Element by element the larger of |a| and |b|, NaN if one is. In 16 bits with PTX two of them an instruction."""
    if PTX and a.dtype.primitive_bitwidth == 16:
        NAME: tl.constexpr = "bf16x2" if tl.bfloat16 == a.dtype else "f16x2"
        return tl.inline_asm_elementwise(
            "{ .reg .b32 x, y; abs." + NAME + " x, $1; abs." + NAME + " y, $2; max.NaN." + NAME + " $0, x, y; }",
            "=r,r,r", [a, b], dtype=a.dtype, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.maximum(bits(a), bits(b)).to(tl.float32, bitcast=True).to(a.dtype)


@triton.jit
def wide(x, PTX: tl.constexpr):
    """x in fp32; bf16 with PTX in one instruction an element, where Triton takes two for every other one."""
    if PTX and tl.bfloat16 == x.dtype:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=f,=f,r", [x], dtype=tl.float32, is_pure=True, pack=2
        )
    return x.to(tl.float32)


@triton.jit
def amax(x):
    """Largest |x| of a tile, as fp32; NaN if there is one."""
    return tl.max(tl.max(bits(x), axis=1), axis=0).to(tl.float32, bitcast=True)


@triton.jit
def amax_of(PARTS, count, FLOOR: tl.constexpr, CHUNK: tl.constexpr):
    """Largest of ``count`` numbers >= 0 at PARTS, at least FLOOR; NaN if one is."""
    best = tl.zeros((CHUNK,), dtype=tl.int32)
    for start in range(0, count, CHUNK):
        at = start + tl.arange(0, CHUNK)
        best = tl.maximum(best, tl.load(PARTS + at, mask=at < count, other=0.0).to(tl.int32, bitcast=True))
    largest = tl.max(best, axis=0).to(tl.float32, bitcast=True)
    return tl.maximum(largest, FLOOR, propagate_nan=tl.PropagateNan.ALL)
