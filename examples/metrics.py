"""Measures of a click model's quality, in numpy and float64, from logits and 0/1 labels.

Logits instead of probabilities: the loss of a confident model is exact, and nothing has to be clipped.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


def sigmoid(logits: ArrayLike) -> Floats:
    """1 / (1 + exp(-z)) without overflow."""
    z = np.asarray(logits, dtype=np.float64)
    small = np.exp(-np.abs(z))
    return np.where(z >= 0, 1.0, small) / (1.0 + small)


def losses(logits: ArrayLike, labels: ArrayLike) -> Floats:
    """Binary log loss of each example, in nats. Shapes [N], [N] -> [N]."""
    z = np.asarray(logits, dtype=np.float64)
    y = np.asarray(labels, dtype=np.float64)
    if z.shape != y.shape or z.ndim != 1 or z.size == 0:
        raise ValueError(f"logits {z.shape} and labels {y.shape} must be two vectors of one length, not empty")
    # log(1 + e^z) - y z, with the exponential of a negative number only.
    return np.maximum(z, 0.0) - y * z + np.log1p(np.exp(-np.abs(z)))


def log_loss(logits: ArrayLike, labels: ArrayLike) -> float:
    """Mean binary log loss, in nats."""
    return float(losses(logits, labels).mean())


def normalised_entropy(logits: ArrayLike, labels: ArrayLike) -> float:
    """Log loss over the entropy of the labels' mean rate (He et al. 2014): 1 is no better than that rate, 0 perfect.

    NaN where all labels are the same, since then there is no entropy to compare with.
    """
    rate = float(np.mean(np.asarray(labels, dtype=np.float64)))
    if rate in (0.0, 1.0):
        return float("nan")
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate))
    return log_loss(logits, labels) / float(entropy)


def auc(logits: ArrayLike, labels: ArrayLike) -> float:
    """Area under the ROC curve: how often a positive scores above a negative, ties counting half. NaN for one class."""
    z = np.asarray(logits, dtype=np.float64)
    y = np.asarray(labels, dtype=bool)
    positives, negatives = int(y.sum()), int((~y).sum())
    if positives == 0 or negatives == 0:
        return float("nan")
    # Mann-Whitney: the sum of the positives' ranks, each tie at the mean rank of its group.
    _, group, size = np.unique(z, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(size) - (size - 1) / 2.0
    return float((mean_rank[group][y].sum() - positives * (positives + 1) / 2.0) / (positives * negatives))


def calibration(logits: ArrayLike, labels: ArrayLike) -> float:
    """Sum of predicted probabilities over the number of positives; 1 is right. NaN without positives."""
    positives = float(np.sum(np.asarray(labels, dtype=np.float64)))
    return float(sigmoid(logits).sum() / positives) if positives else float("nan")


@dataclass(frozen=True)
class RelativeLogLoss:
    """``100 * (LL_arm - LL_base) / LL_base`` and its standard error, both in percent. Positive: the arm is worse."""

    percent: float
    standard_error: float
    examples: int

    def __str__(self) -> str:
        return f"{self.percent:+.3f} % ± {self.standard_error:.3f}"


def relative_log_loss(arm: ArrayLike, base: ArrayLike, block: int = 1) -> RelativeLogLoss:
    """Compare two arms' losses on the same examples.

    Args:
        arm, base: loss of each example, [N], as ``losses`` gives it.
        block: consecutive examples that count as one draw. 1 takes examples as independent; in a stream neighbours
            share their hour's weather and their model: a block as long as that memory gives the wider, honest error.

    The standard error is that of a ratio of means (delta method) over paired differences, so that what both arms find
    hard cancels. It says how well these two trained models are told apart, not how another seed would come out.

    Raises:
        ValueError: the arms differ in length, or there are fewer than two blocks.
    """
    a = np.asarray(arm, dtype=np.float64)
    b = np.asarray(base, dtype=np.float64)
    if a.shape != b.shape or a.ndim != 1:
        raise ValueError(f"the arms' losses must be two vectors of one length, not {a.shape} and {b.shape}")
    blocks = len(a) // block
    if blocks < 2:
        raise ValueError(f"{len(a)} examples make {blocks} blocks of {block}; a standard error needs two")
    ratio = (a.sum() - b.sum()) / b.sum()
    residual = (a - b) - ratio * b
    means = residual[: blocks * block].reshape(blocks, block).mean(axis=1)
    error = means.std(ddof=1) / np.sqrt(blocks) / b.mean()
    return RelativeLogLoss(float(100 * ratio), float(100 * error), len(a))
