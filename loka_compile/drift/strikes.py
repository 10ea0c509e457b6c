"""When a site has left its safe range: the gate's metric on live data against its limit, with hysteresis. No torch.

A check measures a GEMM's kernel on a few live rows, so it comes with a confidence interval. A *strike* is a check whose
whole interval lies above the limit; a check whose mean is within the limit clears the strikes; one in between does
neither. A site leaves after ``patience`` strikes of one of its GEMMs, and never comes back by itself: so noise around
the limit moves nothing, and nothing flaps.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from loka_compile.plan import Plan

#: Site and role.
Key = tuple[str, str]
#: How far above the table's error a kernel may go whose error was above the limit when it was chosen (by hand).
HEADROOM = 1.25


@dataclass(frozen=True)
class Check:
    """The gate's metric (floored MERE) of one GEMM's kernel on live rows, with its 95 % interval (NaN: not known)."""

    site: str
    role: str
    candidate: str
    mere: float
    low: float = math.nan
    high: float = math.nan

    def above(self, limit: float) -> bool:
        """Whether the whole interval lies above; of a single sample, its mean by ``HEADROOM``."""
        if math.isinf(self.mere):
            return True
        return (self.mere / HEADROOM if math.isnan(self.low) else self.low) > limit


@dataclass(frozen=True)
class Departure:
    """A site that left its safe range."""

    site: str
    check: Check
    #: What the table has, and the limit.
    table: float
    limit: float

    def __str__(self) -> str:
        """One readable line."""
        return (
            f"{self.site}: error of {self.check.role} in {self.check.candidate} is {self.check.mere:.3g} on live data "
            f"(table: {self.table:.3g}, limit {self.limit:.3g})"
        )


class Drift:
    """Follows the checks of every GEMM.

    Args:
        plan: says the limits and what the table had.
        patience: strikes in a row after which a site leaves; at least 1.
    """

    def __init__(self, plan: Plan, patience: int) -> None:
        """Nothing has happened yet."""
        self.plan, self.patience = plan, patience
        self.strikes: Counter[Key] = Counter()
        #: The last check of every GEMM.
        self.last: dict[Key, Check] = {}
        self.departed: dict[str, Departure] = {}

    def limit(self, site: str, role: str) -> tuple[float, float]:
        """The table's error of the planned kernel, and the limit of the live one."""
        decision = self.plan.lookup(site, role)
        table = math.nan if decision is None else decision.mere
        limit = self.plan.limits(site).max_mere
        if math.isfinite(table) and table > limit:
            limit = HEADROOM * table
        return table, limit

    def add(self, check: Check) -> Departure | None:
        """Take a check into account; the departure if the site leaves now."""
        key = (check.site, check.role)
        self.last[key] = check
        if check.site in self.departed:
            return None
        table, limit = self.limit(*key)
        if check.above(limit):
            self.strikes[key] += 1
        elif check.mere <= limit:
            self.strikes[key] = 0
        if self.strikes[key] < self.patience:
            return None
        self.departed[check.site] = Departure(check.site, check, table, limit)
        return self.departed[check.site]

    def summary(self) -> Mapping[Key, tuple[float, float, float]]:
        """For every GEMM checked: live error, the table's, and the limit."""
        return {key: (check.mere, *self.limit(*key)) for key, check in self.last.items()}
