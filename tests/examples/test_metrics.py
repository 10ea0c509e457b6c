"""The examples' own metrics against scikit-learn, and the standard error against resampling."""

from __future__ import annotations

import numpy as np
import pytest
import sklearn.metrics

from examples import metrics


@pytest.fixture(params=[(2000, None), (199, None), (500, 1)], ids=["spread", "few", "ties"])
def scored(request):
    rows, decimals = request.param
    rng = np.random.default_rng(rows)
    logits = rng.normal(-1.0, 2.0, rows)
    labels = (rng.random(rows) < 1 / (1 + np.exp(-logits + rng.normal(size=rows)))).astype(float)
    return (logits if decimals is None else logits.round(decimals)), labels


def test_log_loss_auc_and_probabilities_agree_with_scikit_learn(scored):
    logits, labels = scored
    probabilities = metrics.sigmoid(logits)
    assert metrics.log_loss(logits, labels) == pytest.approx(sklearn.metrics.log_loss(labels, probabilities), abs=1e-9)
    assert metrics.auc(logits, labels) == pytest.approx(sklearn.metrics.roc_auc_score(labels, logits), abs=1e-9)


def test_normalised_entropy_is_one_for_the_base_rate(scored):
    logits, labels = scored
    rate = labels.mean()
    constant = np.full(len(labels), np.log(rate / (1 - rate)))
    assert metrics.normalised_entropy(constant, labels) == pytest.approx(1.0, abs=1e-12)
    entropy = sklearn.metrics.log_loss(labels, np.full(len(labels), rate))
    expected = sklearn.metrics.log_loss(labels, metrics.sigmoid(logits)) / entropy
    assert metrics.normalised_entropy(logits, labels) == pytest.approx(expected, abs=1e-9)


def test_calibration_is_predicted_over_observed(scored):
    logits, labels = scored
    expected = (1 / (1 + np.exp(-logits))).sum() / labels.sum()
    assert metrics.calibration(logits, labels) == pytest.approx(expected, abs=1e-9)


def test_extreme_logits_stay_exact():
    logits, labels = np.array([800.0, -800.0, 800.0]), np.array([1.0, 0.0, 0.0])
    np.testing.assert_array_equal(metrics.losses(logits, labels), [0.0, 0.0, 800.0])
    np.testing.assert_array_equal(metrics.sigmoid(logits), [1.0, 0.0, 1.0])


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_one_class_has_no_auc_and_no_normalised_entropy(label):
    logits, labels = np.array([0.1, -0.2]), np.full(2, label)
    assert np.isnan(metrics.auc(logits, labels))
    assert np.isnan(metrics.normalised_entropy(logits, labels))


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match="one length"):
        metrics.losses(np.zeros(3), np.zeros(2))
    with pytest.raises(ValueError, match="not empty"):
        metrics.losses(np.zeros(0), np.zeros(0))
    with pytest.raises(ValueError, match="one length"):
        metrics.relative_log_loss(np.zeros(3), np.zeros(2))
    with pytest.raises(ValueError, match="needs two"):
        metrics.relative_log_loss(np.ones(5), np.ones(5), block=3)


def test_relative_log_loss_and_its_error_against_the_bootstrap():
    rng = np.random.default_rng(1)
    base = rng.gamma(2.0, 0.25, 20_000)
    arm = base * 1.01 + rng.normal(0, 0.05, len(base))
    found = metrics.relative_log_loss(arm, base)
    assert found.percent == pytest.approx(100 * (arm.mean() - base.mean()) / base.mean(), rel=1e-12)
    draws = []
    for _ in range(400):
        rows = rng.integers(0, len(base), len(base))
        draws.append(100 * (arm[rows].mean() / base[rows].mean() - 1))
    # 400 draws give the spread to 3.5 %; a missing factor or unpaired errors would be off by far more.
    assert found.standard_error == pytest.approx(np.std(draws), rel=0.15)


def test_pairing_cancels_what_both_arms_find_hard():
    rng = np.random.default_rng(2)
    base = rng.gamma(2.0, 0.25, 5000)
    paired = metrics.relative_log_loss(base + 1e-3 * rng.normal(size=5000), base)
    unpaired = metrics.relative_log_loss(rng.permutation(base), base)
    assert paired.standard_error < unpaired.standard_error / 100
    assert metrics.relative_log_loss(base, base) == metrics.RelativeLogLoss(0.0, 0.0, 5000)


def test_blocks_widen_the_error_of_a_stream_with_a_memory():
    rng = np.random.default_rng(3)
    base = np.full(10_000, 0.5)
    shared = np.repeat(rng.normal(0, 0.1, 100), 100)
    found = [metrics.relative_log_loss(base + shared, base, block=block) for block in (1, 100)]
    assert found[0].percent == found[1].percent
    # Each hundred rows hold one independent draw, so the error is ten times that of independent rows.
    assert found[1].standard_error == pytest.approx(10 * found[0].standard_error, rel=0.02)
    assert str(found[1]).startswith(f"{found[1].percent:+.3f} % ± ")
