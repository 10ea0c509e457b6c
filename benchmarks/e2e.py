"""Throughput of whole models, embeddings and optimizers included: the original, the Mods, torchao and loka.

    python -m benchmarks.e2e --models wukong,interformer,dhen --size h200 --batch-size 8192 --out benchmarks/results/e2e

Training is a whole step (lookup, forward, backward, Adam, row-wise Adagrad) on batches that lie ready on the device;
inference is lookup and forward. On a GPU a step is captured as one CUDA graph where that works (``--no-graphs``: never
tried), batches are copied into its inputs, and the arms take turns round by round, so that clocks and temperature hit
all alike. Written: ``e2e.json``, ``speedup.png`` (counterpart of the paper's figure 10) and ``latency.png`` (figure 11:
where the time of a training step goes). DHEN stands for the paper's ELFM, which combines DHEN, DCN and DLRM parts.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import rich
import torch
import typer
from rich.progress import Progress
from rich.table import Table

from benchmarks.e2e_plots import plot_latency, plot_speedup
from benchmarks.kernel_kinds import breakdown
from benchmarks.quality_arms import ARMS, Arm, device_text, fp8_summary, prepare, why_not
from examples.data.stream import Batch
from examples.data.synthetic import SyntheticConfig, SyntheticStream
from examples.models.registry import MODELS, build
from examples.training.checkpoint import atomic_write
from examples.training.config import TrainConfig
from examples.training.loop import Trainer

BASE = "bf16"
DEFAULT_ARMS = ("bf16", "mods", "torchao_tensorwise", "torchao_rowwise", "loka")
#: Different batches that a measurement goes through.
BATCHES = 4
app = typer.Typer(add_completion=False)


@dataclass
class Measured:
    """One arm of one model in one mode, ready to be called; ``call(i)`` runs on batch ``i``."""

    arm: Arm
    call: Callable[[int], object]
    graph: str
    loka: dict[str, Any] | None
    peak_mib: float = 0.0


def prepare_arm(
    arm: Arm, model: str, size: str, batches: list[Batch], stream: SyntheticStream, config: TrainConfig, *,
    training: bool, graphs: bool, min_features: int,
) -> Measured:  # fmt: skip
    """Build, compile and, on a GPU, capture."""
    device = stream.device
    torch._dynamo.reset()
    net = build(model, size, stream.schema, device=device)
    own, transform = prepare(arm, config, min_features=min_features, device=device.type)
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    trainer = Trainer(net, stream, own, device=device, transform=transform, capturable=graphs)
    net.train(training)

    def run(batch: Batch) -> object:
        if training:
            return trainer.step(batch)
        with torch.no_grad():
            return trainer.predict(batch)

    # loka samples the first 20 calls before it plans, and compiles once more then.
    for i in range(25):
        run(batches[i % len(batches)])
    replay = capture(run, batches) if graphs else None
    loka = None
    if own.backend == "loka":
        from loka_compile import reports

        loka = fp8_summary(reports()[-1])
    peak = torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else 0.0
    if replay is not None:
        return Measured(arm, replay, "yes", loka, peak)
    return Measured(arm, lambda i: run(batches[i % len(batches)]), "failed" if graphs else "no", loka, peak)


def capture(run: Callable[[Batch], object], batches: list[Batch]) -> Callable[[int], object] | None:
    """The step as a CUDA graph over inputs of its own; None, with the reason printed, where capture fails."""
    inputs = Batch(*(None if t is None else t.clone() for t in batches[0]))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run(inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run(inputs)
    except RuntimeError as error:
        rich.print(f"[yellow]no CUDA graph: {str(error).splitlines()[0]}")
        torch.cuda.synchronize()
        return None

    def replay(i: int) -> None:
        for mine, new in zip(inputs, batches[i % len(batches)], strict=True):
            if mine is not None:
                mine.copy_(new)
        graph.replay()

    return replay


def seconds_per_step(arms: list[Measured], steps: int, rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of one step, for each arm and round; the arms take turns."""
    times: dict[str, list[float]] = {m.arm.name: [] for m in arms}
    for _ in range(rounds):
        for measured in arms:
            _wait(device)
            start = time.perf_counter()
            for i in range(steps):
                measured.call(i)
            _wait(device)
            times[measured.arm.name].append((time.perf_counter() - start) / steps)
    return times


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure_model(
    model: str, size: str, arms: list[Arm], data: SyntheticConfig, config: TrainConfig, *,
    device: str, graphs: bool, steps: int, rounds: int, min_features: int, on_arm: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """Training and inference of one model in all arms."""
    if not MODELS[model][2]:
        data = dataclasses.replace(data, history_length=0)
    stream = SyntheticStream(data, device)
    batches = [stream.batch(i) for i in range(BATCHES)]
    found: dict[str, Any] = {}
    for mode in ("training", "inference"):
        ready = []
        for arm in arms:
            on_arm(f"{model} {mode}: {arm.name}")
            ready.append(
                prepare_arm(
                    arm, model, size, batches, stream, config,
                    training=mode == "training", graphs=graphs, min_features=min_features,
                )
            )  # fmt: skip
        times = seconds_per_step(ready, steps, rounds, stream.device)
        base = statistics.median(times[BASE]) if BASE in times else None
        found[mode] = {}
        for measured in ready:
            own = times[measured.arm.name]
            median = statistics.median(own)
            found[mode][measured.arm.name] = {
                "milliseconds": 1e3 * median,
                "spread": (max(own) - min(own)) / median,
                "examples_per_second": data.batch_size / median,
                "speedup": base / median if base else None,
                "peak_mib": measured.peak_mib,
                "cuda_graph": measured.graph,
                "loka": measured.loka,
                "microseconds_by_kind": breakdown(lambda call=measured.call: call(0), 3, stream.device),
            }
    return found


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Folder for results.")],
    models: Annotated[
        str, typer.Option(help=f"Comma-separated, out of {', '.join(MODELS)}.")
    ] = "wukong,interformer,dhen",
    size: str = "h200",
    arms: Annotated[str, typer.Option(help=f"Comma-separated, out of {', '.join(ARMS)}.")] = ",".join(DEFAULT_ARMS),
    batch_size: int = 8192,
    history: Annotated[int, typer.Option(help="Length of histories, for models that read them.")] = 128,
    steps: Annotated[int, typer.Option(help="Steps of one round.")] = 20,
    rounds: int = 15,
    graphs: Annotated[bool, typer.Option(help="Capture steps as CUDA graphs (GPU only).")] = True,
    backend: Annotated[str, typer.Option(help='Of the arms without loka; "eager" compiles nothing.')] = "inductor",
    data_options: Annotated[str, typer.Option(help="Fields of the synthetic stream, as JSON.")] = "{}",
    min_features: Annotated[int, typer.Option(help="Smallest linear that torchao converts.")] = 128,
    device: str = "",
) -> None:
    """Measure, write e2e.json and two plots."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    for kind, names, known in (("model", models, MODELS), ("arm", arms, ARMS)):
        for name in names.split(","):
            if name not in known:
                raise typer.BadParameter(f"no {kind} {name!r}; there are: {', '.join(known)}", param_hint=f"--{kind}s")
    chosen = []
    for name in arms.split(","):
        if reason := why_not(ARMS[name]):
            rich.print(f"[yellow]arm {name} is left out: {reason}")
        else:
            chosen.append(ARMS[name])
    data = SyntheticConfig(batch_size=batch_size, **{"history_length": history, **json.loads(data_options)})
    graphs = graphs and device.startswith("cuda")
    result: dict[str, Any] = {
        "device": device_text(device), "torch": torch.__version__, "size": size, "batch_size": batch_size,
        "backend": backend, "steps": steps, "rounds": rounds, "models": {},
    }  # fmt: skip
    with Progress() as progress:
        names = models.split(",")
        task = progress.add_task("", total=2 * len(names) * len(chosen))

        def on_arm(text: str) -> None:
            progress.update(task, description=text, advance=1)

        for model in names:
            result["models"][model] = measure_model(
                model, size, chosen, data, TrainConfig(backend=backend, warmup=0), device=device, graphs=graphs,
                steps=steps, rounds=rounds, min_features=min_features, on_arm=on_arm,
            )  # fmt: skip
            out.mkdir(parents=True, exist_ok=True)
            atomic_write(out / "e2e.json", lambda f: f.write((json.dumps(result, indent=1) + "\n").encode()))
    show(result)
    plot_speedup(result, out / "speedup.png")
    plot_latency(result, out / "latency.png")


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
    rich.print(table)


if __name__ == "__main__":
    app()
