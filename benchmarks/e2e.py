"""Throughput of whole models, embeddings and optimizers included: the original, the Mods, torchao and loka.

    python -m benchmarks.e2e --models wukong,interformer,dhen --size h200 --batch-size 8192 --out benchmarks/results/e2e
    python -m benchmarks.e2e ... --jobs 8 --seconds 120       eight arms compile at once; what is not ready is left out

Training is a whole step (lookup, forward, backward, Adam, row-wise Adagrad) on batches that lie ready on the device;
inference is lookup and forward ("frozen": with weights as constants). On a GPU a step is captured as one CUDA graph
where that works (``--no-graphs``: never tried), batches are copied into its inputs, and the arms take turns round by
round, so that clocks and temperature hit all alike; with ``--jobs`` each lives in a process of its own, and one at a
time is asked to run. Written, after every round: ``e2e.json``; in the end ``speedup.png`` (counterpart of the paper's
figure 10) and ``latency.png`` (figure 11: where the time of a training step goes). DHEN stands for the paper's ELFM,
which combines DHEN, DCN and DLRM parts.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import rich
import torch
import typer
from rich.table import Table

from benchmarks._console import console
from benchmarks.e2e_arm import ArmFailedError, Handle, LocalArm, RemoteArm, Spec
from benchmarks.e2e_plots import plot_latency, plot_speedup
from benchmarks.kernel_kinds import breakdown
from benchmarks.quality_arms import ARMS, device_text, why_not
from examples.models.registry import MODELS
from examples.training.checkpoint import atomic_write
from loka_compile import machine

BASE = "bf16"
DEFAULT_ARMS = ("bf16", "loka", "torchao_tensorwise", "torchao_rowwise", "mods")
MODES = ("training", "inference", "frozen")
#: Share of the time given that preparing may take; the rest is for measuring what got ready.
PREPARING = 0.75
#: Kernels of which the time is noted one by one, and characters of their names.
LONGEST, NAME = 40, 160
app = typer.Typer(add_completion=False)


class Results:
    """e2e.json as it grows."""

    def __init__(self, out: Path, setup: dict[str, Any]) -> None:
        self.path = out / "e2e.json"
        self.found: dict[str, Any] = {**setup, "models": {}, "left_out": {}}
        self._began = time.monotonic()
        out.mkdir(parents=True, exist_ok=True)

    def say(self, text: str) -> None:
        """A line with the time."""
        print(f"[{time.monotonic() - self._began:.0f} s] {text}", flush=True)

    def leave_out(self, spec: Spec, reason: str) -> None:
        """Note why an arm has no result."""
        self.say(f"{spec} is left out: {reason}")
        self.found["left_out"][str(spec)] = reason
        self.save()

    def put(self, arm: Handle, own: Sequence[float], base: Sequence[float]) -> None:
        """One arm's times so far, and those of the base in the same rounds."""
        median = statistics.median(own)
        models = self.found["models"]
        modes = models.setdefault(arm.spec.model, {m: {} for m in MODES})
        entry = modes[arm.spec.mode].setdefault(arm.spec.arm, {"microseconds_by_kind": {}})
        entry.update(
            milliseconds=1e3 * median,
            spread=(max(own) - min(own)) / median,
            examples_per_second=self.found["batch_size"] / median,
            speedup=statistics.median(base) / median if base else None,
            rounds=len(own),
            **arm.facts(),
        )

    def save(self) -> None:
        """Write the file."""
        atomic_write(self.path, lambda f: f.write((json.dumps(self.found, indent=1) + "\n").encode()))


