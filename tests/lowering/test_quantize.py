"""The quantisers against a reference written in numpy from the formats' definition."""

import math

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.fx.experimental.proxy_tensor import make_fx

from loka_compile.errors import ConfigError, UnknownNameError
from loka_compile.gemm import Scaling
from loka_compile.lowering.quantize import AMAX_FLOOR, dequantize, fixed_scale, quantize

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8 = [Scaling.TENSORWISE, Scaling.ROWWISE, Scaling.BLOCK_1X128, Scaling.BLOCK_128X128]
#: One row, one column, ragged in both directions, whole blocks, the K of the paper's smallest layer.
SHAPES = [(1, 13), (130, 1), (199, 384), (256, 256), (3, 479)]


def fp8_values(exponent_bits: int, mantissa_bits: int, largest: float) -> np.ndarray:
    """Every non-negative finite number of the format, decoded from its bits."""
    bias = 2 ** (exponent_bits - 1) - 1
    values = []
    for e in range(2**exponent_bits):
        for m in range(2**mantissa_bits):
            fraction = m / 2**mantissa_bits
            values.append((fraction if e == 0 else 1 + fraction) * 2.0 ** (max(e, 1) - bias))
    return np.array([v for v in values if v <= largest])


REPRESENTABLE = {E4M3: fp8_values(4, 3, 448.0), E5M2: fp8_values(5, 2, 57344.0)}


