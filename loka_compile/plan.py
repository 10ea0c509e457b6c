"""The plan: which kernel every GEMM gets, and why. A pure function of the table and the thresholds. No torch import.

How it is made stands in selection/. Every candidate keeps the reason it lost, so that "why not" has an answer.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from loka_compile import jsonio
from loka_compile.errors import ConfigError, CorruptFileError, TableError, UnknownNameError
from loka_compile.gemm import Role
from loka_compile.selection.choose import decide
from loka_compile.selection.decision import BatchRange, Decision, Verdict
from loka_compile.selection.thresholds import Limits, Override, PerSite, Thresholds, as_mapping, overrides
from loka_compile.table import BASELINE, Header, Table

__all__ = ["FORMAT", "VERSION", "BatchRange", "Decision", "Plan", "PlanChange", "Verdict", "make_plan"]

#: What the "format" key of a plan file says.
FORMAT = "loka_compile plan"
#: Version of the file's structure; a file of another version is refused.
VERSION = 1


@dataclass(frozen=True)
class PlanChange:
    """A GEMM that two plans decide differently; None is "not in that plan"."""

    site: str
    role: str
    before: str | None
    after: str | None

    def __str__(self) -> str:
        """One readable line."""
        return f"{self.site} {self.role}: {self.before or 'absent'} -> {self.after or 'absent'}"


class Plan:
    """Decisions by (site, role), with the thresholds and the table header that they come from.

    Raises:
        TableError: two decisions are about the same GEMM.
    """

    def __init__(
        self,
        decisions: Iterable[Decision],
        *,
        max_mere: float = 0.2,
        min_speedup: float = 1.05,
        per_site: tuple[Override, ...] = (),
        header: Header | None = None,
    ) -> None:
        """Sort the decisions and refuse duplicates."""
        self.decisions = tuple(sorted(decisions, key=lambda d: (d.site, _ORDER[d.role])))
        self.max_mere = max_mere
        self.min_speedup = min_speedup
        self.per_site = per_site
        self.header = header
        self._by_gemm = {(d.site, d.role): d for d in self.decisions}
        if len(self._by_gemm) != len(self.decisions):
            twice = [key for key, count in Counter((d.site, d.role) for d in self.decisions).items() if count > 1]
            raise TableError(f"two decisions for {' '.join(twice[0])}")

    def __len__(self) -> int:
        """Number of GEMMs decided about."""
        return len(self.decisions)

    def __repr__(self) -> str:
        """The counts."""
        kernels = ", ".join(f"{name}*{count}" for name, count in self.counts().items())
        return f"Plan({kernels or 'empty'})"

    def lookup(self, site: str, role: Role | str) -> Decision | None:
        """The decision about this GEMM, or None if the plan does not know it (it then stays in high precision)."""
        return self._by_gemm.get((site, str(role)))

    def limits(self, site: str) -> Thresholds:
        """The thresholds of one site, those of ``per_site`` included."""
        return Limits(Thresholds(self.max_mere, self.min_speedup), self.per_site).at(site)

    def predicted(self) -> tuple[float, float, int]:
        """Microseconds of all GEMMs in high precision, in the plan, and how many of them the costs do not know.

        Of a plan with ranges, at the batch size in the middle. Decisions changed by hand have no known cost.
        """
        known = [d for d in self.decisions if math.isfinite(d.us) and math.isfinite(d.baseline_us)]
        before, after = math.fsum(d.baseline_us for d in known), math.fsum(d.us for d in known)
        return before, after, len(self) - len(known)

    def without(self, sites: Collection[str], reason: str) -> Plan:
        """The plan with all GEMMs of these sites in high precision; ``reason`` is what the decisions then say."""
        provider, recipe = BASELINE
        decisions = [
            dataclasses.replace(
                d, provider=provider, recipe=recipe, reason=reason, speedup=1.0, mere=math.nan, ranges=(),
                us=d.baseline_us, planned=f"{provider}:{recipe}",
            ) if d.site in sites else d
            for d in self.decisions
        ]  # fmt: skip
        return Plan(
            decisions,
            max_mere=self.max_mere,
            min_speedup=self.min_speedup,
            per_site=self.per_site,
            header=self.header,
        )

    def counts(self) -> dict[str, int]:
        """How many GEMMs each candidate got, most first: ``{"torch:tensorwise": 12, "high_precision:native": 3}``."""
        counts = Counter(d.candidate for d in self.decisions)
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

    def diff(self, other: Plan) -> tuple[PlanChange, ...]:
        """The GEMMs that ``other`` decides differently, in order of site and role."""
        before, after = self._by_gemm, other._by_gemm
        changes = []
        for site, role in sorted(before.keys() | after.keys(), key=lambda key: (key[0], _ORDER[key[1]])):
            old, new = before.get((site, role)), after.get((site, role))
            names = tuple(None if d is None else d.kernels for d in (old, new))
            if names[0] != names[1]:
                changes.append(PlanChange(site, role, *names))
        return tuple(changes)

    def digest(self) -> str:
        """SHA-256 (hex) of what the plan makes the compiler do: the kernel of every GEMM, and nothing else.

        Two plans of equal digest generate the same code, so compile caches keyed on it may be shared.
        """
        content: list[list[Any]] = [[d.site, d.role, d.provider, d.recipe] for d in self.decisions]
        content += [[d.site, d.role, r.m_from, r.provider, r.recipe] for d in self.decisions for r in d.ranges]
        return hashlib.sha256(jsonio.dumps([VERSION, content]).encode()).hexdigest()

    def check(self, **expected: Any) -> None:
        """As :meth:`Table.check`, on the header of the table that the plan was made from.

        A plan without a header (written by hand) fits everything.

        Raises:
            StaleTableError: the text lists each difference.
        """
        if self.header is not None:
            self.header.check("the plan", **expected)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON that can be read and edited, atomically.

        To change a decision, change its ``provider`` and ``recipe`` (and those in its ``ranges``, or empty these); the
        rest of it explains and is not read back into the choice. What was changed is told from ``planned``.

        Raises:
            OSError: the folder cannot be written.
        """
        header = "null" if self.header is None else self.header.dumps()
        blocks = []
        for decision in self.decisions:
            lines = []
            for field in dataclasses.fields(decision):
                value = getattr(decision, field.name)
                if field.name in ("verdicts", "ranges"):
                    parts = ",\n    ".join(jsonio.dumps(dataclasses.asdict(part)) for part in value)
                    lines.append(f'   "{field.name}": [\n    {parts}\n   ]' if parts else f'   "{field.name}": []')
                else:
                    lines.append(f'   "{field.name}": {jsonio.dumps(value)}')
            blocks.append("  {\n" + ",\n".join(lines) + "\n  }")
        decisions = ",\n".join(blocks)
        text = (
            f'{{\n "format": "{FORMAT}",\n "version": {VERSION},\n'
            f' "max_mere": {jsonio.dumps(self.max_mere)},\n "min_speedup": {jsonio.dumps(self.min_speedup)},\n'
            f' "per_site": {jsonio.dumps(as_mapping(self.per_site))},\n'
            f' "decisions": [\n{decisions}\n ],\n'
            f' "table": {header}\n}}\n'
        )
        jsonio.atomic_write(path, text)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan file. Decisions are taken as written, whatever the verdicts beside them say.

        A decision needs ``site``, ``role``, ``provider`` and ``recipe``; the rest may be left out, and so may
        ``table`` and the thresholds. Whether the provider exists is known only where kernels are chosen.

        Raises:
            CorruptFileError: the file is damaged or not a plan; the text names the entry.
            StaleTableError: the file's format has another version.
            OSError: the file cannot be opened.
        """
        document = jsonio.read_document(path, FORMAT, VERSION)
        known = {"format", "version", "max_mere", "min_speedup", "per_site", "decisions", "table"}
        extra = sorted(set(document) - known)
        if extra:
            raise CorruptFileError(f"{path} has unknown keys {extra}")
        thresholds = {
            name: jsonio.as_float(document[name], f"{path}: {name}")
            for name in ("max_mere", "min_speedup")
            if name in document
        }
        try:
            per_site = overrides(document.get("per_site"))
        except ConfigError as error:
            raise CorruptFileError(f"{path}: {error}") from error
        header = None if document.get("table") is None else Header.from_json(document["table"], f"{path}: table")
        decisions = [
            _decision(entry, f"{path}: decision {index}")
            for index, entry in enumerate(jsonio.as_list(document.get("decisions"), f"{path}: decisions"))
        ]
        try:
            return cls(decisions, header=header, per_site=per_site, **thresholds)
        except TableError as error:
            raise CorruptFileError(f"{path}: {error}") from error


def make_plan(
    table: Table,
    *,
    max_mere: float = 0.2,
    min_speedup: float = 1.05,
    providers: Collection[str] | None = None,
    per_site: PerSite | tuple[Override, ...] | None = None,
) -> Plan:
    """Decide the kernel of every GEMM in ``table``.

    The gate takes the point estimate: ``mere <= max_mere`` passes, equality included, and so does
    ``speedup >= min_speedup``. The confidence interval is shown, not gated on: its width shrinks with sampling effort,
    and a plan should not turn FP8 off because few rows were sampled. An error that is NaN or infinite never passes.
    Ties in time go to the smaller error, then to the name.

    GEMMs that share a quantised operand are decided together: see selection/. Rows for several batch sizes make the
    time a function of the batch size, and the plan may hold a kernel per range of it; an error counts with its worst.

    Args:
        table: measurements.
        max_mere: largest floored MERE of a kernel, 0 to infinity.
        min_speedup: smallest (baseline time) / (quantise + GEMM time), above 0.
        providers: names of the providers that may be used; None is all of them.
        per_site: other limits for sites by shell pattern: ``{"over.*": {"max_mere": 0.1, "providers": ("torch",)}}``.
            A pattern fits a site or its module's name; of several that fit, the last one to set a limit wins.

    Raises:
        ConfigError: a threshold is not a number in its range, or ``per_site`` is not such a mapping.
    """
    limits = Limits.of(max_mere, min_speedup, providers, per_site)
    return Plan(
        decide(table, limits),
        max_mere=max_mere,
        min_speedup=min_speedup,
        per_site=limits.overrides,
        header=table.header,
    )


_ORDER = {role.value: index for index, role in enumerate(Role)}


def _decision(value: Any, where: str) -> Decision:
    entry = jsonio.as_object(value, where)
    for name in ("site", "role", "provider", "recipe"):
        if name in entry:
            jsonio.as_str(entry[name], f"{where}, key {name!r}", non_empty=True)
    place = f"{where} ({entry.get('site')!r} {entry.get('role')!r})"
    verdicts = tuple(
        jsonio.record(Verdict, verdict, f"{place}, verdict {index}")
        for index, verdict in enumerate(jsonio.as_list(entry.get("verdicts", []), f"{place}, key 'verdicts'"))
    )
    ranges = tuple(
        jsonio.record(BatchRange, part, f"{place}, range {index}")
        for index, part in enumerate(jsonio.as_list(entry.get("ranges", []), f"{place}, key 'ranges'"))
    )
    try:
        return _as_changed(jsonio.record(Decision, entry, place, verdicts=verdicts, ranges=ranges))
    except (UnknownNameError, TableError) as error:
        raise CorruptFileError(f"{place}: {error}") from error


def _as_changed(decision: Decision) -> Decision:
    """A decision whose kernel a hand has changed, with the numbers of the kernel that it now has, as far as known."""
    if not (decision.planned and decision.by_hand):
        return decision
    verdict = next((v for v in decision.verdicts if v.candidate == decision.candidate), None)
    native = (decision.provider, decision.recipe) == BASELINE
    reason = f"by hand; planned was {decision.planned}" + (f": {decision.reason}" if decision.reason else "")
    return dataclasses.replace(
        decision,
        reason=decision.reason if decision.reason.startswith("by hand") else reason,
        speedup=1.0 if native else math.nan if verdict is None else verdict.speedup,
        mere=math.nan if verdict is None else verdict.mere,
        us=decision.baseline_us if native else math.nan,
    )
