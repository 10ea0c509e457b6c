"""torch's scaled_mm: our limits are the GPU's, also where only a CPU runs the test."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from loka_compile.gemm import BLOCKWISE, BLOCKWISE_1X128, Gemm, Role, Scaling
from loka_compile.lowering.providers import base, get_provider, torch_scaled_mm
from loka_compile.lowering.providers.base import Quantized
from loka_compile.lowering.providers.torch_scaled_mm import launch_scaled_mm_blockwise
from loka_compile.lowering.quantize import dequantize, quantize

PROVIDER = get_provider("torch")
PLAIN = ("tensorwise", "tensorwise_fast", "rowwise", "rowwise_fast")
STORED = {Role.FORWARD: (False, False), Role.GRAD_INPUT: (False, True), Role.GRAD_WEIGHT: (True, True)}


def gemm(m=256, n=256, k=256, role=Role.FORWARD, **more):
    return Gemm("site#0", role, m, n, k, **more)


@pytest.mark.parametrize("recipe", PLAIN)
@pytest.mark.parametrize("role", list(Role))
def test_limits_of_the_plain_recipes(recipe, role):
    recipe = PROVIDER.recipe(recipe)

    def refuses(**sizes):
        return PROVIDER.refuses_shape(gemm(role=role, **sizes), recipe)

    assert refuses(m=1) is refuses(m=199) is refuses(m=0) is refuses(k=0) is None
    assert refuses(n=16, k=16) is refuses(n=3456, k=18480) is None
    assert refuses(k=13) == "torch._scaled_mm needs k to be a multiple of 16; it is 13"
    assert refuses(n=1) == "torch._scaled_mm needs n to be a multiple of 16; it is 1"
    assert refuses(n=8) is not None
    assert refuses(dynamic="m") is None
    assert "not provably a multiple" in refuses(dynamic="k")
    assert "not provably a multiple" in refuses(dynamic="n")


def test_a_moving_batch_is_the_contraction_of_grad_weight():
    reason = PROVIDER.refuses_shape(gemm(role=Role.GRAD_WEIGHT, k=2048, dynamic="k"), PROVIDER.recipe("rowwise"))
    assert reason == (
        "torch._scaled_mm needs k to be a multiple of 16, but k is the batch, dynamic (now 2048): "
        "it is not provably a multiple"
    )


def test_limits_of_the_block_recipes():
    for recipe in (BLOCKWISE, BLOCKWISE_1X128):
        assert PROVIDER.refuses_shape(gemm(m=199), recipe) is None
        assert "128" in PROVIDER.refuses_shape(gemm(k=192), recipe)
        assert "128" in PROVIDER.refuses_shape(gemm(n=192), recipe)
        assert PROVIDER.refuses(gemm(), recipe, "cpu").startswith("block scales: needs an NVIDIA GPU")
    assert "blockwise_1x128" in PROVIDER.refuses_shape(gemm(role=Role.GRAD_WEIGHT), BLOCKWISE)
    assert PROVIDER.refuses_shape(gemm(role=Role.GRAD_WEIGHT), BLOCKWISE_1X128) is None


@pytest.mark.parametrize(
    ("capability", "cuda", "plain", "blocks"),
    [
        ((8, 0), "13.0", "has 8.0", "has 8.0"),
        ((8, 9), "13.0", None, "has 8.9"),
        ((9, 0), "13.0", None, None),
        ((9, 0), "12.8", None, "12.9"),
        ((10, 0), "13.0", None, "has 10.0"),
    ],
)
def test_platforms(monkeypatch, capability, cuda, plain, blocks):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    for expected, recipe in ((plain, "rowwise"), (blocks, "blockwise")):
        reason = PROVIDER.supported(PROVIDER.recipe(recipe))
        assert reason is None if expected is None else expected in reason
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "e4m3fnuz" in PROVIDER.supported()


def test_rowwise_on_an_old_cpu_build(monkeypatch):
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.11.0+cpu"))
    assert "torch 2.13" in PROVIDER.supported(PROVIDER.recipe("rowwise_fast"), "cpu")
    assert PROVIDER.supported(PROVIDER.recipe("tensorwise"), "cpu") is None
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.14.0a0+git1234"))
    assert PROVIDER.supported(PROVIDER.recipe("rowwise"), "cpu") is None


def on_cuda(t):
    """A fake CUDA tensor like t: CUDA's checks run on it, without a GPU. Call inside a FakeTensorMode."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda")


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("recipe", PLAIN)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 16, 16), (199, 384, 480), (2, 3456, 256), (16, 16, 1024)])
def test_what_we_accept_passes_torchs_checks_for_cuda(recipe, role, m, n, k):
    recipe = PROVIDER.recipe(recipe)
    assert PROVIDER.refuses_shape(gemm(m, n, k, role), recipe) is None
    a_t, b_t = STORED[role]
    a = quantize(torch.randn((k, m) if a_t else (m, k)), recipe.a, transpose=a_t)
    b = quantize(torch.randn((k, n) if b_t else (n, k)), recipe.b, transpose=b_t)
    with FakeTensorMode():
        a, b = (Quantized(on_cuda(q.data), on_cuda(q.scale)) for q in (a, b))
        for out_dtype in (torch.bfloat16, torch.float16, torch.float32):
            out = PROVIDER.compute(a, b, recipe, out_dtype)
            assert (out.shape, out.dtype, out.device.type) == ((m, n), out_dtype, "cuda")


