"""Does FP8 cost log loss? Trains the same model on the same stream in several ways and compares them, seed by seed.

    python -m benchmarks.quality --model wukong --size h200 --examples 50000000 --seeds 5 \\
        --data-options '{"numerics": "raw"}' --out benchmarks/results/quality/wukong_raw

Every (arm, seed) is a run of its own, kept as a file in ``--out``; a second call trains only what is missing, and
``--report-only`` trains nothing. With ``--jobs N`` as many arms are trained side by side (one compiles while another
trains); with ``--seconds`` what does not fit is left for the next call. Written in the end: ``quality.json`` (all
figures), ``plain_fp8.png`` (counterpart of the paper's figure 3: what plain FP8 costs in loss and speed) and
``mods_and_loka.png`` (figure 9: the Mods one by one, and loka, over the whole trajectory). RLL is
100 * (LL_arm - LL_base) / LL_base in percent, base: the original in fp32.

"Neutral" is written only when the 95 % interval over at least three seeds ends below +0.05 %, by labels, by true
probabilities and by the bootstrap, and when plain FP8, the positive control, shows a loss above that on this stream.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import rich
import torch
import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.quality_arms import ARMS, Arm, device_text, planned_arm, why_not
from benchmarks.quality_jobs import train_in_processes
from benchmarks.quality_plots import plot_mods_and_loka, plot_plain_fp8
from benchmarks.quality_runs import OtherSetupError, Runs
from benchmarks.quality_summary import show, strict, summarise
from benchmarks.quality_train import ArmTraining, base_config
from examples.models.registry import MODELS
from examples.training.checkpoint import atomic_write

app = typer.Typer(add_completion=False)


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Folder for runs and results.")],
    model: Annotated[str, typer.Option(help=", ".join(MODELS))] = "wukong",
    size: Annotated[str, typer.Option(help="tiny, h200, paper")] = "h200",
    arms: Annotated[str, typer.Option(help=f"Comma-separated, out of {', '.join(ARMS)}; default: all.")] = "",
    plan: Annotated[list[str] | None, typer.Option(help="NAME=FILE: an arm with all Mods and that plan.")] = None,
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    only_seeds: Annotated[str, typer.Option(help="Train only these of them, such as 0,2; all are compared.")] = "",
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
    jobs: Annotated[int, typer.Option(min=1, help="Arms trained at once, each in a process of its own.")] = 1,
    gpus: Annotated[str, typer.Option(help="GPUs that these processes are dealt out to, such as 0,1.")] = "",
    seconds: Annotated[float, typer.Option(help="Stop after so long and report what there is; 0: no limit.")] = 0.0,
    cuda_graph: Annotated[bool, typer.Option(help="Capture the training step (the same numbers, sooner).")] = True,
    speeds: Annotated[
        Path | None, typer.Option(help="e2e.json for the throughput in plain_fp8.png.", exists=True)
    ] = None,
    report_only: Annotated[bool, typer.Option("--report-only", help="Train nothing.")] = False,
) -> None:
    """Train what is missing, compare, and write quality.json and two plots."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    chosen = [ARMS[n] if n in ARMS else _unknown(n) for n in arms.split(",")] if arms else list(ARMS.values())
    planned = [planned_arm(name, Path(file)) for name, _, file in (p.partition("=") for p in plan or [])]
    chosen = [arm for arm in chosen if arm.name not in {p.name for p in planned}] + planned
    steps = examples // batch_size // window * window
    if steps < 2 * window:
        raise typer.BadParameter(f"{examples} examples are fewer than two windows of {window} steps of {batch_size}")
    setup = {
        "model": model, "size": size, "model_options": json.loads(model_options), "data": data,
        "data_options": json.loads(data_options), "train_options": json.loads(train_options), "batch_size": batch_size,
        "steps": steps, "window": window, "score_from": score_from, "warm_up": warm_up, "min_features": min_features,
        "backend": backend, "device": device_text(device), "torch": torch.__version__,
    }  # fmt: skip
    if report_only and (out / "setup.json").exists():
        setup = json.loads((out / "setup.json").read_text())  # what is there, wherever it was trained
    base_config(setup, cuda_graph=False)  # a mistake in train_options is named before anything runs
    try:
        runs = Runs(out, setup)
    except OtherSetupError as error:
        raise typer.BadParameter(str(error), param_hint="--out") from error
    if not report_only:
        able = [arm for arm in chosen if _is_able(arm)]
        wanted = [int(s) for s in only_seeds.split(",")] if only_seeds else range(seeds)
        missing = [(arm, [s for s in wanted if not runs.done(arm.name, s)]) for arm in able]
        missing = [(arm, left) for arm, left in missing if left]
        how = {"device": device, "cuda_graph": cuda_graph and device.startswith("cuda")}
        limit = time.monotonic() + seconds if seconds else math.inf
        if jobs > 1:
            train_in_processes(
                missing, runs, setup, how, jobs=jobs, gpus=[g for g in gpus.split(",") if g], until=limit
            )
        else:
            _train_here(missing, runs, setup, how, until=limit)
    # Others may train other arms of this folder at the same time, or have done so before.
    names = {arm.name for arm in chosen}
    chosen += [
        arm for arm in ARMS.values() if arm.name not in names and any(runs.done(arm.name, s) for s in range(seeds))
    ]
    summary = summarise(runs, chosen, range(seeds), setup)
    summary["arm_definitions"] = {a.name: {k: str(v) for k, v in asdict(a).items()} for a in chosen}
    atomic_write(out / "quality.json", lambda f: f.write((json.dumps(strict(summary), indent=1) + "\n").encode()))
    show(summary)
    plot_plain_fp8(summary, out / "plain_fp8.png", json.loads(speeds.read_text()) if speeds else None)
    plot_mods_and_loka(summary, out / "mods_and_loka.png")


def _unknown(name: str) -> Arm:
    raise typer.BadParameter(f"no arm {name!r}; there are: {', '.join(ARMS)}", param_hint="--arms")


def _is_able(arm: Arm) -> bool:
    reason = why_not(arm)
    if reason:
        rich.print(f"[yellow]arm {arm.name} is left out: {reason}")
    return not reason


def _train_here(
    missing: Sequence[tuple[Arm, list[int]]], runs: Runs, setup: dict[str, Any], how: dict[str, Any], *, until: float
) -> None:
    """One run after the other, all seeds of an arm before the next arm: what is compiled serves them all."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %"),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        whole = progress.add_task("all runs", total=sum(len(left) for _, left in missing) * setup["steps"])
        for arm, left in missing:
            training = ArmTraining(arm, setup, runs, **how)
            for seed in left:
                if time.monotonic() > until:
                    progress.console.print(f"no time was left for {arm.name}, seed {seed}")
                    continue
                progress.update(whole, description=f"{arm.name}, seed {seed}")
                training.train(seed, lambda _: progress.advance(whole))


if __name__ == "__main__":
    app()
