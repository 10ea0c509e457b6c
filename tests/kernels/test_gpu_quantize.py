"""The FP8 quantisers on a GPU against their plain-torch twin, and x.T against x transposed beforehand, to the bit."""

from __future__ import annotations

import pytest
import torch

from loka_compile.gemm import Scaling
from loka_compile.lowering.quantize import Quantized, dequantize, quantize

pytestmark = pytest.mark.gpu
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALINGS = [Scaling.TENSORWISE, Scaling.ROWWISE, Scaling.BLOCK_1X128, Scaling.BLOCK_128X128]
SHAPES = [(1, 13), (40, 1), (130, 300), (199, 256), (4, 17000), (4096, 2048)]


def launch(x: torch.Tensor, scaling: Scaling, dtype: torch.dtype, *, with_q: bool = True, with_qt: bool = True):
    from loka_compile.kernels.quantize import quantize

    return quantize(x, scaling.value, dtype, with_q=with_q, with_qt=with_qt)


def codes(q: torch.Tensor) -> torch.Tensor:
    return q.view(torch.uint8)


def close(found: tuple[torch.Tensor, torch.Tensor], expected: Quantized) -> None:
    """Scales to the last bits, and so all but a few numbers; those are neighbours."""
    assert found[0].shape == expected.data.shape
    assert found[0].is_contiguous()
    torch.testing.assert_close(found[1], expected.scale, rtol=2.0**-22, atol=0)
    differ = (codes(found[0]).int() - codes(expected.data).int()).abs()
    assert differ.max() <= 1
    assert differ.count_nonzero() <= 2 + 1e-3 * differ.numel()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("m", "n"), SHAPES)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_quantised_like_the_plain_ops(scaling: Scaling, m: int, n: int, dtype: torch.dtype) -> None:
    x = (torch.randn(m, n, device="cuda") * torch.exp2(torch.randint(-9, 9, (m, 1), device="cuda").float())).to(dtype)
    x[m // 2] = 0
    for fp8 in (E4M3, E5M2) if dtype == torch.bfloat16 else (E4M3,):
        q, scale, qt, scale_t = launch(x, scaling, fp8)
        close((q, scale), quantize(x, scaling, dtype=fp8))
        close((qt, scale_t), quantize(x, scaling, dtype=fp8, transpose=True))
        # The same arithmetic whichever way x lies, and whatever else is asked for.
        turned = launch(x.t().contiguous(), scaling, fp8, with_qt=False)
        alone = launch(x, scaling, fp8, with_qt=False)
        only = launch(x, scaling, fp8, with_q=False)
        for made, other in ((qt, turned[0]), (q, alone[0]), (qt, only[2])):
            assert torch.equal(codes(made), codes(other))
        for made, other in ((scale_t, turned[1]), (scale, alone[1]), (scale_t, only[3])):
            assert torch.equal(made, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_nan_inf_and_zero(scaling: Scaling, dtype: torch.dtype) -> None:
    x = torch.randn(260, 384, device="cuda", dtype=dtype)
    x[3], x[:, 7] = 0, 0
    x[5, 200], x[130, 1] = float("nan"), float("-inf")
    for fp8 in (E4M3, E5M2):
        made = launch(x, scaling, fp8)
        for (q, scale), transpose in ((made[:2], False), (made[2:], True)):
            expected = dequantize(quantize(x, scaling, dtype=fp8, transpose=transpose), scaling)
            found = dequantize(Quantized(q, scale), scaling)
            assert torch.equal(found.isnan(), expected.isnan())
            torch.testing.assert_close(found, expected, rtol=0.26, atol=1e-3, equal_nan=True)
    zeros = launch(torch.zeros(130, 200, device="cuda", dtype=dtype), scaling, E4M3)
    assert not codes(zeros[0]).any()
    assert not codes(zeros[2]).any()
    torch.testing.assert_close(zeros[1], torch.full_like(zeros[1], 1e-12 / 448), rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_strides(scaling: Scaling) -> None:
    x = torch.randn(600, 700, device="cuda").bfloat16()
    for view in (x[3:531, 5:517], x[:, 64:192], x.t(), x[::2, ::3]):
        q, scale, qt, scale_t = launch(view, scaling, E4M3)
        close((q, scale), quantize(view, scaling))
        close((qt, scale_t), quantize(view, scaling, transpose=True))


@pytest.mark.parametrize("scaling", SCALINGS)
def test_kernels_that_begin_early_wait_for_what_they_read(scaling: Scaling) -> None:
    """In a graph, x is written just before, and each result is read just after, again and again."""
    source = [torch.randn(1024, 2048, device="cuda").bfloat16() * (i + 1) for i in range(3)]
    expected = [launch(x, scaling, E4M3) for x in source]
    x = torch.empty_like(source[0])
    kept = [[torch.empty_like(part) for part in made] for made in expected]

    def run() -> None:
        for y, keep in zip(source, kept, strict=True):
            x.copy_(y)
            for slot, part in zip(keep, launch(x, scaling, E4M3), strict=True):
                slot.copy_(part)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(20):
        graph.replay()
        for made, keep in zip(expected, kept, strict=True):
            assert all(torch.equal(a.float(), b.float()) for a, b in zip(made, keep, strict=True))
            for slot in keep:
                slot.zero_()
