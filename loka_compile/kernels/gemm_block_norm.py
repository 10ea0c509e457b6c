"""GEMM with BlockNorm in its epilogue, and optionally HardSwish and FP8 output, or SwishNorm's gate: one launch.

The Inductor template in ``lowering/fused`` has the same body; this kernel is what the op runs in eager mode and what
configurations are measured with.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from loka_compile.kernels import block_scales, grid_barrier, tile_parts
from loka_compile.kernels import device as dev
from loka_compile.kernels.config import BLOCK, GemmConfig
from loka_compile.kernels.reference import scaling as scaling_of
from loka_compile.kernels.running import run_kernel
from loka_compile.kernels.scaled_gemm import can_use_tma


@triton.jit
def _finish(
    acc, row, pid_n, SA, SB, R, Y, RSTD, KEPT, Q, QS, M, N, EPS,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, NORM: tl.constexpr, EVEN_N: tl.constexpr, SCALING: tl.constexpr,
    RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr, WRITE_Y: tl.constexpr, WRITE_RSTD: tl.constexpr,
    KEEP: tl.constexpr, WRITE_Q: tl.constexpr, Q_SCALE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Scales, norm, activation and stores of ROWS rows of a product from ``row`` on."""
    rm = row + tl.arange(0, ROWS)
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if SCALING == 1:
        acc = acc * (tl.load(SA) * tl.load(SB))
    elif SCALING == 2:
        sa = tl.load(SA + rm, mask=rm < M, other=0.0)
        sb = tl.load(SB + rn, mask=rn < N, other=0.0)
        acc = acc * sa[:, None] * sb[None, :]
    mask = (rm[:, None] < M) & (rn[None, :] < N)
    offset = rm.to(tl.int64)[:, None] * N + rn[None, :]
    if RESIDUAL:
        acc += tl.load(R + offset, mask=mask, other=0.0).to(tl.float32)
    if not EVEN_N:
        acc = tl.where(rn[None, :] < N, acc, 0.0)
    rstd = tl.rsqrt(dev.block_mean(acc * acc, pid_n * BLOCK_N, N, ROWS, BLOCK_N, NORM) + EPS)
    # Before y is made: both together have no room in the registers of a large tile.
    if KEEP and ACTIVATION == "swish_norm":
        tl.store(KEPT + offset, acc.to(KEPT.dtype.element_ty), mask=mask)
    y = dev.over_block(acc, rstd, ROWS, BLOCK_N, NORM)
    if KEEP and ACTIVATION != "swish_norm":
        tl.store(KEPT + offset, y.to(KEPT.dtype.element_ty), mask=mask)
    if ACTIVATION == "swish_norm":
        y = acc * dev.hardsigmoid(y, PTX)
    else:
        y = dev.activated(y, ACTIVATION, PTX)
    if WRITE_RSTD:
        rb = pid_n * (BLOCK_N // NORM) + tl.arange(0, BLOCK_N // NORM)
        blocks = tl.cdiv(N, NORM)
        tl.store(RSTD + rm[:, None] * blocks + rb[None, :], rstd, mask=(rm[:, None] < M) & (rb[None, :] < blocks))
    if WRITE_Y:
        tl.store(Y + offset, y.to(Y.dtype.element_ty), mask=mask)
    if WRITE_Q == "1x128":
        scaled, scale = block_scales.scaled(y, ROWS, BLOCK_N)
        tl.store(Q + offset, dev.to_fp8(scaled, 1.0, Q.dtype.element_ty, 448.0, PTX), mask=mask)
        rs = pid_n * (BLOCK_N // 128) + tl.arange(0, BLOCK_N // 128)
        tl.store(
            QS + rs.to(tl.int64)[None, :] * M + rm[:, None], scale, mask=(rm[:, None] < M) & (rs[None, :] * 128 < N)
        )
    elif WRITE_Q == "fixed":
        q = dev.to_fp8(dev.activated(y, "hardswish", PTX), Q_SCALE, Q.dtype.element_ty, 448.0, PTX)
        tl.store(Q + offset, q, mask=mask)


@triton.jit
def _tile(
    tile, A, B, SA, SB, R, Y, RSTD, KEPT, Q, QS, M, N, K, stride_a, stride_b, row_a, step_a, row_b, step_b, EPS,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, NORM: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, TMA: tl.constexpr, FAST: tl.constexpr, SCALING: tl.constexpr,
    ROWS_A: tl.constexpr, ROWS_B: tl.constexpr, RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
    WRITE_Y: tl.constexpr, WRITE_RSTD: tl.constexpr, KEEP: tl.constexpr, WRITE_Q: tl.constexpr, Q_SCALE: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    pid_m, pid_n = dev.tile_of(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
    if SCALING == 3:
        acc = block_scales.accumulate(
            A, B, SA, SB, pid_m, pid_n, M, N, K, stride_a, stride_b, row_a, step_a, row_b, step_b, BLOCK_M, BLOCK_N,
            BLOCK_K, EVEN_K, TMA, ROWS_A, ROWS_B,
        )  # fmt: skip
    else:
        acc = dev.accumulate(
            A, B, pid_m, pid_n, 0, tl.cdiv(K, BLOCK_K), M, N, K, stride_a, stride_b, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K,
            TMA, FAST,
        )  # fmt: skip
    _finish(
        acc, pid_m * BLOCK_M, pid_n, SA, SB, R, Y, RSTD, KEPT, Q, QS, M, N, EPS, BLOCK_M, BLOCK_N, NORM, EVEN_N,
        SCALING, RESIDUAL, ACTIVATION, WRITE_Y, WRITE_RSTD, KEEP, WRITE_Q, Q_SCALE, PTX,
    )  # fmt: skip


# Strides of the scales make no other kernel.
@triton.jit(do_not_specialize=["step_a", "row_b", "step_b"])
def _kernel(
    A, B, SA, SB, R, Y, RSTD, KEPT, Q, QS, M, N, K, stride_a, stride_b, row_a, step_a, row_b, step_b, EPS,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, NORM: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, TMA: tl.constexpr, FAST: tl.constexpr, SCALING: tl.constexpr,
    ROWS_A: tl.constexpr, ROWS_B: tl.constexpr, RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
    WRITE_Y: tl.constexpr, WRITE_RSTD: tl.constexpr, KEEP: tl.constexpr, WRITE_Q: tl.constexpr, Q_SCALE: tl.constexpr,
    PTX: tl.constexpr, PERSISTENT: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    if PERSISTENT:
        tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
            _tile(
                tile, A, B, SA, SB, R, Y, RSTD, KEPT, Q, QS, M, N, K, stride_a, stride_b, row_a, step_a, row_b, step_b,
                EPS, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, NORM, EVEN_N, EVEN_K, TMA, FAST, SCALING, ROWS_A, ROWS_B,
                RESIDUAL, ACTIVATION, WRITE_Y, WRITE_RSTD, KEEP, WRITE_Q, Q_SCALE, PTX,
            )  # fmt: skip
    else:
        _tile(
            tl.program_id(0), A, B, SA, SB, R, Y, RSTD, KEPT, Q, QS, M, N, K, stride_a, stride_b, row_a, step_a, row_b,
            step_b, EPS, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, NORM, EVEN_N, EVEN_K, TMA, FAST, SCALING, ROWS_A, ROWS_B,
            RESIDUAL, ACTIVATION, WRITE_Y, WRITE_RSTD, KEEP, WRITE_Q, Q_SCALE, PTX,
        )  # fmt: skip


@triton.jit
def _split_kernel(
    A, B, SA, SB, R, Y, RSTD, KEPT, Q, QS, PARTS, COUNTERS, M, N, K, stride_a, stride_b, EPS,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, NORM: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, TMA: tl.constexpr, FAST: tl.constexpr, SCALING: tl.constexpr,
    RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr, WRITE_Y: tl.constexpr, WRITE_RSTD: tl.constexpr,
    KEEP: tl.constexpr, WRITE_Q: tl.constexpr, Q_SCALE: tl.constexpr, PTX: tl.constexpr, SPLITS: tl.constexpr,
    PHASE: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0) % SPLITS
    group = tl.program_id(0) // SPLITS
    steps = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLITS)
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in range(group, tiles, tl.num_programs(0) // SPLITS):
        pid_m, pid_n = dev.tile_of(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        if PHASE != 2:
            last = tl.minimum((split + 1) * steps, tl.cdiv(K, BLOCK_K))
            part = dev.accumulate(
                A, B, pid_m, pid_n, split * steps, last, M, N, K, stride_a, stride_b, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K,
                TMA, FAST,
            )  # fmt: skip
            tile_parts.hand_in(part, PARTS, COUNTERS, tile, group, split, BLOCK_M, BLOCK_N, SPLITS, PHASE)
        if PHASE != 1:
            acc = tile_parts.add_up(PARTS, tile, split, BLOCK_M, BLOCK_N, SPLITS)
            _finish(
                acc, pid_m * BLOCK_M + split * (BLOCK_M // SPLITS), pid_n, SA, SB, R, Y, RSTD, KEPT, Q, QS, M, N, EPS,
                BLOCK_M // SPLITS, BLOCK_N, NORM, EVEN_N, SCALING, RESIDUAL, ACTIVATION, WRITE_Y, WRITE_RSTD, KEEP,
                WRITE_Q, Q_SCALE, PTX,
            )  # fmt: skip


def launch(
    a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, y: Tensor | None, rstd: Tensor | None,
    q: Tensor | None, *, block: int, eps: float, fast: bool, config: GemmConfig, q_scale: float = 16.0,
    residual: Tensor | None = None, activation: str = "", kept: Tensor | None = None, q_scales: Tensor | None = None,
    room: tuple[Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """Write ``y = BlockNorm(z)`` with ``z = a @ b.T + residual``, and/or ``q = fp8(HardSwish(y) * q_scale)``; rstd.

    With an activation, y is ``HardSwish(BlockNorm(z))`` ("hardswish") or ``z * hardsigmoid(BlockNorm(z))``
    ("swish_norm"), and ``kept`` is what the backward needs beside rstd: BlockNorm(z), or z. q is then y in 1x128
    blocks, with ``q_scales`` [N/128, M]; N a multiple of 128. What is None is not written.

    a [M, K], b [N, K], both with contiguous rows; scales fp32, as :func:`scaling_of` tells them apart: both scalar,
    [M, 1] and [1, N] (contiguous), or blocks of 128 of any strides, with K in steps of 128 whatever ``config`` says.
    residual, where given: [M, N], contiguous, any floating dtype; not scaled. ``config.splits`` counts only without
    activation and blocks of scales; ``room`` is then what :func:`loka_compile.kernels.tile_parts.room` gave for a
    launch of as many tiles and parts, to use it once more.
    """
    (m, k), n = a.shape, b.shape[0]
    norm = dev.norm_tile(n, block)
    block_n = max(norm, min(config.block_n, triton.next_power_of_2(n)))
    scaling = scaling_of(scale_a, scale_b, m, n)
    plain = not scaling.in_blocks and not activation and kept is None and q_scales is None
    splits = config.splits if plain else 1
    tma = config.tma and can_use_tma(a, b)
    block_k = BLOCK if scaling.in_blocks else config.block_k
    args: list[Any] = [a, b]
    if tma:
        args = [
            TensorDescriptor.from_tensor(a, [config.block_m, block_k]),
            TensorDescriptor.from_tensor(b, [block_n, block_k]),
        ]
    tiles = triton.cdiv(m, config.block_m) * triton.cdiv(n, block_n)
    any_ptr = next(t for t in (y, q) if t is not None)
    args += [any_ptr if t is None else t for t in (scale_a, scale_b, residual, y, rstd, kept, q, q_scales)]
    sizes = (m, n, k, a.stride(0), b.stride(0))
    options: dict[str, Any] = {
        "BLOCK_M": config.block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "GROUP_M": config.group_m, "NORM": norm,
        "EVEN_N": n % block_n == 0, "EVEN_K": k % block_k == 0, "TMA": tma, "FAST": fast, "SCALING": scaling.kind,
        "RESIDUAL": residual is not None, "ACTIVATION": activation, "WRITE_Y": y is not None,
        "WRITE_RSTD": rstd is not None, "KEEP": kept is not None, "Q_SCALE": q_scale, "PTX": dev.ptx(a.device),
        "WRITE_Q": "" if q is None else "fixed" if q_scales is None else "1x128",
        "num_warps": config.warps, "num_stages": config.stages,
    }  # fmt: skip
    programs = tiles
    if config.persistent or splits > 1:
        programs = min(tiles, torch.cuda.get_device_properties(a.device).multi_processor_count // splits)
    if splits == 1:
        strides = [
            s for t in (scale_a, scale_b) for s in (t.stride() if t is not None and scaling.in_blocks else (0, 0))
        ]
        run_kernel(
            _kernel, (programs,),
            *args, *sizes, *strides, eps, ROWS_A=scaling.rows_a, ROWS_B=scaling.rows_b,
            PERSISTENT=config.persistent, FLATTEN=config.persistent and tma, **options,
        )  # fmt: skip
        return
    parts, counters = room or tile_parts.room(tiles, config.block_m, block_n, splits, a.device)
    for phase in grid_barrier.phases(a.device):
        grid = (max(1, programs) * splits,)
        run_kernel(_split_kernel, grid, *args, parts, counters, *sizes, eps, SPLITS=splits, PHASE=phase, **options)
