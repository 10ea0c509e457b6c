"""DeepGEMM: 1x128 with 128x128 scales (bf16 result), and 1x128 with 1x128 (fp32 result, for weight gradients).

The library compiles a kernel at the first call of each variant (3 to 5.5 s on an H200), which is refused during a
CUDA-graph capture: call each shape once before capturing. ``torch.compile(mode="reduce-overhead")`` does that by
itself.

Facts: sgl-deep-gemm 0.1.5.post1 with apache-tvm-ffi 0.1.11, and the public sources of DeepGEMM at 54e2261.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import ClassVar

import torch
from torch import Tensor

from loka_compile.errors import LoweringError
from loka_compile.gemm import BLOCKWISE, BLOCKWISE_1X128, Gemm, Recipe, Role, Scaling
from loka_compile.lowering.providers.base import Provider, Quantized, gpu_reason, import_reason, more_rows, multiple_of
from loka_compile.lowering.providers.emulated import product, refuses_blockwise_role
from loka_compile.lowering.quantize import packed

#: Kernel, m, n, k of every call so far: their kernels are compiled and loaded.
CALLED: set[tuple[str, int, int, int]] = set()


#: Up to so many rows the library picks a tile for its 1d1d kernel that does not compile (0.1.5: BLOCK_M of 16 or 32,
#: where WGMMA needs 64).
_SMALL_M = 32


class DeepGemm(Provider):
    """Partial sums are always promoted to fp32 every 128 products; there is no fast accumulation."""

    name: ClassVar[str] = "deepgemm"
    recipes: ClassVar[dict[str, Recipe]] = {recipe.name: recipe for recipe in (BLOCKWISE, BLOCKWISE_1X128)}
    distributions: ClassVar[tuple[str, ...]] = ("sgl-deep-gemm", "tokenspeed-deepgemm", "deep-gemm", "apache-tvm-ffi")

    def supported(self, recipe: Recipe | None = None, device: str | None = None) -> str | None:
        """sm_90 (newer GPUs want other scales) and the package."""
        return gpu_reason((9, 0), below=(9, 1), device=device) or load()

    def multiples(self, recipe: Recipe) -> dict[str, int]:
        """16-byte rows of FP8 and of the result."""
        return {"k": 16, "n": 8 if recipe == BLOCKWISE else 4}

    def _refuses_shape(self, gemm: Gemm, recipe: Recipe) -> str | None:
        if recipe == BLOCKWISE and gemm.role is not Role.GRAD_WEIGHT and gemm.dtype != "bfloat16":
            return f"DeepGEMM's 1d2d kernel writes bfloat16, not {gemm.dtype}"
        who = f"DeepGEMM's {'1d2d' if recipe == BLOCKWISE else '1d1d'} kernel (TMA)"
        return refuses_blockwise_role(gemm, recipe) or multiple_of(gemm, self.multiples(recipe), who)

    def compute(self, a: Quantized, b: Quantized, recipe: Recipe, out_dtype: torch.dtype) -> Tensor:
        """``A @ B.T``; 1x128 scales are handed over in the layout that the kernel's TMA loads want."""
        a_scale = tma_aligned(a.scale)
        if recipe == BLOCKWISE:
            return deepgemm_1d2d(a.data, a_scale, b.data, b.scale).to(out_dtype)
        return deepgemm_1d1d(a.data, a_scale, b.data, tma_aligned(b.scale)).to(out_dtype)


