"""What loka did, read from its report as plain data, and the tables that the demo prints."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import loka_compile

ROLES = ("forward", "grad_input", "grad_weight")
STYLE: dict[str, Any] = {"title_justify": "left", "title_style": "bold", "box": box.SIMPLE_HEAD}


@dataclass(frozen=True)
class Outcome:
    """What loka did, as plain data: :func:`read_outcome` is the one place where this program reads loka's report."""

    text: str
    #: Site -> kind of chain and the Mods that rewrote it.
    chains: dict[str, dict[str, Any]]
    refusals: list[dict[str, str]]
    #: One entry per GEMM: site, role, shape, kernel, its error and speed-up, and all candidates.
    gemms: list[dict[str, Any]]
    max_mere: float
    min_speedup: float
    #: Calls that ran in high precision and were sampled before the plan was made; 0 if a cached table was used.
    sampled_calls: int

    @property
    def counts(self) -> dict[str, int]:
        """How many GEMMs run in each kernel, most first."""
        return dict(Counter(g["kernel"] for g in self.gemms).most_common())


def read_outcome() -> Outcome | None:
    """What loka did in this process's last training compile; None if there was none."""
    reports = [report for report in loka_compile.reports() if report.is_training]
    if not reports:
        return None
    report = reports[-1]
    plan = report.plan
    chains: dict[str, dict[str, Any]] = {}
    for stage in report.stages:
        for match in stage.matched:
            if stage.name != "sites":
                chain = chains.setdefault(match.site, {"kind": match.kind, "mods": []})
                chain["mods"].append(stage.name)
                chain["kind"] = max(chain["kind"], match.kind, key=len)  # "bias" yields to the chain it belongs to
    shapes = {(row.site, row.role): (row.m_max, row.n, row.k) for row in report.table.rows} if report.table else {}
    fallbacks = {(g.decision.site, g.decision.role): g.fallback for g in report.gemms if g.fallback}
    gemms = []
    # The plan, not report.gemms: code that comes from the compile cache has no list of lowered GEMMs.
    for d in plan.decisions if plan is not None else ():
        fallback = fallbacks.get((d.site, d.role), "")
        gemms.append(
            {
                "site": d.site,
                "role": d.role,
                "shape": list(shapes.get((d.site, d.role), ())),
                "kernel": d.candidate,
                "fp8": not (d.is_high_precision or fallback),
                "mere": d.mere,
                "speedup": d.speedup,
                "reason": fallback or d.reason,
                "candidates": [
                    {"kernel": v.candidate, "mere": v.mere, "speedup": v.speedup, "reason": v.reason}
                    for v in d.verdicts
                ],
            }
        )
    refusals = [{"node": r.node, "reason": r.reason, "source": r.source} for r in report.refusals]
    sampled = re.search(r"planned after sampling (\d+) calls", "\n".join(report.notes))
    return Outcome(
        text=str(report),
        chains=chains,
        refusals=refusals,
        gemms=gemms,
        max_mere=plan.max_mere if plan is not None else math.nan,
        min_speedup=plan.min_speedup if plan is not None else math.nan,
        sampled_calls=int(sampled[1]) if sampled else 0,
    )


def show_outcome(outcome: Outcome, console: Console) -> None:
    """Print what was rewritten, what was left alone, and the plan: a row per layer, a column per GEMM."""
    table = Table("site", "chain", "rewritten by", title=f"rewritten: {len(outcome.chains)} layers", **STYLE)
    for site, chain in outcome.chains.items():
        table.add_row(site, chain["kind"], ", ".join(chain["mods"]))
    console.print(table)
    if outcome.refusals:
        table = Table("node", "left alone because", title=f"refused: {len(outcome.refusals)}", **STYLE)
        for refusal in outcome.refusals:
            table.add_row(refusal["node"], refusal["reason"])
        console.print(table)
    if not outcome.gemms:
        console.print("no plan was made: every GEMM stays in high precision")
        return
    counts = ", ".join(f"{count} {kernel}" for kernel, count in outcome.counts.items())
    table = Table("site", "M x N x K", *ROLES, title=f"plan for {len(outcome.gemms)} GEMMs: {counts}", **STYLE)
    by_site: dict[str, dict[str, dict[str, Any]]] = {}
    for gemm in outcome.gemms:
        by_site.setdefault(gemm["site"], {})[gemm["role"]] = gemm
    for site, gemms in by_site.items():
        shape = " x ".join(map(str, gemms["forward"]["shape"])) if "forward" in gemms else ""
        cells = [_cell(gemms[role], outcome) if role in gemms else "[dim]none[/dim]" for role in ROLES]
        table.add_row(site, shape, *cells)
    console.print(table)
    console.print(
        "[dim]Bold: FP8, with its speed-up (quantisation included) and its error (MERE). Dim: high precision, because "
        f"the best FP8 kernel is below {outcome.min_speedup:g}x or above error {outcome.max_mere:g}, "
        "or because none takes the shape.[/dim]"
    )


def _cell(gemm: dict[str, Any], outcome: Outcome) -> str:
    if gemm["fp8"]:
        return f"[bold]{gemm['kernel']}[/bold]\n{gemm['speedup']:.2f}x, error {gemm['mere']:.2f}"
    measured = [c for c in gemm["candidates"] if np.isfinite(c["mere"]) and np.isfinite(c["speedup"])]
    accurate = [c["speedup"] for c in measured if c["mere"] <= outcome.max_mere]
    if accurate:
        return f"[dim]{max(accurate):.2f}x[/dim]"
    return f"[dim]error {min(c['mere'] for c in measured):.2f}[/dim]" if measured else "[dim]no kernel[/dim]"


def show_quality(arms: Mapping[str, Mapping[str, float]], comparisons: Sequence[str], console: Console) -> None:
    """Print the arms' quality side by side, then how far apart they are."""
    table = Table("arm", title="quality, each flight predicted before it was trained on", **STYLE)
    for heading in ("log loss", "NE", "AUC", "calibration", "seconds", "flights/s"):
        table.add_column(heading, justify="right")
    for name, arm in arms.items():
        table.add_row(
            name, f"{arm['log_loss']:.5f}", f"{arm['normalised_entropy']:.4f}", f"{arm['auc']:.4f}",
            f"{arm['calibration']:.3f}", f"{arm['seconds']:.0f}", f"{arm['examples_per_second']:,.0f}",
        )  # fmt: skip
    console.print(table)
    for line in comparisons:
        console.print(line)
    console.print(
        "[dim]± is one standard error; positive is worse. NE: log loss over the entropy of the base rate. "
        "Seconds include compiling; flights/s are those of the second half.[/dim]"
    )
