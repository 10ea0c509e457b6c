"""What one compile did: stages, matches, refusals, and the decision for each GEMM. Kept per process, newest last."""

from __future__ import annotations

import difflib
import threading
import weakref
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from loka_compile.errors import UnknownNameError

if TYPE_CHECKING:
    from torch import Tensor, fx

    from loka_compile.gemm import Gemm
    from loka_compile.passes.base import Match, Refusal
    from loka_compile.plan import Decision, Plan
    from loka_compile.table import Table


#: Stages after the passes, whose graphs belong to one compile.
_LOWERED = ("joint", "forward", "backward")


@dataclass(frozen=True)
class Stage:
    """One step of a compile: a pass's name and tier, its time in seconds, and what it matched and refused."""

    name: str
    tier: str = ""
    seconds: float = 0.0
    matched: tuple[Match, ...] = ()
    refused: tuple[Refusal, ...] = ()


@dataclass(frozen=True)
class LoweredGemm:
    """One GEMM of the compiled graph and what it runs in."""

    gemm: Gemm
    decision: Decision
    #: Why the decision could not be carried out ("" where it was).
    fallback: str = ""


@dataclass
class Report:
    """Everything that was done to one compiled graph; ``print(report)`` shows it as text.

    ``graph(stage)`` and ``diff(stage)`` need ``options={"inspect": True}``.
    """

    stages: list[Stage] = field(default_factory=list)
    gemms: list[LoweredGemm] = field(default_factory=list)
    #: GEMMs without a site or role; they stay in high precision.
    unmapped: list[str] = field(default_factory=list)
    #: Kernels that the fusion made, a line each, and neighbours it left alone, with the reason.
    fusions: list[str] = field(default_factory=list)
    #: Remarks such as why there is no plan.
    notes: list[str] = field(default_factory=list)
    plan: Plan | None = None
    table: Table | None = None
    is_training: bool | None = None
    #: True when the compiled code came from the compile cache, so that lowering did not run.
    from_cache: bool = False
    #: The parameters that the graph reads: what tells whose graph it is.
    parameters: list[weakref.ref[Tensor]] = field(default_factory=list, repr=False)
    #: The report of the sampled version of the same graph.
    replaces: Report | None = field(default=None, repr=False)
    _graphs: dict[str, str] = field(default_factory=dict, repr=False)
    _keep_graphs: bool = field(default=False, repr=False)

    # ------------------------------------------------------------------ recording
    def add_stage(self, stage: Stage, gm: fx.GraphModule) -> None:
        """Record a finished stage and, when inspecting, its graph."""
        if stage.name != "before":
            self.stages.append(stage)
        self.add_graph(stage.name, gm)

    def add_graph(self, name: str, gm: fx.GraphModule) -> None:
        """Keep the graph as code under ``name`` when inspecting."""
        if self._keep_graphs:
            self._graphs[name] = gm.print_readable(print_output=False, include_stride=False, include_device=False)

    def inherit(self, first: Report) -> None:
        """Take over what the passes did when the same graph is compiled a second time."""
        self.replaces = first
        self.parameters = first.parameters
        self.stages = list(first.stages)
        self._graphs = {name: first._graphs[name] for name in first._graphs if name not in _LOWERED}

    # ------------------------------------------------------------------ reading
    def stage_names(self) -> list[str]:
        """The stages whose graphs were kept, in order."""
        return list(self._graphs)

    @property
    def matches(self) -> list[Match]:
        """Every rewrite of every pass."""
        return [m for s in self.stages for m in s.matched if s.name != "sites"]

    @property
    def refusals(self) -> list[Refusal]:
        """Everything that a pass left alone, with the reason."""
        return [r for s in self.stages for r in s.refused]

    @property
    def decisions(self) -> list[Decision]:
        """The decision for each GEMM of the graph."""
        return [g.decision for g in self.gemms]

    @property
    def chains(self) -> dict[str, str]:
        """Site -> kind of the chain that was rewritten there."""
        return {m.site: m.kind for m in self.matches if m.kind.startswith("linear-")}

    def count(self, stage: str) -> int:
        """How many places the pass of that name rewrote."""
        return sum(len(s.matched) for s in self.stages if s.name == stage)

    def unused(self, kind: str) -> int:
        """How many parameters of that kind ("bias", "norm") are no longer read."""
        return sum(m.unused.count(kind) for m in self.matches)

    def counts(self) -> dict[str, int]:
        """How many GEMMs run in each "provider:recipe" (or choice of these by batch size)."""
        return dict(Counter(d.kernels for d in self.decisions))

    def graph(self, stage: str) -> str:
        """The graph before ("before"), after all passes ("after"), or after one pass, as readable code.

        Raises:
            UnknownNameError: no such stage was kept (graphs are kept only with ``inspect=True``).
        """
        name = stage
        if stage == "after":
            name = next((s.name for s in reversed(self.stages) if s.name in self._graphs), stage)
        if name not in self._graphs:
            raise UnknownNameError("stage (graphs are kept with options={'inspect': True})", stage, self._graphs)
        return self._graphs[name]

    def diff(self, stage: str) -> str:
        """What one pass changed: the change in operator counts, then a unified diff of the code."""
        names = list(self._graphs)
        after = self.graph(stage)
        before = self._graphs[names[max(names.index(stage) - 1, 0)]] if stage in names else self.graph("before")
        counts = _call_counts(after)
        counts.subtract(_call_counts(before))
        head = ", ".join(f"{op} {n:+d}" for op, n in sorted(counts.items()) if n)
        lines = difflib.unified_diff(before.splitlines(), after.splitlines(), "before", stage, lineterm="", n=2)
        return "\n".join([f"# {stage}: {head or 'no operator changed'}", *lines])

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, for JSON and for structured trace logs."""
        from dataclasses import asdict

        return {
            "stages": [asdict(s) for s in self.stages],
            "gemms": [{**asdict(g.gemm), "decision": asdict(g.decision), "fallback": g.fallback} for g in self.gemms],
            "unmapped": self.unmapped,
            "fusions": self.fusions,
            "notes": self.notes,
            "counts": self.counts(),
            "from_cache": self.from_cache,
        }

    def __str__(self) -> str:
        from loka_compile.report_text import render

        return render(self)


def _call_counts(code: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for line in code.splitlines():
        head, separator, tail = line.partition(" = ")
        if separator and "(" in tail and not head.strip().startswith("#"):
            found[tail.split("(", 1)[0].strip()] += 1
    return found


_lock = threading.Lock()
_reports: deque[Report] = deque(maxlen=256)


def new_report(*, keep_graphs: bool) -> Report:
    """A fresh report, listed by :func:`reports`."""
    report = Report(_keep_graphs=keep_graphs)
    with _lock:
        _reports.append(report)
    return report


def discard_report(report: Report) -> None:
    """Take a report off the list: its compile was given up."""
    with _lock:
        kept = [r for r in _reports if r is not report]
        _reports.clear()
        _reports.extend(kept)


def merge_reports(parts: list[Report]) -> Report:
    """One report for the graphs of one model. A graph that was compiled twice (sampled, then planned) counts once.

    Raises:
        ValueError: there is no report: nothing was compiled.
    """
    replaced = {id(part.replaces) for part in parts if part.replaces is not None}
    parts = [part for part in parts if id(part) not in replaced]
    if not parts:
        raise ValueError("nothing was compiled: the model holds no operation that torch.compile captures")
    if len(parts) == 1:
        return parts[0]
    merged = Report(_keep_graphs=True, plan=parts[-1].plan, table=parts[-1].table)
    for index, part in enumerate(parts):
        merged.stages += part.stages
        merged.gemms += part.gemms
        merged.unmapped += part.unmapped
        merged.fusions += part.fusions
        merged.notes += [f"graph {index}: {note}" for note in part.notes]
        merged.is_training = merged.is_training or part.is_training
        for name, text in part._graphs.items():
            merged._graphs[name] = f"{merged._graphs.get(name, '')}# graph {index}\n{text}\n"
    return merged


def reports() -> list[Report]:
    """The reports of this process's compiles with ``backend="loka"``, newest last (the last 256)."""
    with _lock:
        return list(_reports)
