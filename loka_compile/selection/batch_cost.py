"""Time as a function of the batch size M: a straight line through measured points, and where such lines cross.

A launch does not depend on the batch; flops and bytes of all three GEMMs of a layer, and of their quantisers, grow with
it linearly. So ``c + d*M`` with ``c, d >= 0`` is fitted by least squares on relative errors. Coefficients are exact
fractions: crossings are solved, not searched. No torch import.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import sympy

S = TypeVar("S")


@dataclass(frozen=True)
class Line:
    """``const + slope * M`` microseconds."""

    const: Fraction = Fraction(0)
    slope: Fraction = Fraction(0)

    def at(self, m: Fraction | int) -> Fraction:
        """Microseconds at batch size ``m``."""
        return self.const + self.slope * m

    def __add__(self, other: Line) -> Line:
        return Line(self.const + other.const, self.slope + other.slope)

    def stretched(self, factor: Fraction) -> Line:
        """The same time as a function of ``M / factor``."""
        return Line(self.const, self.slope * factor)

    def sympy(self) -> sympy.Expr:
        """The expression in the symbol ``M``."""
        import sympy

        m = sympy.Symbol("M", integer=True, positive=True)
        return sympy.Rational(self.const) + sympy.Rational(self.slope) * m


def fit(points: Mapping[float, float]) -> Line:
    """The line through measured times by batch size; one point gives a constant.

    Relative errors are minimised, with both coefficients >= 0.
    """
    if len(points) == 1:
        (only,) = points.values()
        return Line(Fraction(only))
    import numpy as np

    from loka_compile.costs.surface import fit_relative

    times = np.array(list(points.values()), dtype=np.float64)
    if not times.all():  # no relative error to a time of 0: quantisers that are free are so at every size
        return Line(Fraction(float(times.mean())))
    const, slope = fit_relative(np.array([[1.0, m] for m in points], dtype=np.float64), times)
    return Line(Fraction(float(const)), Fraction(float(slope)))


def crossing(a: Line, b: Line) -> Fraction | None:
    """The batch size at which both take the same time; None for parallel lines."""
    if a.slope == b.slope:
        return None
    return (a.const - b.const) / (b.slope - a.slope)


def envelope(
    solve: Callable[[Fraction], S], cost: Callable[[S], Line], low: Fraction, high: Fraction
) -> list[tuple[Fraction, S]]:
    """The cheapest choice at every batch size from ``low`` to ``high``: (from where on, choice), in order.

    The smallest of many lines is concave: a choice that is the cheapest at both ends of an interval is so between them.
    So the ends are solved, then the place where their lines cross, until no cheaper choice turns up there. Exact for
    any number of choices, with one solution per range found.

    Args:
        solve: the cheapest choice at one batch size.
        cost: the time of a choice as a line.
        low: the smallest batch size of interest; ``high``: the largest.
    """

    def between(low: Fraction, first: S, high: Fraction, last: S) -> list[tuple[Fraction, S]]:
        a, b = cost(first), cost(last)
        if a.at(high) == b.at(high):
            return [(low, first)]
        if a.at(low) == b.at(low):
            return [(low, last)]
        place = crossing(a, b)
        assert place is not None  # each is cheaper than the other at its own end
        middle = solve(place)
        if cost(middle).at(place) == a.at(place):
            return [(low, first), (place, last)]
        return between(low, first, place, middle) + between(place, middle, high, last)

    found = between(low, solve(low), high, solve(high))
    return [part for index, part in enumerate(found) if not index or part[1] != found[index - 1][1]]
