"""torchao's Triton GEMMs for block scales: the block recipes on sm_89, and with fp32 results.

Everything else of torchao's FP8 training bottoms out in ``torch._scaled_mm``, which the provider ``torch`` has: its
tensorwise and rowwise recipes are combinations of that provider's GEMMs, and ``rowwise_with_gw_hp`` is a plan that
leaves grad_weight in high precision.

Facts: torchao 0.18.0, ``prototype/blockwise_fp8_training/kernels.py``.
"""

from __future__ import annotations

import functools
import importlib
from importlib import metadata
from typing import Any, ClassVar

import torch
from torch import Tensor

from loka_compile.gemm import BLOCKWISE, BLOCKWISE_1X128, Gemm, Recipe
from loka_compile.lowering.providers.base import Provider, Quantized, gpu_reason, import_reason, multiple_of
from loka_compile.lowering.providers.emulated import product, refuses_blockwise_role
from loka_compile.lowering.quantize import BLOCK, packed

_MODULE = "torchao.prototype.blockwise_fp8_training.kernels"
#: Its function for each recipe.
_FUNCTIONS = {BLOCKWISE.name: "triton_fp8_gemm_1x128_128x128", BLOCKWISE_1X128.name: "triton_fp8_gemm_1x128_128x1"}
#: The functions by recipe, once :func:`load` has found them.
_FOUND: dict[str, Any] = {}


class TorchAO(Provider):
    """Plain ``tl.dot`` kernels that promote to fp32 every 128 products; compiled and autotuned per shape."""

    name: ClassVar[str] = "torchao"
    recipes: ClassVar[dict[str, Recipe]] = {recipe.name: recipe for recipe in (BLOCKWISE, BLOCKWISE_1X128)}
    distributions: ClassVar[tuple[str, ...]] = ("torchao", "triton")

    def supported(self, recipe: Recipe | None = None, device: str | None = None) -> str | None:
        """sm_89 or newer, and torchao from 0.18."""
        return gpu_reason((8, 9), device=device) or load()

    def multiples(self, recipe: Recipe) -> dict[str, int]:
        """Whole blocks and whole tiles."""
        # Tiles are up to 256 wide and read their scales without a mask: past the last row, past the end of memory.
        return {"k": BLOCK, "m": 256, "n": 256}

    def _refuses_shape(self, gemm: Gemm, recipe: Recipe) -> str | None:
        who = "torchao's block GEMM (unmasked scales)"
        return refuses_blockwise_role(gemm, recipe) or multiple_of(gemm, self.multiples(recipe), who)

    def compute(self, a: Quantized, b: Quantized, recipe: Recipe, out_dtype: torch.dtype) -> Tensor:
        """``A @ B.T``; A's scales column-major, B's column-major in 128x128 blocks and row-major in 1x128."""
        b_scale = b.scale if recipe == BLOCKWISE else packed(b.scale.t())
        return torchao_gemm(a.data, packed(a.scale.t()), b.data, b_scale, recipe.name, out_dtype)


def launch_torchao_gemm(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, recipe: str, out_dtype: torch.dtype
) -> Tensor:
    """One of torchao's kernels.

    A custom op because Inductor would copy the source of a user's Triton kernel into its own module, where names that
    torchao's kernels use (``torch``, their tuning hooks) are not defined; and so that a moving batch is no constant.

    Args:
        a: [m, k] e4m3, contiguous; m a multiple of 256 and k of 128.
        a_scale: [k/128, m] fp32, contiguous.
        b: [n, k] e4m3, contiguous; n a multiple of 256.
        b_scale: fp32, contiguous; [n/128, k/128] (blockwise) or [k/128, n] (blockwise_1x128).
        recipe: name of one of the provider's recipes.
        out_dtype: dtype of the result.

    Returns:
        [m, n], contiguous.

    Raises:
        RuntimeError: torchao cannot be used here.
    """
    (m, k), n = a.shape, b.shape[0]
    if m == 0 or n == 0 or k == 0:
        return a.new_zeros((m, n), dtype=out_dtype)
    reason = load()
    if reason:
        raise RuntimeError(f"torchao's GEMM was called, but: {reason}")
    right = b_scale.t() if recipe == BLOCKWISE.name else b_scale
    out: Tensor = _FOUND[recipe](a, b.t(), a_scale.t(), right, BLOCK, out_dtype)
    return out


torchao_gemm = torch.library.custom_op("loka::torchao_gemm", launch_torchao_gemm, mutates_args=(), device_types="cuda")


@torchao_gemm.register_fake
def _(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, recipe: str, out_dtype: torch.dtype) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


@torchao_gemm.register_kernel("cpu")
def torchao_gemm_ref(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, recipe: str, out_dtype: torch.dtype
) -> Tensor:
    """The op's meaning in fp32, for tests of layouts; no plan chooses it."""
    chosen = TorchAO.recipes[recipe]
    right = Quantized(b, b_scale if chosen == BLOCKWISE else b_scale.t())
    return product(Quantized(a, a_scale.t()), right, chosen.a, chosen.b, out_dtype)


@functools.cache
def load() -> str | None:
    """Import torchao's kernels, once per process; returns None or the reason why they cannot be used."""
    try:
        version = metadata.version("torchao")
    except metadata.PackageNotFoundError:
        return "torchao is not installed (pip install 'loka-compile[torchao]')"
    if tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit()) < (0, 18):
        return f"torchao {version} is too old: its block scales are laid out wrongly before 0.18"
    reason = import_reason(_MODULE)
    if reason:
        return reason
    module = importlib.import_module(_MODULE)
    missing = [name for name in _FUNCTIONS.values() if not hasattr(module, name)]
    if missing:
        return f"torchao {version} lacks {', '.join(missing)}: version not supported"
    _FOUND.update((recipe, getattr(module, name)) for recipe, name in _FUNCTIONS.items())
    return None
