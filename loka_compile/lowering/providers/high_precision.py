"""The baseline: the matrix product as torch computes it, in the operands' own dtype. Quantises nothing."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from loka_compile.gemm import NATIVE, Recipe
from loka_compile.lowering.providers.base import Provider, Quantized


class HighPrecision(Provider):
    """``torch.mm`` on the operands as stored, transposes as views: the node that was there before."""

    name: ClassVar[str] = "high_precision"
    recipes: ClassVar[dict[str, Recipe]] = {NATIVE.name: NATIVE}
    dtypes: ClassVar[frozenset[str]] = frozenset({"bfloat16", "float16", "float32", "float64"})

    def compute(self, a: Quantized, b: Quantized, recipe: Recipe, out_dtype: torch.dtype) -> Tensor:
        """``A @ B.T`` in the operands' dtype (on a GPU with TF32 if the user allows that), cast to ``out_dtype``."""
        return torch.mm(a.data, b.data.t()).to(out_dtype)
