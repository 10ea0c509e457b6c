"""Latency as a function of shape, from measured points. Numpy only.

1. A *model* ``sum_j c_j * feature_j(shape)`` whose features grow with every dimension (the first is the constant 1: the
   launch) and whose coefficients ``c_j >= 0`` are fitted by least squares on relative errors; but never below launch
   plus ``least(shape)``, the time that its bytes take at the bandwidth of the data sheet. Monotone by construction.
2. A *correction*: what the model misses at the points, ``log(time / model)``, is interpolated between them by kriging
   (a Gaussian process over the logarithms of the sizes) and multiplied in. It knows that a kernel has bad tiles for
   some shapes, is smooth, follows the points as far as their noise allows, and fades to 1 away from them: there the
   model stands alone.
3. A measured shape answers with its measurement.

How much an answer is worth is another question: :meth:`Surface.comparable` says whether a measured shape is like the
one asked for. Where none is, an answer is an extrapolation, and costs/ draws no advantage from it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

#: Fewer points than this do not carry a model: only the measured shapes themselves have a cost then.
MIN_POINTS = 4
#: How far a measured time speaks for other sizes (in ln): a factor of 4 in one dimension. This and NOISE were chosen
#: for the smallest leave-one-out error of the H200's table (benchmarks/leave_one_out.py); it is flat around them.
LENGTH = 1.4
#: Variance of a measurement about the smooth surface, relative to the variance of the correction.
NOISE = 0.1
#: A shape is comparable to a measured one if no size is smaller than its by more than this factor, or larger by more
#: than that. Below, launches and partly filled tiles take over and FP8's advantage vanishes; above, it stays.
BELOW, ABOVE = 2.0, 4.0

Array = NDArray[np.float64]
Shape = tuple[int, ...]


class Surface:
    """Latency in microseconds over shapes of one kernel. What is expensive is computed when first asked for.

    Args:
        points: measured latency by shape.
        features: shape -> feature values; each must be non-negative and non-decreasing in every dimension.
        least: shape -> microseconds that no kernel can beat; non-decreasing in every dimension.
    """

    def __init__(
        self,
        points: Mapping[Shape, float],
        features: Callable[[Shape], Sequence[float]],
        least: Callable[[Shape], float],
    ) -> None:
        self.points = dict(points)
        self.features = features
        self.least = least

    @functools.cached_property
    def coefficients(self) -> Array | None:
        """Fitted coefficients, one per feature, or None when there are too few points."""
        if len(self.points) < MIN_POINTS:
            return None
        matrix = np.array([self.features(_positive(s)) for s in self.points], dtype=np.float64)
        return fit_relative(matrix, np.array(list(self.points.values()), dtype=np.float64))

    def model(self, shape: Shape) -> float | None:
        """The fitted model alone (step 1), or None when there are too few points."""
        if self.coefficients is None:
            return None
        shape = _positive(shape)
        fitted = float(np.dot(self.coefficients, np.asarray(self.features(shape), dtype=np.float64)))
        return max(fitted, float(self.coefficients[0]) + self.least(shape))

    def __call__(self, shape: Shape) -> float | None:
        """Latency at ``shape``; None when it was not measured and there are too few points for a model."""
        if shape in self.points:
            return self.points[shape]
        value = self.model(shape)
        if value is None:
            return None
        return max(value * math.exp(self._correction(shape)), self.least(_positive(shape)))

    def comparable(self, shape: Shape) -> bool:
        """Whether a measured shape is like this one; see ``BELOW`` and ``ABOVE``."""
        gaps = _logs(_positive(shape)) - self._log_shapes
        inside = (gaps >= -math.log(BELOW) - 1e-9) & (gaps <= math.log(ABOVE) + 1e-9)
        return bool(inside.all(axis=1).any())

    @functools.cached_property
    def _log_shapes(self) -> Array:
        return np.array([_logs(_positive(s)) for s in self.points], dtype=np.float64).reshape(len(self.points), -1)

    @functools.cached_property
    def _weights(self) -> Array:
        """What every point adds to the correction where its correlation is 1."""
        missed = [math.log(time / (self.model(shape) or time)) for shape, time in self.points.items()]
        covariance = _correlation(self._log_shapes, self._log_shapes)
        covariance[np.diag_indices_from(covariance)] += NOISE
        weights: Array = np.linalg.solve(covariance, np.array(missed, dtype=np.float64)).astype(np.float64)
        return weights

    def _correction(self, shape: Shape) -> float:
        """The interpolated logarithm of time / model (step 2)."""
        return float((_correlation(_logs(_positive(shape))[None, :], self._log_shapes) @ self._weights)[0])


def fit_relative(matrix: Array, times: Array) -> Array:
    """Coefficients ``c >= 0`` that minimise ``sum((matrix @ c / times - 1)**2)``, found exactly.

    With a handful of features every subset of active ones can be tried: the optimum is the best non-negative solution
    among the unconstrained fits of the subsets. Relative errors, so that a launch-bound 4 us counts like a 400 us GEMM.
    """
    scaled = matrix / times[:, None]
    ones = np.ones_like(times)
    count = matrix.shape[1]
    best, best_error = np.zeros(count), float(len(times))
    for size in range(1, count + 1):
        for subset in itertools.combinations(range(count), size):
            columns = scaled[:, subset]
            # Columns differ by orders of magnitude; lstsq's rank test wants them alike.
            norms = np.linalg.norm(columns, axis=0)
            norms[norms == 0] = 1.0
            solution = np.linalg.lstsq(columns / norms, ones, rcond=None)[0] / norms
            if (solution < 0).any():
                continue
            residual = columns @ solution - ones
            error = float(residual @ residual)
            if error < best_error - 1e-12:
                best, best_error = np.zeros(count), error
                best[list(subset)] = solution
    return best


def _correlation(one: Array, other: Array) -> Array:
    """Squared exponential: 1 for equal shapes, 0.6 at a distance of ``LENGTH``."""
    squared = np.square((one[:, None, :] - other[None, :, :]) / LENGTH).sum(axis=2)
    return np.asarray(np.exp(-0.5 * squared))


def _logs(shape: Shape) -> Array:
    return np.log(np.array(shape, dtype=np.float64))


def _positive(shape: Shape) -> Shape:
    """An empty dimension costs what a dimension of one does (a launch); its logarithm must exist."""
    return tuple(max(1, size) for size in shape)
