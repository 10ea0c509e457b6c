"""FP8 on AMD's MI300: ``aten._scaled_mm`` (hipBLASLt) with e4m3fnuz operands. Not run on this hardware.

The recipes and their numbers are tested in emulation. MI350 (gfx950) has the OCP formats instead and is refused until
somebody has run it. Sources: torch 2.11, ``ScaledBlas.cpp`` (which dtypes each gfx target takes, rowwise on hipBLASLt).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from loka_compile.gemm import ROWWISE_FNUZ, TENSORWISE_FNUZ, Gemm, Recipe
from loka_compile.lowering.providers.base import Provider, Quantized, default_device, multiple_of

#: What AMD calls an MI300 in ``gcnArchName``.
_TARGET = "gfx94"


class TorchROCm(Provider):
    """gfx94x. There is no choice of accumulation."""

    name: ClassVar[str] = "torch_rocm"
    recipes: ClassVar[dict[str, Recipe]] = {recipe.name: recipe for recipe in (TENSORWISE_FNUZ, ROWWISE_FNUZ)}

    def supported(self, recipe: Recipe | None = None, device: str | None = None) -> str | None:
        """An MI300 and a torch built for ROCm."""
        if (device or default_device()) != "cuda":
            return "needs an AMD GPU of gfx94x (MI300); the operands are on the CPU"
        if not torch.version.hip:
            return "needs an AMD GPU of gfx94x (MI300); this torch is not built for ROCm"
        if not torch.cuda.is_available():
            return "needs an AMD GPU of gfx94x (MI300); torch sees none"
        here = torch.cuda.get_device_properties().gcnArchName
        if not here.startswith(_TARGET):
            return f"needs an AMD GPU of gfx94x (MI300); this one is {here}, whose FP8 format is another"
        return None

    def multiples(self, recipe: Recipe) -> dict[str, int]:
        """16-byte rows."""
        return {"k": 16, "n": 16}

    def _refuses_shape(self, gemm: Gemm, recipe: Recipe) -> str | None:
        return multiple_of(gemm, self.multiples(recipe), "torch._scaled_mm")

    def compute(self, a: Quantized, b: Quantized, recipe: Recipe, out_dtype: torch.dtype) -> Tensor:
        """``A @ B.T``; B is handed over as ``[n, k].t()``."""
        return torch.ops.aten._scaled_mm.default(
            a.data, b.data.t(), a.scale, b.scale.t(), None, None, out_dtype, recipe.fast_accum
        )
