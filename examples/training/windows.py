"""Quality over windows of a stream, computed where the predictions are: the host waits once for each window.

Every prediction is made before its example is trained on (progressive validation), so a window's log loss is that of a
model on data it has never seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ECE_BINS = 20


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Log loss of each prediction against labels or true probabilities, in nats and float64."""
    return F.binary_cross_entropy_with_logits(logits.double(), targets.double(), reduction="none")


def entropy(p: Tensor) -> Tensor:
    """Entropy of each probability, in nats and float64; 0 at 0 and 1."""
    p = p.double()
    return -(torch.xlogy(p, p) + torch.xlogy(1 - p, 1 - p))


def auc(logits: Tensor, labels: Tensor) -> Tensor:
    """Area under the ROC curve, ties counting half; NaN where there is only one class or a prediction is NaN."""
    order = logits.argsort()
    scores, positive = logits[order], labels[order].double()
    n = len(scores)
    rank = torch.arange(1, n + 1, dtype=torch.float64, device=scores.device)
    # A tie's rank is the middle of its run: from the first position of its value to the last.
    first = torch.searchsorted(scores, scores, right=False).clamp(max=n - 1)  # a NaN is sorted behind the end
    last = torch.searchsorted(scores, scores, right=True) - 1
    rank = (rank[first] + rank[last]) / 2
    positives = positive.sum()
    area = ((rank * positive).sum() - positives * (positives + 1) / 2) / (positives * (n - positives))
    return torch.where(scores.isnan().any(), float("nan"), area)


def expected_calibration_error(logits: Tensor, labels: Tensor, bins: int = ECE_BINS) -> Tensor:
    """sum over bins of n_b / n * |mean prediction - mean label|, bins of equal mass in the order of the predictions."""
    order = logits.argsort(stable=True)
    p, y = logits[order].double().sigmoid(), labels[order].double()
    n = len(p)
    bin_of = torch.arange(n, device=p.device) * bins // n
    gaps = torch.zeros(bins, dtype=torch.float64, device=p.device).index_add_(0, bin_of, p - y)
    return gaps.abs().sum() / n


def window_metrics(logits: Tensor, labels: Tensor, probability: Tensor | None = None) -> dict[str, float]:
    """All measures of one window from its logits, labels and, where they are known, true probabilities, [n] each.

    ``log_loss`` in nats; ``normalised_entropy`` is the log loss over the entropy of the window's click rate ``ctr``;
    ``calibration`` the sum of predictions over the number of clicks; ``ece`` over 20 bins of equal mass. With true
    probabilities: ``true_log_loss``, the expected log loss given the features, and ``excess``, how far it lies above
    the entropy of the truth (0 is perfect). Undefined values are NaN.
    """
    loss = cross_entropy(logits, labels).mean()
    rate = labels.double().mean()
    values = {
        "log_loss": loss,
        "normalised_entropy": loss / entropy(rate) if len(labels) else loss,
        "auc": auc(logits, labels),
        "calibration": logits.double().sigmoid().mean() / rate,
        "ece": expected_calibration_error(logits, labels),
        "ctr": rate,
    }
    if probability is not None:
        values["true_log_loss"] = cross_entropy(logits, probability).mean()
        values["excess"] = values["true_log_loss"] - entropy(probability).mean()
    stacked = torch.stack(list(values.values())).tolist()
    # 0 / 0 and x / 0: a window of one class has no normalised entropy, and without clicks no calibration.
    return {
        name: value if abs(value) != float("inf") else float("nan") for name, value in zip(values, stacked, strict=True)
    }


class Window:
    """Collects ``steps`` batches of predictions on the device.

    When ``add`` has returned True, ``metrics`` and ``step_losses`` describe the full window; ``clear`` starts the next.
    """

    def __init__(self, steps: int, batch_size: int, *, true_probability: bool, device: torch.device) -> None:
        self.steps = steps
        self.batch_size = batch_size
        self.filled = 0
        self._rows = torch.zeros(3 if true_probability else 2, steps, batch_size, device=device)

    def add(self, logits: Tensor, labels: Tensor, probability: Tensor | None = None) -> bool:
        """Take one batch, [B] each; True when the window is full."""
        rows = (logits, labels) if probability is None else (logits, labels, probability)
        for row, values in zip(self._rows, rows, strict=True):
            row[self.filled].copy_(values)
        self.filled += 1
        return self.filled == self.steps

    def clear(self) -> None:
        """Forget everything."""
        self.filled = 0

    def metrics(self) -> dict[str, float]:
        """`window_metrics` of what is there."""
        return window_metrics(*self._rows[:, : self.filled].flatten(1))

    def step_losses(self) -> Tensor:
        """Log loss summed over each batch, [1 or 2, filled] float64 on the CPU: by labels, by true probabilities."""
        rows = self._rows[:, : self.filled]
        return torch.stack([cross_entropy(rows[0], target).sum(dim=1) for target in rows[1:]]).cpu()

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self._rows[:, : self.filled].clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        rows = state["rows"]
        self.filled = rows.shape[1]
        self._rows[:, : self.filled] = rows
