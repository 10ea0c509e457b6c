"""Arms of the quality protocol side by side, each in a process: while one compiles, another trains."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks._children import end, last_line, start
from benchmarks.quality_arms import Arm
from benchmarks.quality_runs import Runs

#: Seconds between two looks at the processes.
POLL = 0.5


def train_in_processes(
    missing: Sequence[tuple[Arm, list[int]]], runs: Runs, setup: Mapping[str, Any], how: Mapping[str, Any], *,
    jobs: int, gpus: Sequence[str], until: float,
) -> None:  # fmt: skip
    """Train the missing seeds of each arm, ``jobs`` arms at a time, dealt out to ``gpus``, in the order given.

    An arm that fails is reported with its last words, and the others go on. At ``until`` (of time.monotonic) what still
    runs is stopped; its finished seeds are kept.
    """
    began = time.monotonic()
    waiting = list(missing)
    running: dict[int, tuple[Arm, list[int], subprocess.Popen[str]]] = {}
    at_once = min(jobs, len(waiting))

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:.0f} s] {text}", flush=True)

    def log(arm: Arm) -> Any:
        return runs.folder / f"{arm.name}.log"

    try:
        while waiting or running:
            for slot in range(at_once):
                if slot not in running and waiting:
                    arm, seeds = waiting.pop(0)
                    spec = {
                        **how, "setup": setup, "arm": arm.name, "plan": arm.options.get("plan"), "seeds": seeds,
                        "out": str(runs.folder), "jobs": jobs,
                    }  # fmt: skip
                    gpu = gpus[slot % len(gpus)] if gpus else None
                    child = start("benchmarks.quality_train", [json.dumps(spec)], log(arm), at_once=at_once, gpu=gpu)
                    running[slot] = (arm, seeds, child)
            time.sleep(POLL)
            for slot, (arm, seeds, child) in list(running.items()):
                code = child.poll()
                for seed in [s for s in seeds if runs.done(arm.name, s)]:
                    seeds.remove(seed)
                    say(f"{arm.name}, seed {seed}: {runs.facts(arm.name, seed)['seconds']:.0f} s")
                if code is not None:
                    del running[slot]
                    if code:
                        say(f"{arm.name} failed: {last_line(log(arm))}")
            if time.monotonic() > until:
                for arm, seeds, _ in [*running.values(), *((a, s, None) for a, s in waiting)]:
                    say(f"no time was left for {arm.name}, seeds {', '.join(map(str, seeds))}: {last_line(log(arm))}")
                break
    finally:
        for _, _, child in running.values():
            end(child, patience=2.0)
