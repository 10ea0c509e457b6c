"""AMD's FP8 format and Blackwell's MX scales: formats, layouts and who is chosen where.
In emulation: no such GPU here."""

import types

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from loka_compile.gemm import MXFP8, ROWWISE_FNUZ, TENSORWISE_FNUZ, Gemm, Role, Scaling
from loka_compile.lowering.providers import available_providers, get_provider, torch_mx
from loka_compile.lowering.quantize import dequantize, quantize

FNUZ, E4M3 = torch.float8_e4m3fnuz, torch.float8_e4m3fn
FNUZ_SCALINGS = [Scaling.TENSORWISE, Scaling.ROWWISE, Scaling.BLOCK_1X128, Scaling.BLOCK_128X128]


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("scaling", FNUZ_SCALINGS)
def test_fnuz_reaches_240_and_has_no_negative_zero(scaling, transpose):
    x = torch.randn(150, 260) * torch.exp2(torch.randint(-9, 9, (150, 1)).float())
    x[7] = 0
    q = quantize(x, scaling, transpose=transpose, dtype=FNUZ)
    operand = x.t() if transpose else x
    assert q.data.dtype == FNUZ
    assert q.data.float().abs().max() == 240
    # 0x80 is negative zero in other formats and NaN in this one.
    assert not (q.data.view(torch.uint8) == 0x80).any()
    unit = dequantize(type(q)(torch.ones_like(q.data, dtype=torch.float32), q.scale), scaling).double()
    error = (dequantize(q, scaling).double() - operand.double()).abs()
    assert (error <= (2.0**-4 * operand.double().abs() + 2.0**-11 * unit) * 1.0001).all()


