"""The command ``loka``: look at tables and plans, measure kernels, probe a training. No torch import."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table as Grid

from loka_compile import plan as plans
from loka_compile.bench.command import bench
from loka_compile.errors import CorruptFileError, LokaError
from loka_compile.plan import Decision, Plan, make_plan
from loka_compile.probe.command import make, probe
from loka_compile.selection.thresholds import as_mapping, parse_per_site
from loka_compile.table import Header, Measurement, Table

app = typer.Typer(name="loka", help="FP8 for recommendation models: tables, plans, measurements.", no_args_is_help=True)
table_app = typer.Typer(help="Tables: what was measured.", no_args_is_help=True)
plan_app = typer.Typer(help="Plans: which kernel every GEMM gets, and why.", no_args_is_help=True)
app.add_typer(table_app, name="table")
app.add_typer(plan_app, name="plan")
app.command("bench")(bench)
app.command("probe")(probe)
table_app.command("make")(make)

File = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A table file.")]
PlanFile = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A plan file, or a table to plan from.")]
MaxMere = Annotated[float, typer.Option(help="Largest error of a kernel, when planning from a table.")]
MinSpeedup = Annotated[float, typer.Option(help="Smallest speed-up of a kernel, when planning from a table.")]
PerSiteOption = Annotated[
    list[str] | None,
    typer.Option(
        "--per-site",
        help='Limits of some sites when planning from a table: "over.*:max_mere=0.1", "head:providers=torch,fbgemm".',
    ),
]
SiteFilter = Annotated[str, typer.Option("--site", help="Only sites that contain this text.")]


@table_app.command("show")
def table_show(
    file: File,
    site: SiteFilter = "",
    all_rows: Annotated[bool, typer.Option("--all", help="Also show refused candidates.")] = False,
) -> None:
    """Print a table: every candidate of every GEMM, with its error and its speed."""
    with _complaints():
        table = Table.load(file)
    console = _console()
    _print_header(console, table.header)
    shown = [row for row in table.rows if site in row.site and (all_rows or not row.refused)]
    grid = _grid("site", "role", "M", "N", "K", "candidate", ">error", ">95 % interval", ">drawn", ">raw rows",
                 ">quantise us", ">GEMM us", ">baseline us", ">speed-up", "refused", "remark")  # fmt: skip
    for row in shown:
        batch = str(row.m_min) if row.m_min == row.m_max else f"{row.m_min}..{row.m_max}"
        grid.add_row(
            *map(escape, (row.site, row.role, batch, str(row.n), str(row.k), row.candidate)),
            _number(row.mere), _interval(row), _number(row.mere_drawn), _number(row.mere_raw),
            _number(row.quantize_us, 1), _number(row.gemm_us, 1), _number(row.baseline_us, 1),
            _number(row.speedup, 2), escape(row.refused), escape(row.remark),
        )  # fmt: skip
    console.print(grid)
    hidden = sum(1 for row in table.rows if site in row.site) - len(shown)
    console.print(f"{len(shown)} rows" + (f", {hidden} refused ones hidden (--all shows them)" if hidden else ""))


@table_app.command("diff")
def table_diff(before: File, after: File) -> None:
    """Print the rows that differ between two tables. Exit status 1 if any does."""
    with _complaints():
        old, new = Table.load(before), Table.load(after)
    console = _console()
    old_header, new_header = old.header.to_json(timestamps=False), new.header.to_json(timestamps=False)
    for name, value in old_header.items():
        if value != new_header[name]:
            console.print(escape(f"header {name}: {value!r} -> {new_header[name]!r}"))
    changes = old.diff(new)
    grid = _grid("site", "role", "candidate", ">error", ">speed-up", "what")
    for change in changes:
        row = change.after or change.before
        assert row is not None
        grid.add_row(
            *map(escape, (row.site, row.role, row.candidate)),
            _arrow(change.before, change.after, "mere", 4),
            _arrow(change.before, change.after, "speedup", 2),
            "added" if change.before is None else "removed" if change.after is None else "changed",
        )
    if changes:
        console.print(grid)
    console.print(f"{len(changes)} of {len(old.rows)} and {len(new.rows)} rows differ")
    if changes or old_header != new_header:
        raise typer.Exit(1)


@plan_app.command("show")
def plan_show(
    file: PlanFile,
    max_mere: MaxMere = 0.2,
    min_speedup: MinSpeedup = 1.05,
    per_site: PerSiteOption = None,
    site: SiteFilter = "",
) -> None:
    """Print a plan: the kernel of every GEMM. A table is planned from with the given thresholds."""
    with _complaints():
        plan = _load_plan(file, max_mere, min_speedup, per_site)
    console = _console()
    if plan.header is not None:
        _print_header(console, plan.header)
    console.print(escape("; ".join(_limits(plan))))
    grid = _grid("site", "role", "kernel", ">error", ">speed-up", ">us", "reason")
    for decision in plan.decisions:
        if site in decision.site:
            style = "" if decision.is_high_precision else "green"
            grid.add_row(
                *map(escape, (decision.site, decision.role, decision.kernels)),
                _number(decision.mere), _number(decision.speedup, 2), _number(decision.us, 1),
                escape(decision.reason), style=style,
            )  # fmt: skip
    console.print(grid)
    before, after, unknown = plan.predicted()
    if after:
        missing = f", {unknown} of unknown cost left out" if unknown else ""
        console.print(f"predicted: {before:.1f} us in high precision, {after:.1f} us by the plan "
                      f"({before / after:.2f}x){missing}")  # fmt: skip
    console.print(", ".join(f"{name}: {count}" for name, count in plan.counts().items()) or "empty plan")


@plan_app.command("explain")
def plan_explain(
    site: Annotated[str, typer.Argument(help='A site, such as "over.mlp.2#0", or its module\'s name.')],
    file: Annotated[
        Path, typer.Option("--plan", "-p", exists=True, dir_okay=False, help="A plan file, or a table to plan from.")
    ],
    max_mere: MaxMere = 0.2,
    min_speedup: MinSpeedup = 1.05,
    per_site: PerSiteOption = None,
) -> None:
    """Print every candidate of a site's GEMMs and what became of it."""
    with _complaints():
        plan = _load_plan(file, max_mere, min_speedup, per_site)
    console = _console()
    found = [d for d in plan.decisions if site in (d.site, d.site.rpartition("#")[0])]
    if not found:
        known = "\n  ".join(dict.fromkeys(d.site for d in plan.decisions)) or "none"
        _fail(f"the plan knows no site {site!r}; it knows:\n  {known}")
    for decision in found:
        _explain(console, decision, plan)


