"""``loka probe``: train with the probe on; ``loka table make``: statistics to a table. No torch until they run."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loka_compile.errors import ConfigError, LokaError

if TYPE_CHECKING:
    from torch import nn

    from loka_compile.probe.probe import Probe
    from loka_compile.table import Table

Folder = Annotated[Path, typer.Option("--dir", file_okay=False, help="Where statistics are kept.")]
Target = Annotated[
    str,
    typer.Option(
        help="Whose cost table gives the speeds, such as h200; here: measure on this GPU; default: errors alone."
    ),
]
Providers = Annotated[str, typer.Option(help="Comma-separated; default: all.")]
Pairs = Annotated[int, typer.Option(min=1, help="Input/weight pairs per GEMM at least.")]
Cap = Annotated[int, typer.Option(min=1, help="Pairs per GEMM at most.")]


def probe(
    factory: Annotated[str, typer.Argument(help="module:function or file.py:function; see below.")],
    dir: Folder,
    steps: Annotated[int, typer.Option(min=1, help="Training steps in all, those of earlier runs counted in.")] = 1000,
    every: Annotated[int, typer.Option(min=1, help="Steps from one sampled one to the next.")] = 100,
    save_every: Annotated[int, typer.Option(min=1, help="Steps from one saving to the next.")] = 1000,
    arg: Annotated[list[str] | None, typer.Option(help="NAME=VALUE for the function; may be repeated.")] = None,
    no_budget: Annotated[
        bool, typer.Option("--no-budget", help="Take all statistics in every window, whatever they cost.")
    ] = False,
    table: Annotated[Path | None, typer.Option(dir_okay=False, help="Then make this table, as `table make`.")] = None,
    target: Target = "",
    providers: Providers = "",
    pairs: Pairs = 100,
    cap: Cap = 400,
) -> None:
    """Train with the probe on, and learn what every linear layer's GEMMs see.

    The function returns the model and an iterator that makes one training step whenever it is advanced: usually a
    generator with the training loop in it, and a `yield` (of the loss, if that shall be shown) after each step. If it
    takes an argument `start`, it is given the number of steps that earlier runs into the same folder have made.

    A killed run is continued by the same command.
    """
    console = Console(stderr=True)
    with complaints(console):
        _train(console, factory, dir, steps, every, save_every, no_budget, arg or [])
        if table is not None:
            _make(console, dir, table, target, providers, pairs, cap)


def make(
    dir: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Where a probe has kept its statistics.")],
    out: Annotated[Path, typer.Option(dir_okay=False, help="The table to write.")],
    target: Target = "",
    providers: Providers = "",
    pairs: Pairs = 100,
    cap: Cap = 400,
) -> None:
    """Measure every candidate kernel on what a probe has learnt. A killed run is continued by the same command."""
    console = Console(stderr=True)
    with complaints(console):
        _make(console, dir, out, target, providers, pairs, cap)


def _train(
    console: Console, factory: str, folder: Path, steps: int, every: int, save_every: int, no_budget: bool,
    arguments: list[str],
) -> None:  # fmt: skip
    function = find_function(factory)
    values = dict(_argument(text) for text in arguments)
    from loka_compile.probe.intake import rank
    from loka_compile.probe.probe import Probe
    from loka_compile.probe.storage import read

    saved = read(folder, rank())
    done = 0 if saved is None else saved.step
    if done >= steps:
        console.print(f"{folder} holds the statistics of {done} steps already")
        return
    if "start" in inspect.signature(function).parameters:
        values.setdefault("start", done)
    model, iterator = _made(function, factory, values)
    more: dict[str, Any] = {"budget": None} if no_budget else {}
    session = Probe(model, every=every, save_every=save_every, dir=folder, **more)
    with session as p, progress_bar(console, "steps", steps, done) as show:
        advance(p, iterator, steps, show)
    console.print(escape(str(p.report())), soft_wrap=True)
    if p.steps < steps:
        console.print(f"[yellow]the iterator of {escape(factory)} ended after {p.steps} of {steps} steps")


def advance(p: Probe, iterator: Iterator[Any], steps: int, show: Callable[[int, str], None]) -> None:
    """Advance the training until the probe has counted ``steps`` or the iterator ends; ``show`` counts and losses.

    Where no ``torch.optim`` optimizer ends the windows, the iterations do.
    """
    counted = p.steps
    for item in iterator:
        if p.steps == counted:
            p.step()
        counted = p.steps
        show(counted, "" if item is None else item)
        if counted >= steps:
            return


def find_function(name: str) -> Callable[..., Any]:
    """The function that ``module:function`` or ``file.py:function`` names.

    Raises:
        ConfigError: it is written otherwise, or there is no such module, file or function.
    """
    place, colon, attribute = name.rpartition(":")
    if not (colon and place and attribute):
        raise ConfigError(f"{name!r} names no function; write module:function or file.py:function")
    if place.endswith(".py"):
        path = Path(place)
        if not path.is_file():
            raise ConfigError(f"there is no file {place}")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    else:
        if "" not in sys.path and str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not (place + ".").startswith(error.name + "."):
                raise  # something that the user's module imports
            raise ConfigError(f"there is no module {place!r}, seen from {Path.cwd()}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        there = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        raise ConfigError(f"{place} has no function {attribute!r}; it has: {', '.join(there) or 'none'}")
    found: Callable[..., Any] = function
    return found


def _argument(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (equals and name.isidentifier()):
        raise ConfigError(f"--arg {text!r} is not of the form NAME=VALUE")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _made(function: Callable[..., Any], name: str, values: dict[str, Any]) -> tuple[nn.Module, Iterator[Any]]:
    from torch import nn

    try:
        inspect.signature(function).bind(**values)
    except TypeError as error:
        raise ConfigError(f"{name} cannot be called with {sorted(values)}: {error}") from error
    made = function(**values)
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise ConfigError(f"{name} must return (model, iterator of training steps), not {type(made).__name__}")
    try:
        return made[0], iter(made[1])
    except TypeError as error:
        raise ConfigError(f"the second thing that {name} returns cannot be iterated over: {error}") from error


def _make(
    console: Console, folder: Path, out: Path, target: str, providers: str, pairs: int, cap: int
) -> Table:  # fmt: skip
    from loka_compile.probe.gate import Effort
    from loka_compile.probe.partial import make_table

    names = [part.strip() for part in providers.split(",") if part.strip()]
    effort = Effort(pairs, max(pairs, cap))
    with progress_bar(console, "sites") as show:
        table = make_table(
            folder, out, target=target or None, providers=names or None, effort=effort,
            progress=lambda done, total, site: show(done, site, total),
        )  # fmt: skip
    remarks = sum(1 for row in table.rows if row.remark)
    console.print(f"{len(table)} rows, {remarks} with a remark: {out}", soft_wrap=True)
    return table


@contextmanager
def progress_bar(console: Console, what: str, total: int | None = None, done: int = 0) -> Iterator[Callable[..., None]]:
    """A bar with ``show(done, text, total)``, which draws at most twice a second, or writes lines to a log."""
    counts = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*counts, TextColumn("{task.description}"), console=console) as progress:
        task = progress.add_task("", total=total, completed=done)
        drawn = [0.0]

        def show(done: int, text: Any = "", total: int | None = total) -> None:
            now, last = time.monotonic(), done == total
            if now < drawn[0] + (0.5 if console.is_terminal else 10.0) and not last:
                return
            drawn[0] = now
            text = text if isinstance(text, str) else f"loss {float(text):.5g}"  # waits for the device
            progress.update(task, completed=done, total=total, description=escape(text))
            if not console.is_terminal:
                console.print(escape(f"{done} of {total} {what} {text}"), soft_wrap=True)

        yield show


@contextmanager
def complaints(console: Console) -> Iterator[None]:
    """Turn our errors into one line on stderr and exit status 2."""
    try:
        yield
    except (LokaError, OSError) as error:
        console.print(f"[red]error:[/] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(2) from None
