"""Kernels with one planted defect each, of the kinds that have been seen in kernel libraries (issue 3).

A faulty provider rounds to FP8 and multiplies as the emulation does, but for its defect. What a test sees of the defect
is the ratio of its error to that of the emulation, which is the same recipe done right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from loka_compile.gemm import BLOCKWISE_1X128, ROWWISE, TENSORWISE, Gemm, Recipe, Scaling
from loka_compile.lowering.providers.base import Quantized
from loka_compile.lowering.providers.emulated import Emulated

#: Elements of one step of the tensor core along the contraction, and bits that its accumulator keeps: measured on
#: Hopper by the authors of DeepSeek-V3 (arXiv 2412.19437, section 3.3.2).
MMA_K, ACCUMULATOR_BITS = 32, 14
#: Kernels work on so many rows at a time; a batch that is no multiple of it is padded.
TILE = 128


class Faulty(Emulated):
    """The emulation of one recipe, with a defect."""

    name: ClassVar[str] = "faulty"
    recipe_used: ClassVar[Recipe]

    def __init__(self) -> None:
        self.recipes = {self.recipe_used.name: self.recipe_used}  # type: ignore[misc]

    def _refuses_shape(self, gemm: Gemm, recipe: Recipe) -> str | None:
        return None


class Sound(Faulty):
    """No defect, in one recipe."""

    name: ClassVar[str] = "sound"

    def __init__(self, recipe: Recipe) -> None:
        self.recipes = {recipe.name: recipe}  # type: ignore[misc]


class DroppedLastBlock(Faulty):
    """The loop over the contraction ends one block of 128 too early."""

    recipe_used = BLOCKWISE_1X128

    def compute(self, a: Quantized, b: Quantized, recipe: Recipe, out_dtype: torch.dtype) -> Tensor:
        data = a.data.clone()
        data[:, (data.shape[1] - 1) // TILE * TILE :] = 0
        return super().compute(Quantized(data, a.scale), b, recipe, out_dtype)


class SwappedTileScales(Faulty):
    """The scales of the first two tiles along the contraction are mixed up."""

    recipe_used = BLOCKWISE_1X128

    def compute(self, a: Quantized, b: Quantized, recipe: Recipe, out_dtype: torch.dtype) -> Tensor:
        scale = a.scale.clone()
        scale[:, :2] = scale[:, :2].flip(1)
        return super().compute(Quantized(a.data, scale), b, recipe, out_dtype)


class WrongRowScale(Faulty):
    """Every row of A is multiplied by the scale of the row before it."""

    recipe_used = ROWWISE

    def compute(self, a: Quantized, b: Quantized, recipe: Recipe, out_dtype: torch.dtype) -> Tensor:
        return super().compute(Quantized(a.data, a.scale.roll(1, 0)), b, recipe, out_dtype)


class StalePadding(Faulty):
    """Rows are padded to whole tiles with what the operand's buffer held before, and the amax is taken over all."""

    recipe_used = TENSORWISE

    def __init__(self) -> None:
        super().__init__()
        #: What the buffers of A and of B held last; they are filled in turns.
        self._held: list[Tensor | None] = [None, None]

    def quantize(
        self, x: Tensor, scaling: Scaling, dtype: torch.dtype, transpose: bool, bound: float | None
    ) -> Quantized:
        rows, width = x.shape
        stale = self._held.pop(0)
        self._held.append(x)
        missing = -rows % TILE * width
        if stale is None or not missing:
            return super().quantize(x, scaling, dtype, transpose, bound)
        old = stale.reshape(-1).to(x.dtype)
        old = old.repeat(-(-missing // old.numel()))[:missing].view(-1, width)
        whole = super().quantize(torch.cat([x, old]), scaling, dtype, transpose, bound)
        kept = whole.data[:, :rows] if transpose else whole.data[:rows]
        return Quantized(kept.contiguous(), whole.scale)


class HiddenFastAccumulation(Faulty):
    """Partial sums stay in the tensor core's accumulator, where the recipe promises to promote them to fp32."""

    recipe_used = ROWWISE

    def compute(self, a: Quantized, b: Quantized, recipe: Recipe, out_dtype: torch.dtype) -> Tensor:
        sums = torch.zeros(a.data.shape[0], b.data.shape[0], device=a.data.device)
        for start in range(0, a.data.shape[1], MMA_K):
            left, right = (q.data[:, start : start + MMA_K].float() for q in (a, b))
            part = left @ right.t()
            # Both are aligned to the larger exponent; what falls below the last bit is cut off.
            exponent = torch.frexp(torch.maximum(sums.abs(), part.abs())).exponent
            unit = torch.ldexp(torch.ones_like(sums), exponent - ACCUMULATOR_BITS)
            sums = torch.trunc(sums / unit) * unit + torch.trunc(part / unit) * unit
        return (sums * a.scale * b.scale.t()).to(out_dtype)


@dataclass(frozen=True)
class Defect:
    """A defect by name."""

    name: str
    provider: type[Faulty]

    @property
    def what(self) -> str:
        """One sentence."""
        return (self.provider.__doc__ or "").strip().splitlines()[0]


DEFECTS = (
    Defect("dropped last K block", DroppedLastBlock),
    Defect("swapped scales of two tiles", SwappedTileScales),
    Defect("scale of a wrong row", WrongRowScale),
    Defect("uninitialised padding rows", StalePadding),
    Defect("fast accumulation where promised not", HiddenFastAccumulation),
)
