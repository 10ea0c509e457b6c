"""``loka::quantize_fp8`` against torch's rules for custom ops and against the plain ops; on a GPU too."""

import pytest
import torch

from loka_compile.gemm import Scaling
from loka_compile.lowering.quantize import quantize
from loka_compile.lowering.quantize_op import quantize_both, quantize_fp8

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DEVICES = ["cpu"] + [pytest.param("cuda", marks=pytest.mark.gpu)] * torch.cuda.is_available()
SCALINGS = [Scaling.TENSORWISE, Scaling.ROWWISE, Scaling.BLOCK_1X128, Scaling.BLOCK_128X128]
#: Awkward ones, a batch of one, rows longer than the registers of a program, and the sizes of real layers.
SHAPES = [(1, 13), (199, 384), (130, 1), (3, 20000), (20000, 3), (0, 8), (8, 0), (1024, 2048)]


def operand(m, n, dtype, device):
    generator = torch.Generator().manual_seed(m + n)
    x = torch.randn(m, n, generator=generator) * torch.exp2(torch.randint(-9, 9, (m, 1), generator=generator).float())
    if m > 2:
        x[m // 2] = 0
    return x.to(dtype).to(device)


def same(found, expected):
    """To the bit on a CPU. On a GPU torch divides by a number by multiplying with its inverse:
    the last bit may differ."""
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
        a, b = (t.float().nan_to_num(nan=-1.0, posinf=3e38) for t in (one, other))
        if one.device.type == "cpu":
            assert torch.equal(a, b)
        elif one.dtype == torch.float32:
            torch.testing.assert_close(a, b, rtol=2.0**-22, atol=0)
        else:
            # A value on a rounding boundary may go to its other neighbour, one step of at most 2**-2 away.
            assert (a != b).float().mean() <= 1e-2 if a.numel() > 1000 else True
            assert ((a - b).abs() <= 0.25 * b.abs() + torch.finfo(one.dtype).tiny).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_equal_to_the_plain_ops(scaling, dtype, device):
    for m, n in SHAPES:
        x = operand(m, n, dtype, device)
        plain, turned = quantize(x, scaling), quantize(x, scaling, transpose=True)
        as_stored, transposed = quantize_both(x, scaling)
        same(as_stored, plain)
        same(transposed, turned)
        # The transposed output equals its contiguous twin.
        same(quantize_fp8(x.t().contiguous(), scaling.value, E4M3, True, False)[:2], turned)
        for result in (as_stored.data, transposed.data):
            assert result.is_contiguous()
        same(quantize_fp8(x, scaling.value, E4M3, True, False)[:2], plain)
        same(quantize_fp8(x, scaling.value, E4M3, False, True)[2:], turned)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fp8", [E4M3, E5M2])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_zeros_nan_inf_and_saturation(scaling, fp8, device):
    x = torch.randn(140, 300, device=device)
    x[3], x[:, 7] = 0, 0
    x[5, 200], x[139, 1], x[:, 290] = float("nan"), float("-inf"), 3e38
    for transpose, result in zip((False, True), quantize_both(x, scaling, dtype=fp8), strict=True):
        expected = quantize(x, scaling, transpose=transpose, dtype=fp8)
        same(result, expected)
    zeros = quantize_fp8(torch.zeros(3, 5, device=device), scaling.value, fp8, True, True)
    assert not zeros[0].float().any()
    for scale in (zeros[1], zeros[3]):
        torch.testing.assert_close(scale, torch.full_like(scale, 1e-12 / torch.finfo(fp8).max), rtol=1e-6, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_strides(scaling, device):
    wide = torch.randn(400, 500, device=device)
    for x in (wide[3:140, 5:190], wide.t(), wide[::2, ::3], wide[:1].expand(7, 500)):
        for transpose, result in zip((False, True), quantize_both(x, scaling), strict=True):
            same(result, quantize(x, scaling, transpose=transpose))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(("with_q", "with_qt"), [(True, True), (True, False), (False, True)])
def test_custom_op(scaling, with_q, with_qt, device):
    x = torch.randn(199, 300, device=device)
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(quantize_fp8, (x, scaling.value, E4M3, with_q, with_qt), test_utils=checks)


@pytest.mark.gpu
@pytest.mark.parametrize("scaling", SCALINGS)
def test_in_a_cuda_graph(scaling):
    x = torch.randn(512, 512, device="cuda").bfloat16()
    quantize_both(x, scaling)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = quantize_both(x, scaling)
    for _ in range(2):
        x.copy_(torch.randn(512, 512))
        graph.replay()
        for transpose, result in zip((False, True), results, strict=True):
            same(result, quantize(x, scaling, transpose=transpose))
