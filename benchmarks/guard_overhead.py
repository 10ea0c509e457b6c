"""What the drift guard costs a training run: throughput against the same run without it, and what a look finds.

    python -m benchmarks.guard_overhead --out benchmarks/results/guard_overhead_h200.json      # one GPU, 120 s in all

Cases: four layers of linear + LayerNorm + SiLU of width 2048 and 4096, batch 4096, bf16, fused AdamW, compiled with
``backend="loka"`` and ``table="auto"``. Two runs of a model of its own each, taking turns in blocks of ``every`` steps,
one of which is looked at by the guard in its steady state (what ``grace`` gives is used up). A block ends when the
device is idle and the guard's worker has done what was waiting. The overhead is the mean over rounds of
``t(guard) / t(none) - 1`` with its 95 % interval. A case without a single FP8 kernel has nothing to guard, and says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import loka_compile
from benchmarks.probe_overhead import build
from loka_compile.drift.guard import Guard
from loka_compile.jsonio import atomic_write, dumps
from loka_compile.machine import describe
from loka_compile.probe.errors import confidence_interval

CASES = ("chain2048", "chain4096")
#: Calls that are sampled before the plan is made, and looks in the warm-up: both graphs are compiled by then.
AUTO_CALLS, WARM_LOOKS, WARM_EVERY = 5, 3, 5


@contextlib.contextmanager
def run_of(case: str, guarded: bool, options: argparse.Namespace) -> Iterator[tuple[Callable[[], None], Guard | None]]:
    """A training run that is planned, compiled and warm: its step, and the guard around it."""
    device = torch.device(options.device)
    model, loss = build(case, options.batch, device)
    chosen = {"auto_calls": AUTO_CALLS, "max_mere": options.max_mere, "min_speedup": options.min_speedup}
    if options.target:
        chosen["target"] = options.target
    compiled = torch.compile(model, backend="loka", options=chosen)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        loss(compiled).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(AUTO_CALLS + 2):
        step()
    if not guarded:
        for _ in range(WARM_LOOKS * WARM_EVERY):
            step()
        yield step, None
        return
    with loka_compile.guard(model, every=WARM_EVERY) as guard:
        for _ in range(WARM_LOOKS * WARM_EVERY):
            step()
        _ = guard.errors
        guard.every = options.every
        while guard.steps % options.every:  # a block begins with the step that is looked at
            step()
        guard._budget.allowance = guard._budget.spent  # what it may take is what it earns from now on
        yield step, guard


def block(step: Callable[[], None], guard: Guard | None, steps: int, device: torch.device) -> float:
    """Seconds of so many steps, the guard's work beside them included."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    if guard is not None:
        _ = guard.errors  # waits for the worker
    return time.perf_counter() - start


def measure(case: str, options: argparse.Namespace, until: float) -> dict[str, Any]:
    """Rounds of both runs until the time is up (three at least)."""
    torch._dynamo.reset()
    device = torch.device(options.device)
    times: dict[bool, list[float]] = {False: [], True: []}
    with contextlib.ExitStack() as stack:
        runs = {guarded: stack.enter_context(run_of(case, guarded, options)) for guarded in (False, True)}
        guard = runs[True][1]
        assert guard is not None
        if not guard.errors:
            raise RuntimeError("no GEMM of this case runs in FP8: there is nothing to guard")
        before = guard.looks
        while len(times[True]) < 3 or (time.perf_counter() < until and len(times[True]) < options.rounds):
            for guarded in (False, True) if len(times[True]) % 2 else (True, False):
                step, of = runs[guarded]
                times[guarded].append(block(step, of, options.every, device))
        ratios = [t / t0 - 1 for t, t0 in zip(times[True], times[False], strict=True)]
        interval = confidence_interval(ratios)
        return {
            "case": case, "rounds": len(ratios), "step_ms": 1e3 * min(times[False]) / options.every,
            "overhead": interval.mean, "overhead_low": interval.low, "overhead_high": interval.high,
            "looks": guard.looks - before, "gemms": len(guard.errors), "departed": sorted(guard.departed),
            "errors": {" ".join(key): list(value) for key, value in guard.errors.items()},
        }  # fmt: skip


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run all cases within the time; a case that fails is reported and left out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=110.0, help="for everything, compilation included")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cases", nargs="*", default=CASES, help="chain<width>")
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=200, help="at most")
    parser.add_argument("--target", default="", help="plan for another device and emulate it")
    parser.add_argument("--max-mere", type=float, default=0.2)
    parser.add_argument("--min-speedup", type=float, default=1.05)
    options = parser.parse_args(argv)
    start = time.perf_counter()
    command = "python -m benchmarks.guard_overhead " + " ".join(sys.argv[1:] if argv is None else argv)
    results: dict[str, Any] = {
        "command": command, **describe(), "batch": options.batch, "every": options.every, "rows": [], "failed": {},
    }  # fmt: skip
    print(json.dumps({k: v for k, v in results.items() if isinstance(v, str)}), flush=True)
    for number, case in enumerate(options.cases):
        now = time.perf_counter() - start
        try:
            row = measure(case, options, start + now + (options.seconds - now) / (len(options.cases) - number))
            results["rows"].append(row)
            print(f"{case}: {row['step_ms']:.2f} ms a step, overhead {100 * row['overhead']:.2f} % "
                  f"({100 * row['overhead_low']:.2f}..{100 * row['overhead_high']:.2f}) over {row['rounds']} rounds, "
                  f"{row['looks']} looks at {row['gemms']} GEMMs, left: {row['departed'] or 'none'}",
                  flush=True)  # fmt: skip
        except Exception as error:
            traceback.print_exc()
            results["failed"][case] = f"{type(error).__name__}: {error}"
        atomic_write(options.out, dumps(results, indent=1))
    print(f"{time.perf_counter() - start:.0f} s; failed: {results['failed'] or 'none'}")
    rows: list[dict[str, Any]] = results["rows"]
    return rows


if __name__ == "__main__":
    main()
