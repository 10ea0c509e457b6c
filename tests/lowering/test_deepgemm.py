"""DeepGEMM: what is refused, and the calling convention (on a stand-in for its one function).

The stand-in checks what the library is documented to want and computes its meaning; it is not the library. The real
kernels run in test_provider_contract.py on a GPU.
"""

import sys
import types

import pytest
import torch

from loka_compile.errors import LoweringError
from loka_compile.gemm import BLOCKWISE, BLOCKWISE_1X128, Gemm, Role
from loka_compile.lowering.providers import deepgemm, get_provider
from loka_compile.lowering.quantize import dequantize, quantize

PROVIDER = get_provider("deepgemm")


def gemm(m=256, n=256, k=256, role=Role.FORWARD, **more):
    return Gemm("site#0", role, m, n, k, **more)


@pytest.fixture(autouse=True)
def _fresh():
    deepgemm.load.cache_clear()
    yield
    deepgemm.load.cache_clear()


def test_limits_of_1d2d():
    assert PROVIDER.refuses_shape(gemm(1, 8, 16), BLOCKWISE) is None
    assert PROVIDER.refuses_shape(gemm(k=576, role=Role.GRAD_INPUT), BLOCKWISE) is None
    assert PROVIDER.refuses_shape(gemm(k=123200, dynamic="m"), BLOCKWISE) is None
    assert "k to be a multiple of 16" in PROVIDER.refuses_shape(gemm(k=13), BLOCKWISE)
    assert "n to be a multiple of 8" in PROVIDER.refuses_shape(gemm(n=4), BLOCKWISE)
    assert "bfloat16, not float32" in PROVIDER.refuses_shape(gemm(dtype="float32"), BLOCKWISE)
    assert "use blockwise_1x128" in PROVIDER.refuses_shape(gemm(role=Role.GRAD_WEIGHT), BLOCKWISE)


def test_limits_of_1d1d():
    for dtype in ("float32", "bfloat16", "float16"):
        assert PROVIDER.refuses_shape(gemm(1, 4, 16, Role.GRAD_WEIGHT, dtype=dtype), BLOCKWISE_1X128) is None
    assert "n to be a multiple of 4" in PROVIDER.refuses_shape(gemm(n=6), BLOCKWISE_1X128)
    reason = PROVIDER.refuses_shape(gemm(k=2048, role=Role.GRAD_WEIGHT, dynamic="k"), BLOCKWISE_1X128)
    assert "the batch, dynamic (now 2048)" in reason


def test_not_installed_and_broken(tmp_path, monkeypatch):
    assert deepgemm.load() == "deep_gemm is not installed (pip install 'loka-compile[deepgemm]')"
    package = tmp_path / "deep_gemm"
    package.mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    for body, reason in (
        (
            "raise OSError('_C.so: undefined symbol: c10::ValueError')",
            "OSError: _C.so: undefined symbol: c10::ValueError",
        ),
        ("assert False, 'no CUDA home'", "AssertionError: no CUDA home"),
        ("import apache_tvm_ffi_that_is_missing", "ModuleNotFoundError"),
        ("x = 1", "has no fp8_gemm_nt"),
    ):
        (package / "__init__.py").write_text(body)
        sys.modules.pop("deep_gemm", None)
        deepgemm.load.cache_clear()
        assert reason in deepgemm.load()
    sys.modules.pop("deep_gemm", None)


@pytest.mark.parametrize(("rows", "aligned"), [(1, 4), (4, 4), (199, 200), (384, 384)])
def test_tma_aligned_scales(rows, aligned):
    scale = torch.rand(rows, 3)
    result = deepgemm.tma_aligned(scale)
    assert result.shape == (3, aligned)
    assert result.is_contiguous()
    # As the kernel sees it: [rows, 3] with rows adjacent and columns 16 bytes apart.
    assert torch.equal(result.t()[:rows], scale)
    assert result.t()[:rows].stride() == (1, aligned)
    assert result.stride(0) * 4 % 16 == 0


