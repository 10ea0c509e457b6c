"""What may be said about a difference in log loss: paired seeds, intervals, and the words that go with them.

An arm's run on one seed is a row of losses summed over each training step, taken before the step trained on its
examples. Two arms of a seed see the same examples in the same order, so they are compared step by step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Floats = NDArray[np.float64]

#: An arm is called neutral when its interval ends below this (percent); the project aims at the second.
MARGIN = 0.05
GOAL = 0.02
#: Consecutive examples that are drawn as one in the bootstrap: long enough for a drift to be inside a block.
BLOCK_EXAMPLES = 100_000
MIN_SEEDS = 3


def relative_percent(arm: Floats, base: Floats) -> float:
    """RLL: 100 * (LL_arm - LL_base) / LL_base over the given steps; positive is worse."""
    return float(100 * (arm.sum() - base.sum()) / base.sum())


def per_window(arm: Floats, base: Floats, window: int) -> Floats:
    """RLL of each whole window of so many steps, in percent."""
    whole = len(base) // window * window
    a, b = (x[:whole].reshape(-1, window).sum(axis=1) for x in (arm, base))
    return 100 * (a - b) / b


@dataclass(frozen=True)
class Interval:
    """A mean over seeds with its 95 % interval; ``low`` and ``high`` are NaN for a single seed."""

    mean: float
    low: float
    high: float
    seeds: int

    def __str__(self) -> str:
        if self.seeds < 2:
            return f"{self.mean:+.3f} % (one seed)"
        return f"{self.mean:+.3f} % [{self.low:+.3f}, {self.high:+.3f}]"


def t_interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """mean +- t(n - 1) * sd / sqrt(n)."""
    x = np.asarray(values, dtype=np.float64)
    n = len(x)
    if n < 2:
        return Interval(float(x.mean()), math.nan, math.nan, n)
    half = stats.t.ppf((1 + level) / 2, n - 1) * x.std(ddof=1) / math.sqrt(n)
    return Interval(float(x.mean()), float(x.mean() - half), float(x.mean() + half), n)


def block_bootstrap(
    arms: Sequence[Floats], bases: Sequence[Floats], block: int, *, draws: int = 2000, seed: int = 0
) -> Interval:
    """Percentile interval of the mean RLL over these runs, blocks of steps drawn with replacement within each run.

    It knows only how well these trained models are told apart by their examples, not how other seeds would come out:
    where it is wider than the t interval, the seeds agree by luck.

    Raises:
        ValueError: a run has fewer than two blocks.
    """
    rng = np.random.default_rng(seed)
    sampled = np.zeros(draws)
    for arm, base in zip(arms, bases, strict=True):
        count = len(base) // block
        if count < 2:
            raise ValueError(f"{len(base)} steps make {count} blocks of {block}; a bootstrap needs two")
        a, b = (x[: count * block].reshape(count, block).sum(axis=1) for x in (arm, base))
        weights = rng.multinomial(count, np.full(count, 1 / count), size=draws)
        sampled += 100 * (weights @ a / (weights @ b) - 1) / len(arms)
    low, high = np.percentile(sampled, [2.5, 97.5])
    mean = float(np.mean([relative_percent(a, b) for a, b in zip(arms, bases, strict=True)]))
    return Interval(mean, float(low), float(high), len(arms))


@dataclass(frozen=True)
class Comparison:
    """One arm against another over all seeds that both have."""

    labels: Interval
    truth: Interval | None
    bootstrap: Interval
    #: RLL of each seed in percent, by labels and by true probabilities.
    seeds_labels: tuple[float, ...]
    seeds_truth: tuple[float, ...]

    @property
    def high(self) -> float:
        """The worst upper end of all intervals."""
        return max(i.high for i in (self.labels, self.truth, self.bootstrap) if i is not None)

    @property
    def low(self) -> float:
        """The lower end of the sharpest interval there is: true probabilities where they are known."""
        return (self.truth or self.labels).low

    def verdict(self, control: bool = True) -> str:
        """ "neutral" only where every interval ends below the margin, over enough seeds, with a working control."""
        interval = self.truth or self.labels
        if interval.seeds < MIN_SEEDS:
            return f"not resolved: {interval.seeds} of {MIN_SEEDS} seeds"
        if self.low > 0 and self.high >= MARGIN:
            return "worse"
        if not self.high < MARGIN:
            return f"not resolved, +-{(interval.high - interval.low) / 2:.3f} %"
        if not control:
            return "no claim: the positive control shows no loss"
        return "neutral, within the goal" if self.high < GOAL else "neutral"

    def to_json(self) -> dict[str, Any]:
        """Plain values, with the verdict left to whoever knows about the control."""
        return asdict(self)


def compare(arms: Sequence[Floats], bases: Sequence[Floats], batch_size: int) -> Comparison:
    """Compare runs seed by seed. Each is [1 or 2, steps]: losses by labels, and by true probabilities where known."""
    by_seed = [
        [relative_percent(a[row], b[row]) for a, b in zip(arms, bases, strict=True)] for row in range(len(arms[0]))
    ]
    # The sharper score, in blocks that are long enough, but at least ten of them.
    row = len(arms[0]) - 1
    steps = min(a.shape[1] for a in arms)
    block = max(1, min(-(-BLOCK_EXAMPLES // batch_size), steps // 10))
    return Comparison(
        labels=t_interval(by_seed[0]),
        truth=t_interval(by_seed[1]) if row else None,
        bootstrap=block_bootstrap([a[row] for a in arms], [b[row] for b in bases], block),
        seeds_labels=tuple(by_seed[0]),
        seeds_truth=tuple(by_seed[1]) if row else (),
    )


def noise_band(windows: Floats) -> float:
    """Half width (percent) that RLL of windows, [seeds, windows], stays within in 95 % of the cases: 1.96 * RMS."""
    return float(1.96 * np.sqrt(np.mean(np.square(windows))))
