"""``loka bench``: measure kernels and quantisers on the GPU at hand, into a cost table. No torch until it runs."""

from __future__ import annotations

import platform
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loka_compile import machine
from loka_compile.bench import workload
from loka_compile.bench.records import Records
from loka_compile.errors import ConfigError, LokaError, UnknownNameError
from loka_compile.gemm import Role

if TYPE_CHECKING:
    from loka_compile.bench.runner import Outcome
    from loka_compile.lowering.providers.base import Provider

METHOD = (
    "medians of CUDA-graph replays, all arms of a shape in turns, operands rotated past the L2, results written to "
    "memory of their own; quantisers as Inductor compiles them for the shape, without a producer; kernels without the "
    "relayout of scales that Inductor fuses into the quantiser; fp32 baselines in TF32"
)
_DTYPES = ("bfloat16", "float16", "float32")
_ROLES = ",".join(role.value for role in Role)


def bench(
    shapes: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="CSV: group,layer,M_batch,K_in,N_out.")],
    out: Annotated[Path, typer.Option(help="The cost table to write, or to go on with.")],
    seconds: Annotated[float, typer.Option(help="Time budget, start-up included.")] = 300.0,
    providers: Annotated[
        str, typer.Option(help="Comma-separated; default: all that work here; -NAME: all but it.")
    ] = "",
    groups: Annotated[str, typer.Option(help="Only groups that begin so, in this order; comma-separated.")] = "",
    roles: Annotated[str, typer.Option(help="Comma-separated, in this order.")] = _ROLES,
    dtypes: Annotated[str, typer.Option(help="Comma-separated, in this order.")] = "bfloat16",
    prepare: Annotated[float, typer.Option(help="Share of the budget for self-tests and first calls.")] = 0.25,
    workers: Annotated[int, typer.Option(help="Processes that compile; -1: one a core.")] = -1,
) -> None:
    """Measure every kernel, its baseline and its quantisers on this GPU. A killed run is continued by the same command.

    Exit status 3: a kernel broke the device. It is recorded as broken; the same command goes on after it.
    """
    started = time.monotonic()
    console = Console(stderr=True)
    try:
        _run(console, shapes, out, seconds, providers, groups, roles, dtypes, prepare, workers, started)
    except (LokaError, OSError) as error:
        console.print(f"[red]error:[/] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(2) from None


def _run(
    console: Console, shapes: Path, out: Path, seconds: float, providers: str, groups: str, roles: str, dtypes: str,
    prepare: float, workers: int, started: float,
) -> None:  # fmt: skip
    layers = workload.read_layers(shapes, _split(groups))
    chosen_roles = [_one_of("role", name, [r.value for r in Role]) for name in _split(roles)]
    chosen_dtypes = [_one_of("dtype", name, _DTYPES) for name in _split(dtypes)]
    gemms = workload.gemms(layers, [Role(name) for name in chosen_roles], chosen_dtypes)
    import torch

    from loka_compile.bench.operands import Operands
    from loka_compile.bench.prepare import configure
    from loka_compile.bench.runner import Bench
    from loka_compile.bench.timing import DeviceLostError, GraphTimer

    if not torch.cuda.is_available():
        raise ConfigError("loka bench measures on a CUDA device; torch sees none here")
    configure()
    found = _providers(console, _split(providers))
    properties = torch.cuda.get_device_properties(0)
    records = Records(out, header())
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    ) as progress:
        task = progress.add_task("", total=1)
        shown = [time.monotonic()]

        def show(done: int, total: int, text: str) -> None:
            progress.update(task, completed=done, total=total, description=escape(text))
            # A log has no bar: a line now and then.
            if not console.is_terminal and time.monotonic() > shown[0] + 10:
                shown[0] = time.monotonic()
                console.print(escape(f"{shown[0] - started:.0f} s: {done} of {total}, {text}"))

        run = Bench(
            gemms, found, records, GraphTimer(), Operands(torch.device("cuda")), seconds=seconds, prepare=prepare,
            l2=properties.L2_cache_size, workers=_cores() if workers < 0 else workers, started=started, progress=show,
        )  # fmt: skip
        try:
            outcome = run.run()
        except DeviceLostError as error:
            console.print(f"[red]the device is lost:[/] {escape(str(error))}; run the same command again to go on")
            raise typer.Exit(3) from None
    _summary(console, outcome, out, time.monotonic() - started)


def header() -> dict[str, str]:
    """What a file of measurements says of where it comes from: device, versions of everything installed, method."""
    import torch

    found = {
        **machine.describe(),
        "python": platform.python_version(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "method": METHOD,
    }
    properties = torch.cuda.get_device_properties(0)
    clock, width = (getattr(properties, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))
    if clock and width:
        # kHz, two transfers per clock; bits.
        found["bandwidth_gb_s"] = f"{2 * clock * width / 8e6:.0f} (memory clock and bus width)"
    return found


def _providers(console: Console, names: list[str]) -> list[Provider]:
    from loka_compile.lowering.providers import PROVIDERS, get_provider
    from loka_compile.table import BASELINE

    known = [name for name, *_ in PROVIDERS if name not in (BASELINE[0], "emulated")]
    for name in names:
        _one_of("provider", name.removeprefix("-"), known)
    chosen = [name for name in names if not name.startswith("-")] or known
    found = []
    for name in chosen:
        if f"-{name}" in names:
            continue
        provider = get_provider(name)
        reason = provider.supported(device="cuda")
        if reason:
            console.print(f"[yellow]{name} is left out:[/] {escape(reason)}", soft_wrap=True)
        else:
            found.append(provider)
    return found


def _summary(console: Console, outcome: Outcome, out: Path, seconds: float) -> None:
    for candidate, reason in outcome.failed.items():
        console.print(escape(f"left out: {candidate}: {reason}"), soft_wrap=True)
    for key, reason in outcome.broken.items():
        console.print(escape(f"broken: {' '.join(part for part in key if part)}: {reason}"), soft_wrap=True)
    for (candidate, reason), count in outcome.refused.most_common(20):
        console.print(escape(f"refused at {count} shapes: {candidate}: {reason}"), soft_wrap=True)
    console.print(
        f"{outcome.measured} measurements in {seconds:.0f} s, {len(outcome.broken)} broken, {outcome.left} left: {out}",
        soft_wrap=True,
    )


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _one_of(kind: str, name: str, legal: list[str] | tuple[str, ...]) -> str:
    if name not in legal:
        raise UnknownNameError(kind, name, legal)
    return name


def _cores() -> int:
    import os

    return os.cpu_count() or 1
