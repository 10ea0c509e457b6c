"""One GEMM whose kernel depends on the batch size, where that is known only when the graph runs.

``loka::gemm_by_batch`` stands in the graph in place of the product. Its table of kernels is an argument, so it is part
of the cache's key; the operator looks at the batch size of the call and runs the kernel of its range. One graph,
nothing is compiled again, every size is served.

Why an operator and not ``torch.cond`` on the symbolic size: a branch is a subgraph of its own in Inductor, which
neither the partitioner nor fusion looks into, that is re-traced under autograd, and that CUDA graphs refuse (torch 2.11
to 2.13); and a graph per range would be a compile per range. An operator has the same cost in fusion, works alike in
all versions, and under CUDA graphs, which record every size for itself anyway. What it costs: quantisation happens
inside, kernel by kernel, and neither fuses with producers nor is shared. So it is used only where a plan holds more
than one range and the batch is dynamic. Where all ranges take the same FP8 operands,
``loka::gemm_of_quantised_by_batch`` stands there instead and quantisation stays in the graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from loka_compile.gemm import NATIVE
from loka_compile.lowering.quantize import Quantized
from loka_compile.selection.decision import BatchRange

#: Which of the GEMM's sizes m, n, k the batch is.
LETTERS = "mnk"


def encode(ranges: Sequence[BatchRange]) -> str:
    """Ranges as the operator takes them: ``"0=high_precision:native;512=torch:rowwise"``."""
    return ";".join(f"{r.m_from}={r.candidate}" for r in ranges)


def kernel_of(ranges: str, m: int) -> tuple[str, str]:
    """Provider and recipe of the range that holds batch size ``m``; below the first one, that one's."""
    chosen = ""
    for index, part in enumerate(ranges.split(";")):
        start, _, candidate = part.partition("=")
        if not index or int(start) <= m:
            chosen = candidate
    provider, _, recipe = chosen.partition(":")
    return provider, recipe


@torch.library.custom_op("loka::gemm_by_batch", mutates_args=())
def gemm_by_batch(
    a: Tensor,
    a_transposed: bool,
    b: Tensor,
    b_transposed: bool,
    batch: str,
    ranges: str,
    out_dtype: torch.dtype,
    a_bound: float | None,
    b_bound: float | None,
) -> Tensor:
    """``A @ B.T`` [m, n] in the kernel that ``ranges`` names for the batch size.

    Args:
        a: A [m, k] as stored (its transpose with ``a_transposed``); ``b``: B [n, k] likewise.
        batch: which of m, n, k is the batch size.
        ranges: see :func:`encode`.
        out_dtype: of the result.
        a_bound, b_bound: proven bounds of the operands, or None.
    """
    from loka_compile.lowering.providers import get_provider

    m, k = reversed(a.shape) if a_transposed else a.shape
    n = b.shape[1] if b_transposed else b.shape[0]
    provider_name, recipe_name = kernel_of(ranges, {"m": m, "n": n, "k": k}[batch])
    if recipe_name == NATIVE.name:
        product = torch.mm(a.t() if a_transposed else a, b if b_transposed else b.t())
        return product.to(out_dtype).contiguous()
    provider = get_provider(provider_name)
    recipe = provider.recipe(recipe_name)
    return provider.gemm(
        a, a_transposed, b, b_transposed, recipe, out_dtype, a_bound=a_bound, b_bound=b_bound
    ).contiguous()  # fmt: skip


@gemm_by_batch.register_fake
def _(
    a: Tensor,
    a_transposed: bool,
    b: Tensor,
    b_transposed: bool,
    batch: str,
    ranges: str,
    out_dtype: torch.dtype,
    a_bound: float | None,
    b_bound: float | None,
) -> Tensor:
    m = a.shape[1] if a_transposed else a.shape[0]
    n = b.shape[1] if b_transposed else b.shape[0]
    return a.new_empty((m, n), dtype=out_dtype)


@torch.library.custom_op("loka::gemm_of_quantised_by_batch", mutates_args=())
def gemm_of_quantised_by_batch(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, size: int, ranges: str, out_dtype: torch.dtype
) -> Tensor:
    """``A @ B.T`` [m, n] of FP8 operands [m, k] and [n, k] in the kernel that ``ranges`` names for batch size ``size``.

    The operands are padded to what the kernels want, so ``size`` need not be one of theirs.
    """
    from loka_compile.lowering.providers import get_provider

    if 0 in (a.shape[0], b.shape[0], a.shape[1]):
        return a.new_zeros((a.shape[0], b.shape[0]), dtype=out_dtype)
    provider_name, recipe_name = kernel_of(ranges, size)
    provider = get_provider(provider_name)
    recipe = provider.recipe(recipe_name)
    return provider.compute(Quantized(a, a_scale), Quantized(b, b_scale), recipe, out_dtype).contiguous()


@gemm_of_quantised_by_batch.register_fake
def _(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, size: int, ranges: str, out_dtype: torch.dtype) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)
