"""Gradient through an activation and BlockNorm in one pass that also prepares what the next GEMMs read.

For the gradient ``d`` [M, N] of a layer's output and what the forward kept (y [M, N], rstd [M, blocks])::

    g  = d * act'(y)          (HardSwish, SiLU or none)
    dx = rstd * (g - y * mean_block(g * y))

Written in the same pass: the largest |dx| of every tile, so that the FP8 cast (:mod:`loka_compile.kernels.cast`) needs
no pass to find its scale, and, where asked, ``fp8(act(y) * 16)`` transposed, which the grad_weight GEMM of the
layer above wants with the batch contiguous.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from loka_compile.kernels import device as dev
from loka_compile.kernels.config import BackwardConfig
from loka_compile.kernels.gradient_tile import gradients
from loka_compile.kernels.running import run_kernel

#: Best of those tried on an H200 (benchmarks/backward_sweep.py).
CONFIG = BackwardConfig(32, 8, 3, stages=2)


@triton.jit
def _backward_kernel(
    G, Y, RSTD, DX, AMAX, XT, M, N, words, tiles,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NORM: tl.constexpr, ACT: tl.constexpr, WRITE_XT: tl.constexpr,
    WORDS: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    dev.wait(PDL)
    grid_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        d = gradients(tile, G, Y, RSTD, XT, M, N, words, BLOCK_M, BLOCK_N, NORM, ACT, WRITE_XT, WORDS, PTX)
        pid_m, pid_n = tile // grid_n, tile % grid_n
        rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        best = tl.zeros((BLOCK_M // 4, BLOCK_N), dtype=DX.dtype.element_ty)
        for i in tl.static_range(4):
            rm = pid_m * BLOCK_M + 4 * tl.arange(0, BLOCK_M // 4) + i
            dx = d[i].to(DX.dtype.element_ty)
            at = DX + rm.to(tl.int64)[:, None] * N + rn[None, :]
            # The cast reads it next, so that it should stay in L2 before all else.
            tl.store(at, dx, mask=(rm[:, None] < M) & (rn[None, :] < N), eviction_policy="evict_last")
            # Of the rounded values, so that no element exceeds it.
            best = dev.larger(best, dx, PTX)
        tl.store(AMAX + tile, dev.amax(best))


@torch.no_grad()
def block_norm_backward(
    grad: Tensor, y: Tensor, rstd: Tensor, *, block: int, activation: str, with_xt: bool,
    config: BackwardConfig = CONFIG,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``(dx, amax, xt)`` for contiguous grad and y [M, N] and rstd fp32 [M, ceil(N/block)]; block at most 256.

    y in e4m3 stands for y / 16. activation: one of kernels.reference.ACTIVATIONS, or "" for none.

    dx [M, N] in grad's dtype; amax fp32 [tiles]; xt e4m3 [N, M] (empty unless with_xt).
    """
    (m, n), device = grad.shape, grad.device
    norm = dev.norm_tile(n, block)
    block_n = max(norm, min(256, triton.next_power_of_2(n)))
    tiles = triton.cdiv(m, config.block_m) * triton.cdiv(n, block_n)
    room = config.resident * torch.cuda.get_device_properties(device).multi_processor_count
    # Elsewhere addresses or numbers take more registers, and the bound would spill them.
    lean = grad.element_size() == 2 and n % 16 == 0 and m % 16 == 0
    dx = torch.empty_like(grad)
    amax = torch.empty((tiles,), dtype=torch.float32, device=device)
    xt = torch.empty((n, m) if with_xt else (0,), dtype=torch.float8_e4m3fn, device=device)
    run_kernel(
        _backward_kernel, (min(tiles, room),),
        grad, y, rstd, dx, amax, xt, m, n, m // 4, tiles, BLOCK_M=config.block_m, BLOCK_N=block_n, NORM=norm,
        ACT=activation, WRITE_XT=with_xt, WORDS=m % 4 == 0, PTX=dev.ptx(device), STAGES=config.stages,
        num_warps=config.warps, num_stages=1, **dev.bounded(config.registers if lean else None), **dev.early(device),
    )  # fmt: skip
    return dx, amax, xt
