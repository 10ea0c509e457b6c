"""MSLK and FBGEMM: which one is loaded, what is refused, and the calling convention (on a stand-in for its ops).

The stand-in checks what the library is documented to want and computes its meaning; it is not the library. The real
kernels run in test_provider_contract.py on a GPU.
"""

import sys
from typing import ClassVar

import pytest
import torch

from loka_compile.gemm import BLOCKWISE, BLOCKWISE_128X128, Gemm, Role
from loka_compile.lowering.providers import get_provider, mslk
from loka_compile.lowering.providers.base import Quantized
from loka_compile.lowering.quantize import dequantize, quantize

PROVIDER = get_provider("fbgemm")


def gemm(m=256, n=256, k=256, role=Role.FORWARD, **more):
    return Gemm("site#0", role, m, n, k, **more)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(mslk, "_FOUND", {})
    mslk.load.cache_clear()
    yield
    mslk.load.cache_clear()


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_fast", "blockwise_128x128"])
def test_limits(recipe):
    recipe = PROVIDER.recipe(recipe)
    for role in Role:
        assert PROVIDER.refuses_shape(gemm(1, 8, 16, role), recipe) is None
    assert "k to be a multiple of 16" in PROVIDER.refuses_shape(gemm(k=13), recipe)
    assert "n to be a multiple of 8" in PROVIDER.refuses_shape(gemm(n=1), recipe)
    assert PROVIDER.refuses_shape(gemm(dynamic="m"), recipe) is None
    assert "not provably" in PROVIDER.refuses_shape(gemm(role=Role.GRAD_WEIGHT, dynamic="k"), recipe)
    assert "bfloat16, not float32" in PROVIDER.refuses_shape(gemm(dtype="float32"), recipe)


def test_limits_of_groupwise():
    assert PROVIDER.refuses_shape(gemm(m=1), BLOCKWISE) is None
    assert "128" in PROVIDER.refuses_shape(gemm(n=200), BLOCKWISE)
    assert "128" in PROVIDER.refuses_shape(gemm(k=144), BLOCKWISE)
    assert "grad_weight" in PROVIDER.refuses_shape(gemm(role=Role.GRAD_WEIGHT), BLOCKWISE)


