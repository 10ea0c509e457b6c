"""Several FP8 GEMMs of one shape in one launch: together they fill a device that one of them leaves half empty.

    out_i[n, k] = sum_m a_i[n, m] * b_i[k, m] * scale_a_i * scale_b_i

Meant for the grad_weights of narrow layers: nothing in the backward waits for them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from loka_compile.kernels import device as dev
from loka_compile.kernels.config import GemmConfig
from loka_compile.kernels.running import run_kernel

#: GEMMs of one launch: each adds a branch where a program finds its operands.
GROUP = 8


@triton.jit
def _grouped_gemm_kernel(
    AS, BS, SAS, SBS, OUTS, M, N, K, stride_a, stride_b, COUNT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, EVEN_K: tl.constexpr, FAST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    dev.wait(PDL)
    which = tl.program_id(1)
    A = AS[0]
    B = BS[0]
    SA = SAS[0]
    SB = SBS[0]
    OUT = OUTS[0]
    for i in tl.static_range(1, COUNT):
        if which == i:
            A = AS[i]
            B = BS[i]
            SA = SAS[i]
            SB = SBS[i]
            OUT = OUTS[i]
    pid_m, pid_n = dev.tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    acc = dev.accumulate(
        A, B, pid_m, pid_n, 0, tl.cdiv(K, BLOCK_K), M, N, K, stride_a, stride_b, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K,
        False, FAST,
    )  # fmt: skip
    acc = acc * (tl.load(SA) * tl.load(SB))
    rm = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rm[:, None] < M) & (rn[None, :] < N)
    tl.store(OUT + rm.to(tl.int64)[:, None] * N + rn[None, :], acc.to(OUT.dtype.element_ty), mask=mask)


@torch.no_grad()
def grouped_gemm(
    a: list[Tensor], b: list[Tensor], scale_a: list[Tensor], scale_b: list[Tensor], out_dtype: torch.dtype, *,
    fast: bool, config: GemmConfig,
) -> list[Tensor]:  # fmt: skip
    """``a_i @ b_i.T * scale_a_i * scale_b_i`` [M, N] in out_dtype, for a_i [M, K] and b_i [N, K].

    All a of one shape and dtype, likewise all b; M, N and K above 0; scales fp32 of one element.
    """
    # Inductor may lay an operand out otherwise than the graph said (a padded batch), and one stride serves all.
    a, b = ([x.contiguous() for x in xs] for xs in (a, b))
    (m, k), n, device = a[0].shape, b[0].shape[0], a[0].device
    outs = [torch.empty((m, n), dtype=out_dtype, device=device) for _ in a]
    tiles = triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n)
    for first in range(0, len(a), GROUP):
        cut = slice(first, first + GROUP)
        count = len(a[cut])
        run_kernel(
            _grouped_gemm_kernel, (tiles, count),
            tuple(a[cut]), tuple(b[cut]), tuple(scale_a[cut]), tuple(scale_b[cut]), tuple(outs[cut]), m, n, k,
            a[0].stride(0), b[0].stride(0), COUNT=count, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
            BLOCK_K=config.block_k, GROUP_M=config.group_m, EVEN_K=k % config.block_k == 0, FAST=fast,
            num_warps=config.warps, num_stages=config.stages, **dev.early(device),
        )  # fmt: skip
    return outs
