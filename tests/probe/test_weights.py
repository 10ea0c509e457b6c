"""The matrix-normal model of a weight, against the paper's equations written out in numpy."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import scipy.linalg
import torch

from loka_compile.errors import ProbeError
from loka_compile.probe import weights
from loka_compile.probe.weights import WeightTracker

EPS = 1e-6


def cholesky(a: np.ndarray) -> np.ndarray:
    return np.linalg.cholesky(a + EPS * np.trace(a) / len(a) * np.eye(len(a)))


def paper(ws: list[np.ndarray], momentum: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """M, U, V after all of ``ws``: explicit triangular solves, symmetrisation, trace normalisation, in fp64."""
    rows, columns = ws[0].shape
    mean, u, v = ws[0].copy(), np.eye(rows), None
    for w in ws[1:]:
        wc = w - mean
        mean = momentum * mean + (1 - momentum) * w
        if v is None:
            v = np.mean(wc**2) * np.eye(columns)
        tilde = scipy.linalg.solve_triangular(cholesky(v), wc.T, lower=True).T
        hat = scipy.linalg.solve_triangular(cholesky(u), wc, lower=True)
        sides = []
        for old, new in ((u, tilde @ tilde.T / columns), (v, hat.T @ hat / rows)):
            mixed = momentum * old + (1 - momentum) * new
            mixed = (mixed + mixed.T) / 2
            sides.append(mixed + EPS * np.trace(mixed) / len(mixed) * np.eye(len(mixed)))
        u, v = sides
        scale = np.trace(u) / rows
        u, v = u / scale, v * scale
    return mean, u, v


def matrix_normal(rows: int, columns: int, count: int, seed: int = 0) -> Iterator[np.ndarray]:
    """Weights around a fixed mean with correlated rows and columns."""
    rng = np.random.default_rng(seed)
    mean = rng.standard_normal((rows, columns))
    left, right = (rng.standard_normal((n, n)) * 0.05 + 0.1 * np.diag(rng.uniform(0.5, 2, n)) for n in (rows, columns))
    for _ in range(count):
        yield mean + left @ rng.standard_normal((rows, columns)) @ right.T


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("rows", "columns"), [(8, 13), (13, 8), (1, 5), (5, 1), (40, 40)])
@pytest.mark.parametrize("momentum", [0.9, 0.99])
def test_the_papers_equations(rows: int, columns: int, momentum: float, dtype: torch.dtype) -> None:
    tolerance = 1e-5 if dtype is torch.float32 else 1e-10
    if 1 in (rows, columns) and dtype is torch.float32:
        tolerance = 1e-3  # one side has rank one: its factor loses a thousandth in any fp32 arithmetic
    ws = [w.astype(np.float32).astype(np.float64) for w in matrix_normal(rows, columns, 30)]
    tracker = WeightTracker(rows, columns, momentum=momentum, dtype=dtype)
    for w in ws:
        assert tracker.update(torch.from_numpy(w))
    mean, u, v = paper(ws, momentum)
    np.testing.assert_allclose(tracker.mean().numpy(), mean, atol=tolerance * np.abs(mean).max())
    np.testing.assert_allclose(tracker.row_covariance().numpy(), u, atol=tolerance * np.abs(u).max())
    np.testing.assert_allclose(tracker.column_covariance().numpy(), v, atol=tolerance * np.abs(v).max())
    assert float(tracker.row_covariance().trace()) == pytest.approx(rows, rel=tolerance)


def correlation(a: np.ndarray) -> np.ndarray:
    return a / np.sqrt(np.outer(np.diag(a), np.diag(a)))


def test_row_and_column_correlations_of_a_matrix_normal_source_are_found() -> None:
    rows, columns, count = 12, 20, 1500
    ws = np.stack(list(matrix_normal(rows, columns, count, seed=3)))
    tracker = WeightTracker(rows, columns, momentum=0.99)
    for w in ws:
        tracker.update(torch.from_numpy(w))
    rng = np.random.default_rng(3)
    rng.standard_normal((rows, columns))
    left, right = (rng.standard_normal((n, n)) * 0.05 + 0.1 * np.diag(rng.uniform(0.5, 2, n)) for n in (rows, columns))
    # A moving average over about 2/(1-m) = 200 weights: standard errors of 1/sqrt(200 * other side), five of them.
    u, v = tracker.row_covariance().numpy(), tracker.column_covariance().numpy()
    assert np.abs(correlation(u) - correlation(left @ left.T)).max() < 5 / math.sqrt(200 * columns)
    assert np.abs(correlation(v) - correlation(right @ right.T)).max() < 5 / math.sqrt(200 * rows)
    total = np.trace(left @ left.T) * np.trace(right @ right.T)
    assert np.trace(u) * np.trace(v) == pytest.approx(total, rel=0.1)


def test_a_short_side_inflates_the_other() -> None:
    """What the documentation says of the paper's flip-flop: V is right for square weights, too large for flat ones."""
    g = torch.Generator().manual_seed(0)
    inflation = []
    for rows in (64, 16, 1):
        tracker = WeightTracker(rows, 64, momentum=0.9)
        for _ in range(100):
            tracker.update(torch.randn(rows, 64, generator=g))
        inflation.append(float(tracker.column_covariance().diagonal().mean()))
    assert inflation[0] == pytest.approx(1.0, rel=0.2)
    assert inflation[0] < inflation[1] < inflation[2] < 10
    assert inflation[2] > 2


