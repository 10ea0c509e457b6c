"""Cost tables and the latency model: exact, monotone, continuous, and honest about what was not measured."""

import csv
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from loka_compile.costs import CostTable, target_of_device_name
from loka_compile.costs.file import parse
from loka_compile.costs.padded import padded_latency
from loka_compile.costs.surface import fit_relative
from loka_compile.errors import UnknownNameError
from loka_compile.gemm import (
    BLOCKWISE,
    ROWWISE,
    ROWWISE_FAST,
    TENSORWISE,
    TENSORWISE_FAST,
    Gemm,
    Recipe,
    Role,
    Scaling,
)
from loka_compile.lowering.providers import get_provider

#: Seven shapes of seven candidates, forward only, B not quantised: so little that every rule of estimation is needed.
SEVEN = Path(__file__).parent / "data" / "seven_shapes.csv"
H200 = CostTable.from_csv(SEVEN, "h200")
CANDIDATES = H200.candidates()
SHAPES = [
    (2048, 768, 256), (1024, 512, 512), (1024, 256, 7680), (4096, 1024, 1024), (4096, 2048, 2048), (4096, 4096, 2048),
    (4096, 7680, 4096),
]  # fmt: skip


def gemm(m, n, k, role=Role.FORWARD, **more):
    return Gemm("s#0", role, m, n, k, **more)


def lines_of_the_file():
    return list(csv.DictReader(line for line in SEVEN.read_text().splitlines() if not line.startswith("#")))


def test_measured_points_come_back_exactly():
    seen = 0
    for line in lines_of_the_file():
        g = gemm(*(int(line[c]) for c in "mnk"))
        latency = H200.latency(g, line["provider"], line["recipe"])
        assert latency.gemm_us == float(line["gemm_us"])
        assert latency.measured
        assert H200.baseline(g) == float(line["baseline_us"])
        assert H200.latency(g, "high_precision", "native").total_us == float(line["baseline_us"])
        seen += 1
    assert seen == 49
    # Spot checks against the source of the figures, not against the file.
    assert H200.baseline(gemm(4096, 7680, 4096)) == 385.0
    assert H200.latency(gemm(4096, 4096, 2048), "fbgemm", "rowwise_fast").gemm_us == 58.4
    assert H200.latency(gemm(1024, 256, 7680), "torch", "blockwise").gemm_us == 22.8
    assert H200.latency(gemm(1024, 256, 7680), "torch", "blockwise").quantize_a_us == 38.2
    assert H200.latency(gemm(1024, 512, 512), "torch", "tensorwise_fast").quantize_a_us == 4.8
    # [4096, 2048] was measured twice, at 9.2 and 9.3.
    assert H200.latency(gemm(4096, 2048, 2048), "torch", "rowwise").quantize_a_us == pytest.approx(9.25)


def test_model_misses_its_own_points_by_little():
    """The fitted model alone, before the correction: within 25 % but for one point (DeepGEMM at 4096x1024x1024)."""
    misses = {}
    for provider, recipe in [*CANDIDATES, ("high_precision", "native")]:
        role = "forward" if provider == "high_precision" else ""
        surface = H200.gemms[(provider, recipe, role, "bfloat16", False)]
        for shape, time in surface.points.items():
            misses[(provider, shape, recipe)] = abs(math.log(surface.model(shape) / time))
    outlier = misses.pop(("deepgemm", (4096, 1024, 1024), "blockwise"))
    assert max(misses.values()) < math.log(1.25)
    assert outlier > 0.4


def test_coefficients_are_the_least_squares_optimum():
    for key, surface in H200.gemms.items():
        width = 2 if key[0] == "high_precision" else 1
        matrix = np.array(
            [[1, k, 2e-6 * m * n * k, 1e-6 * (width * (m * k + n * k) + 2 * m * n)] for m, n, k in surface.points]
        )
        times = np.array(list(surface.points.values()))
        expected, _ = nnls(matrix / times[:, None], np.ones(len(times)))
        np.testing.assert_allclose(surface.coefficients, expected, rtol=1e-6, atol=1e-9)
        assert (surface.coefficients >= 0).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(4, 12))
def test_fit_equals_scipys_nnls(seed, points):
    rng = np.random.default_rng(seed)
    matrix = np.exp(rng.normal(size=(points, 4)) * 3)
    times = np.exp(rng.normal(size=points) * 2)
    ours = fit_relative(matrix, times)
    expected, _ = nnls(matrix / times[:, None], np.ones(points))

    def loss(c):
        return float(np.sum((matrix @ c / times - 1) ** 2))

    assert loss(ours) == pytest.approx(loss(expected), rel=1e-6, abs=1e-9)


