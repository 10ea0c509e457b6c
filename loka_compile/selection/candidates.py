"""The candidates of each GEMM: whether they may be used, how accurate they are, and what they cost. No torch import."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from loka_compile.gemm import Role, refused_for_role
from loka_compile.selection.batch_cost import Line, fit
from loka_compile.selection.combination import Item
from loka_compile.selection.decision import Verdict
from loka_compile.selection.operands import OPERANDS, TRANSPOSED, tensor
from loka_compile.selection.thresholds import Limits, Thresholds
from loka_compile.table import BASELINE, Measurement, Table

#: Site and role.
Key = tuple[str, str]

#: How far a candidate came before it lost; the reason of the one that came furthest explains the GEMM.
REFUSED, INACCURATE, SLOW, ELIGIBLE = range(4)


class Span(NamedTuple):
    """Batch sizes that were measured: the smallest, one in the middle, the largest."""

    low: float
    middle: float
    high: float


NOTHING = Line()


@dataclass(frozen=True)
class Candidate:
    """A candidate of one GEMM, with the time it takes as lines over the batch size."""

    verdict: Verdict
    stage: int
    total_us: float
    span: Span
    baseline: Line = NOTHING
    #: What this GEMM pays alone.
    own: Line = NOTHING
    #: What others may use as well.
    items: Mapping[Item, Line] = field(default_factory=dict)
    #: Tensors that it reads in their own dtype, and that would not be written so otherwise.
    stored: Mapping[Item, Line] = field(default_factory=dict)

    @property
    def usable(self) -> bool:
        """Allowed, accurate, and of a known cost; whether it pays is a question of the company."""
        return self.stage >= SLOW and bool(self.baseline.const or self.baseline.slope)

    @property
    def pays(self) -> bool:
        """Whether it is fast enough on its own."""
        return self.stage == ELIGIBLE

    @property
    def order(self) -> tuple[float, float, str]:
        """Fastest first, then most accurate, then by name; what is unknown comes last."""
        return _last(self.total_us), _last(self.verdict.mere), self.verdict.candidate


class Native(NamedTuple):
    """What the table says of a GEMM in high precision."""

    refused: str
    mere: float
    #: At the batch size in the middle.
    us: float
    #: As of a candidate.
    stored: Mapping[Item, Line]


def candidates_of(table: Table, limits: Limits) -> dict[Key, list[Candidate]]:
    """Every FP8 candidate of every GEMM, in the order of speed; a GEMM without any has an empty list."""
    groups: dict[Key, dict[tuple[str, str], list[Measurement]]] = {}
    for row in table.rows:
        groups.setdefault((row.site, row.role), {}).setdefault((row.provider, row.recipe), []).append(row)
    found: dict[Key, list[Candidate]] = {}
    for key, by_name in groups.items():
        given = [rows for name, rows in by_name.items() if name != BASELINE]
        batches = {row.batch for rows in given for row in rows}
        judged = (_judge(rows, limits.at(key[0]), table.header.same, batches) for rows in given)
        found[key] = sorted(judged, key=lambda c: c.order)
    return found


def native_of(table: Table, key: Key) -> Native:
    """What stands in the table of the GEMM in high precision."""
    rows = [row for row in table.rows if (row.site, row.role) == key and (row.provider, row.recipe) == BASELINE]
    refused = next((row.refused for row in rows if row.refused), "")
    times = [row.baseline_us for row in sorted(rows, key=lambda row: row.batch)]
    return Native(refused, max((row.mere for row in rows), default=math.nan),
                  times[len(times) // 2] if times else math.nan, _stored(rows, table.header.same))  # fmt: skip


def _judge(
    group: list[Measurement], limits: Thresholds, same: Mapping[str, str], batches_of_all: set[float]
) -> Candidate:
    total = math.fsum(row.total_us for row in group)
    speedup = math.fsum(row.baseline_us for row in group) / total if total > 0 else math.nan
    if len(group) == 1:
        speedup = group[0].speedup
    # max() would drop a NaN that is not the first.
    mere = math.nan if any(math.isnan(row.mere) for row in group) else max(row.mere for row in group)
    provider, recipe = group[0].provider, group[0].recipe
    stage, reason = REFUSED, next((row.refused for row in group if row.refused), "")
    if not reason and limits.providers is not None and provider not in limits.providers:
        enabled = ", ".join(sorted(limits.providers)) or "none"
        reason = f"provider {provider!r} is not among the enabled ones ({enabled})"
    reason = reason or refused_for_role(recipe, group[0].role)
    if not reason:
        if not math.isfinite(mere):
            stage, reason = INACCURATE, "non-finite output" if math.isinf(mere) else "error not known"
        elif mere > limits.max_mere:
            stage, reason = INACCURATE, f"error {mere:.4g} > {limits.max_mere:g}"
        elif math.isnan(speedup):
            stage, reason = SLOW, "no cost known"
        elif missing := sorted(batches_of_all - {row.batch for row in group}):
            # A line through fewer points than the others' could not be compared with theirs.
            stage, reason = INACCURATE, f"not measured at M = {', '.join(f'{m:g}' for m in missing)}"
        elif speedup < limits.min_speedup:
            stage, reason = SLOW, f"speed-up {speedup:.4g} < {limits.min_speedup:g}"
        else:
            stage = ELIGIBLE
    batches = sorted(row.batch for row in group)
    span = Span(batches[0], batches[len(batches) // 2], batches[-1])
    remark = "; ".join(dict.fromkeys(row.remark for row in group if row.remark))
    verdict = Verdict(provider, recipe, mere, speedup, reason, remark)
    if stage < SLOW or math.isnan(speedup):
        return Candidate(verdict, stage, total, span)
    baseline = fit({row.batch: row.baseline_us for row in group})
    return Candidate(verdict, stage, total, span, baseline, *_cost(group, same), _stored(group, same))


def _cost(group: list[Measurement], same: Mapping[str, str]) -> tuple[Line, dict[Item, Line]]:
    """The GEMM's own time, and what it needs of its operands."""
    forms = {(row.a_form, row.b_form) for row in group}
    if len(forms) > 1 or "" in next(iter(forms)):
        return fit({row.batch: row.total_us for row in group}), {}
    items: dict[Item, Line] = {}
    role = Role(group[0].role)
    for which, operand, transposed in zip("ab", OPERANDS[role], TRANSPOSED[role], strict=True):
        own_name = tensor(group[0].site, operand)
        name = same.get(own_name, own_name)
        form = getattr(group[0], f"{which}_form")
        once = fit({row.batch: getattr(row, f"{which}_once_us") for row in group})
        items[name, form] = once
        layout = fit({row.batch: getattr(row, f"{which}_layout_us") for row in group})
        if layout != NOTHING:
            items[name, form, "transposed" if transposed else "as stored"] = layout
    return fit({row.batch: row.gemm_us for row in group}), items


def _stored(group: list[Measurement], same: Mapping[str, str]) -> dict[Item, Line]:
    """The operands that the producer writes in their own dtype for this candidate's sake."""
    found: dict[Item, Line] = {}
    for row in group[:1]:
        for which, operand in zip("ab", OPERANDS[Role(row.role)], strict=True):
            line = fit({other.batch: getattr(other, f"{which}_stored_us") for other in group})
            if line != NOTHING:
                own_name = tensor(row.site, operand)
                found[same.get(own_name, own_name), "as it is"] = line
    return found


def _last(value: float) -> float:
    return math.inf if math.isnan(value) else value
