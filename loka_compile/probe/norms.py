"""Norms over time (of a site's bias, and of its input's mean), and what a bias does in training: paper figure 6.

The rule, on a series of norms y over equally spaced samples, at least ``MIN_POINTS`` of them; the first eighth is left
out as warm-up. A level is the median of a tenth of the series, the line is the running mean over a tenth, and the noise
is measured by second differences, which a smooth course does not reach:

    vanishing    the last level is below 5 % of the largest norm (the median of three neighbours, warm-up included)
    cycling      y less its straight line comes back to itself (autocorrelation above 0.5 at a lag, between 8 samples
                 and a third of the series, before which it fell below -0.2) and swings by more than 5 %
    oscillating  no cycle, but the standard deviation of the noise is above 5 % of the level, or the line turns around
                 by more than half of its range at least three times
    diverging    the last level is the largest, above 1.1 times the first, and the last third rose at least 1.3 times
                 as fast as the first
    drifting     the last third changed by at least 0.4 of what the first did, in the same direction, and y changed
                 by more than 5 % in all
    converging   everything else: it has settled
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np

MIN_POINTS = 24


class Behaviour(str, Enum):
    """How a norm develops."""

    OSCILLATING = "oscillating"
    VANISHING = "vanishing"
    CYCLING = "cycling"
    DRIFTING = "drifting"
    CONVERGING = "converging"
    DIVERGING = "diverging"
    UNKNOWN = "unknown"

    def __str__(self) -> str:
        return self.value


class NormSeries:
    """A norm over time in bounded memory: when full, every second point goes, and points then come half as often."""

    def __init__(self, capacity: int = 4096) -> None:
        """Start with no points."""
        self.capacity = capacity
        self.stride = 1
        self.steps: list[int] = []
        self.values: list[float] = []
        self._seen = 0

    def __len__(self) -> int:
        return len(self.steps)

    def append(self, step: int, value: float) -> None:
        """Add a point."""
        if self._seen % self.stride == 0:
            self.steps.append(step)
            self.values.append(value)
        self._seen += 1
        if len(self.steps) > self.capacity:
            self.steps, self.values = self.steps[::2], self.values[::2]
            self.stride *= 2

    def behaviour(self) -> Behaviour:
        """The class of this series."""
        return classify(self.values)

    def state(self) -> dict[str, Any]:
        """As plain values for JSON."""
        return {
            "capacity": self.capacity,
            "stride": self.stride,
            "seen": self._seen,
            "steps": list(self.steps),
            "values": list(self.values),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> NormSeries:
        """The series whose ``state()`` this is; it may have been through JSON, where NaN is null."""
        new = cls(int(state["capacity"]))
        new.stride, new._seen = int(state["stride"]), int(state["seen"])
        new.steps = [int(step) for step in state["steps"]]
        new.values = [math.nan if value is None else float(value) for value in state["values"]]
        return new


def classify(values: Sequence[float]) -> Behaviour:
    """The class of a series of norms, by the rule above. UNKNOWN if it is too short or not finite."""
    y = np.asarray(values, dtype=np.float64)
    if len(y) < MIN_POINTS or not np.isfinite(y).all():
        return Behaviour.UNKNOWN
    scale = float(np.abs(y).max())
    if scale == 0.0:
        return Behaviour.VANISHING
    y = y / scale
    peak = np.median(np.stack([y[:-2], y[1:-1], y[2:]]), axis=0).max()
    y = y[len(y) // 8 :]
    part = max(3, len(y) // 10)
    levels = np.array([np.median(y[start : start + part]) for start in range(0, len(y) - part + 1, part)])
    if levels[-1] < 0.05 * peak:
        return Behaviour.VANISHING
    if _cycles(y):
        return Behaviour.CYCLING
    if _oscillates(y, part):
        return Behaviour.OSCILLATING
    third = max(1, len(levels) // 3)
    first, last = levels[third] - levels[0], levels[-1] - levels[-1 - third]
    if levels[-1] >= levels.max() and levels[-1] > 1.1 * levels[0] and last > 1.3 * max(first, 0.0):
        return Behaviour.DIVERGING
    moved = abs(levels[-1] - levels[0]) > 0.05 * levels.max()
    if moved and first * last > 0 and abs(last) > 0.4 * abs(first):
        return Behaviour.DRIFTING
    return Behaviour.CONVERGING


def _cycles(y: np.ndarray) -> bool:
    time = np.arange(len(y))
    rest = y - np.polyval(np.polyfit(time, y, 1), time)
    if rest.std() * np.sqrt(2) < 0.05 * np.abs(y).mean():
        return False
    full = np.correlate(rest, rest, "full")[len(y) - 1 :]
    overlap = full / (np.arange(len(y), 0, -1) * rest.var())
    lags = overlap[: len(y) // 3 + 1]
    fell = np.flatnonzero(lags < -0.2)
    if not len(fell):
        return False
    after = lags[max(int(fell[0]), 8) :]
    return bool(len(after) and after.max() > 0.5)


def _oscillates(y: np.ndarray, part: int) -> bool:
    line = np.convolve(np.pad(y, part // 2, mode="edge"), np.ones(part) / part, "valid")[: len(y)]
    if np.diff(y, 2).std() / np.sqrt(6) > 0.05 * np.abs(line).mean():  # the deviation, were y a line and white noise
        return True
    swing = 0.5 * (line.max() - line.min())
    if swing < 0.025 * np.abs(line).mean():
        return False
    turns, anchor, direction = 0, float(line[0]), 0
    for value in line:
        if direction == 0:
            if abs(value - anchor) >= swing:
                direction, anchor = int(np.sign(value - anchor)), float(value)
        elif (value - anchor) * direction > 0:
            anchor = float(value)
        elif (anchor - value) * direction >= swing:
            turns, direction, anchor = turns + 1, -direction, float(value)
    return turns >= 3