size = st.integers(1, 200_000) | st.sampled_from([1, 8, 13, 128, 199, 256, 384, 512, 1024, 2048, 4096, 7680, 123_200])
dims = st.tuples(size, size, size) | st.sampled_from(SHAPES)
role_of = st.sampled_from(list(Role))


@settings(max_examples=200, deadline=None)
@given(dims, dims, st.sampled_from([*H200.gemms.values(), *H200.quantizers.values()]))
def test_the_model_of_a_larger_shape_is_never_faster(one, other, surface):
    """The model alone; measurements are not always so, and the correction follows them."""
    width = len(next(iter(surface.points)))
    small = tuple(map(min, one, other))[:width]
    large = tuple(map(max, one, other))[:width]
    assert surface.model(small) <= surface.model(large) * (1 + 1e-12)


@settings(max_examples=200, deadline=None)
@given(dims, st.integers(0, 2), role_of, st.sampled_from(CANDIDATES))
def test_no_jumps(shape, axis, role, candidate):
    """One more row (column, ...) of a large shape changes the time by about its share of the work, not by a step."""
    shape = tuple(max(s, 64) for s in shape)
    more = tuple(s + 1 if d == axis else s for d, s in enumerate(shape))
    if shape in SHAPES or more in SHAPES:
        return  # a measurement stands beside the smooth surface
    a, b = (H200.latency(gemm(*s, role), *candidate) for s in (shape, more))
    if a.comparable == b.comparable:  # at the border of what was measured the advantage ends
        assert abs(b.gemm_us / a.gemm_us - 1) <= 5.0 / shape[axis]


@settings(max_examples=200, deadline=None)
@given(dims, role_of, st.sampled_from(CANDIDATES))
def test_times_are_finite_positive_and_obey_the_memory(shape, role, candidate):
    latency = H200.latency(gemm(*shape, role), *candidate)
    m, n, k = shape
    assert math.isfinite(latency.total_us)
    assert latency.gemm_us > 1.0  # no kernel was ever seen to start in less
    if shape not in SHAPES:
        # 4.8 TB/s is what the memory can do; measured points and the growth from them may be better by caches.
        slack = 2.0
        assert latency.gemm_us * slack >= (m * k + n * k + 2 * m * n) / 4.8e6


def test_speedups_are_sane_far_from_the_points():
    # A square GEMM that is larger than everything measured: FP8 is about twice as fast as bf16.
    g = gemm(8192, 8192, 8192)
    ratio = H200.baseline(g) / H200.latency(g, "torch", "tensorwise_fast").gemm_us
    assert 1.5 < ratio < 2.2
    # A tiny one: nothing to win, quantisation only costs.
    g = gemm(64, 64, 64)
    assert all(H200.baseline(g) / H200.latency(g, *c).total_us < 1 for c in CANDIDATES)


@pytest.mark.parametrize("shape", [(0, 64, 64), (64, 0, 64), (64, 64, 0), (1, 1, 1)])
def test_empty_and_smallest_shapes_cost_a_launch(shape):
    assert 1.0 < H200.latency(gemm(*shape), "torch", "rowwise").gemm_us < 6.0


def test_never_measured_is_none():
    g = gemm(4096, 2048, 2048)
    assert H200.latency(g, "fbgemm", "rowwise") is None
    assert H200.latency(g, "nobody", "rowwise") is None
    assert H200.latency(g, "torch", "no_such_recipe") is None
    assert H200.latency(g, "torch", "blockwise_1x128") is None


def test_unmeasured_neighbour_is_marked_so():
    assert H200.latency(gemm(4096, 2048, 2048), "torch", "rowwise").measured
    assert not H200.latency(gemm(4096, 2048, 2047), "torch", "rowwise").measured
    assert not H200.latency(gemm(4096, 2048, 2048, dtype="float32"), "torch", "rowwise").measured


def test_recipe_object_and_name_agree_and_a_new_recipe_uses_its_scalings():
    g = gemm(4096, 2048, 1792)
    assert H200.latency(g, "torch", ROWWISE_FAST) == H200.latency(g, "torch", "rowwise_fast")
    mine = Recipe("rowwise", Scaling.TENSORWISE, Scaling.TENSORWISE)
    assert H200.latency(g, "torch", mine).quantize_a_us == H200.latency(g, "torch", TENSORWISE).quantize_a_us


