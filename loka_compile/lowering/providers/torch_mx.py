"""MXFP8 on Blackwell: ``aten._scaled_mm_v2`` with blocks of 32 and scales of 8 exponent bits. Not run on this hardware.

The recipe, its numbers and the layout of its scales are tested in emulation. Sources: the OCP Microscaling Formats
specification 1.0 (scales that are powers of two, NaN as 255); cuBLAS 13 documentation, "1D block scaling factors
layout"; ``torch.nn.functional.scaled_mm`` of torch 2.11.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from loka_compile.gemm import MXFP8, Gemm, Recipe, Scaling
from loka_compile.lowering.providers.base import Provider, Quantized, gpu_reason, multiple_of
from loka_compile.lowering.providers.emulated import product
from loka_compile.lowering.quantize import BLOCK_MX

#: ``torch.nn.functional.ScalingType.BlockWise1x32`` and ``SwizzleType.SWIZZLE_32_4_4``, as the op takes them.
_BLOCK_1X32, _SWIZZLE_32_4_4 = 3, 1
#: Rows and scales of a tile of scales.
_ROWS, _SCALES = 128, 4


class TorchMX(Provider):
    """sm_100 and newer, CUDA 12.8."""

    name: ClassVar[str] = "torch_mx"
    recipes: ClassVar[dict[str, Recipe]] = {MXFP8.name: MXFP8}

    def supported(self, recipe: Recipe | None = None, device: str | None = None) -> str | None:
        """Blackwell. Older GPUs have no tensor cores for such scales."""
        reason = gpu_reason((10, 0), device=device)
        if reason:
            return reason
        cuda = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
        if cuda < (12, 8):
            return f"MX scales need cuBLASLt of CUDA 12.8; this torch is built for CUDA {torch.version.cuda}"
        return None

    def multiples(self, recipe: Recipe) -> dict[str, int]:
        """Whole blocks of 32, 16-byte rows of the result."""
        return {"k": BLOCK_MX, "n": 16}

    def _refuses_shape(self, gemm: Gemm, recipe: Recipe) -> str | None:
        return multiple_of(gemm, self.multiples(recipe), "torch's MXFP8 scaled_mm")

    def compute(self, a: Quantized, b: Quantized, recipe: Recipe, out_dtype: torch.dtype) -> Tensor:
        """``A @ B.T``."""
        return scaled_mm_mx(a.data, swizzled(a.scale), b.data, swizzled(b.scale), out_dtype)


def swizzled(scale: Tensor) -> Tensor:
    """[rows, k/32] fp32 powers of two to the flat e8m0 scales that cuBLASLt reads.

    Tiles of 128 rows and 4 scales, row-major, filled up with ones; within a tile, the scale of row ``r`` and block
    ``c`` lies at ``(r % 32) * 16 + (r // 32) * 4 + c``.
    """
    rows, blocks = scale.shape
    tiles_m, tiles_k = (rows + _ROWS - 1) // _ROWS, (blocks + _SCALES - 1) // _SCALES
    padding = (0, tiles_k * _SCALES - blocks, 0, tiles_m * _ROWS - rows)
    tiles = torch.nn.functional.pad(scale, padding, value=1.0).view(tiles_m, 4, 32, tiles_k, _SCALES)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).to(torch.float8_e8m0fnu)


def unswizzled(scale: Tensor, rows: int, blocks: int) -> Tensor:
    """[rows, blocks] fp32: the inverse of :func:`swizzled`."""
    tiles_m, tiles_k = (rows + _ROWS - 1) // _ROWS, (blocks + _SCALES - 1) // _SCALES
    tiles = scale.to(torch.float32).view(tiles_m, tiles_k, 32, 4, _SCALES).permute(0, 3, 2, 1, 4)
    return tiles.reshape(tiles_m * _ROWS, tiles_k * _SCALES)[:rows, :blocks]


def launch_scaled_mm_mx(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    """``aten._scaled_mm_v2`` with both operands in blocks of 32.

    Args:
        a: [m, k] e4m3, contiguous; k a multiple of 32.
        a_scale: :func:`swizzled` scales of A; ``b_scale`` likewise.
        b: [n, k] e4m3, contiguous; n a multiple of 16.
        b_scale: see ``a_scale``.
        out_dtype: dtype of the result.

    Returns:
        [m, n], contiguous.
    """
    if a.shape[0] == 0 or a.shape[1] == 0 or b.shape[0] == 0:
        return a.new_zeros((a.shape[0], b.shape[0]), dtype=out_dtype)
    kinds, swizzles = [_BLOCK_1X32], [_SWIZZLE_32_4_4]
    return torch.ops.aten._scaled_mm_v2.default(
        a, b.t(), [a_scale], kinds, swizzles, [b_scale], kinds, swizzles, None, out_dtype, [], False
    )


scaled_mm_mx = torch.library.custom_op("loka::scaled_mm_mx", launch_scaled_mm_mx, mutates_args=(), device_types="cuda")


@scaled_mm_mx.register_fake
def _(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


@scaled_mm_mx.register_kernel("cpu")
def scaled_mm_mx_ref(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    """The op's meaning in fp32, for tests of the layout; no plan chooses it."""
    left, right = (
        Quantized(x, unswizzled(scale, x.shape[0], (x.shape[1] + BLOCK_MX - 1) // BLOCK_MX))
        for x, scale in ((a, a_scale), (b, b_scale))
    )
    return product(left, right, Scaling.BLOCK_1X32, Scaling.BLOCK_1X32, out_dtype)
