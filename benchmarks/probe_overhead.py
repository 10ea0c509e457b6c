"""What the probe costs a training run: throughput, the worst step, memory; against the same run without it (issue 3).

    python -m benchmarks.probe_overhead --out benchmarks/results/probe_overhead_h200.json      # one GPU, 150 s in all

Cases: four layers of linear + LayerNorm + SiLU of width 2048 and 4096, and a small Wukong (its size "demo", autocast),
batch 4096, bf16, fused AdamW. Modes: eager, torch.compile, and torch.compile(mode="reduce-overhead") for CUDA graphs.

Arms, each a model of its own, taking turns in blocks of ``every`` steps, one of which is sampled:

    none     no probe
    probe    ``probe(model, every=100)`` as it is by default, in the steady state: what ``grace`` gives is used up
    all      the same with ``budget=None``: every layer and every weight in every window, whatever it costs

A block ends when the device is idle and the probe's worker has done everything that was waiting. The overhead is the
mean over rounds of ``t(arm) / t(none) - 1`` with its 95 % interval.
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

import loka_compile.probe
from examples.models.wukong import Wukong, WukongConfig
from loka_compile.jsonio import atomic_write, dumps
from loka_compile.machine import describe, version
from loka_compile.probe.errors import confidence_interval
from loka_compile.probe.probe import Probe

LAYERS = 4
MODES = ("graphs", "compile", "eager")
CASES = ("chain4096", "chain2048", "wukong")
ARMS = ("none", "probe", "all")
#: Windows of the warm-up: the first compiles, and a CUDA graph is captured in the second and replayed in the third.
WARM_WINDOWS, WARM_EVERY = 4, 5


@dataclass
class Arm:
    """A training run that can go on for some steps at a time."""

    name: str
    step: Callable[[], None]
    probe: Probe | None
    first_window_s: float = 0.0
    reserved: int = 0
    block_s: list[float] = field(default_factory=list)
    step_s: list[list[float]] = field(default_factory=list)
    peak: int = 0

    def block(self, steps: int, device: torch.device) -> None:
        """Run ``steps`` steps and keep their times."""
        cuda = device.type == "cuda"
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated()
        start = time.perf_counter()
        marks = [_mark(cuda)]
        for _ in range(steps):
            self.step()
            marks.append(_mark(cuda))
        if cuda:
            torch.cuda.synchronize()
        if self.probe is not None:
            _ = self.probe.stats  # waits for the worker
        self.block_s.append(time.perf_counter() - start)
        self.step_s.append([_between(a, b) for a, b in itertools.pairwise(marks)])
        if cuda:
            self.peak = max(self.peak, torch.cuda.max_memory_allocated() - base)


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
def arm(name: str, case: str, mode: str, options: argparse.Namespace, backend: str) -> Iterator[Arm]:
    """One arm, warmed up: everything is compiled and captured, with taps and without."""
    device = torch.device(options.device)
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
    reserved = _reserved(device)
    model, loss = build(case, options.batch, device)
    how = {"eager": {}, "compile": {"backend": backend}, "graphs": {"backend": backend, "mode": "reduce-overhead"}}
    run = model if mode == "eager" else torch.compile(model, **how[mode])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        loss(run).backward()
        optimizer.step()
        optimizer.zero_grad()

    budget = {"budget": None} if name == "all" else {}
    session = loka_compile.probe(model, every=WARM_EVERY, **budget) if name != "none" else contextlib.nullcontext()
    with session as p:
        start = time.perf_counter()
        step()
        _reserved(device)
        made = Arm(name, step, p, time.perf_counter() - start)
        warm = WARM_WINDOWS * WARM_EVERY
        warm += -warm % options.every  # a block begins with the sampled step
        for number in range(1, warm):
            if p is not None and number == (WARM_WINDOWS - 1) * WARM_EVERY + 1:
                p.every = options.every
            if p is not None and number == warm - 1:
                use_up_grace(p)
            step()
        made.reserved = _reserved(device) - reserved
        yield made


def use_up_grace(probe: Probe) -> None:
    """Bring the probe to where it is after long training: what it may take is what it earns from now on."""
    _ = probe.stats
    for budget in probe._intake.budgets.values():
        budget.allowance = budget.spent


def _reserved(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    return torch.cuda.memory_reserved()


def run_case(case: str, mode: str, options: argparse.Namespace, until: float) -> list[dict[str, Any]]:
    """Rounds of all arms until the time is up (three at least); one result per arm."""
    torch._dynamo.reset()
    device = torch.device(options.device)
    with contextlib.ExitStack() as stack:
        arms = [stack.enter_context(arm(name, case, mode, options, options.backend)) for name in options.arms]
        before = {a.name: a.probe.report() for a in arms if a.probe is not None}
        rounds = 0
        while rounds < 3 or (time.perf_counter() < until and rounds < options.rounds):
            turn = rounds % len(arms)
            for one in arms[turn:] + arms[:turn]:
                one.block(options.every, device)
            rounds += 1
        after = {a.name: a.probe.report() for a in arms if a.probe is not None}
        return [summary(case, mode, a, arms[0], before.get(a.name), after.get(a.name)) for a in arms]


def summary(case: str, mode: str, one: Arm, none: Arm, before: Any, after: Any) -> dict[str, Any]:
    """The figures of one arm beside those of the arm without a probe."""
    ratios = [t / t0 - 1 for t, t0 in zip(one.block_s, none.block_s, strict=True)]
    interval = confidence_interval(ratios)
    usual = statistics.median(t for block in one.step_s for t in block[1:])
    found: dict[str, Any] = {
        "case": case, "mode": mode, "arm": one.name, "rounds": len(ratios), "steps": len(one.step_s[0]),
        "step_ms": usual * 1e3,
        "overhead": interval.mean, "overhead_low": interval.low, "overhead_high": interval.high,
        "throughput_ratio": 1 / (1 + interval.mean),
        "sampled_step_ms": statistics.median(block[0] for block in one.step_s) * 1e3,
        "worst_step_ms": max(t for block in one.step_s for t in block) * 1e3,
        "first_window_s": one.first_window_s,
        "peak_bytes_of_a_block": one.peak, "reserved_bytes": one.reserved, "block_s": one.block_s,
    }  # fmt: skip
    if after is not None:
        found |= {
            "extra_peak_bytes": one.peak - none.peak, "extra_reserved_bytes": one.reserved - none.reserved,
            "statistics_bytes": after.bytes, "waiting_bytes": after.most_staged_bytes,
            "windows": after.windows - before.windows, "windows_over_budget": after.over_budget - before.over_budget,
            "calls_taken": sum(s.calls for s in after.sites) - sum(s.calls for s in before.sites),
            "weights_taken": sum(s.weight_updates for s in after.sites) - sum(s.weight_updates for s in before.sites),
            "worker_share": (after.spent_s - before.spent_s) / sum(one.block_s),
        }  # fmt: skip
    return found


def line(row: dict[str, Any]) -> str:
    """One row of the printed table."""
    text = f"{row['case']:10} {row['mode']:8} {row['arm']:6} {row['step_ms']:8.3f} {row['sampled_step_ms']:9.2f} "
    text += f"{row['worst_step_ms']:8.2f}"
    if row["arm"] == "none":
        return text
    half = 100 * (row["overhead_high"] - row["overhead"])
    return text + (
        f" {100 * row['overhead']:7.2f} +-{half:5.2f} {row['throughput_ratio']:7.4f} {100 * row['worker_share']:7.2f} "
        f"{row['calls_taken']:6} {row['weights_taken']:4} {row['statistics_bytes'] / 1e6:7.0f} "
        f"{row['extra_peak_bytes'] / 1e6:7.0f} {row['extra_reserved_bytes'] / 1e6:7.0f}"
    )


HEAD = (
    f"{'case':10} {'mode':8} {'arm':6} {'step ms':>8} {'sampled':>9} {'worst':>8} {'overhead %':>14} {'ratio':>8} "
    f"{'worker%':>7} {'calls':>6} {'wgts':>4} {'stat MB':>7} {'peak MB':>7} {'rsvd MB':>7}"
)


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run all cases within the time; a case that fails is reported and left out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=140.0, help="for everything, compilation included")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cases", nargs="*", default=CASES, help="chain<width>, wukong or wukong:<size>")
    parser.add_argument("--modes", nargs="*", choices=MODES, default=MODES)
    parser.add_argument("--arms", nargs="*", choices=ARMS, default=ARMS, help="the first is what others stand against")
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
    todo = [(case, mode) for case in options.cases for mode in options.modes]
    for number, (case, mode) in enumerate(todo):
        now = time.perf_counter() - start
        left = options.seconds - now
        if left < 0.05 * options.seconds:
            results["failed"][f"{case} {mode}"] = "no time was left"
            continue
        try:
            until = start + now + left / (len(todo) - number)
            rows = run_case(case, mode, options, until)
            results["rows"] += rows
            print("\n".join(map(line, rows)), flush=True)
        except Exception as error:
            traceback.print_exc()
            results["failed"][f"{case} {mode}"] = f"{type(error).__name__}: {error}"
        atomic_write(options.out, dumps(results, indent=1))
    print(f"{time.perf_counter() - start:.0f} s; failed: {results['failed'] or 'none'}")
    atomic_write(options.out, dumps(results, indent=1))
    rows_found: list[dict[str, Any]] = results["rows"]
    return rows_found


if __name__ == "__main__":
    main()