def test_bound_makes_tensorwise_free_and_nothing_else():
    shape = (4096, 2048, 2048)
    plain, bounded = gemm(*shape), gemm(*shape, a_bound=16.0)
    for recipe in (TENSORWISE, TENSORWISE_FAST):
        assert H200.latency(bounded, "torch", recipe).quantize_a_us == 0.0
        assert H200.latency(bounded, "torch", recipe).quantize_b_us > 0.0
        both = gemm(*shape, a_bound=16.0, b_bound=1.0)
        assert H200.latency(both, "torch", recipe).quantize_us == 0.0
    # Row and block scales need an amax all the same.
    for recipe in (ROWWISE, BLOCKWISE):
        assert H200.latency(bounded, "torch", recipe) == H200.latency(plain, "torch", recipe)


def test_bounded_operand_pays_for_its_transpose():
    free = H200.latency(gemm(2048, 2048, 4096, Role.GRAD_WEIGHT, b_bound=16.0), "torch", TENSORWISE)
    paid = H200.latency(gemm(2048, 2048, 4096, Role.GRAD_WEIGHT), "torch", TENSORWISE)
    assert 0 < free.quantize_b_us < paid.quantize_b_us


def test_transposed_operands_cost_more():
    for recipe in ("tensorwise", "rowwise", "blockwise"):
        forward = H200.latency(gemm(2048, 2048, 2048), "torch", recipe)
        grad_input = H200.latency(gemm(2048, 2048, 2048, Role.GRAD_INPUT), "torch", recipe)
        grad_weight = H200.latency(gemm(2048, 2048, 2048, Role.GRAD_WEIGHT), "torch", recipe)
        assert forward.gemm_us == grad_input.gemm_us == grad_weight.gemm_us
        assert forward.quantize_a_us == grad_input.quantize_a_us < grad_weight.quantize_a_us
        assert forward.quantize_b_us < grad_input.quantize_b_us == grad_weight.quantize_b_us
        # At least the bytes: one read and one write of 4 MiB at 4.8 TB/s.
        assert grad_input.quantize_b_us - forward.quantize_b_us >= 2 * 2048**2 / 4.8e6


def test_transposed_operand_is_looked_up_as_it_is_stored():
    # A of grad_weight is dy.T [N, M], stored as [M, N] = [1024, 7680]: the shape with the 38.2 us outlier.
    grad_weight = H200.latency(gemm(7680, 512, 1024, Role.GRAD_WEIGHT), "torch", "blockwise")
    assert grad_weight.quantize_a_us > 38.2
    assert H200.latency(gemm(7680, 512, 1024), "torch", "blockwise").quantize_a_us < 38.2


def test_fp32_sites_are_slower_in_the_baseline_and_in_reading():
    half, full = (gemm(4096, 2048, 2048, dtype=d) for d in ("bfloat16", "float32"))
    assert H200.baseline(gemm(4096, 2048, 2048, dtype="float16")) == H200.baseline(half)
    assert 1.8 < H200.baseline(full) / H200.baseline(half) < 2.1
    for candidate in CANDIDATES:
        a, b = (H200.latency(g, *candidate) for g in (half, full))
        assert a.quantize_a_us < b.quantize_a_us < 2 * a.quantize_a_us + 1
        assert a.gemm_us < b.gemm_us < 1.5 * a.gemm_us  # a wider output, nothing else


def test_targets_and_device_names():
    assert "h200" in CostTable.targets()
    assert CostTable.load("h200") is CostTable.load("h200")
    with pytest.raises(UnknownNameError, match=r"unknown target 'tpu'.*h200"):
        CostTable.load("tpu")
    with pytest.raises(UnknownNameError):
        CostTable.load("../h200")
    assert target_of_device_name("NVIDIA H200") == "h200"
    assert target_of_device_name("NVIDIA H200 NVL") == "h200"
    for other in ("NVIDIA H100 80GB HBM3", "NVIDIA GH200 480GB", "NVIDIA H200 MIG 1g.18gb", "cpu", ""):
        assert target_of_device_name(other) is None


# --- never in favour of FP8 beyond what was measured ---


@pytest.mark.parametrize(
    "beyond",
    [
        gemm(16, 8, 131_072, Role.GRAD_WEIGHT),  # a token mixing layer
        gemm(8, 16, 131_072, Role.GRAD_WEIGHT),
        gemm(131_072, 8, 16),
        gemm(4096, 1, 64),
        gemm(4096, 64, 64),
        gemm(4096, 4096, 16),
        gemm(1, 4096, 4096),
        gemm(1, 1024, 1024, dtype="float32"),
        gemm(10**6, 4096, 4096),
        gemm(4096, 4096, 10**6, a_bound=16.0, b_bound=1.0),
        gemm(16, 16, 16, a_fused=True, b_fused=True),
        gemm(64, 64, 64, dtype="float32", norm="epilogue"),
    ],
    ids=str,
)
def test_without_a_comparable_measured_shape_fp8_is_never_faster(beyond):
    for table in (H200, generous()):
        for candidate in table.candidates():
            latency = table.latency(beyond, *candidate)
            assert not latency.comparable
            assert table.baseline(beyond) / latency.total_us <= 1.0
            # Not even with quantisation for free, as when another GEMM pays for it.
            assert latency.gemm_us >= table.baseline(beyond)


