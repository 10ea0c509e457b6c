"""Latency as a function of shape, from a handful of measured points. Numpy only.

Three steps, each of which keeps the one before honest:

1. A *model* ``sum_j c_j * feature_j(shape)`` whose features grow with every dimension (the first is the constant 1: the
   launch) and whose coefficients ``c_j >= 0`` are fitted by least squares on relative errors; but never below launch
   plus ``least(shape)``, the time that its bytes take at the bandwidth of the data sheet. Monotone by construction.
2. *Bounds* from every measured point ``(s_i, t_i)``: a shape is not faster than a measured one that it contains, and
   grows from one at most proportionally, up to an exponent::

       max_i t_i * prod_d min(1, s_d / s_id)**growth   <=  t(s)  <=  min_i t_i * prod_d max(1, s_d / s_id)**growth

   ``growth`` is ``GROWTH``, or as much more as the points themselves need to obey the bounds. Both sides are monotone
   and continuous, so clipping the model to them is too. At ``s_i`` they meet, and their influence fades with the
   distance between the logarithms of the shapes: this is the correction of the model.
3. A measured shape answers with its measurement. That differs from step 2 only where measurements contradict each other
   (a kernel that is faster on a larger shape), and is then the one place where the surface is not monotone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

#: Smallest exponent of growth per dimension. Above 1 because doubling a dimension was seen to cost up to 2.13 times
#: (fewer hits in L2, a last wave of tiles that is partly empty).
GROWTH = 1.1
#: Largest one. Steeper bounds say nothing any more; points that need it contradict each other.
MAX_GROWTH = 4.0
#: Fewer points than this do not carry a model: only the measured shapes themselves have a cost then.
MIN_POINTS = 4

Array = NDArray[np.float64]
Shape = tuple[int, ...]


class Surface:
    """Latency in microseconds over shapes of one kernel.

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
        """Fit the model to the points."""
        self.points = dict(points)
        self._features = features
        self._least = least
        self._log_shapes = np.log(np.array([_positive(s) for s in self.points], dtype=np.float64))
        self._times = np.array(list(self.points.values()), dtype=np.float64)
        #: Exponent of the bounds (step 2).
        self.growth = _growth(self._log_shapes, np.log(self._times))
        #: Fitted coefficients, one per feature, or None when there are too few points.
        self.coefficients: Array | None = None
        if len(self.points) >= MIN_POINTS:
            matrix = np.array([features(s) for s in self.points], dtype=np.float64)
            self.coefficients = fit_relative(matrix, self._times)

    def model(self, shape: Shape) -> float | None:
        """The fitted model alone (step 1), or None when there are too few points."""
        if self.coefficients is None:
            return None
        shape = _positive(shape)
        fitted = float(np.dot(self.coefficients, np.asarray(self._features(shape), dtype=np.float64)))
        return max(fitted, float(self.coefficients[0]) + self._least(shape))

    def __call__(self, shape: Shape) -> float | None:
        """Latency at ``shape``; None when it was not measured and there are too few points for a model."""
        if shape in self.points:
            return self.points[shape]
        value = self.model(shape)
        if value is None:
            return None
        gap = np.log(np.array(_positive(shape), dtype=np.float64)) - self._log_shapes
        lower = float(np.max(self._times * np.exp(self.growth * np.minimum(gap, 0).sum(axis=1))))
        upper = float(np.min(self._times * np.exp(self.growth * np.maximum(gap, 0).sum(axis=1))))
        return max(lower, min(value, upper))


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


def _growth(log_shapes: Array, log_times: Array) -> float:
    """The smallest exponent in ``GROWTH..MAX_GROWTH`` with which no point lies outside the bounds of another."""
    gaps = np.maximum(log_shapes[:, None, :] - log_shapes[None, :, :], 0).sum(axis=2)
    rises = log_times[:, None] - log_times[None, :]
    larger = gaps > 0
    needed = float((rises[larger] / gaps[larger]).max(initial=0.0))
    # A hair more, so that rounding does not put a point outside the bound that it defines.
    return min(MAX_GROWTH, max(GROWTH, needed * (1 + 1e-9)))


def _positive(shape: Shape) -> Shape:
    """An empty dimension costs what a dimension of one does (a launch); its logarithm must exist."""
    return tuple(max(1, size) for size in shape)
