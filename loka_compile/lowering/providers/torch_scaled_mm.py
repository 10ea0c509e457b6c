"""torch's own FP8 GEMMs (cuBLASLt): ``aten._scaled_mm``, and ``aten._scaled_mm_v2`` for scales in blocks.

The CPU executes shapes and layouts that CUDA rejects, so the limits of the GPU are checked here, for both. Sources:
torch's meta functions and kernels of 2.11 to 2.13; pytorch issues and pull requests 133334, 162022, 166752, 190449,
191138, 193802.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from loka_compile.gemm import (
    BLOCKWISE,
    BLOCKWISE_1X128,
    ROWWISE,
    ROWWISE_FAST,
    TENSORWISE,
    TENSORWISE_FAST,
    Gemm,
    Recipe,
    Scaling,
)
from loka_compile.lowering.providers.base import Provider, Quantized, default_device, gpu_reason, multiple_of
from loka_compile.lowering.providers.emulated import product, refuses_blockwise_role
from loka_compile.lowering.quantize import BLOCK, packed

_aten = torch.ops.aten
_PLAIN = (TENSORWISE, TENSORWISE_FAST, ROWWISE, ROWWISE_FAST)
_BLOCKED = (BLOCKWISE, BLOCKWISE_1X128)
#: ``torch.nn.functional.ScalingType``, as the op takes it.
_BLOCK_1X128, _BLOCK_128X128 = 4, 5


class TorchScaledMM(Provider):
    """Tensorwise and rowwise on sm_89 and newer and on the CPU; 1x128 and 128x128 blocks on sm_90.

    Never an FP8 result (torch 2.10 and 2.11 ignore its scale silently) and never a bias (not available with fp32).
    """

    name: ClassVar[str] = "torch"
    recipes: ClassVar[dict[str, Recipe]] = {recipe.name: recipe for recipe in (*_PLAIN, *_BLOCKED)}

    def supported(self, recipe: Recipe | None = None, device: str | None = None) -> str | None:
        """A GPU from sm_89 (blocks: exactly sm_90, CUDA 12.9), or a CPU (rowwise: torch 2.13; blocks: never)."""
        blocked = recipe is not None and recipe.name in (BLOCKWISE.name, BLOCKWISE_1X128.name)
        if blocked:
            return _block_reason(device)
        if (device or default_device()) != "cpu":
            return gpu_reason((8, 9), device=device)
        if recipe is not None and recipe.a is Scaling.ROWWISE and not _torch_at_least(2, 13):
            return f"rowwise scaled_mm on a CPU needs torch 2.13; this is {torch.__version__}"
        return None

    def multiples(self, recipe: Recipe) -> dict[str, int]:
        """16; whole blocks where scales are in blocks."""
        # Where a block is cut, torch's fake function and its kernel disagree about the scale's shape.
        return {"k": BLOCK, "n": BLOCK} if recipe in _BLOCKED else {"k": 16, "n": 16}

    def _refuses_shape(self, gemm: Gemm, recipe: Recipe) -> str | None:
        who = "torch's block-scaled scaled_mm" if recipe in _BLOCKED else "torch._scaled_mm"
        return refuses_blockwise_role(gemm, recipe) or multiple_of(gemm, self.multiples(recipe), who)

    def compute(self, a: Quantized, b: Quantized, recipe: Recipe, out_dtype: torch.dtype) -> Tensor:
        """``A @ B.T``; B is handed over as ``[n, k].t()``, the column-major form that CUDA (and Inductor) wants."""
        if recipe.a is Scaling.BLOCK_1X128:
            in_squares = recipe.b is Scaling.BLOCK_128X128
            b_scale = _pad_k_blocks(b.scale) if in_squares else packed(b.scale.t())
            return scaled_mm_blockwise(a.data, packed(a.scale.t()), b.data, b_scale, in_squares, out_dtype)
        # Positional up to out_dtype: bias and scale_result (None) come before it in the op's schema.
        return _aten._scaled_mm.default(
            a.data, b.data.t(), a.scale, b.scale.t(), None, None, out_dtype, recipe.fast_accum
        )


def _pad_k_blocks(scale: Tensor) -> Tensor:
    """[n/128, k/128] to [n/128, L4]: cuBLASLt wants columns of scales 16 bytes apart, so 4 blocks of k at a time."""
    blocks = scale.shape[1]
    return torch.nn.functional.pad(scale, (0, -blocks % 4), value=1.0)


def launch_scaled_mm_blockwise(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, b_in_squares: bool, out_dtype: torch.dtype
) -> Tensor:
    """``aten._scaled_mm_v2`` with A in 1x128 and B in 128x128 or 1x128 blocks.

    A custom op because Inductor's own Triton templates for block scales give wrong numbers (pytorch 193802) and must
    not be offered this GEMM.

    Args:
        a: [m, k] e4m3, contiguous; k a multiple of 128.
        a_scale: [k/128, m] fp32, contiguous.
        b: [n, k] e4m3, contiguous; n a multiple of 128.
        b_scale: ``b_in_squares``: [n/128, L4] fp32 with k/128 rounded up to L4, a multiple of 4. Else [k/128, n].
        b_in_squares: B is scaled in 128x128 blocks.
        out_dtype: dtype of the result.

    Returns:
        [m, n], contiguous.
    """
    m, k = a.shape
    if m == 0 or k == 0 or b.shape[0] == 0:
        return a.new_zeros((m, b.shape[0]), dtype=out_dtype)
    extra = -m % 4
    if extra:
        # The scales of A are m floats apart, and what cuBLASLt reads in columns must be 16-byte aligned.
        a = torch.cat([a.view(torch.uint8), a.new_zeros((extra, k), dtype=torch.uint8)]).view(a.dtype)
        a_scale = torch.nn.functional.pad(a_scale, (0, extra), value=1.0)
    recipe_b = _BLOCK_128X128 if b_in_squares else _BLOCK_1X128
    out = _aten._scaled_mm_v2.default(
        a, b.t(), [a_scale.t()], [_BLOCK_1X128], [], [b_scale.t()], [recipe_b], [], None, out_dtype, [], False
    )
    return out[:m].clone() if extra else out


scaled_mm_blockwise = torch.library.custom_op(
    "loka::scaled_mm_blockwise", launch_scaled_mm_blockwise, mutates_args=(), device_types="cuda"
)


@scaled_mm_blockwise.register_fake
def _(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, b_in_squares: bool, out_dtype: torch.dtype) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


@scaled_mm_blockwise.register_kernel("cpu")
def scaled_mm_blockwise_ref(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, b_in_squares: bool, out_dtype: torch.dtype
) -> Tensor:
    """The op's meaning in fp32, for tests of layouts; no plan chooses it."""
    b_scaling = Scaling.BLOCK_128X128 if b_in_squares else Scaling.BLOCK_1X128
    canonical = b_scale[:, : b.shape[1] // BLOCK] if b_in_squares else b_scale.t()
    return product(Quantized(a, a_scale.t()), Quantized(b, canonical), Scaling.BLOCK_1X128, b_scaling, out_dtype)


def _block_reason(device: str | None) -> str | None:
    reason = gpu_reason((9, 0), below=(9, 1), device=device)
    if reason:
        return f"block scales: {reason}"
    cuda = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    if cuda < (12, 9):
        return f"block scales need cuBLASLt of CUDA 12.9; this torch is built for CUDA {torch.version.cuda}"
    return None


def _torch_at_least(major: int, minor: int) -> bool:
    here = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    return here >= (major, minor)
