"""Shapes that compile all at once, a process each, and then measure one after another on the same GPU."""

from __future__ import annotations

import argparse
import fcntl
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _timing import measure_graphs

#: Seconds before the end in which nothing is compiled, and nobody is waited for any more.
MEASURING, PATIENCE = 15.0, 12.0


def parser(description: str | None, seconds: float) -> argparse.ArgumentParser:
    """The options of a program that :func:`run_shapes` starts once for each shape."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, default=Path("."))
    made.add_argument("--seconds", type=float, default=seconds, help="no more than so long")
    made.add_argument("--shape", type=int, help=argparse.SUPPRESS)
    made.add_argument("--end", type=float, help=argparse.SUPPRESS)
    return made


@contextmanager
def configured(config: Any) -> Iterator[None]:
    """What is compiled now takes ``config`` for its fused GEMMs; None: what ships."""
    from loka_compile.lowering.fused import lowerings

    known = lowerings.config_for
    if config is not None:
        lowerings.config_for = lambda *_: config  # type: ignore[assignment]
    try:
        yield
    finally:
        lowerings.config_for = known


def compile_here() -> None:
    """In a shape's process: compile without caches, whose keys do not know the configuration, and by itself."""
    import torch._inductor.config as inductor_config

    from loka_compile.lowering.fused import lowerings

    inductor_config.force_disable_caches = True
    inductor_config.compile_threads = 1
    lowerings.register()


def measure_alone(
    graphs: Mapping[str, Any], folder: Path, index: int, count: int, end: float, rounds: int = 15
) -> dict[str, float]:
    """Median microseconds of a shape's graphs, once all ``count`` shapes are compiled (or time is nearly up)."""
    (folder / f"{index}.ready").touch()
    while len(list(folder.glob("*.ready"))) < count and time.time() < end - PATIENCE:
        time.sleep(0.1)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return measure_graphs(graphs, rounds)


def keep(folder: Path, index: int, found: Mapping[str, Any]) -> None:
    """Write what a shape's process found."""
    (folder / f"{index}.json").write_text(json.dumps(found))


def run_shapes(
    program: str, out: Path, folder: Path, count: int, seconds: float, more: Sequence[str] = ()
) -> list[dict[str, Any] | None]:
    """Start ``program --out OUT --shape I --end TIME`` for every shape; what each found, None for one out of time."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("*.ready"), *folder.glob("*.json")):
        old.unlink()
    end = time.time() + seconds
    running = [
        subprocess.Popen([sys.executable, program, "--out", str(out), "--shape", str(i), "--end", str(end), *more])
        for i in range(count)
    ]
    for process in running:
        try:
            process.wait(max(1.0, end - time.time()))
        except subprocess.TimeoutExpired:
            process.kill()
    parts = [folder / f"{i}.json" for i in range(count)]
    return [json.loads(part.read_text()) if part.exists() else None for part in parts]
