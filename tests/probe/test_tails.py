"""Moments against scipy, and tail quantiles against the sorted values."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import scipy.stats
import torch

from loka_compile.errors import ProbeError
from loka_compile.probe import tails
from loka_compile.probe.tails import Moments, TailSketch


def heavy(rows: int, features: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_t(5, (rows, features)) * 3 + 50).astype(np.float32)


def moments_of(x: np.ndarray, sizes: list[int]) -> Moments:
    out, start = Moments(x.shape[1]), 0
    for size in sizes:
        rows = torch.from_numpy(x[start : start + size])
        out.update(rows, torch.isfinite(rows).all(1))
        start += size
    assert start == len(x)
    return out


@pytest.mark.parametrize("features", [1, 13, 199])
def test_moments_equal_scipys_whatever_the_batches(features: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tails, "_CHUNK", 5000)  # wide batches are taken in parts
    x = heavy(700, features)
    got, wide = moments_of(x, [1, 199, 0, 500]), x.astype(np.float64)
    assert int(got.count) == 700
    np.testing.assert_allclose(got.mean().numpy(), wide.mean(0), rtol=1e-10)
    np.testing.assert_allclose(got.kurtosis().numpy(), scipy.stats.kurtosis(wide, fisher=False), rtol=1e-9)
    np.testing.assert_allclose(got.skewness().numpy(), scipy.stats.skew(wide), rtol=1e-8, atol=1e-9)
    assert torch.equal(got.amax, torch.from_numpy(np.abs(x).max(0)))


def test_merge_is_exact() -> None:
    x = heavy(500, 4)
    first, second = moments_of(x[:123], [123]), moments_of(x[123:], [377])
    first.merge(second)
    first.merge(Moments(4))
    empty = Moments(4)
    empty.merge(first)
    for got in (first, empty):
        np.testing.assert_allclose(got.kurtosis().numpy(), scipy.stats.kurtosis(x.astype(np.float64), fisher=False))
        assert int(got.count) == 500


def test_degenerate_features_are_finite() -> None:
    x = np.zeros((20, 4), np.float32)
    x[:, 1] = 1e4
    x[:, 2] = np.linspace(-3.2e38, 3.2e38, 20)
    x[:, 3] = np.linspace(0, 1e-30, 20)
    got = moments_of(x, [1, 7, 12])
    assert torch.isfinite(got.sums).all()
    want = scipy.stats.kurtosis(np.linspace(-1, 1, 20), fisher=False)
    np.testing.assert_allclose(got.kurtosis().numpy(), [3.0, 3.0, want, want], rtol=1e-6)
    np.testing.assert_allclose(got.skewness().numpy(), 0, atol=1e-6)
    assert got.amax.tolist() == [0.0, 1e4, np.float32(3.2e38), np.float32(1e-30)]


def test_masked_rows_do_not_count() -> None:
    x = heavy(50, 3)
    dirty = np.insert(x, 7, np.float32(np.inf), axis=0)
    dirty[7, 0] = np.nan
    got = moments_of(dirty, [20, 31])
    assert int(got.count) == 50
    np.testing.assert_allclose(got.kurtosis().numpy(), scipy.stats.kurtosis(x.astype(np.float64), fisher=False))


def test_moments_survive_a_state_round_trip() -> None:
    x = heavy(60, 3)
    again = Moments.from_state(moments_of(x[:30], [30]).state())
    rows = torch.from_numpy(x[30:])
    again.update(rows, torch.ones(30, dtype=torch.bool))
    assert torch.equal(again.sums, moments_of(x, [30, 30]).sums)


def rank_error(values: np.ndarray, got: float, q: float) -> float:
    """How far the returned value's rank is off, as part of the mass beyond the quantile."""
    rank = np.searchsorted(np.sort(values), got) / len(values)
    return abs(rank - q) / (1 - q)


@pytest.mark.parametrize("q", [0.5, 0.9, 0.99, 0.999, 0.9999])
def test_tail_quantiles_of_heavy_tails(q: float) -> None:
    x = np.random.default_rng(1).standard_t(3, (4000, 40)).astype(np.float32)
    sketch = TailSketch(40)
    for rows in np.array_split(x, 50):
        sketch.update(torch.from_numpy(rows))
    assert rank_error(np.abs(x).ravel(), sketch.site_quantile(q), q) < 0.1
    if q < 0.999:
        for group, got in enumerate(sketch.quantile(q)):
            assert rank_error(np.abs(x[:, group * 2 : group * 2 + 2]).ravel(), float(got), q) < 0.15


def test_granularity_is_bounded_and_falls_on_blocks_of_128() -> None:
    assert (TailSketch(32).group, len(TailSketch(32).sketches)) == (1, 32)
    assert TailSketch(33).group == 2
    assert (TailSketch(4096).group, len(TailSketch(4096).sketches)) == (128, 32)
    assert TailSketch(7680).group == 256
    wide = TailSketch(123_200)
    assert wide.group % 128 == 0
    assert len(wide.sketches) <= 32
    assert TailSketch(300).feature_quantile(0.9).shape == (300,)


def test_sketches_merge_and_survive_a_state_round_trip() -> None:
    x = np.random.default_rng(2).standard_t(3, (6000, 2)).astype(np.float32)
    first, second = TailSketch(2), TailSketch(2)
    first.update(torch.from_numpy(x[:1000]))
    second.update(torch.from_numpy(x[1000:]))
    again = TailSketch.from_state(first.state())
    assert np.array_equal(again.quantile(0.99), first.quantile(0.99))
    again.merge(second)
    for feature in range(2):
        assert rank_error(np.abs(x[:, feature]), float(again.quantile(0.99)[feature]), 0.99) < 0.1
    assert again.nbytes < 2 * 25_000


def test_an_empty_sketch_has_no_quantile() -> None:
    assert np.isnan(TailSketch(5).quantile(0.9)).all()
    assert np.isnan(TailSketch(5).site_quantile(0.9))


def test_without_the_package_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasketches", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not tails.sketches_available()
    with pytest.raises(ProbeError, match="pip install datasketches"):
        TailSketch(4)
