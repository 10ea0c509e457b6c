"""Chains of linear + norm + activation: compiled bf16, torchao float8 and loka_compile side by side (issue 5).

    python benchmarks/chain.py --out results/            # everything
    python benchmarks/chain.py --only inference --widths 1024 2048 --arms A B E --seconds 60

Arms: A the original model (bias, LayerNorm, SiLU), bf16, Inductor. A' the same with max-autotune. B the Mods by hand
(no bias, BlockNorm, HardSwish), bf16, Inductor. C and D torchao float8 on the models of A and B, in training
(every recipe; the best counts). E ``backend="loka"`` on the model of A. N the same without FP8: Mods and fusion alone.
Input arrives and output leaves in bf16. Medians of CUDA-graph replays, arms interleaved. ``chain.json`` is written
after every case; with ``--seconds`` no arm begins after that time. ``--prewarm 12`` first compiles everything but A' in
12 processes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import compile_times  # noqa: E402
import figure13  # noqa: E402
from _timing import capture, measure_graphs  # noqa: E402
from chain_arms import DEVICE, TORCHAO, arms, original, step  # noqa: E402
from prewarm import prewarm  # noqa: E402

from loka_compile import machine  # noqa: E402

LAYERS = 4
#: Kind, batch and width of the case that --large adds.
LARGE = ("training", 16384, 1024)
KINDS = ("inference", "training", "fig13", "compile")


def kernels_of(call: Callable[[], object]) -> list[tuple[str, int, float]]:
    """Name, count and total microseconds of every kernel of one call, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(5):
            call()
        torch.cuda.synchronize()
    rows = [(e.key, e.count // 5, e.device_time_total / 5) for e in prof.key_averages() if e.device_time_total]
    return sorted(rows, key=lambda row: -row[2])


class Run:
    """One run of the program: its options, its clock, its results on disk."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.start = time.time()
        self.results: dict = {"versions": machine.describe(), "command": " ".join(sys.argv), "cases": [], "fig13": []}

    def log(self, text: str) -> None:
        print(f"[{time.time() - self.start:5.0f}s] {text}", flush=True)

    def in_time(self) -> bool:
        return time.time() - self.start < self.options.seconds

    def save(self) -> None:
        self.options.out.mkdir(parents=True, exist_ok=True)
        (self.options.out / "chain.json").write_text(json.dumps(self.results, indent=1) + "\n")

    def case(self, kind: str, batch: int, width: int) -> dict:
        """Every arm of one case; an arm that fails is noted and left out."""
        torch.manual_seed(0)
        model, training = original(width, width, LAYERS), kind == "training"
        if not training:
            model.eval().requires_grad_(False)
        inputs = [torch.randn(batch, width, device=DEVICE, dtype=torch.bfloat16) for _ in range(3)]
        grad = torch.randn_like(inputs[0]) / batch if training else None
        calls, extra, keep, reference = {}, {}, [], None
        for arm, make in arms(model, training, self.options.arms, self.options.torchao).items():
            if not self.in_time():
                extra[arm] = {"error": "not run in time"}
                continue
            torch._dynamo.reset()
            try:
                start = time.time()
                compiled = make()
                steps = [step(compiled, x, grad) for x in inputs]
                out = steps[0]()
                torch.cuda.synchronize()
                if self.options.compile_only:
                    continue
                extra[arm] = {"first_call_s": round(time.time() - start, 2)}
                self.log(f"    {arm}: first call {extra[arm]['first_call_s']} s")
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                steps[0]()
                torch.cuda.synchronize()
                extra[arm]["peak_mb"] = round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)
                with torch.no_grad():
                    value = compiled(inputs[0]).double() if training else out.double()
                if arm == "B":
                    reference = value
                if arm.startswith("E") and reference is not None:
                    extra[arm]["output_vs_B"] = round(((value - reference).norm() / reference.norm()).item(), 4)
                # Captured now: the next arm resets Dynamo, and with it this arm's compiled code.
                calls[arm] = (capture(steps), len(steps))
                keep.append((compiled, steps))
                if arm.startswith(tuple(self.options.profile)) and self.options.profile:
                    extra[arm]["kernels"] = kernels_of(steps[0])
            except Exception as error:
                extra[arm] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
                self.log(traceback.format_exc()[-1500:])
        times = measure_graphs(calls, rounds=20) if calls else {}
        self.log(f"{kind} {batch}x{width}: " + " | ".join(f"{arm} {us:.1f}" for arm, us in times.items()))
        return {"case": f"{kind} {batch}x{width}", "us": times, "extra": extra}

    def wanted(self) -> list[tuple[str, int, int]]:
        only, widths = self.options.only or KINDS, self.options.widths
        wanted = [(kind, 4096, w) for kind in ("inference", "training") if kind in only for w in widths]
        return wanted + [LARGE] * self.options.large

    def prewarm(self) -> None:
        """Compile what the cases need, each arm of each case in a process of its own."""
        commands = []
        for case in self.wanted():
            kind, _, width = case
            which = ["--widths", "--large"] if case == LARGE else ["--widths", str(width)]
            for arm in self.options.arms:
                if arm == "A'" or (kind == "inference" and arm in ("C", "D")):
                    continue
                recipes = self.options.torchao if arm in ("C", "D") else [""]
                for recipe in recipes:
                    more = ["--torchao", recipe] if recipe else []
                    commands.append(
                        [sys.executable, __file__, "--compile-only", "--only", kind, *which, "--arms", arm, *more]
                    )
        if "fig13" in (self.options.only or KINDS):
            commands += [
                [sys.executable, __file__, "--compile-only", "--only", "fig13", "--pair", str(k), str(n)]
                for k, n in figure13.PAIRS
            ]
        done = prewarm(commands, self.options.prewarm, self.options.seconds / 2)
        self.log(f"compiled {done} of {len(commands)} arms and cases in {self.options.prewarm} processes")

    def cases(self) -> None:
        for kind, batch, width in self.wanted():
            if not self.in_time():
                self.log(f"{kind} {batch}x{width}: not run in time")
                continue
            found = self.case(kind, batch, width)
            if self.options.compile_only:
                continue
            self.results["cases"].append(found)
            self.save()
            gc.collect()
            torch.cuda.empty_cache()

    def figure13(self) -> None:
        def save(rows: list[dict]) -> None:
            self.results["fig13"] = rows
            self.save()

        rows = figure13.run(self.log, self.in_time, save)
        if rows:
            versions = self.results["versions"]
            title = f"{versions['gpu']}, torch {versions['torch']}, batch {figure13.BATCH}, forward"
            figure13.plot(rows, self.options.out / "figure13.png", title)

    def compile_times(self) -> None:
        try:
            found = compile_times.measure(
                seconds=max(1.0, min(600.0, self.options.seconds - (time.time() - self.start)))
            )
        except RuntimeError as error:
            self.log(f"compile: {error}")
            return
        self.results |= {"compile_s": compile_times.medians(found), "compile_s_each": found}
        medians = self.results["compile_s"]
        self.log("compile: " + " | ".join(f"{a} {s} {t:.3f} s" for a, by in medians.items() for s, t in by.items()))
        self.save()


def main(arguments: list[str] | None = None) -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--only", choices=KINDS, action="append")
    parser.add_argument("--widths", type=int, nargs="*", default=[512, 1024, 2048, 4096])
    parser.add_argument("--arms", nargs="*", default=["A", "A'", "B", "C", "D", "E"])
    parser.add_argument("--torchao", nargs="*", default=list(TORCHAO), help="recipes of arms C and D")
    parser.add_argument("--profile", nargs="*", default=[], help="arms whose kernels are listed")
    parser.add_argument("--large", action="store_true", help="also the training step at batch 16384, width 1024")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="nothing begins after so long")
    parser.add_argument("--prewarm", type=int, default=0, metavar="N", help="first compile in N processes")
    parser.add_argument("--pair", type=int, nargs=2, help="with --compile-only: of figure 13")
    parser.add_argument("--compile-only", action="store_true", help="measure nothing and write nothing")
    run = Run(parser.parse_args(arguments))
    only = run.options.only or KINDS
    # Without processes that fill the caches, first calls are those of a cold compile.
    os.environ.setdefault("TORCHINDUCTOR_FX_GRAPH_CACHE", str(int(run.options.prewarm > 0)))
    if run.options.prewarm:
        run.prewarm()
    run.cases()
    if run.options.compile_only:
        if run.options.pair:
            figure13.compile_pair(*run.options.pair)
        return
    if "fig13" in only:
        run.figure13()
    if "compile" in only and run.in_time():
        run.compile_times()
    run.save()


if __name__ == "__main__":
    main()