def write_package(root, name, body):
    package = root / name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(body)


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """An empty place for pretended packages; what they import into is cleaned up."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("mslk", "fbgemm_gpu"):
            del sys.modules[name]


def test_nothing_installed():
    assert mslk.load() == ("", "neither mslk nor fbgemm_gpu is installed (pip install 'loka-compile[fbgemm]')")


def test_a_broken_wheel_is_skipped_with_its_reason_and_not_replaced(packages):
    write_package(packages, "mslk", "raise OSError('mslk.so: undefined symbol: _ZN3c1013MessageLogger')")
    write_package(packages, "fbgemm_gpu", "raise AssertionError('both libraries in one process')")
    namespace, reason = mslk.load()
    assert namespace == ""
    assert reason == "import of mslk.gemm failed with OSError: mslk.so: undefined symbol: _ZN3c1013MessageLogger"


def test_mslk_is_preferred_and_the_other_left_alone(packages):
    write_package(packages, "mslk", "")
    write_package(packages / "mslk", "gemm", "")
    write_package(packages, "fbgemm_gpu", "raise AssertionError('both libraries in one process')")
    # The pretended package registers no ops: that is a version we do not know.
    assert mslk.load() == (
        "", "torch.ops.mslk lacks f8f8bf16_rowwise, f8f8bf16_blockwise, f8f8bf16_groupwise: version not supported"
    )  # fmt: skip
    assert "fbgemm_gpu" not in sys.modules


def test_what_the_process_has_loaded_wins(packages, monkeypatch):
    write_package(packages, "mslk", "raise AssertionError('both libraries in one process')")
    write_package(packages, "fbgemm_gpu", "")
    write_package(packages / "fbgemm_gpu", "experimental", "")
    write_package(packages / "fbgemm_gpu" / "experimental", "gen_ai", "")
    __import__("fbgemm_gpu.experimental.gen_ai")
    with torch.library._scoped_library("fbgemm", "FRAGMENT") as library:
        for op in mslk._OPS:
            library.define(f"{op}(Tensor x) -> Tensor")
        assert mslk.load() == ("fbgemm", None)
        assert mslk._op("f8f8bf16_rowwise") is torch.ops.fbgemm.f8f8bf16_rowwise.default
    assert "mslk" not in sys.modules


def test_platform_comes_before_the_import(packages):
    write_package(packages, "mslk", "raise AssertionError('imported on a machine without a GPU')")
    assert "operands are on the CPU" in PROVIDER.supported(device="cpu")
    assert "mslk" not in sys.modules


class Ops:
    """As documented: x [m, k], w [n, k] contiguous e4m3; see each op for its scales. Computes in fp32."""

    calls: ClassVar[list] = []

    @classmethod
    def _take(cls, x, w, x_scale, w_scale, *more):
        for t in (x, w):
            assert t.dtype == torch.float8_e4m3fn
            assert t.is_contiguous()
        for s in (x_scale, w_scale):
            assert s.dtype == torch.float32
            assert s.is_contiguous()
        cls.calls.append(more)
        return (*x.shape, w.shape[0])

    @staticmethod
    def f8f8bf16_rowwise(x, w, x_scale, w_scale, bias, fast):
        m, _, n = Ops._take(x, w, x_scale, w_scale, bias, fast)
        assert x_scale.shape == (m,)
        assert w_scale.shape == (n,)
        return ((x.float() @ w.float().t()) * x_scale[:, None] * w_scale).bfloat16()

    @staticmethod
    def f8f8bf16_blockwise(x, w, x_scale, w_scale, block_m, block_n, block_k):
        m, k, n = Ops._take(x, w, x_scale, w_scale, block_m, block_n, block_k)
        blocks = -(-k // 128)
        assert x_scale.shape == (-(-m // 128), blocks)
        assert w_scale.shape == (-(-n // 128), blocks)
        spread = [s.repeat_interleave(128, 0).repeat_interleave(128, 1) for s in (x_scale, w_scale)]
        return ((x.float() * spread[0][:m, :k]) @ (w.float() * spread[1][:n, :k]).t()).bfloat16()

    @staticmethod
    def f8f8bf16_groupwise(x, w, x_scale, w_scale):
        m, k, n = Ops._take(x, w, x_scale, w_scale)
        assert m % 4 == 0  # else an illegal instruction (seen with mslk-cuda 1.1.0 on an H200)
        assert x_scale.shape == (k // 128, m)
        assert w_scale.shape == (k // 128, n // 128)
        left = x.float() * x_scale.t().repeat_interleave(128, 1)
        right = w.float() * w_scale.t().repeat_interleave(128, 0).repeat_interleave(128, 1)
        return (left @ right.t()).bfloat16()


@pytest.fixture
def pretended(monkeypatch):
    monkeypatch.setattr(mslk, "_op", lambda name: getattr(Ops, name))
    Ops.calls.clear()
    # The custom op's CPU kernel is its reference; what runs on the GPU is the function that calls the library.
    monkeypatch.setattr(mslk, "groupwise_gemm", mslk.launch_groupwise_gemm)


@pytest.mark.parametrize(("transposed_a", "transposed_b"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("name", ["rowwise", "rowwise_fast", "blockwise", "blockwise_128x128"])
@pytest.mark.parametrize(("m", "n", "k"), [(199, 256, 384), (1, 128, 128)])
def test_calling_convention(pretended, name, transposed_a, transposed_b, m, n, k):
    recipe = PROVIDER.recipe(name)
    a = torch.randn((k, m) if transposed_a else (m, k), dtype=torch.bfloat16)
    b = torch.randn((k, n) if transposed_b else (n, k), dtype=torch.bfloat16)
    out = PROVIDER.gemm(a, transposed_a, b, transposed_b, recipe, torch.bfloat16)
    left = dequantize(quantize(a, recipe.a, transpose=transposed_a), recipe.a).double()
    right = dequantize(quantize(b, recipe.b, transpose=transposed_b), recipe.b).double()
    expected = left @ right.t()
    assert out.dtype == torch.bfloat16
    assert ((out.double() - expected).abs() <= 2.0**-8 * expected.abs() + 1e-3).all()
    more = {"rowwise": (None, False), "rowwise_fast": (None, True), "blockwise_128x128": (128, 128, 128)}
    assert Ops.calls == [more.get(name, ())]


def test_wrong_scales_never_reach_the_unchecked_kernel(pretended):
    a, b = quantize(torch.randn(8, 256), BLOCKWISE.a), quantize(torch.randn(128, 256), BLOCKWISE.b)
    good = (a.scale.t().contiguous(), b.scale.t().contiguous())
    for bad in ((a.scale, good[1]), (good[0], b.scale), (good[0].half(), good[1]), (a.scale.t(), good[1])):
        with pytest.raises(ValueError, match="must be contiguous fp32 of shape"):
            mslk.launch_groupwise_gemm(a.data, bad[0], b.data, bad[1])
    assert mslk.launch_groupwise_gemm(a.data, good[0], b.data, good[1]).shape == (8, 128)


def test_empty_groupwise():
    e4m3 = torch.zeros(0, 128).to(torch.float8_e4m3fn)
    out = mslk.launch_groupwise_gemm(
        e4m3, torch.ones(1, 0), torch.zeros(128, 128).to(torch.float8_e4m3fn), torch.ones(1, 1)
    )
    assert (out.shape, out.dtype) == ((0, 128), torch.bfloat16)


def test_a_call_without_the_library_says_so():
    a = quantize(torch.randn(8, 128), BLOCKWISE_128X128.a)
    with pytest.raises(RuntimeError, match="neither mslk nor fbgemm_gpu is installed"):
        PROVIDER.compute(a, Quantized(*a), BLOCKWISE_128X128, torch.bfloat16)
