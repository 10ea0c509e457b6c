"""What the probe costs a training run: throughput, the worst step, memory; against the same run without it (issue 3).

    python -m benchmarks.probe_overhead --out benchmarks/results/probe_overhead_h200.json      # one GPU, 240 s in all

Cases: four layers of linear + LayerNorm + SiLU of width 2048 and 4096, and a small Wukong (its size "demo", autocast),
batch 4096, bf16, fused AdamW. Modes: eager, torch.compile, and torch.compile(mode="reduce-overhead") for CUDA graphs.

Arms:

    probe    ``probe(model, every=100)`` as it is by default, in the steady state: what ``grace`` gives is used up
    all      the same with ``budget=None``: every layer and every weight in every window, whatever it costs

One model is trained in blocks of ``every`` steps, with and without the probe in turns: two models, alike in all but
where their memory lies, differ by 1 % and more. A block with the probe has one sampled step in its middle; it ends when
the device is idle and the worker has done everything that was waiting. The overhead is the mean over rounds of
``t(with) / t(without) - 1`` with its 95 % interval. Where steps are bound by a CPU that others use too, blocks differ
by far more than 1 %; "by halves" is the same quantity with less of that noise: nothing happens before the sampled step,
so a block's second half is compared with its own first half, and what blocks without the probe show of it is taken off.
A budget of half a percent is spent in jobs that are dearer than
what one block earns, so that many blocks are without any: a measurement must be long enough to hold its share of
them. ``worker_share`` says what it held, and a run begins with half of a job owed, as it does at any time on average.
With ``--arms probe all`` the cost is also estimated from what windows of arm ``all`` cost: see ``probe_windows``.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import loka_compile.probe
from benchmarks import probe_windows
from examples.models.wukong import Wukong, WukongConfig
from loka_compile.jsonio import atomic_write, dumps
from loka_compile.machine import describe, version
from loka_compile.probe.errors import confidence_interval
from loka_compile.probe.probe import Probe

LAYERS = 4
MODES = ("graphs", "compile", "eager")
CASES = ("chain4096", "chain2048", "wukong")
ARMS = ("probe", "all")
#: Steps before the probe is there, and windows of its warm-up: the first compiles, and a CUDA graph is captured in the
#: second and replayed in the third.
WARM_STEPS, WARM_WINDOWS, WARM_EVERY = 4, 4, 5


@dataclass
class Blocks:
    """Times of the blocks that were run in one way."""

    block_s: list[float] = field(default_factory=list)
    step_s: list[list[float]] = field(default_factory=list)
    peak: int = 0

    def late(self) -> list[float]:
        """By how much the second half of each block, and the wait for its end, took longer: as a part of the block."""
        found = []
        for whole, steps in zip(self.block_s, self.step_s, strict=True):
            before = sum(steps[: len(steps) // 2])
            found.append((whole - 2 * before) / (2 * before))
        return found

    def run(self, step: Callable[[], None], steps: int, device: torch.device, finish: Callable[[], object]) -> None:
        """Run ``steps`` steps, then ``finish``, and keep their times."""
        cuda = device.type == "cuda"
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated()
        start = time.perf_counter()
        marks = [_mark(cuda)]
        for _ in range(steps):
            step()
            marks.append(_mark(cuda))
        if cuda:
            torch.cuda.synchronize()
        finish()
        self.block_s.append(time.perf_counter() - start)
        self.step_s.append([_between(a, b) for a, b in itertools.pairwise(marks)])
        if cuda:
            self.peak = max(self.peak, torch.cuda.max_memory_allocated() - base)


@dataclass
class Arm:
    """A training run with a probe that can be switched off and on."""

    name: str
    step: Callable[[], None]
    probe: Probe
    first_window_s: float = 0.0
    hook_us: float = 0.0
    extra_reserved: int = 0
    without: Blocks = field(default_factory=Blocks)
    with_probe: Blocks = field(default_factory=Blocks)
    #: Whether each block with the probe had a window: the budget may not allow one.
    opened: list[bool] = field(default_factory=list)

    def block(self, on: bool, steps: int, device: torch.device) -> None:
        """One block with the probe, or as if there were none: between windows it is nothing but its clock."""
        if not on:
            self.probe._hook.remove()
            self.without.run(self.step, steps, device, lambda: None)
            self.probe._hook = register_optimizer_step_post_hook(self.probe._on_optimizer_step)
            return
        self.probe._last_tick = time.perf_counter()  # the block without it has earned nothing
        windows = self.probe.windows
        self.with_probe.run(self.step, steps, device, lambda: self.probe.stats)  # .stats waits for the worker
        self.opened.append(self.probe.windows > windows)


def _mark(cuda: bool) -> Any:
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(a: Any, b: Any) -> float:
    return b - a if isinstance(a, float) else a.elapsed_time(b) / 1e3


def build(case: str, batch: int, device: torch.device) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """A model, and what turns (the compiled form of) it into a loss on one batch."""
    torch.manual_seed(0)
    if case.startswith("chain"):
        width = int(case.removeprefix("chain"))
        parts: list[nn.Module] = []
        for _ in range(LAYERS):
            parts += [nn.Linear(width, width), nn.LayerNorm(width), nn.SiLU()]
        model = nn.Sequential(*parts).to(device, torch.bfloat16)
        x = torch.randn(batch, width, device=device, dtype=torch.bfloat16)
        return model, lambda run: run(x).float().square().mean()
    size = case.partition(":")[2] or "demo"
    model = Wukong(WukongConfig.named(size, table_sizes=[1000] * 26, numerics=13)).to(device)
    numerics = torch.randn(batch, 13, device=device)
    categories = torch.randint(1000, (batch, 26), device=device)
    labels = torch.rand(batch, device=device).round()

    def loss(run: nn.Module) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            logits = run(numerics, categories)
        return nn.functional.binary_cross_entropy_with_logits(logits.float(), labels)

    return model, loss


@contextlib.contextmanager
def arm(name: str, case: str, mode: str, options: argparse.Namespace) -> Iterator[Arm]:
    """One arm, warmed up: everything is compiled and captured, with taps and without."""
    device = torch.device(options.device)
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
    model, loss = build(case, options.batch, device)
    backend = options.backend
    how = {"eager": {}, "compile": {"backend": backend}, "graphs": {"backend": backend, "mode": "reduce-overhead"}}
    run = model if mode == "eager" else torch.compile(model, **how[mode])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        loss(run).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_STEPS):
        step()
    reserved = _reserved(device)
    with loka_compile.probe(model, every=WARM_EVERY, **({"budget": None} if name == "all" else {})) as p:
        start = time.perf_counter()
        step()
        _reserved(device)
        made = Arm(name, step, p, time.perf_counter() - start)
        for _ in range(WARM_WINDOWS * WARM_EVERY):
            step()
        made.hook_us = probe_windows.hook_us(step, p, options.every)
        p.every = options.every
        while p.steps % options.every != options.every // 2:  # windows open in the middle of a block
            step()
        owe_half_a_job(p)
        made.extra_reserved = _reserved(device) - reserved
        yield made


def owe_half_a_job(probe: Probe) -> None:
    """Bring the probe to where it is after long training: the grace is spent, and half of a job on top of it."""
    _ = probe.stats
    for budget in probe._intake.budgets.values():
        costs = budget._estimates.values()
        budget.allowance = budget.spent - (0.5 * max(costs) if costs else 0.0)


def _reserved(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    return torch.cuda.memory_reserved()


def weight(case: str) -> int:
    """How much of the time a case gets: jobs on wide layers are rare."""
    return 2 if case == "chain4096" else 1


def run_case(case: str, mode: str, name: str, options: argparse.Namespace, until: float) -> dict[str, Any]:
    """Rounds of one arm until the time is up (three at least)."""
    torch._dynamo.reset()
    device = torch.device(options.device)
    with arm(name, case, mode, options) as one:
        before, rounds = one.probe.report(), 0
        while rounds < 3 or (time.perf_counter() < until and rounds < options.rounds):
            for on in (False, True) if rounds % 2 else (True, False):
                one.block(on, options.every, device)
            rounds += 1
        return summary(case, mode, one, before, one.probe.report())


def summary(case: str, mode: str, one: Arm, before: Any, after: Any) -> dict[str, Any]:
    """The figures of one arm."""
    ratios = [t / t0 - 1 for t, t0 in zip(one.with_probe.block_s, one.without.block_s, strict=True)]
    interval = confidence_interval(ratios)
    halves = [b - a for a, b in zip(one.without.late(), one.with_probe.late(), strict=True)]
    by_halves = confidence_interval(halves)
    found: dict[str, Any] = {
        "case": case, "mode": mode, "arm": one.name, "rounds": len(ratios), "steps": len(one.without.step_s[0]),
        "overhead": interval.mean, "overhead_low": interval.low, "overhead_high": interval.high,
        "overhead_median": statistics.median(ratios), "by_halves": by_halves.mean, "by_halves_low": by_halves.low,
        "by_halves_high": by_halves.high, "by_halves_median": statistics.median(halves),
        "throughput_ratio": 1 / (1 + interval.mean),
        "hook_us": one.hook_us, "first_window_s": one.first_window_s, "extra_reserved_bytes": one.extra_reserved,
        "extra_peak_bytes": one.with_probe.peak - one.without.peak,
    }  # fmt: skip
    for name, blocks in (("without", one.without), ("with", one.with_probe)):
        steps = blocks.step_s
        found |= {
            f"step_ms_{name}": 1e3 * statistics.median(t for block in steps for t in block),
            f"worst_step_ms_{name}": 1e3 * max(t for block in steps for t in block),
            f"block_s_{name}": blocks.block_s,
        }
    middle = found["steps"] - found["steps"] // 2  # blocks begin every // 2 steps after a multiple of every
    found["sampled_step_ms"] = 1e3 * statistics.median(block[middle] for block in one.with_probe.step_s)
    found["window_extra_ms"] = [  # the layers are tapped at the end of the step before
        1e3 * (sum(block[middle - 1 : middle + 1]) - 2 * statistics.median(block[:middle]))
        for block in itertools.compress(one.with_probe.step_s, one.opened)
    ]
    if after is not None:
        found |= {
            "statistics_bytes": after.bytes, "waiting_bytes": after.most_staged_bytes,
            "windows": after.windows - before.windows, "windows_over_budget": after.over_budget - before.over_budget,
            "calls_taken": sum(s.calls for s in after.sites) - sum(s.calls for s in before.sites),
            "weights_taken": sum(s.weight_updates for s in after.sites) - sum(s.weight_updates for s in before.sites),
            "worker_share": (after.spent_s - before.spent_s) / sum(one.with_probe.block_s),
        }  # fmt: skip
    return found


def line(row: dict[str, Any]) -> str:
    """One row of the printed table."""
    half = 100 * (row["overhead_high"] - row["overhead"])
    half2 = 100 * (row["by_halves_high"] - row["by_halves"])
    return (
        f"{row['case']:10} {row['mode']:8} {row['arm']:6} {row['step_ms_without']:8.3f} {row['step_ms_with']:8.3f} "
        f"{row['worst_step_ms_without']:6.1f} {row['worst_step_ms_with']:6.1f} {row['rounds']:6} "
        f"{100 * row['overhead']:7.2f} +-{half:5.2f} {100 * row['overhead_median']:7.2f} "
        f"{100 * row['by_halves']:7.2f} +-{half2:5.2f} {100 * row['by_halves_median']:7.2f} "
        f"{100 * row['worker_share']:7.2f} {row['calls_taken']:6} {row['weights_taken']:4} "
        f"{row['statistics_bytes'] / 1e6:7.0f} {row['extra_peak_bytes'] / 1e6:7.0f} "
        f"{row['extra_reserved_bytes'] / 1e6:7.0f}"
    )


HEAD = (
    f"{'case':10} {'mode':8} {'arm':6} {'step ms':>8} {'with':>8} {'worst':>6} {'with':>6} {'rounds':>6} "
    f"{'overhead %':>14} {'median':>7} {'by halves %':>14} {'median':>7} {'worker%':>7} {'calls':>6} {'wgts':>4} "
    f"{'stat MB':>7} {'peak MB':>7} {'rsvd MB':>7}"
)


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run all cases within the time; a case that fails is reported and left out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=230.0, help="for everything, compilation included")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cases", nargs="*", default=CASES, help="chain<width>, wukong or wukong:<size>")
    parser.add_argument("--modes", nargs="*", choices=MODES, default=MODES)
    parser.add_argument("--arms", nargs="*", choices=ARMS, default=("probe",))
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=200, help="at most")
    parser.add_argument("--backend", default="inductor")
    options = parser.parse_args(argv)
    start = time.perf_counter()
    command = "python -m benchmarks.probe_overhead " + " ".join(sys.argv[1:] if argv is None else argv)
    results: dict[str, Any] = {
        "command": command, **describe(), "datasketches": version("datasketches"), "cores": os.cpu_count(),
        "batch": options.batch, "every": options.every, "rows": [], "failed": {},
    }  # fmt: skip
    print(json.dumps({k: v for k, v in results.items() if isinstance(v, str)}))
    print(HEAD, flush=True)
    todo = [(case, mode, name) for case in options.cases for mode in options.modes for name in options.arms]
    for number, (case, mode, name) in enumerate(todo):
        now = time.perf_counter() - start
        left = options.seconds - now
        if left < 0.05 * options.seconds:
            results["failed"][f"{case} {mode} {name}"] = "no time was left"
            continue
        try:
            share = weight(case) / sum(weight(other) for other, _, _ in todo[number:])
            row = run_case(case, mode, name, options, start + now + left * share)
            results["rows"].append(row)
            print(line(row), flush=True)
        except Exception as error:
            traceback.print_exc()
            results["failed"][f"{case} {mode} {name}"] = f"{type(error).__name__}: {error}"
        atomic_write(options.out, dumps(results, indent=1))
    results["estimates"] = probe_windows.estimates(results["rows"])
    if results["estimates"]:
        print("\n".join([probe_windows.HEAD, *map(probe_windows.line, results["estimates"])]))
    print(f"{time.perf_counter() - start:.0f} s; failed: {results['failed'] or 'none'}")
    atomic_write(options.out, dumps(results, indent=1))
    rows_found: list[dict[str, Any]] = results["rows"]
    return rows_found


if __name__ == "__main__":
    main()