@contextmanager
def prepared(specs: Sequence[Spec], jobs: int, results: Results, until: float) -> Iterator[list[Handle]]:
    """The arms that could be prepared in time, in the order given; ``jobs`` at a time in processes, 1: here."""
    if jobs == 1:
        here: list[Handle] = []
        for spec in specs:
            if time.monotonic() > until:
                results.leave_out(spec, "no time was left")
                continue
            try:
                here.append(LocalArm(spec))
                results.say(f"{spec} is ready")
            except Exception as error:  # a broken arm must not end the others
                results.leave_out(spec, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        yield here
        return
    waiting, running, ready = list(specs), [], []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                spec = waiting.pop(0)
                log = results.path.with_name(f"{str(spec).replace(' ', '-')}.log")
                running.append(RemoteArm(spec, log, at_once=min(jobs, len(specs))))
            time.sleep(0.2)
            for arm in list(running):
                try:
                    if arm.ready():
                        running.remove(arm)
                        ready.append(arm)
                        results.say(f"{arm.spec} is ready")
                except ArmFailedError as error:
                    running.remove(arm)
                    results.leave_out(arm.spec, str(error))
            if time.monotonic() > until:
                for arm in running:
                    results.leave_out(arm.spec, f"not ready in time ({arm.last_words()})")
                    arm.close()
                for spec in waiting:
                    results.leave_out(spec, "no time was left")
                break
        yield sorted(ready, key=lambda arm: specs.index(arm.spec))
    finally:
        for arm in [*running, *ready]:
            arm.close()


def measure(arms: list[Handle], steps: int, rounds: int, results: Results, until: float) -> None:
    """Time all arms, turn by turn; then where the time of each goes."""
    times: dict[str, list[float]] = {}
    for i in range(rounds):
        if i and time.monotonic() > until:
            results.say(f"no time was left after {i} of {rounds} rounds")
            break
        for arm in list(arms):
            try:
                times.setdefault(str(arm.spec), []).append(arm.time(steps))
            except ArmFailedError as error:
                arms.remove(arm)
                results.leave_out(arm.spec, str(error))
        for arm in arms:
            base = dataclasses.replace(arm.spec, arm=BASE)
            results.put(arm, times[str(arm.spec)], times.get(str(base), []))
        results.save()
    for arm in arms:
        if time.monotonic() > until:
            results.say(f"no time was left to see where the time of {arm.spec} goes")
            break
        times = arm.kernels()
        entry = results.found["models"][arm.spec.model][arm.spec.mode][arm.spec.arm]
        entry["microseconds_by_kind"] = breakdown(times)
        entry["longest_kernels"] = [[name[:NAME], us] for name, us in list(times.items())[:LONGEST]]
        results.save()


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Folder for results.")],
    models: Annotated[
        str, typer.Option(help=f"Comma-separated, out of {', '.join(MODELS)}.")
    ] = "wukong,interformer,dhen",
    size: str = "h200",
    arms: Annotated[str, typer.Option(help=f"Comma-separated, out of {', '.join(ARMS)}.")] = ",".join(DEFAULT_ARMS),
    plan: Annotated[
        list[str] | None, typer.Option(help="NAME=FILE: that arm carries out a plan, and samples nothing.")
    ] = None,
    modes: Annotated[
        str, typer.Option(help=f"Comma-separated, out of {', '.join(MODES)} (inference with constant weights).")
    ] = "training,inference",
    batch_size: int = 8192,
    history: Annotated[int, typer.Option(help="Length of histories, for models that read them.")] = 128,
    steps: Annotated[int, typer.Option(help="Steps of one round.")] = 20,
    rounds: int = 15,
    graphs: Annotated[bool, typer.Option(help="Capture steps as CUDA graphs (GPU only).")] = True,
    backend: Annotated[str, typer.Option(help='Of the arms without loka; "eager" compiles nothing.')] = "inductor",
    data_options: Annotated[str, typer.Option(help="Fields of the synthetic stream, as JSON.")] = "{}",
    model_options: Annotated[str, typer.Option(help="Fields of the models' configuration, as JSON.")] = "{}",
    min_features: Annotated[int, typer.Option(help="Smallest linear that torchao converts.")] = 128,
    jobs: Annotated[int, typer.Option(min=1, help="Arms prepared at once, each in a process; 1: all in this one.")] = 1,
    seconds: Annotated[float, typer.Option(help="Time for each model; 0: no limit.")] = 0.0,
    after: Annotated[int, typer.Option(help="Measure only when the process of this number has ended.")] = 0,
    device: str = "",
) -> None:
    """Measure, write e2e.json and two plots."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    for kind, names, known in (("model", models, MODELS), ("arm", arms, ARMS), ("mode", modes, MODES)):
        for name in names.split(","):
            if name not in known:
                raise typer.BadParameter(f"no {kind} {name!r}; there are: {', '.join(known)}", param_hint=f"--{kind}s")
    chosen = []
    for name in arms.split(","):
        if reason := why_not(ARMS[name]):
            rich.print(f"[yellow]arm {name} is left out: {reason}")
        else:
            chosen.append(name)
    plans = {name: file for name, _, file in (p.partition("=") for p in plan or [])}
    if others := sorted(set(plans) - {n for n in chosen if ARMS[n].options.get("table") == "auto"}):
        raise typer.BadParameter(f"no arm of these plans by itself: {', '.join(others)}", param_hint="--plan")
    graphs = graphs and device.startswith("cuda")
    data = {"batch_size": batch_size, "history_length": history, **json.loads(data_options)}
    setup = {
        "device": device_text(device), "versions": machine.describe(), "torch": torch.__version__, "size": size,
        "batch_size": batch_size, "backend": backend, "steps": steps, "rounds": rounds,
        "data_options": json.loads(data_options), "model_options": json.loads(model_options),
        "graphs": graphs, "plans": plans,
    }  # fmt: skip
    results = Results(out, setup)
    for model in models.split(","):
        specs = [
            Spec(
                model,
                size,
                mode,
                arm,
                data,
                backend,
                device,
                graphs,
                min_features,
                setup["model_options"],
                plans.get(arm, ""),
            )
            for mode in modes.split(",")
            for arm in chosen
        ]
        began = time.monotonic()
        limit = seconds or math.inf
        with prepared(specs, jobs, results, began + PREPARING * limit) as ready:
            wait_for(after, results, began + PREPARING * limit)
            measure(ready, steps, rounds, results, began + limit)
    show(results.found)
    if results.found["models"]:
        plot_speedup(results.found, out / "speedup.png")
        plot_latency(results.found, out / "latency.png")


def wait_for(process: int, results: Results, until: float) -> None:
    """Wait for the end of a process that uses the GPU, such as a training beside which arms were compiled."""
    while process and _lives(process):
        if time.monotonic() > until:
            results.say(f"process {process} has not ended: it shares the GPU with what is measured")
            results.found["shared_gpu"] = True
            return
        time.sleep(0.2)


def _lives(process: int) -> bool:
    """Whether there is such a process, and not just its exit status."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def show(result: dict[str, Any]) -> None:
    """The table for a person."""
    table = Table(title=f"{result['device']}, batch {result['batch_size']}, size {result['size']}")
    for column in ("model", "mode", "arm", "examples/s", "speed-up", "spread", "peak MiB", "CUDA graph"):
        table.add_column(column)
    for model, modes in result["models"].items():
        for mode, arms in modes.items():
            for name, arm in arms.items():
                speedup = f"{arm['speedup']:.2f}x" if arm["speedup"] else "-"
                table.add_row(
                    model, mode, name, f"{arm['examples_per_second']:,.0f}", speedup, f"{arm['spread']:.0%}",
                    f"{arm['peak_mib']:,.0f}", arm["cuda_graph"],
                )  # fmt: skip
    console().print(table)


if __name__ == "__main__":
    app()
