"""A report as text: rich tables, readable in a terminal and in a log."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loka_compile.report import Report


def render(report: Report, width: int = 140) -> str:
    """The whole report as plain text of at most ``width`` columns."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=width, no_color=True)
    kind = {True: "training", False: "inference", None: "compiled"}[report.is_training]
    console.print(f"loka report ({kind} graph{', served from the compile cache' if report.from_cache else ''})")
    _chains(report, console)
    _gemms(report, console)
    for title, lines in (
        ("fused kernels", report.fusions),
        ("GEMMs without a site or role, kept in high precision", report.unmapped),
        ("notes", report.notes),
    ):
        if lines:
            console.print(f"\n{title}:")
            for line in lines:
                console.print(f"  {line}", markup=False, highlight=False)
    return console.file.getvalue()  # type: ignore[attr-defined]


def _chains(report: Report, console: object) -> None:
    from rich.table import Table

    rewritten = report.matches
    table = Table("pass", "site", "what", "parameters no longer read", "source", title=f"rewritten: {len(rewritten)}")
    for stage in report.stages:
        if stage.name == "sites":
            continue
        for m in stage.matched:
            table.add_row(stage.name, m.site, m.kind, ", ".join(m.unused), m.source)
    if rewritten:
        console.print(table)  # type: ignore[attr-defined]
    if report.refusals:
        table = Table("node", "left alone because", "source", title=f"refused: {len(report.refusals)}")
        for r in report.refusals:
            table.add_row(r.node, r.reason, r.source)
        console.print(table)  # type: ignore[attr-defined]


def _gemms(report: Report, console: object) -> None:
    from rich.table import Table

    if not report.gemms:
        return
    counts = ", ".join(f"{name} x {n}" for name, n in sorted(report.counts().items()))
    table = Table(
        "site", "role", "m x n x k", "runs in", "speed-up", "error", "why", "next best", title=f"GEMMs: {counts}"
    )
    for g in report.gemms:
        d = g.decision
        losers = [v for v in d.verdicts if v.candidate != d.candidate and v.speedup == v.speedup]
        losers.sort(key=lambda v: -v.speedup)
        remark = next((v.remark for v in d.verdicts if v.candidate == d.candidate), "")
        others = ", ".join(f"{v.candidate} {v.speedup:.2f}x {v.mere:.3f}" for v in losers[:2])
        table.add_row(
            d.site, str(d.role), f"{g.gemm.m} x {g.gemm.n} x {g.gemm.k}", d.kernels,
            _number(d.speedup, "x"), _number(d.mere), "; ".join(filter(None, (g.fallback or d.reason, remark))), others,
        )  # fmt: skip
    console.print(table)  # type: ignore[attr-defined]


def _number(value: float | None, unit: str = "") -> str:
    return "" if value is None or value != value else f"{value:.3g}{unit}"
