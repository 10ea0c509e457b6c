"""A one-off numeric test of each kernel on the machine at hand: a broken wheel computes wrong numbers without a word.

Known cases: a masked GEMM wrong below 64 rows (DeepGEMM 268), block scales read with the wrong stride (pytorch PR
166752, torchao PR 4229), the last block of k dropped (FBGEMM 6159), a prebuilt wheel that loads and then fails
(DeepGEMM 330).
"""

from __future__ import annotations

import functools
import logging
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from loka_compile.gemm import Gemm, Recipe, Role, Scaling
from loka_compile.lowering.providers import get_provider
from loka_compile.lowering.providers.base import Provider, default_device
from loka_compile.lowering.quantize import BLOCK, Quantized, dequantize

logger = logging.getLogger(__name__)

#: (m, n, k): one row, a few, a ragged number, several blocks of k, an n of three blocks, a k that ends inside a block.
SHAPES = ((1, 128, 256), (8, 256, 640), (199, 384, 512), (64, 128, 128), (16, 128, 208), (256, 512, 384))
#: The test runs in the first of these that the provider computes.
_DTYPES = ("bfloat16", "float32", "float16")
#: Error that the accumulation may add, relative to sum(|a||b|): the tensor cores keep about 13 bits of a partial sum
#: between promotions to fp32; without promotion the loss grows with k.
_ACCUMULATION = {False: 2.0**-10, True: 2.0**-8}
#: Two units in the last place of the result's dtype: a kernel may round twice, or truncate.
_ROUNDING = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-20}


def refusal(provider: Provider, gemm: Gemm, recipe: Recipe, device: str | None = None) -> str | None:
    """Everything that keeps this GEMM off this kernel here: shape, platform, library, a failed self-test. Or None."""
    return provider.refuses(gemm, recipe, device) or self_test(provider.name, recipe.name, gemm.role, device)


def self_test(provider: str, recipe: str, role: Role, device: str | None = None) -> str | None:
    """Test a registered kernel in one role, once per process; returns None or the reason why it must not be used.

    Raises:
        UnknownNameError: no such provider or recipe.
    """
    return _cached(provider, recipe, role, device or default_device())


@functools.cache
def _cached(provider: str, recipe: str, role: Role, device: str) -> str | None:
    found = get_provider(provider)
    # A thread of its own starts without the caller's fake-tensor, autocast and dispatch modes: a self-test may be
    # asked for in the middle of a compile.
    index = torch.cuda.current_device() if device == "cuda" and torch.cuda.is_available() else None
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(_in_thread, found, found.recipe(recipe), role, device, index).result()


def _in_thread(provider: Provider, recipe: Recipe, role: Role, device: str, index: int | None) -> str | None:
    if index is not None:
        torch.cuda.set_device(index)
    return run_self_test(provider, recipe, role, device)


def run_self_test(provider: Provider, recipe: Recipe, role: Role, device: str = "cpu") -> str | None:
    """Compare the kernel with an fp64 product of the same dequantised operands; returns None or what is wrong."""
    if recipe.is_high_precision:
        return None
    tested, refused = 0, None
    dtype = next(d for d in _DTYPES if d in provider.dtypes)
    for m, n, k in SHAPES:
        gemm = Gemm("self-test", role, m, n, k, dtype)
        refused = provider.refuses(gemm, recipe, device)
        if refused:
            continue
        try:
            wrong = _compare(provider, recipe, gemm, device)
        except Exception as error:
            # Whatever a kernel raises, a compile can do without it; the reason goes to the report.
            logger.debug("self-test of %s:%s raised", provider.name, recipe.name, exc_info=True)
            wrong = f"{type(error).__name__}: {str(error).strip()}"
        if wrong:
            wrong = f"self-test failed at m={m}, n={n}, k={k}: {wrong}"
            logger.warning("%s:%s is disabled for %s: %s", provider.name, recipe.name, role, wrong)
            return wrong
        tested += 1
    return None if tested else f"no self-test shape is accepted: {refused}"


def _compare(provider: Provider, recipe: Recipe, gemm: Gemm, device: str) -> str | None:
    """One GEMM in its role's layout: A stored transposed for grad_weight, B for both gradients."""
    dtype = getattr(torch, gemm.dtype)
    a_t, b_t = gemm.role is Role.GRAD_WEIGHT, gemm.role is not Role.FORWARD
    a_base = _operand(gemm.m, gemm.k, a_t, 1, dtype).to(device)
    b_base = _operand(gemm.n, gemm.k, b_t, 2, dtype).to(device)
    a = provider.quantize(a_base, recipe.a, getattr(torch, recipe.a_dtype), a_t, None)
    b = provider.quantize(b_base, recipe.b, getattr(torch, recipe.b_dtype), b_t, None)
    for name, q, base, transposed, scaling in (("A", a, a_base, a_t, recipe.a), ("B", b, b_base, b_t, recipe.b)):
        wrong = _check_operand(q, base.t() if transposed else base, scaling)
        if wrong:
            return f"operand {name} is quantised wrongly: {wrong}"
    out = provider.gemm(a_base, a_t, b_base, b_t, recipe, dtype)
    if out.shape != (gemm.m, gemm.n) or out.dtype != dtype:
        return f"the result is {tuple(out.shape)} {out.dtype}, not {(gemm.m, gemm.n)} {dtype}"
    left, right = _exact(a, recipe.a), _exact(b, recipe.b)
    reference = left @ right.t()
    allowed = _ROUNDING[dtype] * reference.abs() + _ACCUMULATION[recipe.fast_accum] * (left.abs() @ right.abs().t())
    return _worst(out.cpu().double() - reference, allowed)


def _operand(rows: int, k: int, transposed: bool, seed: int, dtype: torch.dtype) -> Tensor:
    """Random values whose magnitude changes with every row and every block, so that no two scales are alike."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=generator)
    for dim, size in ((0, rows), (1, -(-k // BLOCK))):
        magnitude = torch.exp2(torch.randint(-3, 4, (size,), generator=generator).float())
        magnitude = magnitude if dim == 0 else magnitude.repeat_interleave(BLOCK)[:k]
        x = x * magnitude.unsqueeze(1 - dim)
    x = x.to(dtype)
    return x.t().contiguous() if transposed else x


def _check_operand(q: Quantized, x: Tensor, scaling: Scaling) -> str | None:
    """FP8 rounding moves a value by at most half a unit in the last place, or by one subnormal step near 0."""
    exact, x = _exact(q, scaling), x.cpu().double()
    scale = _exact(Quantized(torch.ones_like(q.data, dtype=torch.float32), q.scale), scaling)
    fp8 = torch.finfo(q.data.dtype)
    return _worst(exact - x, x.abs() * fp8.eps / 2 * 1.001 + scale * fp8.tiny * fp8.eps)


def _exact(q: Quantized, scaling: Scaling) -> Tensor:
    return dequantize(q, scaling).cpu().double()


def _worst(error: Tensor, allowed: Tensor) -> str | None:
    """None if every element is within its bound; NaN is not."""
    excess = error.abs() / allowed.clamp(min=1e-30)
    if bool((excess <= 1).all()):
        return None
    return f"error up to {float(excess.nan_to_num(nan=float('inf')).max()):.3g} times the bound"
