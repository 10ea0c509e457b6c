"""What is timed: the baseline of a role, an FP8 kernel, a quantiser. Each as calls on operands of their own."""

from __future__ import annotations

from collections.abc import Callable

import torch

from loka_compile._compat.last_kernel import last_kernel
from loka_compile.bench.operands import Operands, copies_past_l2
from loka_compile.bench.timing import Call
from loka_compile.bench.workload import Operand
from loka_compile.gemm import Gemm, Recipe, Role
from loka_compile.lowering.providers.base import Provider
from loka_compile.lowering.quantize import quantize


def baseline_calls(gemm: Gemm, operands: Operands, l2: int) -> list[Call]:
    """``torch.mm`` on the operands as the role finds them stored: what Inductor runs without max-autotune.

    fp32 runs as the process allows it (TF32 after ``torch.set_float32_matmul_precision("high")``).
    """
    dtype = getattr(torch, gemm.dtype)
    a_turned, b_turned = gemm.role is Role.GRAD_WEIGHT, gemm.role is not Role.FORWARD
    operands.rewind()
    calls: list[Call] = []
    sizes = [dtype.itemsize * s for s in (gemm.m * gemm.k, gemm.n * gemm.k, gemm.m * gemm.n)]
    for _ in range(copies_past_l2(sizes, l2)):
        a = operands.take(gemm.k, gemm.m, dtype).t() if a_turned else operands.take(gemm.m, gemm.k, dtype)
        b = operands.take(gemm.k, gemm.n, dtype) if b_turned else operands.take(gemm.n, gemm.k, dtype).t()
        calls.append(lambda a=a, b=b: torch.mm(a, b))  # type: ignore[misc]
    return calls


def kernel_calls(gemm: Gemm, provider: Provider, recipe: Recipe, operands: Operands, l2: int) -> list[Call]:
    """The kernel that ``provider.compute`` ends in, with its result in the GEMM's dtype.

    Scales are handed over in the layout that the kernel wants: Inductor lets the quantiser write them so.
    """
    out = getattr(torch, gemm.dtype)
    a_dtype, b_dtype = getattr(torch, recipe.a_dtype), getattr(torch, recipe.b_dtype)
    operands.rewind()
    calls: list[Call] = []
    sizes = (gemm.m * gemm.k, gemm.n * gemm.k, gemm.m * gemm.n * out.itemsize)
    for _ in range(copies_past_l2(sizes, l2)):
        a = operands.quantized(gemm.m, gemm.k, recipe.a, a_dtype)
        b = operands.quantized(gemm.n, gemm.k, recipe.b, b_dtype)
        calls.append(last_kernel(lambda a=a, b=b: provider.compute(a, b, recipe, out)))  # type: ignore[misc]
    return calls


def quantizer_calls(operand: Operand, operands: Operands, l2: int) -> list[Call]:
    """The quantiser of one operand, compiled by Inductor for its shape as it is in a model, without a producer."""
    dtype = getattr(torch, operand.dtype)
    compiled = torch.compile(quantizer(operand), dynamic=False, fullgraph=True)
    operands.rewind()
    sizes = (operand.elements * dtype.itemsize, operand.elements)
    inputs = [operands.take(operand.rows, operand.columns, dtype) for _ in range(copies_past_l2(sizes, l2))]
    return [lambda x=x: compiled(x) for x in inputs]  # type: ignore[misc]


def quantizer(operand: Operand) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
    """The function that :func:`quantizer_calls` compiles."""
    scaling, transposed = operand.scaling, operand.transposed

    def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(quantize(x, scaling, transpose=transposed))

    return run
