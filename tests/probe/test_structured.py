"""The bounded forms of wide layers: what is exact, what is bounded, and that no K x K matrix is made."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from loka_compile.errors import ProbeError
from loka_compile.probe.activations import ActivationTracker
from loka_compile.probe.structured import BLOCK, RANK

FEATURES = 300  # two blocks of 128 and a short one


def low_rank_rows(rows: int, rank: int, noise: float, features: int = FEATURES) -> np.ndarray:
    """Rows that live near a ``rank``-dimensional plane, so that blocks are correlated with one another."""
    rng = np.random.default_rng(3)
    plane = rng.standard_normal((rank, features))
    return (rng.standard_normal((rows, rank)) @ plane + noise * rng.standard_normal((rows, features)) + 5.0).astype(
        np.float32
    )


def tracked(x: np.ndarray, form: str, batch: int = 100, dtype: torch.dtype = torch.float32) -> ActivationTracker:
    tracker = ActivationTracker(x.shape[1], form=form, dtype=dtype)
    for rows in torch.from_numpy(x).split(batch):
        tracker.update(rows)
    return tracker


def covariance_of(x: np.ndarray) -> np.ndarray:
    return np.cov(x.astype(np.float64), rowvar=False)


def block_mask(features: int = FEATURES) -> np.ndarray:
    block = np.arange(features) // BLOCK
    return block[:, None] == block[None, :]


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_diagonal_blocks_are_exact_and_the_rest_is_within_the_stated_bound(noise: float) -> None:
    x = low_rank_rows(1000, 20, noise)
    tracker = tracked(x, "blocks")
    want, got = covariance_of(x), tracker.covariance().numpy()
    scale = np.sqrt(np.outer(np.diag(want), np.diag(want)))
    same = block_mask()
    assert (np.abs(got - want) / scale)[same].max() < 1e-5
    units = tracker.units().numpy()  # the bound holds for the features as they are scaled
    got, want = got / np.outer(units, units), want / np.outer(units, units)
    scale = scale / np.outer(units, units)
    bound = float(tracker.scatter.shrunk) / 999
    missed = np.linalg.norm(got - want, 2)
    assert missed <= 2 * bound + 1e-4 * np.linalg.norm(want, 2)
    tail = np.linalg.eigvalsh(want)[:-20].sum() / (RANK - 20)  # what frequent directions promise
    assert bound <= tail * 1.01 + 1e-6 * np.linalg.norm(want, 2)
    if noise == 0:  # the sketch has room for the whole plane: correlations across blocks are kept too
        assert (np.abs(got - want) / scale).max() < 1e-4


def test_the_model_is_positive_definite_even_where_the_sketch_drops_most() -> None:
    rng = np.random.default_rng(4)
    x = rng.standard_normal((2000, FEATURES)).astype(np.float32)  # no low-rank structure at all
    tracker = tracked(x, "blocks")
    regular = tracker.regularised()
    assert torch.equal(regular, regular.mT)
    assert float(torch.linalg.eigvalsh(regular).min()) > 0
    want = covariance_of(x)
    assert np.abs(regular.numpy() - want)[block_mask()].max() < 1e-5 * 5


def test_the_diagonal_form_keeps_variances_only() -> None:
    x = low_rank_rows(500, 5, 1.0)
    tracker = tracked(x, "diagonal")
    want = np.var(x.astype(np.float64), axis=0, ddof=1)
    np.testing.assert_allclose(tracker.variances().numpy(), want, rtol=1e-5)
    np.testing.assert_allclose(tracker.covariance().numpy(), np.diag(want), rtol=1e-5)
    np.testing.assert_allclose(tracker.regularised().numpy(), np.diag(want) * (1 + 1e-6), rtol=1e-5)


@pytest.mark.parametrize("form", ["blocks", "diagonal"])
def test_merge_equals_one_tracker_in_what_is_exact(form: str) -> None:
    x = low_rank_rows(900, 20, 0.0)
    x[450:] += 3.0
    first, second = tracked(x[:450], form), tracked(x[450:], form)
    first.merge(second)
    want, scale = covariance_of(x), np.sqrt(np.outer(np.diag(covariance_of(x)), np.diag(covariance_of(x))))
    got = first.covariance().numpy()
    kept = block_mask() if form == "blocks" else np.eye(FEATURES, dtype=bool)
    assert (np.abs(got - want) / scale)[kept].max() < 1e-5
    if form == "blocks":
        assert (np.abs(got - want) / scale).max() < 1e-4  # rank 21 fits into the sketch


@pytest.mark.parametrize("form", ["blocks", "diagonal"])
def test_dead_and_huge_features_and_bad_rows_in_the_wide_forms(form: str) -> None:
    x = low_rank_rows(300, 10, 1.0)
    x[:, 7] = 0
    x[:, 200] = x[:, 200] / np.abs(x[:, 200]).max() * np.float32(3e38)
    x[13, 250] = math.nan
    tracker = tracked(x, form)
    clean = np.delete(x, 13, axis=0)
    assert (tracker.n, int(tracker.skipped)) == (299, 1)
    want = np.var(clean.astype(np.float64), axis=0, ddof=1)
    np.testing.assert_allclose(tracker.variances().numpy(), want, rtol=1e-5)
    drawn = tracker.factor().draw(50) * tracker.units()
    assert torch.isfinite(drawn).all()


def test_the_form_follows_the_limit_and_survives_a_state_round_trip() -> None:
    assert ActivationTracker(64, full_limit=64).form == "full"
    x = low_rank_rows(200, 5, 1.0)
    tracker = ActivationTracker(FEATURES, full_limit=FEATURES - 1)
    tracker.update(torch.from_numpy(x[:100]))
    again = ActivationTracker.from_state(tracker.state())
    assert again.form == tracker.form == "blocks"
    for t in (tracker, again):
        t.update(torch.from_numpy(x[100:]))
    assert torch.equal(again.covariance(), tracker.covariance())


def test_123200_features_fit_into_the_stated_memory() -> None:
    wide = 123_200
    tracker = ActivationTracker(wide)
    rng = torch.Generator().manual_seed(5)
    common = torch.randn(24, 1, generator=rng)
    rows = common + torch.randn(24, wide, generator=rng)
    tracker.update(rows)
    blocks = -(-wide // BLOCK)
    assert tracker.form == "blocks"
    stated = blocks * BLOCK * BLOCK * 4 + RANK * wide * 4 + wide * (8 + 4 + 4)
    assert stated <= tracker.nbytes <= stated + 64
    assert tracker.nbytes < 97e6
    torch.testing.assert_close(tracker.variances(), rows.double().var(0), rtol=1e-5, atol=0)
    drawn = tracker.factor().draw(2, torch.Generator().manual_seed(0))
    assert drawn.shape == (2, wide)
    with pytest.raises(ProbeError, match=r"would take 121 GB"):
        tracker.covariance()
