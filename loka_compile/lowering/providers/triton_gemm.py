"""Our own FP8 GEMM in Triton: every scaling, any m and n, and a contraction that is cut where the output is narrow.

The kernel takes any k as well, but reads rows that do not start on 16 bytes byte by byte; so k is padded.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import ClassVar

import torch
from torch import Tensor

from loka_compile.gemm import (
    BLOCKWISE,
    BLOCKWISE_1X128,
    BLOCKWISE_128X128,
    ROWWISE,
    ROWWISE_FAST,
    TENSORWISE,
    TENSORWISE_FAST,
    Gemm,
    Recipe,
    Scaling,
)
from loka_compile.lowering.ahead import on_cuda
from loka_compile.lowering.providers.base import Provider, Quantized, gpu_reason, multiple_of
from loka_compile.lowering.providers.emulated import product, refuses_blockwise_role
from loka_compile.lowering.providers.triton_configs import config_for
from loka_compile.lowering.quantize import BLOCK, packed

_RECIPES = (
    TENSORWISE, TENSORWISE_FAST, ROWWISE, ROWWISE_FAST, BLOCKWISE, BLOCKWISE_1X128, BLOCKWISE_128X128
)  # fmt: skip
#: Rows that share a scale along which the contraction is cut into blocks; 0: the scale does not vary along k.
_ROWS = {Scaling.TENSORWISE: 0, Scaling.ROWWISE: 0, Scaling.BLOCK_1X128: 1, Scaling.BLOCK_128X128: BLOCK}


class TritonGemm(Provider):
    """All recipes and roles on sm_90 and newer; compiled at the first call of each kind of shape (about a second)."""

    name: ClassVar[str] = "triton"
    recipes: ClassVar[dict[str, Recipe]] = {recipe.name: recipe for recipe in _RECIPES}
    distributions: ClassVar[tuple[str, ...]] = ("triton",)

    def supported(self, recipe: Recipe | None = None, device: str | None = None) -> str | None:
        """sm_90 or newer (the tiles need its shared memory, and TMA), and Triton."""
        reason = gpu_reason((9, 0), device=device)
        if reason is None and importlib.util.find_spec("triton") is None:
            return "triton is not installed (pip install triton)"
        return reason

    def multiples(self, recipe: Recipe) -> dict[str, int]:
        """16-byte rows of the operands."""
        return {"k": 16}

    def _refuses_shape(self, gemm: Gemm, recipe: Recipe) -> str | None:
        who = "our Triton GEMM (16-byte rows)"
        return refuses_blockwise_role(gemm, recipe) or multiple_of(gemm, self.multiples(recipe), who)

    def compute(self, a: Quantized, b: Quantized, recipe: Recipe, out_dtype: torch.dtype) -> Tensor:
        """``A @ B.T``; 1x128 scales lie with their rows adjacent, so that a tile reads them in one piece."""
        a_scale, b_scale = (
            packed(q.scale.t()).t() if scaling is Scaling.BLOCK_1X128 else q.scale
            for q, scaling in ((a, recipe.a), (b, recipe.b))
        )
        return scaled_gemm(a.data, a_scale, b.data, b_scale, recipe.name, out_dtype)


def launch_scaled_gemm(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, recipe: str, out_dtype: torch.dtype
) -> Tensor:
    """The kernel with its shipped configuration.

    Args:
        a: [m, k] FP8, contiguous; ``b`` [n, k] likewise.
        a_scale: fp32: [] (tensorwise), [m, 1] (rowwise), [m, ceil(k/128)] or [ceil(m/128), ceil(k/128)], of any
            strides.
        b: see ``a``.
        b_scale: see ``a_scale``.
        recipe: name of one of the provider's recipes.
        out_dtype: dtype of the result.

    Returns:
        [m, n], contiguous.
    """
    from loka_compile.kernels.scaled_gemm import scaled_gemm as run

    (m, k), n = a.shape, b.shape[0]
    if m == 0 or n == 0 or k == 0:
        return a.new_zeros((m, n), dtype=out_dtype)
    chosen = TritonGemm.recipes[recipe]
    config = config_for(recipe, m, n, k, _multiprocessors(a.device.index))
    rows_a, rows_b = _ROWS[chosen.a], _ROWS[chosen.b]
    return run(a, b, a_scale, b_scale, out_dtype, fast=chosen.fast_accum, config=config, rows_a=rows_a, rows_b=rows_b)


scaled_gemm = torch.library.custom_op("loka::scaled_gemm", launch_scaled_gemm, mutates_args=(), device_types="cuda")
on_cuda("loka::scaled_gemm", launch_scaled_gemm)


@scaled_gemm.register_fake
def _(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, recipe: str, out_dtype: torch.dtype) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


@scaled_gemm.register_kernel("cpu")
def scaled_gemm_ref(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, recipe: str, out_dtype: torch.dtype
) -> Tensor:
    """The op's meaning in fp32, for tests; no plan chooses it."""
    chosen = TritonGemm.recipes[recipe]
    return product(Quantized(a, a_scale), Quantized(b, b_scale), chosen.a, chosen.b, out_dtype)


@functools.cache
def _multiprocessors(device: int | None) -> int:
    return torch.cuda.get_device_properties(
        torch.cuda.current_device() if device is None else device
    ).multi_processor_count
