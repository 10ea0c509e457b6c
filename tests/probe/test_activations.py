"""Mean and covariance of rows, against numpy in fp64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from loka_compile.errors import ProbeError
from loka_compile.probe.activations import ActivationTracker

FP32, FP64 = torch.float32, torch.float64


def correlated(rows: int, features: int, seed: int = 0, offset: float = 0.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    mixing = rng.standard_normal((features, features)) / math.sqrt(features) + np.eye(features)
    return rng.standard_normal((rows, features)) @ mixing * rng.uniform(0.1, 10, features) + offset


def tracked(x: np.ndarray, sizes: list[int], dtype: torch.dtype = FP32, **options: object) -> ActivationTracker:
    tracker = ActivationTracker(x.shape[1], dtype=dtype, **options)
    start = 0
    for size in sizes:
        tracker.update(torch.from_numpy(x[start : start + size]).to(dtype))
        start += size
    assert start == len(x)
    return tracker


def error(got: torch.Tensor, want: np.ndarray) -> float:
    """The largest deviation of a covariance in units of the two standard deviations."""
    deviation = np.sqrt(np.diag(want))
    return float(np.abs((got.numpy() - want) / np.outer(deviation, deviation)).max())


@pytest.mark.parametrize(("dtype", "tolerance"), [(FP32, 1e-5), (FP64, 1e-10)])
@pytest.mark.parametrize("features", [1, 13, 200])
def test_mean_and_covariance_equal_numpys_whatever_the_batches(
    dtype: torch.dtype, tolerance: float, features: int
) -> None:
    x = correlated(1000, features).astype(np.float32 if dtype is FP32 else np.float64)
    tracker = tracked(x, [1, 199, 1, 0, 2, 500, 297], dtype)
    want = np.cov(x.astype(np.float64), rowvar=False).reshape(features, features)
    assert tracker.n == 1000
    assert error(tracker.covariance(), want) < tolerance
    mean = x.astype(np.float64).mean(0)
    assert np.abs((tracker.mean().numpy() - mean) / np.sqrt(np.diag(want))).max() < tolerance
    np.testing.assert_allclose(tracker.variances().numpy(), np.diag(want), rtol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(FP32, 1e-5), (FP64, 1e-10)])
def test_offset_of_1e4_with_unit_variance_over_1000_updates(dtype: torch.dtype, tolerance: float) -> None:
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((8000, 13)) + 1e4).astype(np.float32)
    tracker = tracked(x, [8] * 1000, dtype)
    want = np.cov(x.astype(np.float64), rowvar=False)
    assert error(tracker.covariance(), want) < tolerance
    np.testing.assert_allclose(tracker.mean().numpy(), x.astype(np.float64).mean(0), rtol=tolerance * 1e-4)


def test_a_mean_that_jumps_leaves_no_cancellation() -> None:
    rng = np.random.default_rng(2)
    x = (rng.standard_normal((200, 5)) + np.repeat([0.0, 1e4], 100)[:, None]).astype(np.float32)
    tracker = tracked(x, [100, 100])
    assert error(tracker.covariance(), np.cov(x.astype(np.float64), rowvar=False)) < 1e-6


@pytest.mark.parametrize("dtype", [FP32, FP64])
def test_dead_constant_and_duplicated_features(dtype: torch.dtype) -> None:
    x = correlated(300, 6).astype(np.float32)
    x[:, 1], x[:, 2], x[:, 4] = 0.0, 1e4 + 1 / 3, x[:, 3]
    tracker = tracked(x, [100, 200], dtype)
    covariance = tracker.covariance()
    assert torch.equal(covariance[1], torch.zeros(6, dtype=FP64))
    assert covariance[2].abs().max() < 1e-6
    torch.testing.assert_close(covariance[3, 4], covariance[3, 3], rtol=1e-6, atol=0)
    regular = tracker.regularised()
    assert torch.isfinite(regular).all()
    assert torch.equal(regular, regular.mT)
    torch.linalg.cholesky(regular)  # positive definite
    torch.testing.assert_close(regular.diagonal()[[0, 3, 5]], covariance.diagonal()[[0, 3, 5]], rtol=1e-5, atol=0)
    assert 0 < regular[1, 1] < 1e-6 * covariance[0, 0]
    assert 0 < regular[2, 2] < 1e-3


@pytest.mark.parametrize("rows", [0, 1])
def test_a_batch_of_no_row_and_of_one_row(rows: int) -> None:
    tracker = ActivationTracker(4)
    x = torch.tensor([[1.0, -2.0, 0.0, 3e4]])[:rows]
    assert tracker.update(x).tolist() == [True] * rows
    assert tracker.n == rows
    assert torch.equal(tracker.covariance(), torch.zeros(4, 4, dtype=FP64))
    assert torch.equal(tracker.mean(), x.sum(0).double())
    torch.linalg.cholesky(tracker.regularised())


def test_all_zero_rows() -> None:
    tracker = tracked(np.zeros((10, 3)), [4, 6])
    assert torch.equal(tracker.covariance(), torch.zeros(3, 3, dtype=FP64))
    regular = tracker.regularised()
    torch.linalg.cholesky(regular)
    assert regular.max() <= 1.1e-12


@pytest.mark.parametrize("dtype", [FP32, FP64])
@pytest.mark.parametrize("magnitude", [3e38, 1e-30])
def test_extreme_magnitudes_beside_ordinary_ones(dtype: torch.dtype, magnitude: float) -> None:
    x = correlated(400, 3)
    x[:, 1] *= 0.9 * magnitude / np.abs(x[:, 1]).max()
    x = x.astype(np.float32)
    tracker = tracked(x, [1, 150, 249], dtype)
    want = np.cov(x.astype(np.float64), rowvar=False)
    assert torch.isfinite(tracker.covariance()).all()
    assert error(tracker.covariance(), want) < 1e-5
    regular = tracker.regularised()
    deviation = regular.diagonal().sqrt()
    torch.linalg.cholesky(regular / deviation[:, None] / deviation)
    assert error(regular, want) < 1e-4


def test_a_scale_that_grows_late_and_a_feature_that_wakes_up() -> None:
    x = correlated(600, 4).astype(np.float32)
    x[:300, 2] = 0
    x[300:, 0] *= 1e30
    tracker = tracked(x, [200, 200, 200])
    assert error(tracker.covariance(), np.cov(x.astype(np.float64), rowvar=False)) < 1e-5


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_rows_that_are_not_finite_are_skipped_and_counted(bad: float) -> None:
    x = correlated(100, 5).astype(np.float32)
    dirty = x.copy()
    dirty[[3, 50, 99], [0, 4, 2]] = bad
    clean = np.delete(x, [3, 50, 99], axis=0)
    tracker = tracked(dirty, [40, 60])
    assert (tracker.n, int(tracker.skipped)) == (97, 3)
    assert error(tracker.covariance(), np.cov(clean.astype(np.float64), rowvar=False)) < 1e-5
    mask = tracker.update(torch.full((2, 5), bad))
    assert mask.tolist() == [False, False]
    assert (tracker.n, int(tracker.skipped)) == (97, 5)
    np.testing.assert_allclose(tracker.mean().numpy(), clean.astype(np.float64).mean(0), rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_rows_of_any_leading_shape(dtype: torch.dtype) -> None:
    x = torch.from_numpy(correlated(60, 7)).to(dtype)
    tracker = ActivationTracker(7)
    tracker.update(x.view(3, 20, 7))
    assert tracker.n == 60
    assert error(tracker.covariance(), np.cov(x.double().numpy(), rowvar=False)) < 1e-5


@pytest.mark.parametrize(("dtype", "tolerance"), [(FP32, 1e-5), (FP64, 1e-10)])
def test_merge_equals_one_tracker_that_saw_everything(dtype: torch.dtype, tolerance: float) -> None:
    x = correlated(500, 9).astype(np.float32)
    x[:250, 1] = 0  # known to one side only
    x[250:, 3] *= 1e25
    first, second = tracked(x[:250], [250], dtype), tracked(x[250:], [1, 249], dtype)
    second.update(torch.full((1, 9), math.nan))
    kept = second.covariance()
    first.merge(second)
    first.merge(ActivationTracker(9, dtype=dtype))
    assert (first.n, int(first.skipped)) == (500, 1)
    assert error(first.covariance(), np.cov(x.astype(np.float64), rowvar=False)) < tolerance
    assert torch.equal(second.covariance(), kept)
    empty = ActivationTracker(9, dtype=dtype)
    empty.merge(first)
    torch.testing.assert_close(empty.covariance(), first.covariance(), rtol=1e-12, atol=0)


def test_state_round_trip_goes_on_as_if_nothing_had_happened() -> None:
    x = correlated(200, 6).astype(np.float32)
    whole, half = tracked(x, [100, 100]), tracked(x[:100], [100])
    again = ActivationTracker.from_state(half.state())
    again.update(torch.from_numpy(x[100:]))
    assert torch.equal(again.covariance(), whole.covariance())
    assert again.form == "full"


def test_the_users_modes_do_not_reach_the_arithmetic() -> None:
    x = correlated(300, 16).astype(np.float32)
    plain, moded = tracked(x, [300]), ActivationTracker(16)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        moded.update(torch.from_numpy(x))
    moded.update(torch.from_numpy(x[:0]))
    assert torch.equal(moded.covariance(), plain.covariance())


def test_reduced_precision_products_are_not_used() -> None:
    x = correlated(300, 16).astype(np.float32)
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        tracker = tracked(x, [300])
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before
    assert error(tracker.covariance(), np.cov(x.astype(np.float64), rowvar=False)) < 1e-5


def test_misuse_is_named() -> None:
    with pytest.raises(ProbeError, match="rows of 5 features were given to statistics of 4"):
        ActivationTracker(4).update(torch.ones(2, 5))
    with pytest.raises(ProbeError, match="legal are: full, blocks, diagonal"):
        ActivationTracker(4, form="banded")
    with pytest.raises(ProbeError, match=r"not torch\.float16"):
        ActivationTracker(4, dtype=torch.float16)
    with pytest.raises(ProbeError, match="differ in kind"):
        ActivationTracker(4).merge(ActivationTracker(4, form="diagonal"))


@pytest.mark.gpu
def test_statistics_on_the_gpu_equal_those_on_the_cpu_without_waiting() -> None:
    x = torch.from_numpy(correlated(512, 96).astype(np.float32))
    x[7, 3] = math.inf
    tracker = ActivationTracker(96, device="cuda")
    rows = x.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        tracker.update(rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    want = ActivationTracker(96)
    want.update(x)
    assert error(tracker.covariance().cpu(), want.covariance().numpy()) < 1e-5
    assert int(tracker.skipped) == 1
