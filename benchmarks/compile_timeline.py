"""What happens when in the first training step of the 4-layer chain: what compile_times.py times, taken apart.

    python benchmarks/compile_timeline.py E cold.txt --caches /tmp/caches
    python benchmarks/compile_timeline.py E warm.txt --caches /tmp/caches --profile

One line for each event: seconds since ``torch.compile``, seconds that it took, and what it was. Kernels that Triton
compiles or finds ("hit") in this process are those of our operators; Inductor's workers compile the others. "garbage"
is a full pass of Python's collector, over all objects of the process. With ``--profile`` what cProfile found follows,
and all of it is slower.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import os
import pstats
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

ARMS = {"A": "A", "E": "E all FP8"}
Event = tuple[float, float, str]


def main() -> None:
    """Compile one arm and write what happened."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arm", choices=ARMS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--caches", type=Path, required=True, help="a folder; empty for a cold compile")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--size", type=int, nargs=2, default=(4096, 1024), metavar=("BATCH", "WIDTH"))
    options = parser.parse_args()
    os.environ |= {
        "TORCHINDUCTOR_CACHE_DIR": str(options.caches / "inductor"), "TRITON_CACHE_DIR": str(options.caches / "triton"),
        "LOKA_CACHE_DIR": str(options.caches / "loka"), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
    }  # fmt: skip
    events, profile = timeline(options.arm, *options.size, profile=options.profile)
    with options.out.open("w") as out:
        for event in sorted(events):
            print(*event, file=out)
        if profile is not None:
            for order in ("cumtime", "tottime"):
                pstats.Stats(profile, stream=out).sort_stats(order).print_stats(150)


def timeline(arm: str, batch: int, width: int, *, profile: bool) -> tuple[list[Event], cProfile.Profile | None]:
    """The events of an arm's first step in this process."""
    import torch
    import torch._inductor.compile_fx as compile_fx
    from chain_arms import DEVICE, arms, original, step
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.graph import GraphLowering

    import loka_compile.backend  # noqa: F401  (what the user imports is not compilation)
    from loka_compile.lowering import selftest

    torch.manual_seed(0)
    model = original(width, width, 4)
    x = torch.randn(batch, width, device=DEVICE, dtype=torch.bfloat16)
    make = arms(model, True, [arm])[ARMS[arm]]
    torch.compile(lambda t: t + 1)(x)
    AsyncCompile.wait_pool_ready()
    events: list[Event] = []
    began = time.perf_counter()

    def now() -> float:
        return round(time.perf_counter() - began, 3)

    def watch(owner: Any, name: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = now()
            try:
                return function(*args, **kwargs)
            finally:
                events.append((start, round(now() - start, 3), name))

        setattr(owner, name, timed)

    passes: list[float] = []

    def collecting(phase: str, info: dict[str, int]) -> None:
        if info["generation"] == 2 and phase == "start":
            passes.append(now())
        elif info["generation"] == 2 and passes:
            events.append((passes[-1], round(now() - passes[-1], 3), "garbage"))

    gc.collect()
    gc.callbacks.append(collecting)
    watch(compile_fx, "fx_codegen_and_compile")
    for name in ("run", "codegen", "compile_to_module"):
        watch(GraphLowering, name)
    watch(AsyncCompile, "wait")
    watch(selftest, "self_test")
    if DEVICE == "cuda":
        import triton

        def listener(src: Any, times: Any, cache_hit: bool, **more: Any) -> None:
            events.append((now(), round(times.total / 1e6, 3), f"triton {src.name}{' hit' * cache_hit}"))

        triton.knobs.compilation.listener = listener
    profiler = cProfile.Profile() if profile else None
    run = step(make(), x, torch.randn_like(x) / batch)
    if profiler is not None:
        profiler.enable()
    run()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    if profiler is not None:
        profiler.disable()
    events.append((now(), 0.0, "first step done"))
    return events, profiler


if __name__ == "__main__":
    main()
