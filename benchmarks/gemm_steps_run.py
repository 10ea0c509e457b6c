"""Compiles and times groups of steps (gemm_steps.py), and keeps a JSON file up to date while it does."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rich
import torch
from rich.progress import Progress

from benchmarks.gemm_pieces import Compiled, pieces_of
from benchmarks.gemm_steps import LayerStep
from examples.training.checkpoint import atomic_write
from loka_compile import machine
from loka_compile.bench.operands import Operands, copies_past_l2
from loka_compile.bench.prepare import FirstCall, Job, Preparation, configure
from loka_compile.bench.records import Timing
from loka_compile.bench.timing import Call, DeviceLostError, GraphTimer, Timer
from loka_compile.bench.workload import Layer
from loka_compile.lowering.providers import COMPILE_AT_FIRST_CALL


@dataclass(frozen=True)
class Group:
    """Arms that are timed in turns; each is steps in a row."""

    name: str
    arms: Mapping[str, Sequence[LayerStep]]


def measure(
    groups: Sequence[Group],
    timer: Timer,
    operands: Operands,
    *,
    l2: int,
    workers: int,
    compile_until: float,
    limit: float,
    found: Callable[[Group, dict[str, Timing | str]], None],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Compile all pieces in parallel, in the order of the groups, and time each group as soon as it has all of its own.

    Args:
        groups: what to time, most valuable first.
        timer: how.
        operands: where tensors come from.
        l2: bytes of the L2 cache.
        workers: processes that compile; 0 compiles where it is timed.
        compile_until: when nothing is waited for any more: an arm whose pieces are not there by then is left out.
        limit: when no other group is begun.
        found: called with each group and its timings.
        clock: seconds, monotonic; both times are its.
    """
    compiled: dict[str, Compiled] = {}
    every = dict.fromkeys(step for group in groups for arm in group.arms.values() for step in arm)
    with torch.no_grad():
        # Before the GPU is busy: Inductor times whether padding pays.
        for step in filter(lambda step: step.may_be_padded, every):
            step.compiled(compiled)(*(operands.take(*shape, getattr(torch, step.dtype)) for shape in step.shapes))
    with Preparation(workers) as preparation, torch.no_grad():
        # While the processes start, the steps are traced here.
        needs: dict[LayerStep, list[Job]] = {}
        for step in every:
            if not step.is_native:
                needs[step] = [*_first_calls(step), *pieces_of(step)]
                preparation.add(needs[step])
        pending = list(groups)
        while pending and clock() < limit:
            ready = [g for g in pending if all(preparation.done(j) for j in _jobs(g, needs))]
            if not ready and clock() < compile_until:
                time.sleep(0.05)
                continue
            group = (ready or pending)[0]
            pending.remove(group)
            makers, timings = {}, dict[str, Timing | str]()
            for name, arm in group.arms.items():
                wrong = next(filter(None, (_problem(preparation, needs.get(step, [])) for step in arm)), None)
                if wrong:
                    timings[name] = wrong
                else:
                    makers[name] = functools.partial(_calls, arm, operands, l2, compiled)
            timings |= timer.measure(makers, lambda _: None)
            found(group, timings)


def _jobs(group: Group, needs: Mapping[LayerStep, list[Job]]) -> list[Job]:
    return [job for arm in group.arms.values() for step in arm for job in needs.get(step, [])]


def _first_calls(step: LayerStep) -> list[FirstCall]:
    layer = Layer("", "", step.batch, step.inputs, step.outputs)
    return [
        FirstCall(provider, recipe, layer.gemm(role, step.dtype))
        for role, (provider, recipe) in step.choices
        if provider in COMPILE_AT_FIRST_CALL
    ]


def _problem(preparation: Preparation, jobs: Sequence[Job]) -> str | None:
    for job in jobs:
        if not preparation.done(job):
            return "not compiled in time"
        answer = preparation.answer(job)
        if answer:
            return answer
    return None


def _calls(arm: Sequence[LayerStep], operands: Operands, l2: int, pieces: dict[str, Compiled]) -> list[Call]:
    """Calls of an arm on tensors of their own; one that fills the L2 many times over needs no copies."""
    operands.rewind()
    dtype = getattr(torch, arm[0].dtype)
    sizes = [rows * columns * dtype.itemsize for step in arm for rows, columns in step.shapes]
    compiled = {step: step.compiled(pieces) for step in dict.fromkeys(arm)}
    calls: list[Call] = []
    for _ in range(copies_past_l2(sizes, l2, least=1)):
        parts = []
        for step in arm:
            tensors = [operands.take(*shape, dtype) for shape in step.shapes]
            parts.append(functools.partial(compiled[step], *tensors))
        calls.append(functools.partial(_all, parts))
    return calls


def _all(parts: Sequence[Callable[[], object]]) -> None:
    """In a row; what each returns is dropped at once, as a step's intermediate results are."""
    for part in parts:
        part()


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
        """Time all groups within ``limit`` seconds from the start; see :func:`measure`.

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