def test_draws_have_the_models_row_and_column_covariance() -> None:
    rows, columns, draws = 6, 9, 4000
    tracker = WeightTracker(rows, columns)
    for w in matrix_normal(rows, columns, 50):
        tracker.update(torch.from_numpy(w))
    generator = torch.Generator().manual_seed(1)
    drawn = torch.stack([tracker.draw(generator).double() for _ in range(draws)]) - tracker.mean()
    u, v = tracker.row_covariance(), tracker.column_covariance()
    se = 5 / math.sqrt(draws)  # entries of vec's covariance, in units of the two standard deviations
    assert (drawn.mean(0) / (u.diagonal()[:, None] * v.diagonal()).sqrt()).abs().max() < se
    got = torch.einsum("dij,dkl->ikjl", drawn, drawn) / draws
    want = u[:, :, None, None] * v
    deviation = (u.diagonal()[:, None, None, None] * u.diagonal()[None, :, None, None]).sqrt() * (
        v.diagonal()[:, None] * v.diagonal()
    ).sqrt()
    assert ((got - want) / deviation).abs().max() < 1.5 * se


def test_a_weight_that_does_not_move_gives_itself() -> None:
    w = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    tracker = WeightTracker(5, 7)
    for _ in range(3):
        tracker.update(w)
    torch.testing.assert_close(tracker.draw(), w, rtol=0, atol=1e-8)
    for covariance in (tracker.row_covariance(), tracker.column_covariance()):
        torch.linalg.cholesky(covariance)


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1.0, 2e38])
def test_any_magnitude_gives_finite_positive_definite_sides(scale: float) -> None:
    tracker = WeightTracker(4, 6)
    for w in matrix_normal(4, 6, 20):
        tracker.update(torch.from_numpy(w / 3 * scale).float().clamp(-3e38, 3e38))
    tracker.update(torch.zeros(4, 6))
    for side in (tracker.u, tracker.v):
        assert torch.isfinite(side.blocks).all()
        torch.linalg.cholesky(side.dense() / side.dense().diagonal().mean())
    generator = torch.Generator().manual_seed(0)
    assert all(torch.isfinite(tracker.draw(generator)).all() for _ in range(20))


def test_a_weight_that_grows_beyond_its_scale() -> None:
    ws = [w * 10.0**i for i, w in enumerate(matrix_normal(3, 4, 8))]
    tracker = WeightTracker(3, 4, momentum=0.9)
    for w in ws:
        tracker.update(torch.from_numpy(w).float())
    mean, u, v = paper(ws, 0.9)
    np.testing.assert_allclose(tracker.mean().numpy(), mean, rtol=1e-4, atol=1e-5 * np.abs(mean).max())
    np.testing.assert_allclose(tracker.row_covariance().numpy(), u, atol=1e-2)
    np.testing.assert_allclose(tracker.column_covariance().numpy(), v, atol=1e-2 * np.abs(v).max())


def test_a_weight_with_a_nan_is_skipped_and_counted() -> None:
    tracker, clean = WeightTracker(3, 4), WeightTracker(3, 4)
    for index, w in enumerate(matrix_normal(3, 4, 6)):
        good = torch.from_numpy(w)
        clean.update(good)
        tracker.update(good)
        if index == 2:
            bad = good.clone()
            bad[1, 1] = math.nan
            assert not tracker.update(bad)
    assert (tracker.updates, tracker.skipped) == (6, 1)
    assert torch.equal(tracker.column_covariance(), clean.column_covariance())