@plan_app.command("diff")
def plan_diff(
    before: PlanFile,
    after: PlanFile,
    max_mere: MaxMere = 0.2,
    min_speedup: MinSpeedup = 1.05,
    per_site: PerSiteOption = None,
) -> None:
    """Print the GEMMs that two plans decide differently. Exit status 1 if there are any."""
    with _complaints():
        old, new = (_load_plan(file, max_mere, min_speedup, per_site) for file in (before, after))
    console = _console()
    for was, now in zip(_limits(old), _limits(new), strict=True):
        if was != now:
            console.print(escape(f"{was} -> {now}"))
    changes = old.diff(new)
    grid = _grid("site", "role", "before", "after", "reason")
    for change in changes:
        decision = new.lookup(change.site, change.role) or old.lookup(change.site, change.role)
        assert decision is not None
        names = (change.site, change.role, change.before or "absent", change.after or "absent", decision.reason)
        grid.add_row(*map(escape, names))
    if changes:
        console.print(grid)
    console.print(f"{len(changes)} of {max(len(old), len(new))} GEMMs differ")
    if changes:
        raise typer.Exit(1)


def _load_plan(file: Path, max_mere: float, min_speedup: float, per_site: list[str] | None = None) -> Plan:
    """A plan file as it is; a table file by planning from it."""
    limits = parse_per_site(per_site or ())
    try:
        kind = json.loads(file.read_bytes()).get("format")
    except (ValueError, AttributeError):
        kind = plans.FORMAT  # Plan.load says what is wrong with it
    if kind == plans.FORMAT:
        return Plan.load(file)
    try:
        return make_plan(Table.load(file), max_mere=max_mere, min_speedup=min_speedup, per_site=limits)
    except CorruptFileError as error:
        if kind is None:
            raise CorruptFileError(f"{file} is neither a plan nor a table file") from error
        raise


