"""FP8 GEMM with every scaling: one scale, one a row, one a block of 128; cut along the contraction where that fills
the device.

    out[m, n] = sum_k A[m, k] * scale_a * B[n, k] * scale_b

A contraction that is cut (``GemmConfig.splits``) gives fp32 partial sums, which a second kernel adds in a fixed order:
results do not vary from run to run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from loka_compile.kernels import device as dev
from loka_compile.kernels.config import GemmConfig
from loka_compile.kernels.running import run_kernel

#: Elements of the contraction that share a scale in the block scalings.
BLOCK = 128


@triton.jit
def _item(
    item, A, B, SA, SB, OUT, M, N, K, stride_a, stride_b, row_a, step_a, row_b, step_b, steps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, EVEN_K: tl.constexpr,
    TMA: tl.constexpr, FAST: tl.constexpr, SCALING: tl.constexpr, ROWS_A: tl.constexpr, ROWS_B: tl.constexpr,
):  # fmt: skip
    """One tile of the output, or of one part of it: item counts the tiles of the first part, then of the second."""
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    split = item // tiles
    pid_m, pid_n = dev.tile_of(item % tiles, M, N, BLOCK_M, BLOCK_N, GROUP_M)
    last = tl.minimum((split + 1) * steps, tl.cdiv(K, BLOCK_K))
    acc = dev.accumulate(
        A, B, pid_m, pid_n, split * steps, last, M, N, K, stride_a, stride_b, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, TMA,
        FAST, SA, SB, row_a, step_a, row_b, step_b, ROWS_A, ROWS_B,
    )  # fmt: skip
    rm = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if SCALING == 1:
        acc = acc * (tl.load(SA) * tl.load(SB))
    elif SCALING == 2:
        sa = tl.load(SA + rm, mask=rm < M, other=0.0)
        sb = tl.load(SB + rn, mask=rn < N, other=0.0)
        acc = acc * sa[:, None] * sb[None, :]
    row = split.to(tl.int64) * M + rm
    mask = (rm[:, None] < M) & (rn[None, :] < N)
    tl.store(OUT + row[:, None] * N + rn[None, :], acc.to(OUT.dtype.element_ty), mask=mask)


# What varies from call to call (the batch) or shape to shape without changing the code makes no other kernel of it.
@triton.jit(do_not_specialize=["M", "step_a", "step_b", "steps", "items"])
def _scaled_gemm_kernel(
    A, B, SA, SB, OUT, M, N, K, stride_a, stride_b, row_a, step_a, row_b, step_b, steps, items,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, EVEN_K: tl.constexpr,
    TMA: tl.constexpr, FAST: tl.constexpr, SCALING: tl.constexpr, ROWS_A: tl.constexpr, ROWS_B: tl.constexpr,
    PERSISTENT: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    if PERSISTENT:
        for item in tl.range(tl.program_id(0), items, tl.num_programs(0), flatten=FLATTEN):
            _item(
                item, A, B, SA, SB, OUT, M, N, K, stride_a, stride_b, row_a, step_a, row_b, step_b, steps, BLOCK_M,
                BLOCK_N, BLOCK_K, GROUP_M, EVEN_K, TMA, FAST, SCALING, ROWS_A, ROWS_B,
            )  # fmt: skip
    else:
        _item(
            tl.program_id(0), A, B, SA, SB, OUT, M, N, K, stride_a, stride_b, row_a, step_a, row_b, step_b, steps,
            BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, EVEN_K, TMA, FAST, SCALING, ROWS_A, ROWS_B,
        )  # fmt: skip


@triton.jit
def _sum_parts_kernel(P, OUT, count, SPLITS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = at < count
    acc = tl.load(P + at, mask=mask, other=0.0)
    part = P + at
    for _ in tl.static_range(1, SPLITS):
        part += count
        acc += tl.load(part, mask=mask, other=0.0)
    tl.store(OUT + at, acc.to(OUT.dtype.element_ty), mask=mask)


def can_use_tma(*operands: Tensor) -> bool:
    """Descriptors need rows that start on 16 bytes."""
    return all(t.stride(0) * t.element_size() % 16 == 0 and t.data_ptr() % 16 == 0 for t in operands)


def launch_parts(
    a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, out: Tensor, splits: int, *, fast: bool,
    config: GemmConfig, rows_a: int = 0, rows_b: int = 0,
) -> None:  # fmt: skip
    """Write ``splits`` partial products, each over its run of K, to ``out`` [splits, M, N] (or [M, N] for one).

    a [M, K], b [N, K], both with contiguous rows. ``rows_a``: 0 where A's scale does not vary along K (fp32, one
    element or M), else how many rows share a scale, 1 or 128; scale_a is then [ceil(M/rows_a), ceil(K/128)], any
    strides. Likewise for B. Runs of K that are empty give zeros. ``fast`` is ignored with blocks.
    """
    (m, k), n = a.shape, b.shape[0]
    blocked = rows_a > 0
    block_k = BLOCK if blocked else config.block_k
    tma = config.tma and can_use_tma(a, b)
    args: list[Any] = [a, b]
    if tma:
        args = [
            TensorDescriptor.from_tensor(a, [config.block_m, block_k]),
            TensorDescriptor.from_tensor(b, [config.block_n, block_k]),
        ]
    scaling = 0
    if scale_a is not None and scale_b is not None and not blocked:
        # [1, 1] against [N, 1] is rowwise with one row; both of one element is tensorwise.
        scaling = 1 if scale_a.numel() == scale_b.numel() == 1 else 2
    strides = [s for t in (scale_a, scale_b) for s in (t.stride() if t is not None and blocked else (0, 0))]
    items = triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n) * splits
    grid = items
    if config.persistent:
        grid = min(items, torch.cuda.get_device_properties(a.device).multi_processor_count)
    run_kernel(
        _scaled_gemm_kernel, (grid,),
        *args, out if scale_a is None else scale_a, out if scale_b is None else scale_b, out, m, n, k, a.stride(0),
        b.stride(0), *strides, triton.cdiv(triton.cdiv(k, block_k), splits), items, BLOCK_M=config.block_m,
        BLOCK_N=config.block_n, BLOCK_K=block_k, GROUP_M=config.group_m, EVEN_K=k % block_k == 0, TMA=tma, FAST=fast,
        SCALING=scaling, ROWS_A=rows_a, ROWS_B=rows_b, PERSISTENT=config.persistent,
        FLATTEN=config.persistent and tma, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip


@torch.no_grad()
def scaled_gemm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, *, fast: bool, config: GemmConfig,
    rows_a: int = 0, rows_b: int = 0,
) -> Tensor:  # fmt: skip
    """``A @ B.T`` [M, N] in out_dtype, with M, N and K above 0; arguments as :func:`launch_parts` has them."""
    shape = (a.shape[0], b.shape[0])
    blocks = triton.cdiv(a.shape[1], BLOCK if rows_a else config.block_k)
    # As many parts as have something to add up: an even cut of few blocks leaves the last ones empty.
    splits = triton.cdiv(blocks, triton.cdiv(blocks, config.splits))
    out = torch.empty(shape, dtype=out_dtype, device=a.device)
    parts = out if splits == 1 else torch.empty((splits, *shape), dtype=torch.float32, device=a.device)
    launch_parts(a, b, scale_a, scale_b, parts, splits, fast=fast, config=config, rows_a=rows_a, rows_b=rows_b)
    if splits > 1:
        size = 1024
        programs = (triton.cdiv(out.numel(), size),)
        run_kernel(_sum_parts_kernel, programs, parts, out, out.numel(), SPLITS=splits, BLOCK_SIZE=size, num_warps=4)
    return out