def test_long_sides_are_block_diagonal() -> None:
    rows, columns = 5, 300
    tracker = WeightTracker(rows, columns, full_limit=299)
    full = WeightTracker(rows, columns)
    for w in matrix_normal(rows, columns, 5):
        tracker.update(torch.from_numpy(w))
        full.update(torch.from_numpy(w))
    v = tracker.column_covariance()
    assert torch.equal(v[:128, 128:], torch.zeros(128, 172, dtype=torch.float64))
    assert v[:128, :128].abs().min() > 0
    assert tracker.v.blocks.shape == (3, 128, 128)
    assert tracker.row_covariance().shape == (rows, rows)
    drawn = torch.stack([tracker.draw() for _ in range(200)])
    torch.testing.assert_close(drawn.mean(0).double(), tracker.mean(), rtol=0, atol=0.2)


def test_one_flip_flop_step_of_a_block_diagonal_side_is_that_of_its_blocks() -> None:
    ws = list(matrix_normal(6, 256, 2))
    tracker = WeightTracker(6, 256, full_limit=255)
    for w in ws:
        tracker.update(torch.from_numpy(w))
    _, u, v = paper(ws, tracker.momentum)
    kept = np.kron(np.eye(2), np.ones((128, 128)))
    np.testing.assert_allclose(tracker.row_covariance().numpy(), u, atol=1e-4)
    np.testing.assert_allclose(tracker.column_covariance().numpy(), v * kept, atol=1e-4 * np.abs(v).max())


def test_a_weight_too_large_to_copy_has_an_additive_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "MEAN_LIMIT", 10)
    rng = np.random.default_rng(0)
    plane = rng.standard_normal((6, 1)) + rng.standard_normal((1, 8))
    tracker = WeightTracker(6, 8, momentum=0.9)
    for _ in range(60):
        tracker.update(torch.from_numpy(plane + 0.1 * rng.standard_normal((6, 8))))
    assert tracker.nbytes < 4 * (36 + 64 + 6 + 8 + 6 + 8) + 16
    np.testing.assert_allclose(tracker.mean().numpy(), plane, atol=0.1)
    total = float(tracker.row_covariance().trace() * tracker.column_covariance().trace()) / 48
    assert total == pytest.approx(0.01, rel=0.5)


def test_merging_equal_replicas_changes_nothing_and_an_empty_one_takes_all() -> None:
    tracker = WeightTracker(4, 5)
    for w in matrix_normal(4, 5, 10):
        tracker.update(torch.from_numpy(w))
    before = tracker.state()
    tracker.merge(tracker.clone())
    for name in ("u", "v", "row_mean"):
        assert torch.equal(tracker.state()[name], before[name])
    assert tracker.updates == 20
    empty = WeightTracker(4, 5)
    empty.merge(tracker)
    assert torch.equal(empty.column_covariance(), tracker.column_covariance())
    tracker.merge(WeightTracker(4, 5))
    assert tracker.updates == 20


def test_state_round_trip_goes_on_as_if_nothing_had_happened() -> None:
    ws = list(matrix_normal(4, 5, 10))
    whole, half = WeightTracker(4, 5, momentum=0.9), WeightTracker(4, 5, momentum=0.9)
    for w in ws:
        whole.update(torch.from_numpy(w))
    for w in ws[:5]:
        half.update(torch.from_numpy(w))
    again = WeightTracker.from_state(half.state())
    for w in ws[5:]:
        again.update(torch.from_numpy(w))
    assert all(torch.equal(a, b) for a, b in zip(again.state().values(), whole.state().values(), strict=True))


def test_misuse_is_named() -> None:
    with pytest.raises(ProbeError, match=r"momentum is 1\.0"):
        WeightTracker(2, 2, momentum=1.0)
    with pytest.raises(ProbeError, match=r"a weight of \(3, 2\) was given to statistics of \(2, 3\)"):
        WeightTracker(2, 3).update(torch.zeros(3, 2))
    with pytest.raises(ProbeError, match="differ in kind"):
        WeightTracker(2, 3).merge(WeightTracker(3, 2))
