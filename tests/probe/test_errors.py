"""Error measures against plain numpy and scipy, and what happens at the edges."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from loka_compile.errors import ProbeError
from loka_compile.probe.errors import (
    Errors,
    Reference,
    confidence_interval,
    measure,
    pool,
    t_quantile,
)


def by_hand(out, ref):
    """Every measure written out in numpy, one formula per line."""
    shape = ref.shape
    out, ref = (np.asarray(x.to(torch.float64)).ravel() for x in (out, ref))
    diff = np.abs(out - ref)
    rms = np.sqrt(np.mean(ref**2))
    nonzero = ref != 0
    rows = ref.reshape(-1, shape[-1])
    row_floor = np.repeat(0.05 * np.sqrt(np.mean(rows**2, axis=1)), shape[-1])
    in_row = row_floor > 0
    return {
        "mere_floored": np.mean(diff / np.maximum(np.abs(ref), 0.05 * rms)),
        "mere_by_row": np.mean(diff[in_row] / np.maximum(np.abs(ref), row_floor)[in_row]),
        "mere": np.mean(diff[nonzero] / np.abs(ref[nonzero])),
        "frobenius": np.linalg.norm(diff) / np.linalg.norm(ref),
        "sqnr_db": 10 * np.log10(np.sum(ref**2) / np.sum(diff**2)),
        "max_error": diff.max(),
        "cosine": out @ ref / np.linalg.norm(out) / np.linalg.norm(ref),
        "elements": ref.size,
        "zero_refs": int((~nonzero).sum()),
    }


@pytest.mark.parametrize("shape", [(1, 1), (1, 13), (199, 384), (7, 3, 5)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_measures_equal_their_formulas(shape, dtype):
    torch.manual_seed(0)
    ref = torch.randn(shape, dtype=torch.float64)
    ref.view(-1)[1::7] = 0
    ref[5:6] = 0
    out = (ref + 0.05 * torch.randn(shape)).to(dtype)
    out[5:6] = 0
    found = measure(out, ref)._asdict()
    for name, value in by_hand(out, ref).items():
        assert found[name] == pytest.approx(value, rel=1e-9), name


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.floats(-12, 12), st.floats(-12, 0))
def test_measures_do_not_depend_on_the_unit(seed, exponent, noise):
    rng = torch.Generator().manual_seed(seed)
    ref = torch.randn(40, generator=rng, dtype=torch.float64)
    out = ref + 10**noise * torch.randn(40, generator=rng, dtype=torch.float64)
    scale = 2.0 ** round(exponent * 3)
    a, b = measure(out, ref), measure(out * scale, ref * scale)
    assert b.max_error == pytest.approx(a.max_error * scale)
    for name in ("mere_floored", "mere_by_row", "mere", "frobenius", "sqnr_db", "cosine"):
        assert getattr(b, name) == pytest.approx(getattr(a, name), rel=1e-9)


def test_floored_mere_is_steady_where_the_papers_form_is_not():
    """The finding behind the gate's metric: MERE of centred outputs moves with luck, the floored form does not."""
    torch.manual_seed(1)
    floored, plain = [], []
    for _ in range(30):
        ref = torch.randn(64, 64, dtype=torch.float64)
        found = measure(ref + 0.037 * torch.randn(64, 64), ref)
        floored.append(found.mere_floored)
        plain.append(found.mere)
    spread = [np.std(v) / np.mean(v) for v in (floored, plain)]
    assert spread[0] < 0.05
    assert spread[1] > 5 * spread[0]


