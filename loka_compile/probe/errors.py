"""How far a result is from its fp64 reference, and how sure we are of that.

The gate's metric (``gate.py``) is made of MERE with a floored denominator::

    mere_floored = mean(|out - ref| / max(|ref|, 0.05 * RMS(ref)))

The paper's own MERE (section II-C) divides by ``|ref|`` alone. For outputs centred on zero it has no finite mean, since
``1/|ref|`` is not integrable at 0: it grows with the sample and depends on luck. It stands beside the gate's metric for
comparison with the paper. Its terms with ``ref == 0`` are left out of the mean and counted in ``zero_refs``.

Where a few rows are much larger than the rest, they make up the RMS, and errors of all other rows fall below the floor.
``mere_by_row`` floors each row (each sample of a batch, in forward and grad_input) by its own RMS and shows that case;
on rows of like size both agree.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from loka_compile.errors import ProbeError

#: The denominator of the floored MERE is at least this share of the reference's RMS.
FLOOR = 0.05


class Errors(NamedTuple):
    """Error measures of one result. A result with a NaN or an Inf has infinite errors and a NaN cosine.

    A gate must ask ``metric <= limit`` (which neither infinity nor NaN passes), never ``not > limit``.
    """

    #: Mean of |out - ref| / max(|ref|, 0.05 RMS(ref)).
    mere_floored: float
    #: As mere_floored, with the RMS of the element's own row; rows of zeros alone are left out.
    mere_by_row: float
    #: The paper's MERE, mean of |out - ref| / |ref| over elements with ref != 0.
    mere: float
    #: ||out - ref|| / ||ref||, Frobenius norms.
    frobenius: float
    #: Signal to quantisation noise, 10 log10(||ref||^2 / ||out - ref||^2), decibels; +inf for an exact result.
    sqnr_db: float
    #: Largest |out - ref|, in the output's own unit.
    max_error: float
    #: Cosine of the angle between out and ref as vectors.
    cosine: float
    elements: int
    #: Elements with ref == 0.
    zero_refs: int


_EMPTY = Errors(math.nan, math.nan, math.nan, math.nan, math.nan, math.nan, math.nan, 0, 0)


class Interval(NamedTuple):
    """A mean and its two-sided confidence interval; low and high are NaN where they are not defined."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Reference:
    """A reference with what every comparison with it shares, so that many candidates can be measured against it.

    Raises:
        ProbeError: the reference holds a NaN or an Inf, which no error can be relative to.
    """

    value: Tensor

    def __post_init__(self) -> None:
        """Bring the reference to fp64 and check it."""
        object.__setattr__(self, "value", self.value.detach().to(torch.float64))
        if self.value.numel() and not math.isfinite(self.square):
            raise ProbeError("the reference holds NaN or Inf: leave such samples out before measuring")

    @functools.cached_property
    def square(self) -> float:
        """Sum of squares."""
        flat = self.value.reshape(-1)
        return float(torch.dot(flat, flat))

    @functools.cached_property
    def _inverse_floored(self) -> Tensor:
        floor = FLOOR * math.sqrt(self.square / max(1, self.value.numel()))
        return self.value.abs().clamp_(min=floor).reciprocal_().reshape(-1)

    @functools.cached_property
    def _inverse_by_row(self) -> Tensor:
        """1/max(|ref|, floor of its row), and 0 in rows of zeros."""
        rows = self.value.reshape(-1, self.value.shape[-1] if self.value.dim() else 1)
        floor = FLOOR * rows.square().mean(dim=1, keepdim=True).sqrt_()
        inverse = torch.maximum(rows.abs(), floor).reciprocal_()
        return inverse.masked_fill_(torch.isinf(inverse), 0.0).reshape(-1)

    @functools.cached_property
    def _inverse(self) -> Tensor:
        """1/|ref|, and 0 where ref is 0: those terms then drop out of the sum."""
        inverse = self.value.abs().reciprocal_().reshape(-1)
        return inverse.masked_fill_(torch.isinf(inverse), 0.0)

    @functools.cached_property
    def zeros(self) -> int:
        """Elements whose reciprocal does not exist: exact zeros (and fp64 subnormals)."""
        return int((self._inverse == 0).sum())

    def measure(self, out: Tensor) -> Errors:
        """All measures of ``out`` (any float dtype, on the reference's device).

        Empty tensors measure NaN. A reference of zeros alone gives relative errors of 0 if ``out`` is zero too, else
        infinity.

        Raises:
            ProbeError: the shapes differ.
        """
        if out.shape != self.value.shape:
            raise ProbeError(f"result of shape {tuple(out.shape)} against a reference of {tuple(self.value.shape)}")
        count = out.numel()
        if count == 0:
            return _EMPTY
        ref = self.value.reshape(-1)
        diff = out.detach().to(torch.float64).reshape(-1) - ref
        noise = float(torch.dot(diff, diff))
        if not math.isfinite(noise):
            return Errors(math.inf, math.inf, math.inf, math.inf, -math.inf, math.inf, math.nan, count, self.zeros)
        along = float(torch.dot(diff, ref))
        distance = diff.abs_()
        largest = float(distance.max())
        signal = self.square
        if signal == 0:
            error = math.inf if noise > 0 else 0.0
            sqnr = -math.inf if noise > 0 else math.inf
            return Errors(error, error, error, error, sqnr, largest, math.nan, count, self.zeros)
        used = count - self.zeros
        return Errors(
            mere_floored=float(torch.dot(distance, self._inverse_floored)) / count,
            mere_by_row=self._by_row(distance),
            mere=float(torch.dot(distance, self._inverse)) / used if used else math.nan,
            frobenius=math.sqrt(noise / signal),
            sqnr_db=10 * math.log10(signal / noise) if noise > 0 else math.inf,
            max_error=largest,
            cosine=_cosine(signal, noise, along),
            elements=count,
            zero_refs=self.zeros,
        )

    def _by_row(self, distance: Tensor) -> float:
        inverse = self._inverse_by_row
        empty = inverse == 0
        left_out = int(empty.sum())
        if left_out and bool(distance[empty].any()):
            return math.inf
        return float(torch.dot(distance, inverse)) / max(1, len(distance) - left_out)


