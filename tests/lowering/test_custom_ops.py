"""Every custom op of the kernel libraries against torch's rules for custom ops and against its meaning."""

import importlib

import pytest
import torch

from loka_compile.gemm import Scaling
from loka_compile.lowering.providers import PROVIDERS, deepgemm, mslk, torch_scaled_mm
from loka_compile.lowering.quantize import dequantize, quantize

SMALL, SQUARE = Scaling.BLOCK_1X128, Scaling.BLOCK_128X128


def transposed(scale):
    return scale.t().contiguous()


#: op, scaling of B, the layouts of both scales, further arguments, dtype of the result.
OPS = {
    "scaled_mm_blockwise-squares": (
        torch_scaled_mm.scaled_mm_blockwise, SQUARE, transposed, torch_scaled_mm._pad_k_blocks,
        (True, torch.bfloat16), torch.bfloat16,
    ),
    "scaled_mm_blockwise-rows": (
        torch_scaled_mm.scaled_mm_blockwise, SMALL, transposed, transposed, (False, torch.float32), torch.float32
    ),
    "groupwise_gemm": (mslk.groupwise_gemm, SQUARE, transposed, transposed, (), torch.bfloat16),
    "deepgemm_1d2d": (deepgemm.deepgemm_1d2d, SQUARE, deepgemm.tma_aligned, lambda s: s, (), torch.bfloat16),
    "deepgemm_1d1d": (deepgemm.deepgemm_1d1d, SMALL, deepgemm.tma_aligned, deepgemm.tma_aligned, (), torch.float32),
}  # fmt: skip


@pytest.mark.parametrize("m", [1, 12, 199])
@pytest.mark.parametrize("name", OPS)
def test_custom_op(name, m):
    op, b_scaling, a_layout, b_layout, more, dtype = OPS[name]
    a = quantize(torch.randn(m, 384) * torch.rand(m, 1), SMALL)
    b = quantize(torch.randn(256, 384) * torch.rand(256, 1), b_scaling)
    args = (a.data, a_layout(a.scale), b.data, b_layout(b.scale), *more)
    # torch's own test_schema compares FP8 tensors in a way that is not implemented; its two questions come below.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(op, args, test_utils=checks)
    before = [t.clone() for t in args[:4]]
    out = op(*args)
    for given, copy in zip(args[:4], before, strict=True):
        assert torch.equal(given.float(), copy.float())
        assert out.untyped_storage().data_ptr() != given.untyped_storage().data_ptr()
    assert out.dtype == dtype
    assert out.is_contiguous()
    expected = dequantize(a, SMALL).double() @ dequantize(b, b_scaling).double().t()
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(out.double(), expected, rtol=rounding, atol=1e-4)


def test_all_custom_ops_are_here():
    tested = {entry[0]._qualname for entry in OPS.values()}
    defined = {
        value._qualname
        for _, module, _ in PROVIDERS
        for value in vars(importlib.import_module(module)).values()
        if isinstance(value, torch.library.CustomOpDef)
    }
    assert tested == defined