@pytest.mark.parametrize(("m", "n", "k"), [(64, 64, 24), (64, 24, 64)])
def test_what_we_refuse_fails_torchs_checks_for_cuda(m, n, k):
    """Were a limit lifted one day, this would tell."""
    a, b = (quantize(torch.randn(rows, k), Scaling.TENSORWISE) for rows in (m, n))
    with FakeTensorMode():
        a, b = (Quantized(on_cuda(q.data), on_cuda(q.scale)) for q in (a, b))
        with pytest.raises(RuntimeError, match="divisible by 16"):
            PROVIDER.compute(a, b, PROVIDER.recipe("tensorwise"), torch.bfloat16)


@pytest.mark.parametrize("recipe", [BLOCKWISE, BLOCKWISE_1X128], ids=lambda r: r.name)
@pytest.mark.parametrize(("m", "n", "k"), [(256, 384, 640), (4, 128, 128), (128, 256, 512)])
def test_block_layouts_pass_torchs_checks_for_cuda(monkeypatch, recipe, m, n, k):
    a, b = quantize(torch.randn(m, k), recipe.a), quantize(torch.randn(n, k), recipe.b)
    given = []
    monkeypatch.setattr(torch_scaled_mm, "scaled_mm_blockwise", lambda *args: given.extend(args))
    PROVIDER.compute(a, b, recipe, torch.bfloat16)
    with FakeTensorMode():
        out = launch_scaled_mm_blockwise(*(on_cuda(x) if isinstance(x, torch.Tensor) else x for x in given))
        assert out.shape == (m, n)
        # The same scales without the padding to four blocks are what torch warns of (2.14 no longer does).
        if recipe is BLOCKWISE and k // 128 % 4 and torch.__version__ < (2, 14):
            given[3] = b.scale
            with pytest.raises(RuntimeError, match="blockwise scaling"):
                launch_scaled_mm_blockwise(*(on_cuda(x) if isinstance(x, torch.Tensor) else x for x in given))


def test_rows_are_padded_to_16_bytes_of_scales(monkeypatch):
    """m = 199: the op gets 200 rows with zeros, and 199 come back."""
    seen = {}

    def fake_v2(a, b, a_scale, a_recipe, _a_swizzle, b_scale, b_recipe, _b_swizzle, bias, out_dtype, dims, fast):
        seen.update(rows=a.shape[0], stride=a_scale[0].stride(), recipes=(a_recipe, b_recipe), rest=(bias, dims, fast))
        left = dequantize(Quantized(a, a_scale[0].contiguous()), BLOCKWISE.a)
        right = dequantize(Quantized(b.t(), b_scale[0].t()[:, : b.shape[0] // 128]), BLOCKWISE.b)
        return (left @ right.t()).to(out_dtype)

    class Aten:
        class _scaled_mm_v2:
            default = staticmethod(fake_v2)

    monkeypatch.setattr(torch_scaled_mm, "_aten", Aten)
    x, w = torch.randn(199, 384), torch.randn(256, 384)
    a, b = quantize(x, BLOCKWISE.a), quantize(w, BLOCKWISE.b)
    out = launch_scaled_mm_blockwise(
        a.data, a.scale.t().contiguous(), b.data, torch_scaled_mm._pad_k_blocks(b.scale), True, torch.float32
    )
    assert seen == {"rows": 200, "stride": (1, 200), "recipes": ([4], [5]), "rest": (None, [], False)}
    torch.testing.assert_close(out, dequantize(a, BLOCKWISE.a) @ dequantize(b, BLOCKWISE.b).t())
    assert out.shape == (199, 256)
    assert out.is_contiguous()


@pytest.mark.parametrize(("blocks", "padded"), [(1, 4), (3, 4), (4, 4), (5, 8)])
def test_scales_of_square_blocks_come_in_fours(blocks, padded):
    scale = torch.rand(2, blocks)
    result = torch_scaled_mm._pad_k_blocks(scale)
    assert result.shape == (2, padded)
    assert torch.equal(result[:, :blocks], scale)


@pytest.mark.parametrize("recipe", [BLOCKWISE, BLOCKWISE_1X128], ids=lambda r: r.name)
def test_block_op_against_its_reference(recipe):
    """The op's CPU kernel undoes every layout change of ``compute``; wrong layouts would give wrong numbers."""
    x, w = torch.randn(199, 640), torch.randn(384, 640) * torch.rand(384, 1)
    a, b = quantize(x, recipe.a), quantize(w, recipe.b)
    out = PROVIDER.compute(a, b, recipe, torch.float32)
    expected = dequantize(a, recipe.a).double() @ dequantize(b, recipe.b).double().t()
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)


def test_empty_operands_of_the_block_op():
    a_scale = torch.ones(1, 0)
    out = launch_scaled_mm_blockwise(
        torch.zeros(0, 128).to(torch.float8_e4m3fn), a_scale, torch.zeros(128, 128).to(torch.float8_e4m3fn),
        torch.ones(1, 4), True, torch.bfloat16,
    )  # fmt: skip
    assert out.shape == (0, 128)


def test_default_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert base.default_device() == "cpu"
    assert "sees none" in base.gpu_reason((9, 0), device="cuda")
