"""The transpose of an FP8 matrix that lies in memory, as a kernel of its own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from loka_compile.kernels import device as dev
from loka_compile.kernels.running import run_kernel
from loka_compile.kernels.turned import store_turned


@triton.jit
def _turn_kernel(
    X, T, M, N, words, WORDS: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    dev.wait(PDL)
    pid = tl.program_id(0)
    grid_n = tl.cdiv(N, BLOCK_N)
    rw = (pid // grid_n) * BLOCK_W + tl.arange(0, BLOCK_W)
    rn = (pid % grid_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    packed = tl.zeros((BLOCK_W, BLOCK_N), tl.int32)
    for i in tl.static_range(4):
        rm = 4 * rw + i
        mask = (rm[:, None] < M) & (rn[None, :] < N)
        byte = tl.load(X + rm.to(tl.int64)[:, None] * N + rn[None, :], mask=mask, other=0)
        packed |= byte.to(tl.int32) << (8 * i)
    store_turned(T, packed, rw, rn, M, N, words, WORDS)


@torch.no_grad()
def turn(x: Tensor, *, block_w: int = 32, block_n: int = 128, warps: int = 4) -> Tensor:
    """x [M, N] in FP8 -> [N, M], contiguous, the same bytes."""
    m, n = x.shape
    out = torch.empty((n, m), dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(m, 4 * block_w) * triton.cdiv(n, block_n),)
    run_kernel(
        _turn_kernel, grid,
        x.view(torch.uint8), out, m, n, triton.cdiv(m, 4), WORDS=m % 4 == 0, BLOCK_W=block_w, BLOCK_N=block_n,
        num_warps=warps, **dev.early(x.device),
    )  # fmt: skip
    return out
