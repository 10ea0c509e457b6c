"""From the rows of a table to decisions (paper section III-C). Pure, no torch import.

For each (site, role): candidates that are refused or unknown drop out, then those whose error is above ``max_mere``.
Of the rest the *combination* over all GEMMs is taken whose time is the smallest, with high precision entering as its
time divided by ``min_speedup``. For a GEMM that shares nothing this is: the fastest candidate whose speed-up,
quantisation included, is at least ``min_speedup``. Where GEMMs share operands, a quantisation counts once
(combination.py), so that a candidate may pay in company which would not pay alone.

Rows for several batch sizes are points of a line over the batch size (batch_cost.py), and the combination is found for
every batch size between the smallest and the largest of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction

from loka_compile.selection import combination
from loka_compile.selection.batch_cost import Line, envelope
from loka_compile.selection.candidates import INACCURATE, Candidate, Key, candidates_of, native_of
from loka_compile.selection.combination import Item, Option
from loka_compile.selection.decision import BatchRange, Decision, Verdict
from loka_compile.selection.thresholds import Limits
from loka_compile.table import BASELINE, Table

_NATIVE = ":".join(BASELINE)


def decide(table: Table, limits: Limits) -> list[Decision]:
    """The decision about every GEMM of the table."""
    gemms = candidates_of(table, limits)
    items = {
        key: frozenset(native_of(table, key).stored).union(*(c.items for c in found), *(c.stored for c in found))
        for key, found in gemms.items()
    }
    decisions: list[Decision] = []
    for group in combination.components(items):
        decisions += _Group({key: gemms[key] for key in group}, table, limits).decisions()
    return decisions


class _Group:
    """GEMMs that share operands, directly or through others."""

    def __init__(self, gemms: Mapping[Key, list[Candidate]], table: Table, limits: Limits) -> None:
        self.gemms, self.limits = gemms, limits
        self.natives = {key: native_of(table, key) for key in gemms}
        self.by_name = {key: {c.verdict.candidate: c for c in found} for key, found in gemms.items()}
        spans = [c.span for found in gemms.values() for c in found]
        #: Batch size of each GEMM relative to the group's, which is that of the GEMM with the most batch sizes. A layer
        #: may be applied to several rows per sample.
        self.span = max(spans, key=lambda s: (s.low < s.high, s.high), default=None)
        self.scale = {key: self._scale_of(found) for key, found in gemms.items()}
        self.prices = self._prices()

    def _scale_of(self, found: list[Candidate]) -> Fraction:
        if self.span is None or not found:
            return Fraction(1)
        return Fraction(found[0].span.high) / Fraction(self.span.high)

    def _prices(self) -> dict[Item, Line]:
        """Of every item, over the group's batch size."""
        prices: dict[Item, Line] = {}
        for key, found in self.gemms.items():
            for candidate in found:
                middle = Fraction(candidate.span.middle) / self.scale[key]
                needs = {**candidate.items, **candidate.stored, **self.natives[key].stored}
                for item, line in needs.items():
                    price = line.stretched(self.scale[key])
                    # Alike up to what was measured apart; the dearest, so that nothing is promised that may not come.
                    if item not in prices or price.at(middle) > prices[item].at(middle):
                        prices[item] = price
        return prices

    def decisions(self) -> list[Decision]:
        """One per GEMM."""
        if self.span is None:
            return [self._decision(key, {}, Fraction(1)) for key in self.gemms]
        low, middle, high = (Fraction(m) for m in (self.span.low, self.span.middle, self.span.high))
        if low == high:
            choice = self.solve(middle)
            return [self._decision(key, choice, middle) for key in self.gemms]
        parts = envelope(self.solve, self.cost, low, high)
        choice = [choice for start, choice in parts if start <= middle][-1]
        return [
            self._with_ranges(self._decision(key, choice, middle), key, parts) for key in self.gemms
        ]  # fmt: skip

    def solve(self, m: Fraction) -> dict[Key, str]:
        """The cheapest combination at the group's batch size ``m``: the candidates' names."""
        options = {key: self._options(key, m) for key in self.gemms}
        prices = {item: price.at(m) for item, price in self.prices.items()}
        return {key: option.name for key, option in combination.best(options, prices).items()}

    def cost(self, choice: Mapping[Key, str]) -> Line:
        """What ``solve`` minimises, of one choice, over the group's batch size."""
        whole, paid = Line(), set[Item]()
        for key, name in choice.items():
            candidate = self.by_name[key].get(name)
            whole += (self._native(key) if candidate is None else candidate.own).stretched(self.scale[key])
            paid |= self._items(key, name)
        for item in paid:
            whole += self.prices[item]
        return whole

    def _native(self, key: Key) -> Line:
        """High precision's time with the margin that FP8 has to beat."""
        margin = 1 / Fraction(self.limits.at(key[0]).min_speedup)
        baseline = next((c.baseline for c in self.gemms[key] if c.usable), Line())
        return Line(baseline.const * margin, baseline.slope * margin)

    def _options(self, key: Key, m: Fraction) -> list[Option]:
        at = m * self.scale[key]
        spares = self.natives[key].stored
        # At one batch size, what does not pay alone, shares nothing and spares nothing never will.
        usable = [c for c in self.gemms[key] if c.usable and (c.pays or c.items or spares or c.span.low < c.span.high)]
        options = [
            Option(c.verdict.candidate, c.own.at(at), self._items(key, c.verdict.candidate), tie=c.verdict.mere)
            for c in usable
        ]
        # What pays alone pays in any company; without this, rounding would decide at equality.
        if not any(c.pays and c.span.low == c.span.high for c in usable):
            options.append(Option(_NATIVE, self._native(key).at(at), self._items(key, _NATIVE)))
        return options

    def _decision(self, key: Key, choice: Mapping[Key, str], m: Fraction) -> Decision:
        site, role = key
        found = self.by_name[key]
        chosen = found.get(choice.get(key, _NATIVE))
        verdicts = self._verdicts(key, chosen)
        if chosen is None:
            native = self.natives[key]
            reason = native.refused or _why_none(self.gemms[key])
            return Decision(
                site, role, *BASELINE, reason, 1.0, native.mere, verdicts,
                us=native.us, baseline_us=native.us, planned=_NATIVE,
            )  # fmt: skip
        at = m * self.scale[key]
        users = Counter(item for other, name in choice.items() for item in self._items(other, name))
        unwritten = [item for item in self.natives[key].stored if item in self.prices and not users[item]]
        share = chosen.own.at(at) + sum(
            (self.prices[item].at(m) / users[item] for item in chosen.items), Fraction(0)
        )  # fmt: skip
        alone = all(users[item] == 1 for item in chosen.items)
        speedup = chosen.verdict.speedup if alone else float(chosen.baseline.at(at) / share)
        verdict = chosen.verdict
        reason = self._why(key, chosen, choice, users)
        if unwritten:
            reason += f"; {unwritten[0][0].rpartition(' ')[2]} written in FP8 alone"  # type: ignore[index]
        return Decision(
            site, role, verdict.provider, verdict.recipe, reason, speedup, verdict.mere, verdicts,
            us=float(share), baseline_us=float(chosen.baseline.at(at)), planned=verdict.candidate,
        )  # fmt: skip

    def _with_ranges(self, decision: Decision, key: Key, parts: list[tuple[Fraction, dict[Key, str]]]) -> Decision:
        ranges: list[BatchRange] = []
        for start, choice in parts:
            name = choice[key]
            if not ranges or name != ranges[-1].candidate:
                provider, recipe = name.split(":", 1)
                ranges.append(BatchRange(math.ceil(start * self.scale[key]) if ranges else 0, provider, recipe))
        # Two crossings between the same whole numbers leave a range without a batch size; its neighbours may be alike.
        ends = [*(r.m_from for r in ranges[1:]), math.inf]
        ranges = [r for r, end in zip(ranges, ends, strict=True) if end > r.m_from]
        ranges = [r for i, r in enumerate(ranges) if not i or r.candidate != ranges[i - 1].candidate]
        if len(ranges) < 2 or decision.candidate not in [r.candidate for r in ranges]:
            return decision
        found = dataclasses.replace(decision, ranges=tuple(ranges))
        return dataclasses.replace(found, planned=found.kernels)

    def _items(self, key: Key, name: str) -> frozenset[Item]:
        candidate = self.by_name[key].get(name)
        if candidate is None:
            return frozenset(item for item in self.natives[key].stored if item in self.prices)
        return frozenset(candidate.items) | frozenset(candidate.stored)

    def _verdicts(self, key: Key, chosen: Candidate | None) -> tuple[Verdict, ...]:
        """Every candidate's, the chosen one first, then by how far they came."""
        ranked = sorted(self.gemms[key], key=lambda c: (c is not chosen, -c.stage, c.order))
        return tuple(dataclasses.replace(c.verdict, reason="") if c is chosen else c.verdict for c in ranked)

    def _why(self, key: Key, chosen: Candidate, choice: Mapping[Key, str], users: Mapping[Item, int]) -> str:
        eligible = [c for c in self.gemms[key] if c.pays]
        first = min(eligible, key=lambda c: c.order, default=None)
        if first is chosen:
            reason = f"fastest of {len(eligible)} eligible" if len(eligible) > 1 else "the only eligible one"
        else:
            reason = "in the fastest combination" if first else "pays in combination"
        shared = sorted({str(item[0]) for item in chosen.items if users[item] > 1})  # type: ignore[index]
        words = []
        for name in shared:
            with_whom = sorted(
                f"{other[1]}" if other[0] == key[0] else f"{other[0]} {other[1]}"
                for other, taken in choice.items()
                if other != key and any(item in chosen.items and item[0] == name  # type: ignore[index]
                                        for item in self._items(other, taken))
            )  # fmt: skip
            words.append(f"{name.rpartition(' ')[2]} quantised once with {', '.join(with_whom)}")
        return "; ".join([reason, *words])


def _why_none(judged: list[Candidate]) -> str:
    """Why the candidate that came nearest lost: the fastest of the accurate, else the most accurate, else a refusal."""
    if not judged:
        return "no candidate was measured"
    furthest = max(c.stage for c in judged)
    there = [c for c in judged if c.stage == furthest]
    if furthest == INACCURATE:
        best = min(there, key=lambda c: (math.inf if math.isnan(c.verdict.mere) else c.verdict.mere, c.order))
    else:
        best = min(there, key=lambda c: c.order)
    reasons = {c.verdict.reason for c in there}
    if len(reasons) == 1 and len(there) > 1:
        return f"all {len(there)} candidates: {best.verdict.reason}"
    return f"best is {best.verdict.candidate}: {best.verdict.reason}"