def _limits(plan: Plan) -> list[str]:
    """The thresholds as text: those of every site, and those by pattern."""
    own = "; ".join(
        f"{pattern}: {', '.join(f'{key} {value}' for key, value in limits.items())}"
        for pattern, limits in as_mapping(plan.per_site).items()
    )
    return [f"thresholds: error <= {plan.max_mere:g}, speed-up >= {plan.min_speedup:g}", f"per site: {own or 'none'}"]


def _explain(console: Console, decision: Decision, plan: Plan) -> None:
    console.print(f"[bold]{escape(decision.site)}[/] {decision.role}: [bold]{escape(decision.kernels)}[/]")
    if decision.reason:
        console.print(f"  {escape(decision.reason)}")
    if math.isfinite(decision.us):
        console.print(f"  {decision.us:.1f} us in the plan, {decision.baseline_us:.1f} us in high precision")
    limits = plan.limits(decision.site)
    if (limits.max_mere, limits.min_speedup) != (plan.max_mere, plan.min_speedup):
        console.print(f"  limits of this site: error <= {limits.max_mere:g}, speed-up >= {limits.min_speedup:g}")
    grid = _grid("candidate", ">error", ">speed-up alone", "verdict", "remark")
    for verdict in decision.verdicts:
        chosen = verdict.candidate in [k.candidate for k in (decision.ranges or (decision,))]
        text = "chosen" if chosen and not verdict.reason else escape(verdict.reason) or "eligible, not chosen"
        if chosen and decision.by_hand:
            text = f"chosen by hand, although: {text}" if verdict.reason else "chosen by hand"
        elif chosen and decision.ranges:
            text = "chosen for " + " and ".join(_spans(decision, verdict.candidate))
        grid.add_row(
            escape(verdict.candidate), _number(verdict.mere), _number(verdict.speedup, 2), text,
            escape(verdict.remark), style="green" if chosen else "",
        )  # fmt: skip
    if decision.verdicts:
        console.print(grid)


def _spans(decision: Decision, candidate: str) -> list[str]:
    """The batch sizes at which a decision takes this candidate."""
    starts = [r.m_from for r in decision.ranges]
    spans = [f"M = {start}..{after - 1}" for start, after in pairwise(starts)]
    spans = [f"M < {starts[1]}", *spans[1:], f"M >= {starts[-1]}"]
    return [span for span, r in zip(spans, decision.ranges, strict=True) if r.candidate == candidate]


def _print_header(console: Console, header: Header) -> None:
    parts = [
        f"target {header.target or 'none'}",
        f"device {header.device or 'unknown'}",
        f"torch {header.torch or '?'}",
    ]
    parts += [f"{name} {version}" for name, version in header.libraries.items()]
    parts += [f"{len(header.fingerprint)} sites"] + ([f"made {header.created}"] if header.created else [])
    console.print(escape(", ".join(parts)))
    for site, count in header.dropped_rows.items():
        console.print(escape(f"{site}: {count} sampled rows with NaN or Inf left out"), style="yellow")


def _grid(*columns: str) -> Grid:
    """A grid with these columns; ``>`` in front of a name aligns right."""
    grid = Grid(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        right = name.startswith(">")
        grid.add_column(name.removeprefix(">"), justify="right" if right else "left", overflow="fold")
    return grid


def _number(value: float, digits: int = 4) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def _interval(row: Measurement) -> str:
    low, high = _number(row.mere_low), _number(row.mere_high)
    return "-" if "-" in (low, high) else f"{low}..{high}"


def _arrow(before: Measurement | None, after: Measurement | None, name: str, digits: int) -> str:
    values = ["absent" if row is None else _number(getattr(row, name), digits) for row in (before, after)]
    return values[0] if values[0] == values[1] else " -> ".join(values)


def _console() -> Console:
    # Where no terminal says how wide it is (a pipe, a log), lines must not be cut.
    console = Console()
    return console if console.is_terminal else Console(width=240)


@contextlib.contextmanager
def _complaints() -> Iterator[None]:
    """Turn our errors into one line on stderr and exit status 2."""
    try:
        yield
    except (LokaError, OSError) as error:
        _fail(str(error))


def _fail(text: str) -> None:
    Console(stderr=True).print(f"[red]error:[/] {escape(text)}", soft_wrap=True)
    raise typer.Exit(2)


if __name__ == "__main__":
    app()
