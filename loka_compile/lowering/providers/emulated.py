"""FP8 on any device: operands rounded to FP8 exactly as for a real kernel, products and sums in fp32.

What it tells is the error of the *recipe*. A tensor core's partial sums are less precise than fp32, so recipes with
``fast_accum`` have no emulation: their extra error is a property of the hardware that no public document specifies.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from loka_compile.gemm import (
    BLOCKWISE,
    BLOCKWISE_1X128,
    BLOCKWISE_128X128,
    MXFP8,
    ROWWISE,
    ROWWISE_FNUZ,
    TENSORWISE,
    TENSORWISE_FNUZ,
    Gemm,
    Recipe,
    Role,
    Scaling,
)
from loka_compile.lowering.providers.base import Provider, Quantized
from loka_compile.lowering.quantize import dequantize

_RECIPES = (
    TENSORWISE, ROWWISE, BLOCKWISE, BLOCKWISE_1X128, BLOCKWISE_128X128, MXFP8, TENSORWISE_FNUZ, ROWWISE_FNUZ
)  # fmt: skip


class Emulated(Provider):
    """Every recipe with promoted accumulation, in all roles, at the speed of an fp32 matmul or less."""

    name: ClassVar[str] = "emulated"
    recipes: ClassVar[dict[str, Recipe]] = {recipe.name: recipe for recipe in _RECIPES}

    def _refuses_shape(self, gemm: Gemm, recipe: Recipe) -> str | None:
        return refuses_blockwise_role(gemm, recipe)

    def compute(self, a: Quantized, b: Quantized, recipe: Recipe, out_dtype: torch.dtype) -> Tensor:
        """``A @ B.T`` of the values that the FP8 operands stand for; see :func:`product`."""
        return product(a, b, recipe.a, recipe.b, out_dtype)


def product(a: Quantized, b: Quantized, a_scaling: Scaling, b_scaling: Scaling, out_dtype: torch.dtype) -> Tensor:
    """``A @ B.T`` [m, n] with fp32 products, sums and scales, rounded once to ``out_dtype``.

    Also the CPU reference of the ``loka::`` custom ops that wrap a library's GPU kernel.
    """
    outside = (Scaling.TENSORWISE, Scaling.ROWWISE)
    if a_scaling in outside and b_scaling in outside:
        # Scales that do not vary along k are applied to the sums, as the kernels do: FP8 x FP8 is exact in fp32, TF32
        # and bf16 alike, so the user's matmul precision does not change the products.
        sums = torch.mm(a.data.to(torch.float32), b.data.to(torch.float32).t())
        return (sums * a.scale * b.scale.t()).to(out_dtype)
    return torch.mm(dequantize(a, a_scaling), dequantize(b, b_scaling).t()).to(out_dtype)


def refuses_blockwise_role(gemm: Gemm, recipe: Recipe) -> str | None:
    """1x128 with 128x128 blocks is for a GEMM that has a weight on its B side."""
    if recipe == BLOCKWISE and gemm.role is Role.GRAD_WEIGHT:
        return f"{BLOCKWISE.name} cuts a weight into 128x128 blocks; grad_weight has none, use {BLOCKWISE_1X128.name}"
    return None