def generous():
    """A table in which FP8 takes half the time at every measured shape, and quantising takes next to none."""
    lines = [
        f"{m},{n},{k},forward,bfloat16,lib,tensorwise,0.01,0.01,{(4 + 1e-9 * m * n * k) / 2},{4 + 1e-9 * m * n * k}"
        for m, n, k in SHAPES
    ]
    columns = "m,n,k,role,dtype,provider,recipe,quantize_a_us,quantize_b_us,gemm_us,baseline_us"
    return CostTable("generous", *parse("\n".join([columns, *lines]), "generous"))


def test_near_a_measured_shape_the_advantage_is_kept():
    for near in ((4096, 2048, 2048), (4000, 2048, 2176), (2048, 1024, 1024), (8192, 8192, 4096)):
        latency = generous().latency(gemm(*near), "lib", "tensorwise")
        assert latency.comparable
        assert generous().baseline(gemm(*near)) / latency.total_us > 1.5


def test_a_norm_behind_the_gemm():
    """In the epilogue it is free; apart from the GEMM it is a launch, and the result written and read again."""
    table = CostTable.load("h200")
    extra = table.moving_us(2 * 4096 * 1024 * 2)
    assert extra > 3.5  # 17 MB at 4.8 TB/s alone

    def cost(norm, provider, recipe, dtype="bfloat16"):
        bare, with_norm = (
            table.latency(Gemm("s#0", Role.FORWARD, 4096, 1024, 1024, dtype, norm=n), provider, recipe).gemm_us
            for n in ("", norm)
        )
        return with_norm - bare

    assert cost("epilogue", "torch", "tensorwise_fast") == 0
    assert cost("epilogue", "torch", "rowwise") == 0
    assert cost("epilogue", "high_precision", "native") == 0
    for provider, recipe in (("torch", "blockwise"), ("fbgemm", "rowwise_fast")):
        assert cost("epilogue", provider, recipe) == pytest.approx(extra)
    for provider, recipe in (("torch", "tensorwise_fast"), ("high_precision", "native")):
        assert cost("apart", provider, recipe) == pytest.approx(extra)
    # fp32 has no fused kernel in high precision; its FP8 GEMM has.
    wide = table.moving_us(2 * 4096 * 1024 * 4)
    assert cost("epilogue", "high_precision", "native", "float32") == pytest.approx(wide)
    assert cost("epilogue", "torch", "tensorwise_fast", "float32") == pytest.approx(0, abs=1e-9)


def test_a_padded_result_is_cut_before_the_norm():
    provider = get_provider("torch")
    recipe = provider.recipes["tensorwise"]
    whole = Gemm("s#0", Role.FORWARD, 4096, 1024, 13, norm="epilogue")
    assert provider.padded(whole, recipe).norm == "epilogue"  # only the contraction is padded
    assert provider.padded(replace(whole, n=1000 + 3), recipe).norm == "apart"
    assert provider.padded(replace(whole, n=1000 + 3, norm=""), recipe).norm == ""


def test_a_padded_gemm_is_no_faster_than_the_unpadded_baseline_where_nothing_comparable_was_measured():
    """8192x512x13 is padded to k = 16, of which no kernel was measured; nor may the cut of a result be free."""
    shipped = CostTable.load("h200")
    torch, triton = get_provider("torch"), get_provider("triton")
    narrow = gemm(8192, 512, 13)
    found = padded_latency(shipped, narrow, torch, torch.recipe("rowwise_fast"))
    assert not found.comparable
    assert found.gemm_us == shipped.baseline(narrow) > shipped.baseline(gemm(8192, 512, 16))
    wide = gemm(8192, 1024, 512)
    assert padded_latency(shipped, wide, torch, torch.recipe("rowwise")) == shipped.latency(wide, "torch", "rowwise")
    # k is padded by both, n by torch alone.
    odd, even = gemm(8192, 479, 1019), gemm(8192, 480, 1024)
    cut = padded_latency(shipped, odd, torch, torch.recipe("rowwise")).gemm_us
    assert cut == pytest.approx(
        shipped.latency(even, "torch", "rowwise").gemm_us + shipped.moving_us(2 * 2 * 8192 * 479), rel=1e-9
    )
    whole = padded_latency(shipped, odd, triton, triton.recipe("rowwise")).gemm_us
    assert whole == shipped.latency(gemm(8192, 479, 1024), "triton", "rowwise").gemm_us
