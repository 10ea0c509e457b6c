"""Operands drawn from learnt distributions (paper section III-A.1, "sampling learned distributions").

    activations, output gradients   x' = mean + Z L^T,         L L^T = regularised covariance
    weights                         W' = M + L_U Z L_V^T,      L_U L_U^T = U + eps I, L_V L_V^T = V + eps I

The factorisation is done in fp64, once for all draws of a site.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from loka_compile.errors import ProbeError
from loka_compile.probe.numerics import plain_math
from loka_compile.probe.reservoir import seeded

if TYPE_CHECKING:
    from loka_compile.probe.activations import ActivationTracker
    from loka_compile.probe.site_stats import SiteStats


@dataclass(frozen=True)
class Sample:
    """One draw of a site's operands, in fp32.

    Attributes:
        input: [batch, in_features].
        weight: [out_features, in_features].
        grad_output: [batch, out_features], or None where no gradient was seen. It is drawn independently of the input.
    """

    input: Tensor
    weight: Tensor
    grad_output: Tensor | None


class RowSampler:
    """Draws rows like those that a tracker has seen."""

    def __init__(self, tracker: ActivationTracker) -> None:
        """Factorise the tracker's regularised covariance as it is now."""
        with plain_math(tracker.device):
            self.mean, self.units, self.factor = tracker.mean(), tracker.units(), tracker.factor()

    def draw(self, rows: int, generator: torch.Generator | None = None) -> Tensor:
        """[rows, features] in fp32, within its range."""
        with plain_math(self.mean.device):
            drawn = self.factor.draw(rows, generator) * self.units + self.mean
            largest = torch.finfo(torch.float32).max
            return drawn.clamp(-largest, largest).float()


class SiteSampler:
    """Draws the operands of one site.

    Args:
        stats: the site.
        seed: draws are a function of it, the site's name and the statistics.

    Raises:
        ProbeError: the site has no finite input row or no weight yet.
    """

    def __init__(self, stats: SiteStats, *, seed: int = 0) -> None:
        """Factorise what the draws need."""
        if stats.weight is None or not stats.weight.updates:
            raise ProbeError(f"site {stats.site!r} has no weight statistics to draw from")
        if not stats.input.tracker.n:
            raise ProbeError(f"site {stats.site!r} has seen no finite input row to draw like")
        self._weight, self._input = stats.weight, RowSampler(stats.input.tracker)
        self._grad = None
        if stats.grad_output is not None and stats.grad_output.tracker.n:
            self._grad = RowSampler(stats.grad_output.tracker)
        start = int(torch.randint(1 << 62, (), generator=seeded("draw", seed, stats.site)))
        self._generator = torch.Generator(stats.weight.device).manual_seed(start)

    def weight(self) -> Tensor:
        """A weight [out_features, in_features] in fp32."""
        return self._weight.draw(self._generator)

    def rows(self, batch: int) -> tuple[Tensor, Tensor | None]:
        """Rows of input [batch, in_features] and gradient [batch, out_features] in fp32, independent of each other."""
        x = self._input.draw(batch, self._generator)
        return x, None if self._grad is None else self._grad.draw(batch, self._generator)


def draw(stats: SiteStats, n: int, batch: int, *, seed: int = 0) -> Iterator[Sample]:
    """``n`` independent draws of one site's operands with ``batch`` rows, made one at a time (see SiteSampler)."""
    sampler = SiteSampler(stats, seed=seed)
    for _ in range(n):
        x, grad = sampler.rows(batch)
        yield Sample(x, sampler.weight(), grad)
