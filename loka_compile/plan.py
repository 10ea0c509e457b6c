"""The plan: which kernel every GEMM gets, and why. A pure function of the table and two thresholds. No torch import.

For each (site, role): candidates that are refused or unknown drop out; then those whose error is above ``max_mere``;
then those whose speed-up, quantisation included, is below ``min_speedup``; the fastest of the rest is taken (paper
section III-C). Every candidate keeps the reason it lost, so that "why not" has an answer.
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
from loka_compile.table import BASELINE, Header, Measurement, Table

#: What the "format" key of a plan file says.
FORMAT = "loka_compile plan"
#: Version of the file's structure; a file of another version is refused.
VERSION = 1


@dataclass(frozen=True)
class Verdict:
    """What became of one candidate. ``reason`` is empty when it was eligible (the fastest such is the decision)."""

    provider: str
    recipe: str
    mere: float = math.nan
    speedup: float = math.nan
    reason: str = ""

    @property
    def candidate(self) -> str:
        """Provider and recipe, written ``torch:rowwise_fast``."""
        return f"{self.provider}:{self.recipe}"


@dataclass(frozen=True)
class Decision:
    """The kernel of one GEMM. ``reason`` says why it was taken, or why the GEMM stays in high precision."""

    site: str
    role: str
    provider: str
    recipe: str
    reason: str = ""
    speedup: float = math.nan
    mere: float = math.nan
    verdicts: tuple[Verdict, ...] = ()

    def __post_init__(self) -> None:
        """Accept a Role where a str is declared, and nothing that is neither."""
        roles = [r.value for r in Role]
        if self.role not in roles:
            raise UnknownNameError("role", self.role, roles)
        object.__setattr__(self, "role", Role(self.role).value)

    @property
    def candidate(self) -> str:
        """Provider and recipe, written ``torch:rowwise_fast``."""
        return f"{self.provider}:{self.recipe}"

    @property
    def is_high_precision(self) -> bool:
        """True when the GEMM stays as it was."""
        return (self.provider, self.recipe) == BASELINE


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
        header: Header | None = None,
    ) -> None:
        """Sort the decisions and refuse duplicates."""
        self.decisions = tuple(sorted(decisions, key=lambda d: (d.site, _ORDER[d.role])))
        self.max_mere = max_mere
        self.min_speedup = min_speedup
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
            names = tuple(None if d is None else d.candidate for d in (old, new))
            if names[0] != names[1]:
                changes.append(PlanChange(site, role, *names))
        return tuple(changes)

    def digest(self) -> str:
        """SHA-256 (hex) of what the plan makes the compiler do: the kernel of every GEMM, and nothing else.

        Two plans of equal digest generate the same code, so compile caches keyed on it may be shared.
        """
        content = [[d.site, d.role, d.provider, d.recipe] for d in self.decisions]
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

        To change a decision, change its ``provider`` and ``recipe``; the rest of it explains and is not read back into
        the choice.

        Raises:
            OSError: the folder cannot be written.
        """
        header = "null" if self.header is None else self.header.dumps()
        blocks = []
        for decision in self.decisions:
            entry = {f.name: getattr(decision, f.name) for f in dataclasses.fields(decision) if f.name != "verdicts"}
            verdicts = ",\n    ".join(jsonio.dumps(dataclasses.asdict(v)) for v in decision.verdicts)
            lines = [f'   "{key}": {jsonio.dumps(value)}' for key, value in entry.items()]
            lines.append(f'   "verdicts": [\n    {verdicts}\n   ]' if verdicts else '   "verdicts": []')
            blocks.append("  {\n" + ",\n".join(lines) + "\n  }")
        decisions = ",\n".join(blocks)
        text = (
            f'{{\n "format": "{FORMAT}",\n "version": {VERSION},\n'
            f' "max_mere": {jsonio.dumps(self.max_mere)},\n "min_speedup": {jsonio.dumps(self.min_speedup)},\n'
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
        extra = sorted(set(document) - {"format", "version", "max_mere", "min_speedup", "decisions", "table"})
        if extra:
            raise CorruptFileError(f"{path} has unknown keys {extra}")
        thresholds = {
            name: jsonio.as_float(document[name], f"{path}: {name}")
            for name in ("max_mere", "min_speedup")
            if name in document
        }
        header = None if document.get("table") is None else Header.from_json(document["table"], f"{path}: table")
        decisions = [
            _decision(entry, f"{path}: decision {index}")
            for index, entry in enumerate(jsonio.as_list(document.get("decisions"), f"{path}: decisions"))
        ]
        try:
            return cls(decisions, header=header, **thresholds)
        except TableError as error:
            raise CorruptFileError(f"{path}: {error}") from error


def make_plan(
    table: Table,
    *,
    max_mere: float = 0.2,
    min_speedup: float = 1.05,
    providers: Collection[str] | None = None,
) -> Plan:
    """Decide the kernel of every GEMM in ``table``.

    The gate takes the point estimate: ``mere <= max_mere`` passes, equality included, and so does
    ``speedup >= min_speedup``. The confidence interval is shown, not gated on: its width shrinks with sampling effort,
    and a plan should not turn FP8 off because few rows were sampled. An error that is NaN or infinite never passes.
    Ties in time go to the smaller error, then to the name. Several ranges of batch size of one candidate count
    together: the worst error, and the speed-up of the summed times.

    Args:
        max_mere: largest floored MERE of a kernel, 0 to infinity.
        min_speedup: smallest (baseline time) / (quantise + GEMM time), above 0.
        providers: names of the providers that may be used; None is all of them.

    Raises:
        ConfigError: a threshold is not a number in its range.
    """
    if not (_is_number(max_mere) and max_mere >= 0):
        raise ConfigError(f"option 'max_mere' is {max_mere!r}; legal: a number >= 0")
    if not (_is_number(min_speedup) and min_speedup > 0):
        raise ConfigError(f"option 'min_speedup' is {min_speedup!r}; legal: a number > 0")
    allowed = None if providers is None else frozenset(providers)
    groups: dict[tuple[str, str], dict[tuple[str, str], list[Measurement]]] = {}
    for row in table.rows:
        groups.setdefault((row.site, row.role), {}).setdefault((row.provider, row.recipe), []).append(row)
    decisions = [
        _decide(site, role, candidates, max_mere, min_speedup, allowed)
        for (site, role), candidates in groups.items()
    ]  # fmt: skip
    return Plan(decisions, max_mere=max_mere, min_speedup=min_speedup, header=table.header)


_ORDER = {role.value: index for index, role in enumerate(Role)}
#: How far a candidate came before it lost; the reason of the one that came furthest explains the GEMM.
_REFUSED, _INACCURATE, _SLOW, _ELIGIBLE = range(4)


@dataclass(frozen=True)
class _Candidate:
    verdict: Verdict
    stage: int
    total_us: float

    @property
    def order(self) -> tuple[float, float, str]:
        """Fastest first, then most accurate, then by name; what is unknown comes last."""
        return _last(self.total_us), _last(self.verdict.mere), self.verdict.candidate


def _decide(
    site: str,
    role: str,
    rows: dict[tuple[str, str], list[Measurement]],
    max_mere: float,
    min_speedup: float,
    allowed: frozenset[str] | None,
) -> Decision:
    judged = [
        _judge(group, max_mere, min_speedup, allowed) for key, group in rows.items() if key != BASELINE
    ]  # fmt: skip
    judged.sort(key=lambda c: c.order)
    verdicts = tuple(c.verdict for c in sorted(judged, key=lambda c: (-c.stage, c.order)))
    eligible = [c for c in judged if c.stage == _ELIGIBLE]
    if eligible:
        best = eligible[0].verdict
        others = len(eligible) - 1
        reason = f"fastest of {len(eligible)} eligible" if others else "the only eligible one"
        return Decision(site, role, best.provider, best.recipe, reason, best.speedup, best.mere, verdicts)
    baseline = rows.get(BASELINE, [])
    refused = next((row.refused for row in baseline if row.refused), "")
    reason = refused or _why_none(judged)
    mere = max((row.mere for row in baseline), default=math.nan)
    return Decision(site, role, *BASELINE, reason, 1.0, mere, verdicts)


def _judge(group: list[Measurement], max_mere: float, min_speedup: float, allowed: frozenset[str] | None) -> _Candidate:
    total = math.fsum(row.total_us for row in group)
    speedup = math.fsum(row.baseline_us for row in group) / total if total > 0 else math.nan
    if len(group) == 1:
        speedup = group[0].speedup
    # max() would drop a NaN that is not the first.
    mere = math.nan if any(math.isnan(row.mere) for row in group) else max(row.mere for row in group)
    provider, recipe = group[0].provider, group[0].recipe
    stage, reason = _REFUSED, next((row.refused for row in group if row.refused), "")
    if not reason and allowed is not None and provider not in allowed:
        reason = f"provider {provider!r} is not among the enabled ones ({', '.join(sorted(allowed)) or 'none'})"
    if not reason:
        if not math.isfinite(mere):
            stage, reason = _INACCURATE, "non-finite output" if math.isinf(mere) else "error not known"
        elif mere > max_mere:
            stage, reason = _INACCURATE, f"error {mere:.4g} > {max_mere:g}"
        elif math.isnan(speedup):
            stage, reason = _SLOW, "no cost known"
        elif speedup < min_speedup:
            stage, reason = _SLOW, f"speed-up {speedup:.4g} < {min_speedup:g}"
        else:
            stage = _ELIGIBLE
    return _Candidate(Verdict(provider, recipe, mere, speedup, reason), stage, total)


def _why_none(judged: list[_Candidate]) -> str:
    """Why the candidate that came nearest lost: the fastest of the accurate, else the most accurate, else a refusal."""
    if not judged:
        return "no candidate was measured"
    furthest = max(c.stage for c in judged)
    there = [c for c in judged if c.stage == furthest]
    if furthest == _INACCURATE:
        best = min(there, key=lambda c: (_last(c.verdict.mere), c.order))
    else:
        best = min(there, key=lambda c: c.order)
    reasons = {c.verdict.reason for c in there}
    if len(reasons) == 1 and len(there) > 1:
        return f"all {len(there)} candidates: {best.verdict.reason}"
    return f"best is {best.verdict.candidate}: {best.verdict.reason}"


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
    try:
        return jsonio.record(Decision, entry, place, verdicts=verdicts)
    except UnknownNameError as error:
        raise CorruptFileError(f"{place}: {error}") from error


def _last(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