def tma_aligned(scale: Tensor) -> Tensor:
    """[rows, k/128] to [k/128, rows rounded up to 4], contiguous.

    With its rows 16 bytes apart the library uses it as it is. Otherwise it would transpose the scales in each call, in
    a kernel whose shared memory ends at k = 116,096.
    """
    rows = scale.shape[0]
    return packed(torch.nn.functional.pad(scale, (0, 0, 0, (rows + 3) // 4 * 4 - rows)).t())


def _may_compile(kernel: str, m: int, n: int, k: int) -> None:
    """Refuse a first call during a CUDA-graph capture: compiling and loading a kernel would break the capture.

    Raises:
        LoweringError: the shape was not called before.
    """
    shape = (kernel, m, n, k)
    if shape not in CALLED:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise LoweringError(
                f"DeepGEMM's {kernel} kernel for {m}x{n}x{k} may have to be compiled, which a CUDA-graph capture does "
                "not allow: call the model once with this batch size before capturing"
            )
        CALLED.add(shape)


def launch_deepgemm_1d2d(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """``deep_gemm.fp8_gemm_nt``, A in 1x128 and B in 128x128 blocks.

    Args:
        a: [m, k] e4m3, contiguous.
        a_scale: :func:`tma_aligned` scales of A, fp32.
        b: [n, k] e4m3, contiguous.
        b_scale: [ceil(n/128), ceil(k/128)] fp32, contiguous.

    Returns:
        [m, n] bf16.
    """
    (m, k), n = a.shape, b.shape[0]
    if m == 0 or n == 0 or k == 0:
        # The library would leave the result as it was allocated.
        return a.new_zeros((m, n), dtype=torch.bfloat16)
    _may_compile("1d2d", m, n, k)
    out = a.new_empty((m, n), dtype=torch.bfloat16)
    importlib.import_module("deep_gemm").fp8_gemm_nt((a, a_scale.t()[:m]), (b, b_scale), out)
    return out


def launch_deepgemm_1d1d(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """``deep_gemm.fp8_gemm_nt`` with both operands in 1x128 blocks.

    Args:
        a: [m, k] e4m3; contiguous without a row stride (the kernel assumes one of k).
        a_scale: :func:`tma_aligned` scales of A, fp32; ``b_scale`` likewise.
        b: [n, k] e4m3, contiguous.
        b_scale: see ``a_scale``.

    Returns:
        [m, n] fp32.
    """
    (m, k), n = a.shape, b.shape[0]
    rows = m
    if 0 < m <= _SMALL_M:
        rows = 64
        a, a_scale = more_rows(a, rows - m), torch.nn.functional.pad(a_scale, (0, rows - a_scale.shape[1]))
    # The kernel adds to its result and needs it given; for an empty k the zeros stand.
    out = a.new_zeros((rows, n), dtype=torch.float32)
    if out.numel() and k:
        _may_compile("1d1d", rows, n, k)
        importlib.import_module("deep_gemm").fp8_gemm_nt(
            (a, a_scale.t()[:rows]), (b, b_scale.t()[:n]), out, c=out, recipe=(1, 1, 128)
        )
    return out[:m]


deepgemm_1d2d = torch.library.custom_op(
    "loka::deepgemm_1d2d", launch_deepgemm_1d2d, mutates_args=(), device_types="cuda"
)


@deepgemm_1d2d.register_fake
def _(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=torch.bfloat16)


deepgemm_1d1d = torch.library.custom_op(
    "loka::deepgemm_1d1d", launch_deepgemm_1d1d, mutates_args=(), device_types="cuda"
)


@deepgemm_1d1d.register_fake
def _(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=torch.float32)


@deepgemm_1d2d.register_kernel("cpu")
def deepgemm_1d2d_ref(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """The op's meaning in fp32, for tests of layouts; no plan chooses it."""
    left = Quantized(a, a_scale.t()[: a.shape[0]])
    return product(left, Quantized(b, b_scale), Scaling.BLOCK_1X128, Scaling.BLOCK_128X128, torch.bfloat16)


@deepgemm_1d1d.register_kernel("cpu")
def deepgemm_1d1d_ref(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """The op's meaning in fp32, for tests of layouts; no plan chooses it."""
    left, right = Quantized(a, a_scale.t()[: a.shape[0]]), Quantized(b, b_scale.t()[: b.shape[0]])
    return product(left, right, Scaling.BLOCK_1X128, Scaling.BLOCK_1X128, torch.float32)


@functools.cache
def load() -> str | None:
    """Import DeepGEMM, once per process; returns None or the reason why it cannot be used."""
    if importlib.util.find_spec("deep_gemm") is None:
        return "deep_gemm is not installed (pip install 'loka-compile[deepgemm]')"
    reason = import_reason("deep_gemm")
    if reason:
        return reason
    if not hasattr(importlib.import_module("deep_gemm"), "fp8_gemm_nt"):
        return "deep_gemm has no fp8_gemm_nt: version not supported"
    return None