def fp8_gemm_nt(a, b, d, c=None, recipe=None):
    """The documented contract of sm_90, in fp32."""
    (x, x_scale), (w, w_scale) = a, b
    (m, k), n = x.shape, w.shape[0]
    blocks = -(-k // 128)
    for t in (x, w):
        assert t.dtype == torch.float8_e4m3fn
        assert t.stride() == (k, 1)
    assert x_scale.shape == (m, blocks)
    assert x_scale.stride() == (1, -(-m // 4) * 4)
    assert d.is_contiguous()
    left = x.float() * x_scale.repeat_interleave(128, 1)[:, :k]
    if recipe is None:
        assert c is None
        assert d.dtype == torch.bfloat16
        assert w_scale.shape == (-(-n // 128), blocks)
        assert w_scale.is_contiguous()
        right = w.float() * w_scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    else:
        assert recipe == (1, 1, 128)
        assert m > 32  # else nvcc refuses the tile that the library picks (seen with 0.1.5 on an H200)
        assert c is d
        assert d.dtype == torch.float32
        assert w_scale.shape == (n, blocks)
        assert w_scale.stride() == (1, -(-n // 4) * 4)
        right = w.float() * w_scale.repeat_interleave(128, 1)[:, :k]
    product = left @ right.t()
    d.copy_(product if c is None else c + product)


@pytest.fixture
def pretended(monkeypatch):
    module = types.ModuleType("deep_gemm")
    module.fp8_gemm_nt = fp8_gemm_nt
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    # The custom op's CPU kernel is its reference; what runs on the GPU is the function that calls the library.
    monkeypatch.setattr(deepgemm, "deepgemm_1d2d", deepgemm.launch_deepgemm_1d2d)
    monkeypatch.setattr(deepgemm, "deepgemm_1d1d", deepgemm.launch_deepgemm_1d1d)


@pytest.mark.parametrize(("transposed_a", "transposed_b"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("recipe", [BLOCKWISE, BLOCKWISE_1X128], ids=lambda r: r.name)
@pytest.mark.parametrize(("m", "n", "k"), [(199, 264, 576), (1, 8, 16), (128, 128, 128)])
def test_calling_convention(pretended, recipe, transposed_a, transposed_b, m, n, k):
    a = torch.randn((k, m) if transposed_a else (m, k), dtype=torch.bfloat16)
    b = torch.randn((k, n) if transposed_b else (n, k), dtype=torch.bfloat16)
    left = dequantize(quantize(a, recipe.a, transpose=transposed_a), recipe.a).double()
    right = dequantize(quantize(b, recipe.b, transpose=transposed_b), recipe.b).double()
    expected = left @ right.t()
    for _ in range(2):
        # Twice: an accumulating kernel must not add to its former result.
        out = PROVIDER.gemm(a, transposed_a, b, transposed_b, recipe, torch.bfloat16)
        assert out.dtype == torch.bfloat16
        assert ((out.double() - expected).abs() <= 2.0**-8 * expected.abs() + 1e-3).all()


def test_weight_gradients_keep_fp32(pretended):
    a, b = torch.randn(64, 16), torch.randn(64, 8)
    out = PROVIDER.gemm(a, True, b, True, BLOCKWISE_1X128, torch.float32)
    assert out.dtype == torch.float32
    left, right = (dequantize(quantize(x, BLOCKWISE_1X128.a, transpose=True), BLOCKWISE_1X128.a) for x in (a, b))
    torch.testing.assert_close(out, left @ right.t(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recipe", [BLOCKWISE, BLOCKWISE_1X128], ids=lambda r: r.name)
def test_no_first_call_during_a_capture(pretended, monkeypatch, recipe):
    monkeypatch.setattr(deepgemm, "CALLED", set())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    a, b = torch.randn(48, 128, dtype=torch.bfloat16), torch.randn(8, 128, dtype=torch.bfloat16)

    def call():
        return PROVIDER.gemm(a, False, b, False, recipe, torch.bfloat16)

    with pytest.raises(LoweringError, match=r"48x8x128.*call the model once"):
        call()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    expected = call()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert torch.equal(call(), expected)


def test_empty_without_the_library():
    """The library would leave its result unwritten; it is not even imported here."""

    def operand(*shape):
        return torch.zeros(shape).to(torch.float8_e4m3fn)

    for m, n, k in ((0, 8, 128), (8, 0, 128), (8, 8, 0)):
        scale_a, scale_b = torch.zeros(-(-k // 128), -(-m // 4) * 4), torch.zeros(-(-n // 128), -(-k // 128))
        out = deepgemm.launch_deepgemm_1d2d(operand(m, k), scale_a, operand(n, k), scale_b)
        assert (out.shape, out.dtype) == ((m, n), torch.bfloat16)
        assert not out.any()
        out = deepgemm.launch_deepgemm_1d1d(operand(m, k), scale_a, operand(n, k), torch.zeros(-(-k // 128), n))
        assert (out.shape, out.dtype) == ((m, n), torch.float32)
        assert not out.any()
