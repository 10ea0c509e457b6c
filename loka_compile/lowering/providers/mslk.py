"""The CUTLASS kernels of MSLK and of its predecessor FBGEMM GenAI: rowwise, 128x128 and 1x128 with 128x128 scales.

Both packages carry the same kernels, under ``torch.ops.mslk`` and ``torch.ops.fbgemm``, and register some Triton ops
under the same names: they are never both imported into one process. MSLK is preferred.

Facts: mslk-cuda 1.1.0 and fbgemm-gpu-genai 1.6.0, the releases for torch 2.11. Their Triton GEMMs are left out
(``matmul_fp8_row`` fails on Triton 3.6, ``matmul_fp8_block`` can drop the last block of k, FBGEMM issue 6159).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from typing import Any, ClassVar

import torch
from torch import Tensor

from loka_compile.gemm import BLOCKWISE, BLOCKWISE_128X128, ROWWISE, ROWWISE_FAST, Gemm, Recipe, Scaling
from loka_compile.lowering.providers.base import (
    Provider,
    Quantized,
    gpu_reason,
    import_reason,
    more_rows,
    multiple_of,
)
from loka_compile.lowering.providers.emulated import product, refuses_blockwise_role
from loka_compile.lowering.quantize import BLOCK, packed

#: Module to import and namespace of its ops, the preferred one first.
_LIBRARIES = (("mslk.gemm", "mslk"), ("fbgemm_gpu.experimental.gen_ai", "fbgemm"))
_RECIPES = (ROWWISE, ROWWISE_FAST, BLOCKWISE, BLOCKWISE_128X128)
_OPS = ("f8f8bf16_rowwise", "f8f8bf16_blockwise", "f8f8bf16_groupwise")
#: The library's ops by name, once :func:`load` has found it. Read while tracing, where nothing can be imported.
_FOUND: dict[str, Any] = {}


class Mslk(Provider):
    """bf16 results only, all roles (grad_weight rowwise or 128x128), sm_90."""

    name: ClassVar[str] = "fbgemm"
    recipes: ClassVar[dict[str, Recipe]] = {recipe.name: recipe for recipe in _RECIPES}
    dtypes: ClassVar[frozenset[str]] = frozenset({"bfloat16"})
    distributions: ClassVar[tuple[str, ...]] = ("mslk-cuda", "fbgemm-gpu-genai")

    def supported(self, recipe: Recipe | None = None, device: str | None = None) -> str | None:
        """sm_90 and one of the two packages."""
        return gpu_reason((9, 0), below=(9, 1), device=device) or load()[1]

    def multiples(self, recipe: Recipe) -> dict[str, int]:
        """16-byte rows; whole blocks for the groupwise kernel."""
        # Nothing in the groupwise kernel checks its scales: what does not fit reads out of bounds.
        return {"k": BLOCK, "n": BLOCK} if recipe == BLOCKWISE else {"k": 16, "n": 8}

    def _refuses_shape(self, gemm: Gemm, recipe: Recipe) -> str | None:
        who = "MSLK's groupwise GEMM" if recipe == BLOCKWISE else "MSLK's GEMM (16-byte rows)"
        return refuses_blockwise_role(gemm, recipe) or multiple_of(gemm, self.multiples(recipe), who)

    def compute(self, a: Quantized, b: Quantized, recipe: Recipe, out_dtype: torch.dtype) -> Tensor:
        """``A @ B.T`` in bf16, cast to ``out_dtype`` (a no-op: only bf16 GEMMs are accepted)."""
        if recipe == BLOCKWISE:
            out = groupwise_gemm(a.data, packed(a.scale.t()), b.data, packed(b.scale.t()))
        elif recipe == BLOCKWISE_128X128:
            out = _op("f8f8bf16_blockwise")(a.data, b.data, a.scale, b.scale, BLOCK, BLOCK, BLOCK)
        else:
            out = _op("f8f8bf16_rowwise")(a.data, b.data, a.scale.view(-1), b.scale.view(-1), None, recipe.fast_accum)
        return out.to(out_dtype)


def launch_groupwise_gemm(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """``f8f8bf16_groupwise``, wrapped because the library gives it no fake function.

    Args:
        a: [m, k] e4m3, contiguous; k a multiple of 128.
        a_scale: [k/128, m] fp32, contiguous.
        b: [n, k] e4m3, contiguous; n a multiple of 128.
        b_scale: [k/128, n/128] fp32, contiguous.

    Returns:
        [m, n] bf16.
    """
    (m, k), n = a.shape, b.shape[0]
    if m == 0 or k == 0 or n == 0:
        return a.new_zeros((m, n), dtype=torch.bfloat16)
    expected = ((k // BLOCK, m), (k // BLOCK, n // BLOCK))
    for scale, shape in zip((a_scale, b_scale), expected, strict=True):
        # The kernel checks nothing; a wrong scale would be read out of bounds.
        if scale.dtype != torch.float32 or tuple(scale.shape) != shape or not scale.is_contiguous():
            raise ValueError(f"scale {tuple(scale.shape)} {scale.dtype} must be contiguous fp32 of shape {shape}")
    # The kernel loads a row of A's scales by TMA, which wants it to be a multiple of 16 bytes; with another m it does
    # not fail but executes an illegal instruction, after which the process can no longer use the GPU.
    extra = -m % 4
    if extra:
        a, a_scale = more_rows(a, extra), torch.nn.functional.pad(a_scale, (0, extra))
    out: Tensor = _op("f8f8bf16_groupwise")(a, b, a_scale, b_scale)
    return out[:m]


groupwise_gemm = torch.library.custom_op(
    "loka::groupwise_gemm", launch_groupwise_gemm, mutates_args=(), device_types="cuda"
)


@groupwise_gemm.register_fake
def _(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=torch.bfloat16)


@groupwise_gemm.register_kernel("cpu")
def groupwise_gemm_ref(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """The op's meaning in fp32, for tests of layouts; no plan chooses it."""
    left, right = Quantized(a, a_scale.t()), Quantized(b, b_scale.t())
    return product(left, right, Scaling.BLOCK_1X128, Scaling.BLOCK_128X128, torch.bfloat16)


@functools.cache
def load() -> tuple[str, str | None]:
    """Import one of the two packages, once per process.

    Returns:
        The namespace of its ops and None, or "" and the reason why there is none. A package that is installed but
        fails is not replaced by the other one: it may have registered half of its ops.
    """
    present = [entry for entry in _LIBRARIES if entry[0].partition(".")[0] in sys.modules]
    installed = [entry for entry in _LIBRARIES if importlib.util.find_spec(entry[0].partition(".")[0]) is not None]
    for module, namespace in present or installed:
        reason = import_reason(module) or _missing_ops(namespace)
        if reason:
            return "", reason
        _FOUND.update((op, getattr(getattr(torch.ops, namespace), op).default) for op in _OPS)
        return namespace, None
    return "", "neither mslk nor fbgemm_gpu is installed (pip install 'loka-compile[fbgemm]')"


def _missing_ops(namespace: str) -> str | None:
    ops = getattr(torch.ops, namespace)
    missing = [op for op in _OPS if not hasattr(ops, op)]
    return f"torch.ops.{namespace} lacks {', '.join(missing)}: version not supported" if missing else None


def _op(name: str) -> Any:
    if name not in _FOUND:
        raise RuntimeError(f"{name} was called although its library is unusable: {load()[1]}")
    return _FOUND[name]