def test_fnuz_saturates_and_keeps_nan():
    q = quantize(torch.tensor([[1e30, -20.0, float("nan"), float("inf")]]), Scaling.TENSORWISE, dtype=FNUZ, bound=1.0)
    values = q.data.float()[0]
    assert values[0] == 240
    assert values[1] == -240
    assert values[2].isnan()
    assert values[3] == 240
    poisoned = quantize(torch.tensor([[1.0, float("inf")], [1.0, 2.0]]), Scaling.ROWWISE, dtype=FNUZ)
    back = dequantize(poisoned, Scaling.ROWWISE)
    assert back[0].isnan().all()
    assert back[1].isfinite().all()


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize(("rows", "k"), [(1, 32), (37, 64), (5, 13), (130, 200)])
def test_mx_scales_are_the_smallest_powers_of_two_that_do_not_saturate(rows, k, transpose):
    x = torch.randn(rows, k) * torch.exp2(torch.randint(-30, 30, (rows, 1)).float())
    q = quantize(x.t().contiguous() if transpose else x, Scaling.BLOCK_1X32, transpose=transpose)
    assert q.scale.shape == (rows, -(-k // 32))
    mantissa, _ = torch.frexp(q.scale)
    assert (mantissa == 0.5).all()
    for block in range(q.scale.shape[1]):
        largest = x[:, 32 * block : 32 * block + 32].abs().amax(1)
        assert (largest <= 448 * q.scale[:, block]).all()
        assert (largest > 224 * q.scale[:, block]).all()
    # Powers of two lose nothing: the error is that of e4m3 alone.
    error = (dequantize(q, Scaling.BLOCK_1X32).double() - x.double()).abs()
    smallest = q.scale.double().repeat_interleave(32, 1)[:, :k] * 2.0**-10
    assert (error <= 2.0**-4 * x.double().abs() + smallest).all()


def test_mx_at_the_edges():
    x = torch.randn(5, 64)
    x[0] = 0
    x[1, 3], x[2, 40], x[3, :32], x[4, :32] = float("nan"), float("inf"), 3e38, 1e-38
    q = quantize(x, Scaling.BLOCK_1X32)
    back = dequantize(q, Scaling.BLOCK_1X32)
    assert q.scale[0, 0] == 2.0**-48  # of the floor 1e-12 / 448
    assert not back[0].any()
    assert back[1, :32].isnan().all()
    assert back[1, 32:].isfinite().all()
    assert back[2, 32:].isnan().all()
    assert back[2, :32].isfinite().all()
    torch.testing.assert_close(back[3, :32], x[3, :32], rtol=2.0**-4, atol=0)
    assert not back[4, :32].any()
    exact = q.scale.to(torch.float8_e8m0fnu).float()
    assert torch.equal(exact.nan_to_num(), q.scale.nan_to_num())
    assert torch.equal(exact.isnan(), q.scale.isnan())


@pytest.mark.parametrize("exponent", [-40, 0, 7])
def test_a_scale_that_is_a_power_of_two_stays(exponent):
    x = torch.full((1, 32), 448.0 * 2.0**exponent)
    assert quantize(x, Scaling.BLOCK_1X32).scale.item() == 2.0**exponent
    assert quantize(x * 1.001, Scaling.BLOCK_1X32).scale.item() == 2.0 ** (exponent + 1)


@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (128, 4), (199, 7), (300, 12)])
def test_layout_of_mx_scales(rows, blocks):
    """As the documentation of cuBLAS has it, element by element."""
    scale = torch.exp2(torch.randint(-20, 20, (rows, blocks)).float())
    flat = torch_mx.swizzled(scale)
    tiles_k = -(-blocks // 4)
    assert flat.dtype == torch.float8_e8m0fnu
    assert flat.numel() == -(-rows // 128) * tiles_k * 512
    values = flat.float()
    for r in range(0, rows, 13):
        for c in range(blocks):
            tile = (r // 128) * tiles_k + c // 4
            offset = tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4
            assert values[offset] == scale[r, c]
    assert torch.equal(torch_mx.unswizzled(flat, rows, blocks), scale)


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize(("m", "n", "k"), [(199, 48, 64), (1, 1, 13), (130, 256, 200)])
def test_mx_gemm_is_its_emulation(role, m, n, k):
    """Through the scales' layout and the padding to blocks of 32."""
    a_t, b_t = role is Role.GRAD_WEIGHT, role is not Role.FORWARD
    a = torch.randn((k, m) if a_t else (m, k))
    b = torch.randn((k, n) if b_t else (n, k))
    provider, emulated = get_provider("torch_mx"), get_provider("emulated")
    assert provider.refuses_shape(provider.padded(Gemm("s#0", role, m, n, k, "float32"), MXFP8), MXFP8) is None
    out = provider.gemm(a, a_t, b, b_t, MXFP8, torch.float32)
    torch.testing.assert_close(out, emulated.gemm(a, a_t, b, b_t, MXFP8, torch.float32), rtol=1e-5, atol=1e-4)


def test_mx_with_a_moving_batch_is_one_graph():
    provider = get_provider("torch_mx")
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda a, b: provider.gemm(a, True, b, True, MXFP8, torch.float32), backend=counter, fullgraph=True
    )
    for batch in (256, 199, 330):
        a, b = torch.randn(batch, 40), torch.randn(batch, 32)
        for x in (a, b):
            torch._dynamo.mark_dynamic(x, 0)
        expected = provider.gemm(a, True, b, True, MXFP8, torch.float32)
        torch.testing.assert_close(compiled(a, b), expected, rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 1


def platform(monkeypatch, *, capability=(9, 0), cuda="13.0", hip=None, arch=""):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: types.SimpleNamespace(gcnArchName=arch))
    monkeypatch.setattr(torch.version, "cuda", None if hip else cuda)
    monkeypatch.setattr(torch.version, "hip", hip)


def chosen(*names):
    return {name for name in names if available_providers("cuda")[name] is None}


LIBRARIES = ("torch", "torch_mx", "torch_rocm", "emulated")


@pytest.mark.parametrize(
    ("here", "expected"),
    [
        ({"capability": (9, 0)}, {"torch", "emulated"}),
        ({"capability": (10, 0)}, {"torch", "torch_mx", "emulated"}),
        ({"capability": (12, 0)}, {"torch", "torch_mx", "emulated"}),
        ({"capability": (10, 0), "cuda": "12.6"}, {"torch", "emulated"}),
        ({"capability": (9, 4), "hip": "6.4", "arch": "gfx942:sramecc+:xnack-"}, {"torch_rocm", "emulated"}),
        ({"capability": (9, 5), "hip": "7.0", "arch": "gfx950"}, {"emulated"}),
    ],
    ids=["h200", "b200", "rtx5090", "b200-old-cuda", "mi300", "mi350"],
)
def test_chosen_by_capability(monkeypatch, here, expected):
    platform(monkeypatch, **here)
    assert chosen(*LIBRARIES) == expected


def test_reasons_name_what_is_missing(monkeypatch):
    platform(monkeypatch)
    assert available_providers("cuda")["torch_mx"] == (
        "needs an NVIDIA GPU of compute capability 10.0 or newer; this one has 9.0"
    )
    assert "not built for ROCm" in available_providers("cuda")["torch_rocm"]
    platform(monkeypatch, hip="7.0", arch="gfx950")
    assert "this one is gfx950" in available_providers("cuda")["torch_rocm"]
    for recipe in (TENSORWISE_FNUZ, ROWWISE_FNUZ):
        assert "k to be a multiple of 16" in get_provider("torch_rocm").refuses_shape(
            Gemm("s#0", Role.FORWARD, 8, 16, 13), recipe
        )
