"""What the tests of the contract of kernel libraries share: cases, shapes, operands, and the comparison.

Two references: the fp64 product of the operands as they were quantised (tight: it is the kernel that is tested), and
the fp64 product of the operands as they were given, within the bound of FP8 rounding (it is the recipe).
"""

import pytest
import torch

from loka_compile.gemm import Role
from loka_compile.lowering.providers import PROVIDERS, get_provider
from loka_compile.lowering.quantize import Quantized, dequantize

NAMES = [name for name, _, _ in PROVIDERS]
CASES = [(name, recipe, role) for name in NAMES for recipe in get_provider(name).recipes.values() for role in Role]
IDS = [f"{name}:{recipe.name}-{role}" for name, recipe, role in CASES]
#: (m, n, k) of the GEMM. Every K, N and M occurs, and what no FP8 kernel refuses: whole blocks, an odd number of them.
SHAPES = [
    (0, 384, 479), (0, 8, 18480), (1, 1, 13), (199, 8, 13), (2048, 384, 13), (1, 3456, 479), (199, 384, 479),
    (2048, 1, 479), (1, 48, 18480), (199, 8, 18480), (199, 3456, 128), (2048, 384, 256), (1, 384, 640),
    (256, 256, 384), (384, 8, 0),
]  # fmt: skip
#: Error of the accumulation relative to sum(|a||b|): fp32 sums on a CPU, tensor cores on a GPU.
ACCUMULATION = {("cpu", False): 2.0**-16, ("cpu", True): 2.0**-16, ("cuda", False): 2.0**-10, ("cuda", True): 2.0**-8}
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 2.0**-21}


def operand(rows, k, transposed, seed, dtype=torch.bfloat16, device="cpu"):
    """[rows, k] (stored transposed if asked) with rows and columns of different magnitude; one row is zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=generator)
    x *= torch.exp2(torch.randint(-3, 4, (rows, 1), generator=generator).float())
    x *= torch.exp2(torch.randint(-2, 3, (1, k), generator=generator).float())
    if rows > 2:
        x[1] = 0
    x = x.to(dtype).to(device)
    return x.t().contiguous() if transposed else x


def stored(role):
    """Which operands are stored transposed."""
    return role is Role.GRAD_WEIGHT, role is not Role.FORWARD


def dequantised(provider, x, transposed, scaling, dtype):
    q = provider.quantize(x, scaling, getattr(torch, dtype), transposed, None)
    exact = dequantize(q, scaling).double()
    unit = dequantize(Quantized(torch.ones_like(q.data, dtype=torch.float32), q.scale), scaling).double()
    return exact, unit


def reduced_precision(dtype, device):
    """What torch allows cuBLAS by default: to cut the contraction and to round each partial sum to 16 bits.

    The notes on CUDA semantics call it reduced precision reduction. Partial sums add up to at most sum(|a||b|) in
    absolute value, so that is what their rounding is relative to. At 2048x384x13 on an H200, cuBLAS cuts k into
    8 and 5.
    """
    matmul = torch.backends.cuda.matmul
    allowed = {
        torch.bfloat16: matmul.allow_bf16_reduced_precision_reduction,
        torch.float16: matmul.allow_fp16_reduced_precision_reduction,
    }
    return ROUNDING[dtype] if device == "cuda" and allowed.get(dtype, False) else 0.0


def check(provider, recipe, role, m, n, k, device="cpu", dtype=torch.bfloat16, bases=None):
    a_t, b_t = stored(role)
    a, b = bases or (operand(m, k, a_t, 1, dtype, device), operand(n, k, b_t, 2, dtype, device))
    out = provider.gemm(a, a_t, b, b_t, recipe, dtype)
    case = f"{m}x{n}x{k}"
    assert out.shape == (m, n), case
    assert out.dtype == dtype, case
    assert out.device == a.device, case
    assert out.is_contiguous(), case
    left, right = (a.t() if a_t else a).double(), (b.t() if b_t else b).double()
    if not (m and n and k):
        assert not out.any(), case
        return
    if recipe.is_high_precision:
        reference = left @ right.t()
        accumulation = ACCUMULATION[device, False] + reduced_precision(dtype, device)
        allowed = ROUNDING[dtype] * reference.abs() + accumulation * (left.abs() @ right.abs().t())
        assert ((out.double() - reference).abs() <= allowed).all(), case
        return
    # The steps of fp8: half a unit in the last place of e4m3, or half of its smallest number.
    (qa, unit_a), (qb, unit_b) = (
        dequantised(provider, x, transposed, scaling, fp8)
        for x, transposed, scaling, fp8 in ((a, a_t, recipe.a, recipe.a_dtype), (b, b_t, recipe.b, recipe.b_dtype))
    )
    reference = qa @ qb.t()
    allowed = ROUNDING[dtype] * reference.abs() + ACCUMULATION[device, recipe.fast_accum] * (qa.abs() @ qb.abs().t())
    assert ((out.double() - reference).abs() <= allowed).all(), case
    step_a, step_b = left.abs() * 2.0**-4 + unit_a * 2.0**-10, right.abs() * 2.0**-4 + unit_b * 2.0**-10
    step_a, step_b = step_a * 1.001, step_b * 1.001
    fp8 = step_a @ right.abs().t() + left.abs() @ step_b.t() + step_a @ step_b.t()
    assert ((out.double() - left @ right.t()).abs() <= fp8 + allowed).all(), case


def usable(provider, recipe, device):
    reason = provider.supported(recipe, device)
    if reason:
        pytest.skip(f"{provider.name}:{recipe.name}: {reason}")
