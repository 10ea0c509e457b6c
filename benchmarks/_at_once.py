"""Shapes that compile all at once, a process each, and then measure one after another on the same GPU."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _timing import measure_graphs

#: Seconds before the end in which nothing is compiled, and nobody is waited for any more.
MEASURING, PATIENCE = 15.0, 12.0


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
