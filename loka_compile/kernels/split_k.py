"""GEMM cut along the contraction, for outputs with too few tiles to fill the device (narrow layers with long inputs).

The partial sums are fp32 and are added in a fixed order by the consumer, so results do not vary from run to run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loka_compile.kernels.config import GemmConfig
from loka_compile.kernels.scaled_gemm import launch_parts


@torch.no_grad()
def gemm_split_k(
    a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, splits: int, *, fast: bool,
    config: GemmConfig,
) -> Tensor:  # fmt: skip
    """fp32 [splits, M, N]; the sum over the first dimension is ``a @ b.T``. a [M, K], b [N, K], K contiguous."""
    parts = torch.empty((splits, a.shape[0], b.shape[0]), dtype=torch.float32, device=a.device)
    launch_parts(a, b, scale_a, scale_b, parts, splits, fast=fast, config=config)
    return parts
