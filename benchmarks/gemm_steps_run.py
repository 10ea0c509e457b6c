"""Measures groups of steps (gemm_steps.py) on the GPU and keeps a JSON file up to date while it does."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rich
import torch
from rich.progress import Progress

from benchmarks.gemm_steps import Group, measure
from examples.training.checkpoint import atomic_write
from loka_compile import machine
from loka_compile.bench.operands import Operands
from loka_compile.bench.prepare import configure
from loka_compile.bench.records import Timing
from loka_compile.bench.timing import DeviceLostError, GraphTimer, Timer


class Run:
    """One file of results: what it was measured on, the settings, and ``timings[group][arm]`` as they come.

    An arm's timing is ``{"us": ..., "spread": ...}``, or a text that says why there is none.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self.started = time.monotonic()
        self.result: dict[str, Any] = {**machine.describe(), **settings, "timings": {}}

    def save(self) -> None:
        """Write the file."""
        self.result["seconds"] = round(time.monotonic() - self.started, 1)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.result, indent=1) + "\n"
        atomic_write(self.path, lambda file: file.write(text.encode()))

    def measure(
        self, groups: Sequence[Group], *, limit: float, workers: int = -1, timer: Timer | None = None,
        operands: Operands | None = None,
    ) -> None:  # fmt: skip
        """Time all groups within ``limit`` seconds from the start; see :func:`benchmarks.gemm_steps.measure`.

        Two thirds of them may pass with compiling. On a CPU a timer must be given.
        """
        l2 = torch.cuda.get_device_properties(0).L2_cache_size if timer is None else 1
        configure()
        with Progress() as progress:
            task = progress.add_task("compiling", total=len(groups))

            def found(group: Group, timings: dict[str, Timing | str]) -> None:
                self.result["timings"][group.name] = {
                    name: t if isinstance(t, str) else {"us": round(t.us, 3), "spread": round(t.spread, 4)}
                    for name, t in timings.items()
                }
                progress.update(task, advance=1, description=group.name)
                self.save()

            try:
                measure(
                    groups, timer or GraphTimer(), operands or Operands(torch.device("cuda")), l2=l2,
                    workers=(os.cpu_count() or 1) if workers < 0 else workers,
                    compile_until=self.started + 0.67 * limit, limit=self.started + limit, found=found,
                )  # fmt: skip
            except DeviceLostError as error:
                # What was measured before stays; the summary says what is missing.
                rich.print(f"[red]the device is lost: {error}")
                self.result["lost"] = str(error)
        self.save()
