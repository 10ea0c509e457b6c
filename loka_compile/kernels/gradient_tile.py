"""A tile of a gradient on its way through an activation and BlockNorm; what the backward kernels share.

    g  = d * act'(y)          (HardSwish, SiLU or none)
    dx = rstd * (g - y * mean_block(g * y))

with d the gradient of a layer's output, y [M, N] and rstd [M, blocks] as the forward kept them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loka_compile.kernels import device as dev
from loka_compile.kernels import turned


@triton.jit
def through(
    g, rm, pid_n, Y, RSTD, M, N, BLOCK_N: tl.constexpr, NORM: tl.constexpr, ACT: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """The gradient g of the rows ``rm`` taken through the activation and BlockNorm, and their y; fp32, zero outside."""
    ROWS: tl.constexpr = g.shape[0]
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rb = pid_n * (BLOCK_N // NORM) + tl.arange(0, BLOCK_N // NORM)
    blocks = tl.cdiv(N, NORM)
    mask = (rm[:, None] < M) & (rn[None, :] < N)
    offset = rm.to(tl.int64)[:, None] * N + rn[None, :]
    y = tl.load(Y + offset, mask=mask, other=0.0, eviction_policy="evict_first")
    y = dev.saved(y, Y.dtype.element_ty, PTX)
    rstd = tl.load(
        RSTD + rm[:, None] * blocks + rb[None, :], mask=(rm[:, None] < M) & (rb[None, :] < blocks), other=0.0
    )  # fmt: skip
    if ACT != "":
        g = g * dev.derivative(y, ACT, PTX)
    mean = dev.block_mean(g * y, pid_n * BLOCK_N, N, ROWS, BLOCK_N, NORM)
    return dev.over_block(g - dev.over_block(y, mean, ROWS, BLOCK_N, NORM), rstd, ROWS, BLOCK_N, NORM), y


@triton.jit
def gradient(
    rm, pid_n, G, Y, RSTD, M, N, BLOCK_N: tl.constexpr, NORM: tl.constexpr, ACT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """dx of the rows ``rm`` in fp32, zero outside the tensor, and their y."""
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rm[:, None] < M) & (rn[None, :] < N)
    at = G + rm.to(tl.int64)[:, None] * N + rn[None, :]
    g = tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")
    return through(dev.wide(g, PTX), rm, pid_n, Y, RSTD, M, N, BLOCK_N, NORM, ACT, PTX)


@triton.jit
def store_activation(
    XT, y0, y1, y2, y3, rw, rn, M, N, words, ACT: tl.constexpr, WORDS: tl.constexpr, PTX: tl.constexpr
):  # fmt: skip
    """``fp8(act(y) * 16)`` of four tiles, transposed."""
    x = dev.pack4(
        dev.activated(y0, ACT, PTX), dev.activated(y1, ACT, PTX), dev.activated(y2, ACT, PTX),
        dev.activated(y3, ACT, PTX), 16.0, tl.float8e4nv, 448.0, PTX,
    )  # fmt: skip
    turned.store_turned(XT, x, rw, rn, M, N, words, WORDS)


@triton.jit
def gradients(
    tile, G, Y, RSTD, XT, M, N, words, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NORM: tl.constexpr,
    ACT: tl.constexpr, WRITE_XT: tl.constexpr, WORDS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """dx of a tile as four tiles (see kernels/turned.py), and on the way the transpose of the activation."""
    grid_n = tl.cdiv(N, BLOCK_N)
    pid_m, pid_n = tile // grid_n, tile % grid_n
    rw = pid_m * (BLOCK_M // 4) + tl.arange(0, BLOCK_M // 4)
    d0, y0 = gradient(4 * rw, pid_n, G, Y, RSTD, M, N, BLOCK_N, NORM, ACT, PTX)
    d1, y1 = gradient(4 * rw + 1, pid_n, G, Y, RSTD, M, N, BLOCK_N, NORM, ACT, PTX)
    d2, y2 = gradient(4 * rw + 2, pid_n, G, Y, RSTD, M, N, BLOCK_N, NORM, ACT, PTX)
    d3, y3 = gradient(4 * rw + 3, pid_n, G, Y, RSTD, M, N, BLOCK_N, NORM, ACT, PTX)
    if WRITE_XT:
        rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        store_activation(XT, y0, y1, y2, y3, rw, rn, M, N, words, ACT, WORDS, PTX)
    return d0, d1, d2, d3
