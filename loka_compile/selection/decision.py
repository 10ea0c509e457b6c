"""What a plan says about one GEMM: its kernel, why, and what became of every candidate. No torch import."""

from __future__ import annotations

import math
from dataclasses import dataclass

from loka_compile.errors import TableError, UnknownNameError
from loka_compile.gemm import Role
from loka_compile.table import BASELINE


@dataclass(frozen=True)
class Verdict:
    """What became of one candidate. ``reason`` is empty when it was eligible.

    ``speedup`` is the candidate's own, with everything it needs paid by this GEMM alone.
    """

    provider: str
    recipe: str
    mere: float = math.nan
    speedup: float = math.nan
    reason: str = ""
    #: The table's remark on how its error was measured.
    remark: str = ""

    @property
    def candidate(self) -> str:
        """Provider and recipe, written ``torch:rowwise_fast``."""
        return f"{self.provider}:{self.recipe}"


@dataclass(frozen=True)
class BatchRange:
    """The kernel from batch size ``m_from`` on, up to where the next range begins; the last one has no end."""

    m_from: int
    provider: str
    recipe: str

    @property
    def candidate(self) -> str:
        """Provider and recipe, written ``torch:rowwise_fast``."""
        return f"{self.provider}:{self.recipe}"


@dataclass(frozen=True)
class Decision:
    """The kernel of one GEMM. ``reason`` says why it was taken, or why the GEMM stays in high precision.

    Raises:
        UnknownNameError: ``role`` is not one of forward, grad_input, grad_weight.
        TableError: ``ranges`` are not in order, or the kernel is in none of them.
    """

    site: str
    role: str
    provider: str
    recipe: str
    reason: str = ""
    #: Baseline time over the time in the plan: what is shared with other GEMMs counts in equal parts.
    speedup: float = math.nan
    mere: float = math.nan
    verdicts: tuple[Verdict, ...] = ()
    #: The kernels by batch size, where there is more than one; ``provider`` and ``recipe`` then are those at the batch
    #: size that was measured in the middle.
    ranges: tuple[BatchRange, ...] = ()
    #: Microseconds in the plan, and in high precision.
    us: float = math.nan
    baseline_us: float = math.nan
    #: All kernels as :func:`make_plan` chose them; "" in a plan written by hand.
    planned: str = ""

    def __post_init__(self) -> None:
        """Accept a Role where a str is declared, and nothing that is neither."""
        roles = [r.value for r in Role]
        if self.role not in roles:
            raise UnknownNameError("role", self.role, roles)
        object.__setattr__(self, "role", Role(self.role).value)
        starts = [r.m_from for r in self.ranges]
        if starts != sorted(set(starts)):
            raise TableError(f"{self.site} {self.role}: the ranges of batch size must rise, not {starts}")
        if self.ranges and self.candidate not in [r.candidate for r in self.ranges]:
            raise TableError(
                f"{self.site} {self.role}: {self.candidate} is in none of its ranges; change the ranges, or empty them"
            )

    @property
    def candidate(self) -> str:
        """Provider and recipe, written ``torch:rowwise_fast``."""
        return f"{self.provider}:{self.recipe}"

    @property
    def kernels(self) -> str:
        """All kernels as text: ``torch:rowwise``, or ``high_precision:native, from M = 512 torch:rowwise``."""
        if not self.ranges:
            return self.candidate
        first, *rest = self.ranges
        return ", ".join([first.candidate, *(f"from M = {r.m_from} {r.candidate}" for r in rest)])

    @property
    def by_hand(self) -> bool:
        """Whether a hand has changed what :func:`make_plan` chose, or has written it."""
        return self.planned != self.kernels

    @property
    def is_high_precision(self) -> bool:
        """True when the GEMM stays as it was, whatever the batch size."""
        return all((k.provider, k.recipe) == BASELINE for k in (self.ranges or (self,)))

    def at(self, m: int) -> tuple[str, str]:
        """Provider and recipe at batch size ``m``; sizes that no range covers get the nearest range's kernel."""
        kernel = (self.provider, self.recipe)
        for index, part in enumerate(self.ranges):
            if not index or part.m_from <= m:
                kernel = (part.provider, part.recipe)
        return kernel
