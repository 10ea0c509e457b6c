"""Every custom op of the kernel libraries against torch's rules for custom ops and against its meaning."""

import importlib

import pytest
import torch

from loka_compile.gemm import Scaling
from loka_compile.lowering.providers import (
    PROVIDERS,
    deepgemm,
    get_provider,
    mslk,
    torch_mx,
    torch_scaled_mm,
    torchao,
    triton_gemm,
)
from loka_compile.lowering.quantize import dequantize, quantize
from tests.lowering.contract import ACCUMULATION

SMALL, SQUARE = Scaling.BLOCK_1X128, Scaling.BLOCK_128X128
DEVICES = ["cpu"] + [pytest.param("cuda", marks=pytest.mark.gpu)] * torch.cuda.is_available()


def transposed(scale):
    return scale.t().contiguous()


def as_it_is(scale):
    return scale


#: provider and recipe, op, the layouts of both scales, further arguments, dtype of the result.
OPS = {
    "scaled_mm_blockwise-squares": (
        "torch:blockwise", torch_scaled_mm.scaled_mm_blockwise, transposed, torch_scaled_mm._pad_k_blocks,
        (True, torch.bfloat16), torch.bfloat16,
    ),
    "scaled_mm_blockwise-rows": (
        "torch:blockwise_1x128", torch_scaled_mm.scaled_mm_blockwise, transposed, transposed, (False, torch.float32),
        torch.float32,
    ),
    "groupwise_gemm": ("fbgemm:blockwise", mslk.groupwise_gemm, transposed, transposed, (), torch.bfloat16),
    "deepgemm_1d2d": (
        "deepgemm:blockwise", deepgemm.deepgemm_1d2d, deepgemm.tma_aligned, as_it_is, (), torch.bfloat16
    ),
    "deepgemm_1d1d": (
        "deepgemm:blockwise_1x128", deepgemm.deepgemm_1d1d, deepgemm.tma_aligned, deepgemm.tma_aligned, (),
        torch.float32,
    ),
    "scaled_mm_mx": (
        "torch_mx:mxfp8", torch_mx.scaled_mm_mx, torch_mx.swizzled, torch_mx.swizzled, (torch.float32,), torch.float32
    ),
    "torchao_gemm-squares": (
        "torchao:blockwise", torchao.torchao_gemm, transposed, as_it_is, ("blockwise", torch.bfloat16), torch.bfloat16
    ),
    "torchao_gemm-rows": (
        "torchao:blockwise_1x128", torchao.torchao_gemm, transposed, transposed, ("blockwise_1x128", torch.float32),
        torch.float32,
    ),
    **{
        f"scaled_gemm-{name}": (
            f"triton:{name}", triton_gemm.scaled_gemm, as_it_is, as_it_is, (name, torch.float32), torch.float32
        )
        for name in triton_gemm.TritonGemm.recipes
    },
}  # fmt: skip


@pytest.mark.parametrize("m", [1, 12, 199])
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("device", DEVICES)
def test_custom_op(name, m, device):
    which, op, a_layout, b_layout, more, dtype = OPS[name]
    provider = get_provider(which.partition(":")[0])
    recipe = provider.recipe(which.partition(":")[2])
    if device == "cuda" and provider.supported(recipe, device):
        pytest.skip(f"{which}: {provider.supported(recipe, device)}")
    m = -(-m // provider.multiples(recipe).get("m", 1)) * provider.multiples(recipe).get("m", 1)
    torch.manual_seed(0)
    a = quantize((torch.randn(m, 384) * torch.rand(m, 1)).to(device), recipe.a)
    b = quantize((torch.randn(256, 384) * torch.rand(256, 1)).to(device), recipe.b)
    args = (a.data, a_layout(a.scale), b.data, b_layout(b.scale), *more)
    # torch's own test_schema compares FP8 tensors in a way that is not implemented; its two questions come below.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(op, args, test_utils=checks)
    before = [t.clone() for t in args[:4]]
    out = op(*args)
    for given, copy in zip(args[:4], before, strict=True):
        assert torch.equal(given.reshape(-1).view(torch.uint8), copy.reshape(-1).view(torch.uint8))
        assert out.untyped_storage().data_ptr() != given.untyped_storage().data_ptr()
    assert out.dtype == dtype
    assert out.is_contiguous()
    left, right = dequantize(a, recipe.a).double(), dequantize(b, recipe.b).double()
    expected = left @ right.t()
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-21
    allowed = rounding * expected.abs() + ACCUMULATION[device, recipe.fast_accum] * (left.abs() @ right.abs().t())
    assert ((out.double() - expected).abs() <= allowed).all()


def test_all_custom_ops_are_here():
    tested = {entry[1]._qualname for entry in OPS.values()}
    defined = {
        value._qualname
        for _, module, _ in PROVIDERS
        for value in vars(importlib.import_module(module)).values()
        if isinstance(value, torch.library.CustomOpDef)
    }
    assert tested == defined
