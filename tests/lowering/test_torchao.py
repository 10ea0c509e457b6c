"""torchao's Triton GEMMs: what is refused, and the calling convention (on a stand-in for its module).

The stand-in checks what the library asserts and computes its meaning; it is not the library. The real kernels run in
test_provider_contract.py on a GPU.
"""

import sys
import types
from importlib import metadata

import pytest
import torch

from loka_compile.gemm import BLOCKWISE, BLOCKWISE_1X128, Gemm, Role
from loka_compile.lowering.providers import get_provider, torchao
from loka_compile.lowering.quantize import dequantize, quantize

PROVIDER = get_provider("torchao")


def gemm(m=256, n=256, k=256, role=Role.FORWARD, **more):
    return Gemm("site#0", role, m, n, k, **more)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(torchao, "_FOUND", {})
    torchao.load.cache_clear()
    yield
    torchao.load.cache_clear()


@pytest.mark.parametrize("recipe", [BLOCKWISE, BLOCKWISE_1X128], ids=lambda r: r.name)
def test_limits(recipe):
    for dtype in ("bfloat16", "float16", "float32"):
        assert PROVIDER.refuses_shape(gemm(2048, 768, 384, dtype=dtype), recipe) is None
    for sizes in ({"m": 199}, {"m": 128}, {"n": 384}, {"k": 479}):
        assert "unmasked scales" in PROVIDER.refuses_shape(gemm(**sizes), recipe)
    assert "not provably" in PROVIDER.refuses_shape(gemm(dynamic="m"), recipe)
    assert (PROVIDER.refuses_shape(gemm(role=Role.GRAD_WEIGHT), recipe) is None) == (recipe is BLOCKWISE_1X128)


def test_missing_old_and_broken(monkeypatch):
    assert torchao.load() == "torchao is not installed (pip install 'loka-compile[torchao]')"
    for version, reason in (("0.17.0", "0.17.0 is too old"), ("0.18.0+cu130", "failed with ModuleNotFoundError")):
        monkeypatch.setattr(metadata, "version", lambda name, version=version: version)
        torchao.load.cache_clear()
        assert reason in torchao.load()


def pretend(monkeypatch, **functions):
    """torchao 0.18 with these kernels."""
    module = types.ModuleType("kernels")
    vars(module).update(functions)
    for name in ("torchao", "torchao.prototype", "torchao.prototype.blockwise_fp8_training"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, torchao._MODULE, module)
    monkeypatch.setattr(metadata, "version", lambda name: "0.18.0")


def test_a_version_without_the_kernels(monkeypatch):
    pretend(monkeypatch, triton_fp8_gemm_1x128_128x128=None)
    assert torchao.load() == "torchao 0.18.0 lacks triton_fp8_gemm_1x128_128x1: version not supported"


def column_major(t):
    return t.stride(-2) == 1


def gemm_128x128(a, b, a_s, b_s, block_size, out_dtype):
    assert block_size == 128
    assert not column_major(a)
    assert column_major(b)
    assert column_major(a_s)
    assert column_major(b_s)
    (m, k), n = a.shape, b.shape[1]
    assert a_s.shape == (m, k // 128)
    assert b_s.shape == (k // 128, n // 128)
    right = b.float() * b_s.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (a.float() * a_s.repeat_interleave(128, 1) @ right).to(out_dtype)


def gemm_128x1(a, b, a_s, b_s, block_size, out_dtype):
    assert block_size == 128
    assert column_major(b)
    assert column_major(a_s)
    assert b_s.stride(-1) == 1
    (m, k), n = a.shape, b.shape[1]
    assert a_s.shape == (m, k // 128)
    assert b_s.shape == (k // 128, n)
    return (a.float() * a_s.repeat_interleave(128, 1) @ (b.float() * b_s.repeat_interleave(128, 0))).to(out_dtype)


@pytest.mark.parametrize(("transposed_a", "transposed_b"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("recipe", [BLOCKWISE, BLOCKWISE_1X128], ids=lambda r: r.name)
@pytest.mark.parametrize(("m", "n", "k"), [(256, 512, 384), (256, 256, 128)])
def test_calling_convention(monkeypatch, recipe, transposed_a, transposed_b, m, n, k):
    pretend(monkeypatch, triton_fp8_gemm_1x128_128x128=gemm_128x128, triton_fp8_gemm_1x128_128x1=gemm_128x1)
    assert torchao.load() is None
    # The custom op's CPU kernel is its reference; what runs on the GPU is the function that calls the library.
    monkeypatch.setattr(torchao, "torchao_gemm", torchao.launch_torchao_gemm)
    a = torch.randn((k, m) if transposed_a else (m, k), dtype=torch.bfloat16)
    b = torch.randn((k, n) if transposed_b else (n, k), dtype=torch.bfloat16)
    out = PROVIDER.gemm(a, transposed_a, b, transposed_b, recipe, torch.float32)
    left = dequantize(quantize(a, recipe.a, transpose=transposed_a), recipe.a).double()
    right = dequantize(quantize(b, recipe.b, transpose=transposed_b), recipe.b).double()
    torch.testing.assert_close(out.double(), left @ right.t(), rtol=1e-4, atol=1e-4)


def test_what_is_empty_needs_no_library_and_what_is_not_says_what_is_missing():
    def call(m):
        a, b = torch.zeros(m, 128).to(torch.float8_e4m3fn), torch.zeros(256, 128).to(torch.float8_e4m3fn)
        return torchao.launch_torchao_gemm(a, torch.ones(1, m), b, torch.ones(2, 1), "blockwise", torch.bfloat16)

    assert call(0).shape == (0, 256)
    with pytest.raises(RuntimeError, match="torchao is not installed"):
        call(256)