def measure(out: Tensor, ref: Tensor) -> Errors:
    """Error measures of ``out`` against ``ref`` (same shape, any float dtypes); see :meth:`Reference.measure`."""
    return Reference(ref).measure(out)


def pool(batches: Sequence[Errors]) -> tuple[Errors, Interval]:
    """One set of measures from several independent batches, and the 95 % interval of the floored MERE.

    Means over the batches; ``max_error`` is the largest. One infinite or NaN batch makes the mean so.

    Raises:
        ProbeError: there is no batch.
    """
    if not batches:
        raise ProbeError("no batch was measured")
    pooled = Errors(
        mere_floored=_mean([b.mere_floored for b in batches]),
        mere_by_row=_mean([b.mere_by_row for b in batches]),
        mere=_mean([b.mere for b in batches]),
        frobenius=_mean([b.frobenius for b in batches]),
        sqnr_db=_mean([b.sqnr_db for b in batches]),
        # max() alone would drop a NaN that is not the first.
        max_error=math.nan if any(math.isnan(b.max_error) for b in batches) else max(b.max_error for b in batches),
        cosine=_mean([b.cosine for b in batches]),
        elements=sum(b.elements for b in batches),
        zero_refs=sum(b.zero_refs for b in batches),
    )
    return pooled, confidence_interval([batch.mere_floored for batch in batches])


def confidence_interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """Student's t interval of the mean of independent ``values``: mean +- t(level, n - 1) * s / sqrt(n).

    Low and high are NaN for fewer than two values, and wherever a value is not finite.
    """
    count = len(values)
    mean = _mean(values)
    if count < 2 or not math.isfinite(mean):
        return Interval(mean, math.nan, math.nan)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    half = t_quantile(0.5 + level / 2, count - 1) * math.sqrt(variance / count)
    return Interval(mean, mean - half, mean + half)


def t_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t for ``0.5 <= probability < 1``: Hill's algorithm 396 (CACM 1970), about 5 digits.

    Written here because scipy is no dependency of the package.
    """
    tail = 2 * (1 - probability)
    n = float(degrees)
    if degrees == 1:
        return 1 / math.tan(tail * math.pi / 2)
    if degrees == 2:
        return math.sqrt(2 / (tail * (2 - tail)) - 2)
    a = 1 / (n - 0.5)
    b = 48 / (a * a)
    c = ((20700 * a / b - 98) * a - 16) * a + 96.36
    d = ((94.5 / (b + c) - 3) / b + 1) * math.sqrt(a * math.pi / 2) * n
    y = (d * tail) ** (2 / n)
    if y > 0.05 + a:
        x = _normal_quantile(tail / 2)
        y = x * x
        if n < 5:
            c += 0.3 * (n - 4.5) * (x + 0.6)
        c += (((0.05 * d * x - 5) * x - 7) * x - 2) * x + b
        y = (((((0.4 * y + 6.3) * y + 36) * y + 94.5) / c - y - 3) / b + 1) * x
        y = math.expm1(a * y * y)
    else:
        y = ((1 / (((n + 6) / (n * y) - 0.089 * d - 0.822) * (n + 2) * 3) + 0.5 / (n + 4)) * y - 1) * (n + 1) / (
            n + 2
        ) + 1 / y
    return math.sqrt(n * y)


def _normal_quantile(probability: float) -> float:
    from statistics import NormalDist

    return NormalDist().inv_cdf(probability)


def _mean(values: Sequence[float]) -> float:
    """The mean; NaN of nothing, of any NaN, and of infinities of both signs (on which fsum raises)."""
    if not values or any(math.isnan(v) for v in values) or (math.inf in values and -math.inf in values):
        return math.nan
    return math.fsum(values) / len(values)


def _cosine(signal: float, noise: float, along: float) -> float:
    # |out|^2 from the parts: out = ref + diff.
    out_square = signal + 2 * along + noise
    if out_square <= 0:
        return math.nan
    return max(-1.0, min(1.0, (signal + along) / math.sqrt(signal * out_square)))
