"""Train any of the example models on any of the example streams.

    python -m examples.train --model wukong --size tiny --data synthetic --steps 200 --batch-size 1024 --out /tmp/run
    python -m examples.train --model dhen --size h200 --backend loka --options '{"table": "auto"}' --out /tmp/loka
    python -m examples.train ... --out /tmp/run --resume          goes on where the newest checkpoint stands

``--out`` collects config.json, metrics.jsonl (a line per window) and checkpoints; a resumed run ends with the same bits
as one that was never stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import rich
import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from examples.data.criteo import CriteoFormatError, CriteoStream
from examples.models.registry import MODELS, build
from examples.training.checkpoint import CheckpointError
from examples.training.config import PRECISIONS, TABLE_OPTIMIZERS, TrainConfig
from examples.training.folder import RunFolder
from examples.training.loop import DivergedError, Trainer
from examples.training.sources import SOURCES, open_source


@contextlib.contextmanager
def probing(model: torch.nn.Module, folder: Path | None, every: int) -> Iterator[None]:
    """Learn what the model's linears see, every so many steps, if ``folder`` says where to keep it."""
    if folder is None:
        yield
        return
    # Only here: the example models and their trainer work without the package.
    import loka_compile.probe

    with loka_compile.probe(model, every=every, dir=folder):
        yield


def _json(text: str, option: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise typer.BadParameter(f"not JSON: {error}", param_hint=option) from error
    if not isinstance(value, dict):
        raise typer.BadParameter(f"must be a JSON object such as '{{\"key\": 1}}', not {text}", param_hint=option)
    return value


app = typer.Typer(add_completion=False)


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Folder for metrics and checkpoints.")],
    model: Annotated[str, typer.Option(help=", ".join(MODELS))] = "wukong",
    size: Annotated[str, typer.Option(help="Named size: tiny, h200, paper.")] = "tiny",
    data: Annotated[str, typer.Option(help=", ".join(SOURCES))] = "synthetic",
    files: Annotated[list[Path] | None, typer.Option(help="Criteo file or folder; may be repeated.")] = None,
    steps: Annotated[
        int | None, typer.Option(help="Stop after so many steps; default: at the end of the data.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1)] = 8192,
    backend: Annotated[str, typer.Option(help='"eager" or a backend of torch.compile.')] = "inductor",
    options: Annotated[str, typer.Option(help="Options of the backend, as JSON.")] = "{}",
    mode: Annotated[str | None, typer.Option(help="Mode of torch.compile.")] = None,
    model_options: Annotated[str, typer.Option(help="Fields of the model's configuration, as JSON.")] = "{}",
    data_options: Annotated[str, typer.Option(help="Fields of the data source's configuration, as JSON.")] = "{}",
    precision: Annotated[str, typer.Option(help=", ".join(PRECISIONS))] = "bf16",
    tf32: Annotated[bool, typer.Option(help="TF32 in fp32 matrix products.")] = False,
    lr: float = 1e-3,
    warmup: Annotated[int, typer.Option(help="Steps of linear warm-up.")] = 100,
    table_optimizer: Annotated[str, typer.Option(help=", ".join(TABLE_OPTIMIZERS))] = "rowwise_adagrad",
    table_lr: float = 0.02,
    seed: Annotated[int, typer.Option(min=0, help="Of the initial weights and of the synthetic data.")] = 0,
    window: Annotated[int, typer.Option(help="Steps of one line of metrics.")] = 100,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints; 0: only at the end.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out.")] = False,
    probe: Annotated[Path | None, typer.Option(help="Learn activation distributions into this folder.")] = None,
    probe_every: Annotated[int, typer.Option(min=1, help="Steps between two samples of the probe.")] = 100,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="Repeat bit by bit on a GPU.")] = False,
    cuda_graph: Annotated[
        bool, typer.Option("--cuda-graph", help="Capture the step: the same numbers, sooner.")
    ] = False,
    device: Annotated[str, typer.Option(help='Default: "cuda" if there is one.')] = "",
) -> None:
    """Predict-then-train over a stream, with metrics per window and checkpoints."""
    if cuda_graph and probe is not None:
        raise typer.BadParameter("the probe is Python, which a replayed graph does not run", param_hint="--cuda-graph")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if deterministic:
        # cuBLAS repeats its sums only with a fixed workspace, chosen before its first use.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        config = TrainConfig(
            precision=precision, tf32=tf32, backend=backend, options=_json(options, "--options"), mode=mode, lr=lr,
            warmup=warmup, table_optimizer=table_optimizer, table_lr=table_lr, seed=seed, window=window,
            deterministic=deterministic, cuda_graph=cuda_graph,
        )  # fmt: skip
        source = open_source(
            data, batch_size, device=device, seed=seed, files=files or (), **_json(data_options, "--data-options")
        )
        net = build(model, size, source.schema, seed=seed, device=device, **_json(model_options, "--model-options"))
    except (ValueError, TypeError, FileNotFoundError, ModuleNotFoundError) as error:
        raise typer.BadParameter(str(error)) from error
    trainer = Trainer(net, source, config, device=device)
    folder = RunFolder(out)
    try:
        if resume:
            rich.print(f"going on from step {folder.resume(trainer):,}")
        elif folder.metrics_file.exists():
            raise typer.BadParameter(f"{out} holds a run already: --resume goes on with it", param_hint="--out")
        folder.write_config(
            {"model": model, "size": size, "data": data, "batch_size": batch_size, **dataclasses.asdict(config)}
        )
        with probing(net.dense_arch, probe, probe_every):
            _train(trainer, folder, steps, checkpoint_every)
    except (CheckpointError, CriteoFormatError, DivergedError) as error:
        rich.print(f"[red]{error}")
        raise typer.Exit(1) from error
    if isinstance(source, CriteoStream) and source.bad_lines.count:
        rich.print(f"[yellow]{source.bad_lines}")


def _train(trainer: Trainer, folder: RunFolder, steps: int | None, checkpoint_every: int) -> None:
    columns = (
        TextColumn("step"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[last]}"),
    )
    with Progress(*columns) as progress:
        task = progress.add_task("", total=steps, completed=trainer.step_count, last="")

        def on_step(step: int) -> None:
            progress.update(task, completed=step)
            if checkpoint_every and step % checkpoint_every == 0:
                folder.save(trainer)

        for record, _ in trainer.run(steps, on_step):
            folder.append(record)
            progress.update(
                task,
                last=f"log loss {record['log_loss']:.5f}  NE {record['normalised_entropy']:.4f}  "
                f"AUC {record['auc']:.4f}  {record['examples_per_second']:,.0f} examples/s",
            )
    folder.save(trainer)


if __name__ == "__main__":
    app()
