"""Scales in blocks of 128 in the fused kernels: the main loop of a GEMM of such operands, and a result in 1x128 blocks.

One partial product per block of the contraction, times the scales of its rows and columns, added to an fp32
accumulator. The accumulator is held as [rows, scaled columns, columns that share a scale], so that a scale of 128
columns is one number per row and not a load per column; the scales are read before the tensor core is set going, which
hides them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loka_compile.kernels import device as dev


@triton.jit
def accumulate(
    A, B, SA, SB, pid_m, pid_n, M, N, K, stride_a, stride_b, row_a, step_a, row_b, step_b,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, TMA: tl.constexpr,
    ROWS_A: tl.constexpr, ROWS_B: tl.constexpr,
):  # fmt: skip
    """fp32 tile of ``A[M, K] @ B[N, K].T`` with SA [ceil(M/ROWS_A), ceil(K/BLOCK_K)] and SB likewise.

    row_a and step_a are SA's strides. With TMA, A and B are tensor descriptors, else pointers with K contiguous. Rows
    and columns past the end are zero or repeat valid ones; the caller masks what it stores.
    """
    COLUMNS: tl.constexpr = ROWS_B if ROWS_B < BLOCK_N else BLOCK_N
    rm = (pid_m * BLOCK_M + tl.arange(0, BLOCK_M)) % M
    rs = (pid_n * BLOCK_N + tl.arange(0, BLOCK_N // COLUMNS) * COLUMNS) % N
    sa_ptr = SA + (rm // ROWS_A) * row_a
    sb_ptr = SB + (rs // ROWS_B) * row_b
    acc = tl.zeros((BLOCK_M, BLOCK_N // COLUMNS, COLUMNS), dtype=tl.float32)
    if not TMA:
        rn = (pid_n * BLOCK_N + tl.arange(0, BLOCK_N)) % N
        rk = tl.arange(0, BLOCK_K)
        a_ptr = A + rm.to(tl.int64)[:, None] * stride_a + rk[None, :]
        b_ptr = B + rn.to(tl.int64)[None, :] * stride_b + rk[:, None]
    for k in range(0, tl.cdiv(K, BLOCK_K)):
        scale = tl.load(sa_ptr)[:, None] * tl.load(sb_ptr)[None, :]
        if TMA:
            product = tl.dot(A.load([pid_m * BLOCK_M, k * BLOCK_K]), B.load([pid_n * BLOCK_N, k * BLOCK_K]).T)
        else:
            if EVEN_K:
                a = tl.load(a_ptr)
                b = tl.load(b_ptr)
            else:
                a = tl.load(a_ptr, mask=rk[None, :] < K - k * BLOCK_K, other=0.0)
                b = tl.load(b_ptr, mask=rk[:, None] < K - k * BLOCK_K, other=0.0)
            product = tl.dot(a, b)
            a_ptr += BLOCK_K
            b_ptr += BLOCK_K
        acc += tl.reshape(product, (BLOCK_M, BLOCK_N // COLUMNS, COLUMNS)) * scale[:, :, None]
        sa_ptr += step_a
        sb_ptr += step_b
    return tl.reshape(acc, (BLOCK_M, BLOCK_N))


@triton.jit
def scaled(x, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """x [BLOCK_M, BLOCK_N] divided by one scale per row and 128 columns, and these, [BLOCK_M, BLOCK_N // 128].

    As ``lowering/quantize.py`` makes them: the largest |x| of a group over 448. A NaN makes its whole group NaN.
    """
    groups = tl.reshape(x, (BLOCK_M, BLOCK_N // 128, 128))
    largest = tl.max(dev.bits(groups), axis=2).to(tl.float32, bitcast=True)
    scale = tl.maximum(largest, 1e-12, propagate_nan=tl.PropagateNan.ALL) * (1.0 / 448.0)
    return tl.reshape(groups * (1.0 / scale)[:, :, None], (BLOCK_M, BLOCK_N)), scale
