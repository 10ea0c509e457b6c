"""Does FP8 cost log loss? Trains the same model on the same stream in several ways and compares them, seed by seed.

    python -m benchmarks.quality --model wukong --size h200 --examples 50000000 --seeds 5 \\
        --data-options '{"numerics": "raw"}' --out benchmarks/results/quality/wukong_raw

Every (arm, seed) is a run of its own, kept as a file in ``--out``; a second call trains only what is missing, and
``--report-only`` trains nothing. Written in the end: ``quality.json`` (all figures), ``plain_fp8.png`` (counterpart of
the paper's figure 3: what plain FP8 costs in loss and speed) and ``mods_and_loka.png`` (figure 9: the Mods one by one,
and loka, over the whole trajectory). RLL is 100 * (LL_arm - LL_base) / LL_base in percent, base: the original in fp32.

"Neutral" is written only when the 95 % interval over at least three seeds ends below +0.05 %, by labels, by true
probabilities and by the bootstrap, and when plain FP8, the positive control, shows a loss above that on this stream.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import rich
import torch
import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.quality_arms import ARMS, Arm, device_text, fp8_summary, planned_arm, prepare, why_not
from benchmarks.quality_plots import plot_mods_and_loka, plot_plain_fp8
from benchmarks.quality_stats import Floats
from benchmarks.quality_summary import OtherSetupError, Runs, show, strict, summarise
from examples.models.registry import MODELS, build
from examples.training.checkpoint import atomic_write
from examples.training.config import TrainConfig
from examples.training.loop import DivergedError, Trainer
from examples.training.sources import open_source

#: Secondary measures, averaged over the scored windows.
MEASURES = ("auc", "calibration", "ece", "normalised_entropy")
app = typer.Typer(add_completion=False)


def train(
    arm: Arm, seed: int, setup: dict[str, Any], base: TrainConfig, device: str, on_step: Any
) -> tuple[Floats, dict]:
    """One run: losses summed over each step [1 or 2, steps], and facts about it."""
    torch._dynamo.reset()
    stream = open_source(setup["data"], setup["batch_size"], device=device, seed=seed, **setup["data_options"])
    model = build(
        setup["model"],
        setup["size"],
        stream.schema,
        seed=seed + arm.other_seed,
        device=device,
        **setup["model_options"],
    )
    config, transform = prepare(arm, base, min_features=setup["min_features"], device=device)
    trainer = Trainer(model, stream, config, device=device, transform=transform)
    started = time.perf_counter()
    losses: list[Floats] = []
    records: list[dict[str, Any]] = []
    diverged = ""
    try:
        for record, window in trainer.run(setup["steps"], on_step):
            losses.append(window.numpy())
            records.append(record)
    except DivergedError as error:
        diverged = str(error)
    if not records:
        raise ValueError(f"the stream ended before the first window of {config.window} steps was full")
    rates = [r["examples_per_second"] for r in records]
    scored = [r for r in records if r["step"] > setup["score_from"] * setup["steps"]] or records[-1:]
    facts: dict[str, Any] = {
        "arm": arm.name, "text": arm.text, "seed": seed, "diverged": diverged,
        # The first windows compile and warm up.
        "examples_per_second": float(np.median(rates[len(rates) // 3 :])),
        "seconds": time.perf_counter() - started,
        "scored": {k: float(np.mean([r[k] for r in scored])) for k in MEASURES},
    }  # fmt: skip
    if config.backend == "loka":
        from loka_compile import reports

        facts["loka"] = fp8_summary(reports()[-1])
    return np.concatenate(losses, axis=1), facts


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Folder for runs and results.")],
    model: Annotated[str, typer.Option(help=", ".join(MODELS))] = "wukong",
    size: Annotated[str, typer.Option(help="tiny, h200, paper")] = "h200",
    arms: Annotated[str, typer.Option(help=f"Comma-separated, out of {', '.join(ARMS)}; default: all.")] = "",
    plan: Annotated[list[str] | None, typer.Option(help="NAME=FILE: one more arm, all Mods and that plan.")] = None,
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    examples: Annotated[int, typer.Option(help="Examples of one run.")] = 20_000_000,
    batch_size: int = 8192,
    window: Annotated[int, typer.Option(help="Steps of one point of a trajectory.")] = 100,
    score_from: Annotated[float, typer.Option(help="Share of the run before scoring begins.")] = 0.5,
    warm_up: Annotated[float, typer.Option(help="Share of the run left out of trajectories.")] = 0.2,
    min_features: Annotated[int, typer.Option(help="Smallest linear that plain FP8 converts.")] = 128,
    data: str = "synthetic",
    data_options: Annotated[str, typer.Option(help="Fields of the data source, as JSON.")] = '{"numerics": "raw"}',
    model_options: Annotated[str, typer.Option(help="Fields of the model's configuration, as JSON.")] = "{}",
    train_options: Annotated[str, typer.Option(help="Fields of TrainConfig (lr, ...), as JSON.")] = "{}",
    backend: Annotated[str, typer.Option(help='Of the arms without loka; "eager" compiles nothing.')] = "inductor",
    device: str = "",
    report_only: Annotated[bool, typer.Option("--report-only", help="Train nothing.")] = False,
) -> None:
    """Train what is missing, compare, and write quality.json and two plots."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    chosen = [ARMS[n] if n in ARMS else _unknown(n) for n in arms.split(",")] if arms else list(ARMS.values())
    chosen += [planned_arm(name, Path(file)) for name, _, file in (p.partition("=") for p in plan or [])]
    steps = examples // batch_size // window * window
    if steps < 2 * window:
        raise typer.BadParameter(f"{examples} examples are fewer than two windows of {window} steps of {batch_size}")
    setup = {
        "model": model, "size": size, "model_options": json.loads(model_options), "data": data,
        "data_options": json.loads(data_options), "train_options": json.loads(train_options), "batch_size": batch_size,
        "steps": steps, "window": window, "score_from": score_from, "warm_up": warm_up, "min_features": min_features,
        "backend": backend, "device": device_text(device), "torch": torch.__version__,
    }  # fmt: skip
    base = TrainConfig(backend=backend, window=window, **setup["train_options"])
    try:
        runs = Runs(out, setup)
    except OtherSetupError as error:
        raise typer.BadParameter(str(error), param_hint="--out") from error
    if not report_only:
        _train_missing(chosen, range(seeds), runs, setup, base, device)
    summary = summarise(runs, chosen, range(seeds), setup)
    summary["arm_definitions"] = {a.name: {k: str(v) for k, v in asdict(a).items()} for a in chosen}
    atomic_write(out / "quality.json", lambda f: f.write((json.dumps(strict(summary), indent=1) + "\n").encode()))
    show(summary)
    plot_plain_fp8(summary, out / "plain_fp8.png")
    plot_mods_and_loka(summary, out / "mods_and_loka.png")


def _unknown(name: str) -> Arm:
    raise typer.BadParameter(f"no arm {name!r}; there are: {', '.join(ARMS)}", param_hint="--arms")


def _train_missing(
    arms: Sequence[Arm], seeds: Sequence[int], runs: Runs, setup: dict[str, Any], base: TrainConfig, device: str
) -> None:
    able = []
    for arm in arms:
        reason = why_not(arm)
        if reason:
            rich.print(f"[yellow]arm {arm.name} is left out: {reason}")
        else:
            able.append(arm)
    # Seeds outside: after each round of arms, everything finished can be compared.
    missing = [(arm, seed) for seed in seeds for arm in able if not runs.done(arm.name, seed)]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %"),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        whole = progress.add_task("all runs", total=len(missing) * setup["steps"])
        for arm, seed in missing:
            progress.update(whole, description=f"{arm.name}, seed {seed}")
            losses, facts = train(arm, seed, setup, base, device, lambda _: progress.advance(whole))
            runs.save(arm.name, seed, losses, facts)


if __name__ == "__main__":
    app()