def group_index(scaling: Scaling, rows: int, k: int) -> np.ndarray:
    """The number of each element's scale, flattened."""
    row, column = np.indices((rows, k))
    blocks = -(-k // 128)
    return {
        Scaling.TENSORWISE: row * 0,
        Scaling.ROWWISE: row,
        Scaling.BLOCK_1X128: row * blocks + column // 128,
        Scaling.BLOCK_128X128: row // 128 * blocks + column // 128,
    }[scaling]


def spread(shape: tuple[int, int], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Values over six decades, so that scales differ and subnormals occur."""
    generator = torch.Generator().manual_seed(seed)
    magnitude = torch.exp(torch.randn(shape, generator=generator) * 3)
    return (torch.randn(shape, generator=generator) * magnitude).to(dtype)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("scaling", FP8)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "fp8"), [(torch.float32, E4M3), (torch.bfloat16, E4M3), (torch.float16, E5M2)])
def test_scales_and_rounding(shape, scaling, transpose, dtype, fp8):
    x = spread(shape, torch.float32).clamp(-3e4, 3e4).to(dtype)
    q = quantize(x, scaling, transpose=transpose, dtype=fp8)
    operand = (x.t() if transpose else x).double().numpy()
    rows, k = operand.shape
    groups = group_index(scaling, rows, k)
    amax = np.zeros(groups.max() + 1)
    np.maximum.at(amax, groups, np.abs(operand))
    largest = REPRESENTABLE[fp8][-1]
    scale = np.maximum(amax, 1e-12) / largest
    expected_shape = {
        Scaling.TENSORWISE: (),
        Scaling.ROWWISE: (rows, 1),
        Scaling.BLOCK_1X128: (rows, -(-k // 128)),
        Scaling.BLOCK_128X128: (-(-rows // 128), -(-k // 128)),
    }[scaling]
    assert q.scale.shape == expected_shape
    assert q.scale.dtype == torch.float32
    assert q.scale.is_contiguous()
    np.testing.assert_allclose(q.scale.double().numpy().reshape(-1), scale, rtol=1e-6)

    assert q.data.shape == (rows, k)
    assert q.data.dtype == fp8
    assert q.data.stride() == (k, 1)
    scaled = operand / scale[groups]
    got = q.data.double().numpy()
    table = REPRESENTABLE[fp8]
    right = np.searchsorted(table, np.abs(scaled)).clip(1, len(table) - 1)
    distance = np.minimum(np.abs(np.abs(scaled) - table[right]), np.abs(np.abs(scaled) - table[right - 1]))
    # Nearest up to the rounding of the fp32 division, which can decide a near-tie the other way.
    assert np.all(np.abs(got - scaled) <= distance + 2e-6 * np.abs(scaled))
    assert np.all(np.isin(np.abs(got), table))


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("scaling", FP8)
def test_dequantise_is_data_times_the_scale_of_its_group(scaling, transpose):
    x = spread((199, 300))
    q = quantize(x, scaling, transpose=transpose)
    rows, k = q.data.shape
    expected = q.data.double().numpy() * q.scale.double().numpy().reshape(-1)[group_index(scaling, rows, k)]
    result = dequantize(q, scaling)
    assert result.dtype == torch.float32
    np.testing.assert_allclose(result.double().numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("fp8", [E4M3, E5M2])
@pytest.mark.parametrize("scaling", [Scaling.TENSORWISE, Scaling.BLOCK_128X128])
def test_transposed_operand_shares_the_quantisation(scaling, fp8):
    x = spread((200, 300))
    stored, turned = quantize(x, scaling, dtype=fp8), quantize(x, scaling, transpose=True, dtype=fp8)
    assert torch.equal(turned.data.view(torch.uint8), stored.data.view(torch.uint8).t())
    assert torch.equal(turned.scale, stored.scale.t() if scaling is Scaling.BLOCK_128X128 else stored.scale)

    def ops(transpose):
        graph = make_fx(lambda x: tuple(quantize(x, scaling, transpose=transpose, dtype=fp8)))(x).graph
        return [str(node.target) for node in graph.nodes if node.op == "call_function"]

    # The same ops in the same order, then only views and copies: CSE of a graph with both keeps one quantisation.
    short, long = ops(False), ops(True)
    assert long[: len(short)] == short
    assert set(long[len(short) :]) <= {"aten.t.default", "aten.clone.default"}


@pytest.mark.parametrize("scaling", FP8)
def test_zeros(scaling):
    x = spread((256, 256))
    x[:128, :128] = 0
    x[130] = 0
    q = quantize(x, scaling)
    assert torch.isfinite(q.scale).all()
    floor = AMAX_FLOOR / 448
    zero = quantize(torch.zeros(3, 200), scaling)
    assert torch.equal(zero.data.float(), torch.zeros(3, 200))
    torch.testing.assert_close(zero.scale, torch.full_like(zero.scale, floor))
    assert torch.equal(dequantize(q, scaling)[130], torch.zeros(256))
    if scaling in (Scaling.BLOCK_1X128, Scaling.BLOCK_128X128):
        assert q.scale[0, 0].item() == pytest.approx(floor)


def test_floor_of_amax():
    tiny = quantize(torch.tensor([[1e-13, -5e-13]]), Scaling.ROWWISE)
    assert tiny.scale.item() == pytest.approx(1e-12 / 448)
    assert tiny.data.float().tolist() == [[44.0, -224.0]]
    above = quantize(torch.tensor([[1e-11]]), Scaling.ROWWISE)
    assert above.scale.item() == pytest.approx(1e-11 / 448)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "inductor"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_value_poisons_its_group_and_no_other(bad, compiled):
    x = spread((256, 384), seed=3)
    x[130, 300] = bad
    poisoned = {
        Scaling.TENSORWISE: (slice(None), slice(None)),
        Scaling.ROWWISE: (130, slice(None)),
        Scaling.BLOCK_1X128: (130, slice(256, 384)),
        Scaling.BLOCK_128X128: (slice(128, 256), slice(256, 384)),
    }

    def all_scalings(x):
        return [dequantize(quantize(x, scaling), scaling) for scaling in FP8]

    torch._dynamo.reset()
    results = (torch.compile(all_scalings, fullgraph=True) if compiled else all_scalings)(x)
    for scaling, result in zip(FP8, results, strict=True):
        expected = torch.zeros(256, 384, dtype=torch.bool)
        expected[poisoned[scaling]] = True
        assert torch.equal(torch.isnan(result), expected), scaling
        assert torch.isfinite(result[~expected]).all(), scaling


def test_proven_bound_needs_no_amax():
    x = spread((40, 60)).clamp(-16, 16)
    q = quantize(x, Scaling.TENSORWISE, bound=16.0)
    assert q.scale.item() == 1 / 16
    assert q.scale.shape == ()
    assert torch.equal(q.data.float(), (x * 16).to(E4M3).float())
    graph = make_fx(lambda x: tuple(quantize(x, Scaling.TENSORWISE, bound=16.0)))(x).graph
    assert not [node for node in graph.nodes if "amax" in str(node.target)]


@pytest.mark.parametrize(
    ("bound", "dtype", "factor"),
    [(16.0, E4M3, 16.0), (448.0, E4M3, 1.0), (449.0, E4M3, 0.5), (1.75, E4M3, 256.0), (16.0, E5M2, 2048.0),
     (1e-300, E4M3, 2.0**126), (1e300, E4M3, 2.0**-126)],
)  # fmt: skip
def test_fixed_scale(bound, dtype, factor):
    assert fixed_scale(bound, dtype) == factor


def test_beyond_the_bound_saturates_and_nan_stays_in_place():
    x = torch.tensor([[28.1, -1e9, math.inf, math.nan, 1.0]])
    q = quantize(x, Scaling.TENSORWISE, bound=16.0)
    result = dequantize(q, Scaling.TENSORWISE)[0]
    assert result[:3].tolist() == [28.0, -28.0, 28.0]
    assert torch.isnan(result[3])
    assert result[4] == 1.0


def test_other_scalings_ignore_the_bound():
    x = spread((30, 200))
    for scaling in (Scaling.ROWWISE, Scaling.BLOCK_1X128, Scaling.BLOCK_128X128):
        plain, bounded = quantize(x, scaling), quantize(x, scaling, bound=16.0)
        assert torch.equal(plain.scale, bounded.scale)
        assert torch.equal(plain.data.float(), bounded.data.float())


@pytest.mark.parametrize("scaling", FP8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_element_never_overflows(scaling, dtype):
    """amax * (1 / scale) may exceed 448 by a rounding; torch <= 2.11 casts that to NaN unless it is clamped."""
    x = spread((300, 257), seed=5).abs().clamp(1e-4, 6e4).to(dtype)
    assert torch.isfinite(quantize(x, scaling).data.float()).all()
    huge = torch.full((2, 3), 3e38)
    q = quantize(huge, scaling)
    assert q.data.float().eq(448).all()
    torch.testing.assert_close(dequantize(q, scaling), huge)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("scaling", FP8)
@pytest.mark.parametrize("shape", [(0, 256), (0, 13), (7, 0), (0, 0)])
def test_empty(shape, scaling, transpose):
    q = quantize(torch.zeros(shape), scaling, transpose=transpose)
    rows, k = reversed(shape) if transpose else shape
    assert q.data.shape == (rows, k)
    assert dequantize(q, scaling).shape == (rows, k)
    if scaling is Scaling.TENSORWISE:
        assert q.scale.item() == pytest.approx(AMAX_FLOOR / 448)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("scaling", FP8)
def test_any_strides_give_packed_data(scaling, transpose):
    wide = spread((400, 600))
    views = {
        "sliced": wide[5:205, 7:307],
        "transposed": wide[:300, :200].t(),
        "every second": wide[::2, ::2],
        "one row": wide[3:4, :300],
        "one column": wide[:200, 3:4],
        "expanded": wide[:1, :300].expand(200, 300),
    }
    for name, view in views.items():
        q = quantize(view, scaling, transpose=transpose)
        expected = quantize(view.clone(memory_format=torch.contiguous_format), scaling, transpose=transpose)
        assert q.data.stride() == (q.data.shape[1], 1), name
        assert torch.equal(q.data.float(), expected.data.float()), name
        assert torch.equal(q.scale, expected.scale), name


def test_none_is_a_view():
    x = spread((4, 6), torch.bfloat16)
    q = quantize(x, Scaling.NONE, transpose=True)
    assert q.data.data_ptr() == x.data_ptr()
    assert torch.equal(dequantize(q, Scaling.NONE), x.t().float())


def test_bad_arguments_are_named():
    with pytest.raises(UnknownNameError, match="float16"):
        quantize(torch.ones(2, 2), Scaling.TENSORWISE, dtype=torch.float16)
    with pytest.raises(ConfigError, match="2-D"):
        quantize(torch.ones(2, 2, 2), Scaling.ROWWISE)
    for bound in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match="bound"):
            quantize(torch.ones(2, 2), Scaling.TENSORWISE, bound=bound)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("scaling", FP8)
def test_no_guard_on_symbolic_sizes(scaling, transpose):
    """But torch's own: a tensor with a size of ceil(s / 128) asks whether that is 1, for sizes 0 and 1 are special."""
    traced = make_fx(lambda x: dequantize(quantize(x, scaling, transpose=transpose), scaling), tracing_mode="symbolic")(
        torch.randn(200, 256)
    )
    guards = {str(guard.expr) for guard in traced.shape_env.guards}
    if scaling in (Scaling.TENSORWISE, Scaling.ROWWISE):
        assert not guards
    else:
        assert all("127)//128" in guard and guard.endswith((", 1)", "> 1", ">= 2")) for guard in guards), guards


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("scaling", FP8)
def test_one_graph_for_all_batches(scaling, transpose):
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(
        lambda x: tuple(quantize(x, scaling, transpose=transpose)), backend=counter, fullgraph=True, dynamic=True
    )
    for batch in (512, 199, 200, 1000):
        x = spread((batch, 256))
        data, scale = compiled(x)
        expected = quantize(x, scaling, transpose=transpose)
        assert torch.equal(scale, expected.scale)
        assert torch.equal(data.float(), expected.data.float())
    assert counter.frame_count == 1


def test_inductor_agrees_with_eager():
    def both(x):
        return [tuple(quantize(x, scaling, transpose=True)) for scaling in (Scaling.ROWWISE, Scaling.BLOCK_1X128)]

    torch._dynamo.reset()
    compiled = torch.compile(both, fullgraph=True)
    for batch in (200, 323):
        x = spread((batch, 256), torch.bfloat16)
        torch._dynamo.mark_dynamic(x, 0)
        for (data, scale), (expected, expected_scale) in zip(compiled(x), both(x), strict=True):
            assert data.is_contiguous()
            torch.testing.assert_close(scale, expected_scale, rtol=3e-7, atol=0)
            # One ulp of the scale can move a value across a rounding boundary, by one FP8 step.
            assert (data.float() == expected.float()).float().mean() > 0.999
            torch.testing.assert_close(data.float(), expected.float(), rtol=0.13, atol=2**-9)
