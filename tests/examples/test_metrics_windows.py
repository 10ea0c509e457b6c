"""Metrics of windows against scikit-learn, against the numpy metrics of the demo, and against plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import sklearn.metrics
import torch

from examples import metrics as plain
from examples.training.windows import ECE_BINS, Window, auc, cross_entropy, expected_calibration_error, window_metrics


def sample(n: int, seed: int = 0, scale: float = 2.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, labels, true probabilities; the logits are off from the truth, and rounded so that many tie."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randn(n, generator=generator) * scale - 1
    p = truth.sigmoid()
    labels = (torch.rand(n, generator=generator) < p).float()
    logits = ((truth + torch.randn(n, generator=generator)) * 4).round() / 4
    return logits, labels, p


@pytest.mark.parametrize("n", [2, 19, 1000, 30_001])
def test_against_scikit_learn(n: int) -> None:
    logits, labels, _ = sample(n)
    labels[:2] = torch.tensor([0.0, 1.0])
    q = logits.double().sigmoid().numpy()
    found = window_metrics(logits, labels)
    assert found["log_loss"] == pytest.approx(sklearn.metrics.log_loss(labels.numpy(), q), rel=1e-12)
    assert found["auc"] == pytest.approx(sklearn.metrics.roc_auc_score(labels.numpy(), q), rel=1e-12)
    rate = labels.double().mean().item()
    base = sklearn.metrics.log_loss(labels.numpy(), np.full(n, rate))
    assert found["normalised_entropy"] == pytest.approx(found["log_loss"] / base, rel=1e-12)
    assert found["ctr"] == rate


def test_against_the_numpy_metrics() -> None:
    logits, labels, _ = sample(5000, seed=1)
    found = window_metrics(logits, labels)
    for name in ("log_loss", "normalised_entropy", "auc", "calibration"):
        assert found[name] == pytest.approx(getattr(plain, name)(logits.numpy(), labels.numpy()), rel=1e-11), name


@pytest.mark.parametrize("n", [20, 21, 999, 4000])
def test_calibration_error_against_a_loop(n: int) -> None:
    logits, labels, _ = sample(n, seed=2)
    order = np.argsort(logits.numpy(), kind="stable")
    q, y = logits.double().sigmoid().numpy()[order], labels.double().numpy()[order]
    expected = 0.0
    for b in range(ECE_BINS):
        here = [i for i in range(n) if i * ECE_BINS // n == b]
        expected += len(here) / n * abs(q[here].mean() - y[here].mean())
    assert expected_calibration_error(logits, labels).item() == pytest.approx(expected, rel=1e-12)


def test_calibration_error_sees_a_bias_that_auc_does_not() -> None:
    _, labels, p = sample(200_000, seed=3)
    true = torch.logit(p)
    assert expected_calibration_error(true, labels) < 0.01
    assert expected_calibration_error(true + 1, labels) > 0.1
    assert auc(true + 1, labels).item() == pytest.approx(auc(true, labels).item(), abs=1e-6)


def test_true_probabilities() -> None:
    logits, labels, p = sample(100_000, seed=4)
    found = window_metrics(logits, labels, p)
    q, t = logits.double().sigmoid().numpy(), p.double().numpy()
    expected = -np.mean(t * np.log(q) + (1 - t) * np.log1p(-q))
    entropy = -np.mean(t * np.log(t) + (1 - t) * np.log1p(-t))
    assert found["true_log_loss"] == pytest.approx(expected, rel=1e-9)
    assert found["excess"] == pytest.approx(expected - entropy, rel=1e-6)
    # Drawn labels tell the same in the mean.
    assert found["true_log_loss"] == pytest.approx(found["log_loss"], abs=0.01)
    perfect = window_metrics(torch.logit(p.double()), labels, p)
    assert abs(perfect["excess"]) < 1e-6
    assert found["excess"] > 0.05


def test_extremes() -> None:
    # Certain and right, certain and wrong; no overflow, no clipping.
    found = cross_entropy(torch.tensor([800.0, -800.0, 800.0]), torch.tensor([1.0, 0.0, 0.0]))
    assert found.tolist() == [0.0, 0.0, 800.0]
    one_class = window_metrics(torch.randn(10), torch.zeros(10))
    assert math.isnan(one_class["auc"])
    assert math.isnan(one_class["normalised_entropy"])
    assert math.isnan(one_class["calibration"])
    assert one_class["log_loss"] > 0
    constant = window_metrics(torch.full((10,), 0.3), torch.tensor([0.0, 1.0] * 5))
    assert constant["auc"] == 0.5
    broken = window_metrics(torch.tensor([float("nan"), 1.0]), torch.tensor([0.0, 1.0]))
    assert math.isnan(broken["log_loss"])
    assert math.isnan(broken["auc"])


def test_window_collects_batches() -> None:
    logits, labels, p = sample(60, seed=5)
    window = Window(3, 20, true_probability=True, device=torch.device("cpu"))
    full = [window.add(*(t[20 * i : 20 * i + 20] for t in (logits, labels, p))) for i in range(3)]
    assert full == [False, False, True]
    assert window.metrics() == window_metrics(logits, labels, p)
    losses = window.step_losses()
    assert losses.dtype == torch.float64
    for row, target in zip(losses, (labels, p), strict=True):
        torch.testing.assert_close(row, cross_entropy(logits, target).reshape(3, 20).sum(1))
    window.clear()
    assert not window.add(logits[:20], labels[:20], p[:20])
    assert window.metrics() == window_metrics(logits[:20], labels[:20], p[:20])


def test_window_goes_on_from_its_state() -> None:
    logits, labels, _ = sample(40, seed=6)
    first = Window(2, 20, true_probability=False, device=torch.device("cpu"))
    first.add(logits[:20], labels[:20])
    second = Window(2, 20, true_probability=False, device=torch.device("cpu"))
    second.load_state_dict(first.state_dict())
    assert second.add(logits[20:], labels[20:])
    assert second.metrics() == window_metrics(logits, labels)
