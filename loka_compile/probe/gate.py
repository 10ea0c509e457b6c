"""The gate's metric: the one number by which a candidate is accurate enough or not, and the remarks beside it.

    g = MERE floored by the RMS of the whole result                      (errors.py)
        or, if that is larger, floored row by row; in forward and grad_input, whose rows are samples of the batch

Why row by row as well: one sample a million times larger than the others makes up the RMS, and a kernel that loses all
the others would pass. The rows of grad_weight are output features of one weight that an optimizer steps as a whole, so
there the first form alone counts.

``g`` is measured on operands drawn from the learnt distributions and on the raw rows that were kept. The worse of the
two is the candidate's; a remark says where the Gaussian underestimates it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from loka_compile.errors import ProbeError
from loka_compile.gemm import Role
from loka_compile.probe.errors import Errors, Interval, confidence_interval, pool

#: Roles in which each row of the result is a sample of its own.
BY_ROW = (Role.FORWARD, Role.GRAD_INPUT)
#: Raw rows whose error is so many times that of draws are worth a remark.
UNDERESTIMATED = 1.2
#: A kernel with so many times the error of the same recipe in exact arithmetic is worth a remark: 1.2 is far beyond
#: the spread of 50 pairs, and what sound kernels round differently is within 1 %.
FAULTY = 1.2


@dataclass(frozen=True)
class Effort:
    """How long operands are drawn for one GEMM: until every candidate's interval is narrow, or the cap is reached.

    Raises:
        ProbeError: a value is out of range.
    """

    #: Input/weight pairs at least. The paper takes 50 and 100; fewer are for a quick look.
    pairs: int = 100
    #: Pairs at most.
    cap: int = 400
    #: Width of the 95 % interval of the gate's metric, as part of the metric.
    width: float = 0.02
    #: Rows of one pair.
    rows: int = 128

    def __post_init__(self) -> None:
        if not (1 <= self.pairs <= self.cap and self.width > 0 and self.rows >= 1):
            raise ProbeError(f"pairs, cap and rows are at least 1, cap not below pairs, width above 0: {self}")


class Score(NamedTuple):
    """All error measures of a candidate on one kind of operands; ``gate`` is the gate's metric with its interval."""

    errors: Errors
    gate: Interval
    pairs: int

    def is_settled(self, effort: Effort) -> bool:
        """Whether more pairs would tell nothing more: the interval is narrow, or the metric is infinite or NaN."""
        if self.pairs < effort.pairs:
            return False
        return not math.isfinite(self.gate.mean) or self.gate.high - self.gate.low <= effort.width * self.gate.mean


def score(batches: Sequence[Errors], role: Role) -> Score:
    """Pool what was measured on independent pairs of one GEMM.

    Raises:
        ProbeError: there is none.
    """
    errors = pool(batches)[0]
    by_row = role in BY_ROW and errors.mere_by_row > errors.mere_floored
    return Score(
        errors, confidence_interval([b.mere_by_row if by_row else b.mere_floored for b in batches]), len(batches)
    )


def worse(drawn: Score | None, raw: Score | None) -> Score:
    """The score that gates. What is not a number counts as the worst.

    Raises:
        ProbeError: there is neither.
    """
    found = [s for s in (drawn, raw) if s is not None]
    if not found:
        raise ProbeError("nothing was measured")
    return max(found, key=lambda s: math.inf if math.isnan(s.gate.mean) else s.gate.mean)


def remarks(drawn: Score | None, raw: Score | None, exact: Score | None, effort: Effort) -> str:
    """What a reader of the table should know of a candidate, or "".

    Args:
        drawn, raw: its scores.
        exact: the score of its recipe in exact arithmetic, on the same draws; None where it is that or cannot tell.
        effort: what was asked of the draws.
    """
    found = []
    if drawn is not None and raw is not None and raw.gate.mean > UNDERESTIMATED * drawn.gate.mean:
        found.append(f"a Gaussian underestimates it: {drawn.gate.mean:.3g} drawn, {raw.gate.mean:.3g} on raw rows")
    if drawn is not None and exact is not None and drawn.gate.mean > FAULTY * exact.gate.mean:
        ratio = drawn.gate.mean / exact.gate.mean if exact.gate.mean > 0 else math.inf
        found.append(f"{ratio:.3g} times the error of exact arithmetic: a faulty kernel?")
    if drawn is not None and drawn.pairs > 1 and not drawn.is_settled(effort):
        found.append(f"interval wider than {100 * effort.width:g} % after {drawn.pairs} pairs")
    return "; ".join(found)