def test_exact_result_has_no_error():
    ref = torch.tensor([[1.0, -2.0, 0.0]])
    assert measure(ref.clone(), ref) == Errors(0.0, 0.0, 0.0, 0.0, math.inf, 0.0, 1.0, 3, 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_element_makes_every_error_too_large(bad):
    ref = torch.randn(50, 50)
    out = ref.clone()
    out[17, 3] = bad
    found = measure(out, ref)
    assert found.mere_floored == found.mere_by_row == found.mere == found.frobenius == found.max_error == math.inf
    assert found.sqnr_db == -math.inf
    assert math.isnan(found.cosine)
    assert not found.mere_floored <= 1e300


def test_zero_references_are_left_out_of_the_papers_form_but_not_of_the_gate():
    ref = torch.tensor([0.0, 2.0])
    found = measure(torch.tensor([1.0, 2.0]), ref)
    assert found.mere == 0.0
    assert found.zero_refs == 1
    assert found.mere_floored == pytest.approx(0.5 * 1.0 / (0.05 * math.sqrt(2.0)))


def test_row_floor_shows_what_one_large_row_hides_from_the_gate():
    ref = torch.randn(64, 32)
    ref[10] *= 1e5
    out = ref.clone()
    out[torch.arange(64) != 10] = 0  # every other row is lost
    found = measure(out, ref)
    assert found.mere_floored < 0.01
    assert found.mere_by_row > 0.9


def test_result_where_a_row_should_be_zero():
    ref = torch.ones(2, 3)
    ref[1] = 0
    assert measure(ref.clone(), ref).mere_by_row == 0.0
    out = ref.clone()
    out[1, 2] = 1e-9
    assert measure(out, ref).mere_by_row == math.inf


def test_reference_of_zeros_alone():
    zeros = torch.zeros(3, 4)
    assert measure(zeros, zeros).mere_floored == 0.0
    assert measure(zeros, zeros).sqnr_db == math.inf
    off = measure(zeros + 1e-30, zeros)
    assert off.mere_floored == off.mere == off.frobenius == math.inf
    assert off.max_error == pytest.approx(1e-30)


def test_opposite_and_orthogonal_results():
    ref = torch.tensor([3.0, 4.0])
    assert measure(-ref, ref).cosine == pytest.approx(-1.0)
    assert measure(torch.tensor([-4.0, 3.0]), ref).cosine == pytest.approx(0.0, abs=1e-15)
    assert math.isnan(measure(torch.zeros(2), ref).cosine)
    assert measure(torch.zeros(2), ref).mere_floored == 1.0


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_extreme_magnitudes(size):
    ref = torch.tensor([1.0, -3.0]) * size
    assert measure(ref * 1.01, ref).mere_floored == pytest.approx(0.01, rel=1e-4)


def test_empty_result_measures_nothing():
    found = measure(torch.zeros(0, 5), torch.zeros(0, 5))
    assert math.isnan(found.mere_floored)
    assert found.elements == 0


def test_misuse_is_named():
    with pytest.raises(ProbeError, match=r"\(2, 3\) against a reference of \(3, 2\)"):
        measure(torch.zeros(2, 3), torch.zeros(3, 2))
    for bad in (math.nan, math.inf):
        with pytest.raises(ProbeError, match="NaN or Inf"):
            Reference(torch.tensor([1.0, bad]))
    with pytest.raises(ProbeError, match="no batch"):
        pool([])


def test_t_quantile_equals_scipys():
    for degrees in [*range(1, 60), 99, 1000, 10**6]:
        for probability in (0.6, 0.9, 0.95, 0.975, 0.995, 0.9995):
            assert t_quantile(probability, degrees) == pytest.approx(stats.t.ppf(probability, degrees), rel=5e-5)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=30))
def test_interval_equals_scipys(values):
    found = confidence_interval(values)
    if np.std(values) > 1e-12:  # scipy has no interval of width 0
        low, high = stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=stats.sem(values))
        # An end may be next to 0: what is as exact as the quantile is how far it is from the mean.
        half = pytest.approx((high - low) / 2, rel=1e-4, abs=1e-12)
        assert found.mean == pytest.approx(np.mean(values))
        assert found.high - found.mean == half
        assert found.mean - found.low == half


def test_an_interval_that_ends_next_to_0_equals_scipys():
    values = [0.5, 0.71875, 0.375, 0.0859375]
    low, _ = stats.t.interval(0.95, 3, loc=np.mean(values), scale=stats.sem(values))
    assert confidence_interval(values).low == pytest.approx(low, abs=1e-5 * np.mean(values))


def test_interval_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(0)
    hits = 0
    for values in rng.normal(3.0, 1.0, size=(2000, 4)):
        found = confidence_interval(list(values))
        hits += found.low <= 3.0 <= found.high
    assert 0.935 < hits / 2000 < 0.965


def test_interval_of_too_little():
    assert all(math.isnan(v) for v in confidence_interval([]))
    one = confidence_interval([0.1])
    assert one.mean == 0.1
    assert math.isnan(one.low)
    assert math.isnan(one.high)
    assert confidence_interval([0.1, math.inf]).mean == math.inf
    assert math.isnan(confidence_interval([0.1, math.inf]).high)
    assert math.isnan(confidence_interval([math.nan, 0.1]).mean)
    assert math.isnan(confidence_interval([math.inf, -math.inf]).mean)


def test_pool_averages_and_takes_the_largest_maximum():
    a = Errors(0.1, 0.2, 0.3, 0.03, 30.0, 0.5, 0.999, 10, 1)
    b = Errors(0.2, 0.4, 0.5, 0.05, 26.0, 0.2, 0.997, 20, 0)
    pooled, interval = pool([a, b])
    assert pooled == pytest.approx(Errors(0.15, 0.3, 0.4, 0.04, 28.0, 0.5, 0.998, 30, 1))
    assert interval.mean == pytest.approx(0.15)
    assert interval.high - interval.mean == pytest.approx(stats.t.ppf(0.975, 1) * 0.05, rel=1e-4)


def test_one_bad_batch_spoils_the_pool():
    good = measure(torch.ones(3) * 1.1, torch.ones(3))
    bad = measure(torch.tensor([1.0, math.nan, 1.0]), torch.ones(3))
    for batches in ([good, bad], [bad, good]):
        pooled, interval = pool(batches)
        assert pooled.mere_floored == interval.mean == pooled.max_error == math.inf
    empty = measure(torch.zeros(0), torch.zeros(0))
    assert math.isnan(pool([good, empty])[0].mere_floored)
    assert math.isnan(pool([good, empty])[0].max_error)
