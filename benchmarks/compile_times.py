"""How long the 4-layer chain takes to compile, cold and with warm caches (issue 5; benchmarks/chain.py runs it).

    python benchmarks/chain.py --only compile --out results/

Each time is that of a process of its own with caches of its own: from ``torch.compile`` to the end of the first
training step, CUDA and Inductor's workers already started. Cold and then warm are processes with the same caches; warm
is the median of seven. Garbage is collected before the clock starts: a full pass takes as long as a third of a warm
compile, and into which arm's it fell would depend on what was imported before. Modules come from bytecode, as they do
where pip has installed them: two processes of each arm, whose times are dropped, write it. The others run alone, the
arms in turn.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

ARMS = {"A": "A", "E": "E all FP8"}
#: Processes of each arm, one after another, and what their time counts as. The first two, which import what a cold and
#: a warm compile import, run beside the other arm's.
RUNS = ("bytecode", "bytecode", "cold", *["warm"] * 7)


def child(arm: str, batch: int, width: int, layers: int) -> float:
    """Seconds of the first step of an arm in this process."""
    import torch
    from chain_arms import DEVICE, arms, original, step
    from torch._inductor.async_compile import AsyncCompile

    import loka_compile.backend  # noqa: F401  (what the user imports is not compilation)

    torch.manual_seed(0)
    model = original(width, width, layers)
    x = torch.randn(batch, width, device=DEVICE, dtype=torch.bfloat16)
    grad = torch.randn_like(x) / batch
    make = arms(model, True, [arm])[ARMS[arm]]
    torch.compile(lambda t: t + 1)(x)
    AsyncCompile.wait_pool_ready()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    gc.collect()
    start = time.perf_counter()
    step(make(), x, grad)()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def medians(found: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    """Of what :func:`measure` found, the median of each arm and state."""
    return {arm: {state: statistics.median(times) for state, times in by.items()} for arm, by in found.items()}


def measure(
    batch: int = 4096, width: int = 1024, layers: int = 4, seconds: float = 150.0
) -> dict[str, dict[str, list[float]]]:
    """Seconds of each process by arm and by "cold" or "warm".

    Raises:
        RuntimeError: a process failed or took longer than ``seconds``; its last words are in the message.
    """
    found: dict[str, dict[str, list[float]]] = {arm: {} for arm in ARMS}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for state in RUNS:
            for together in [list(ARMS)] if state == "bytecode" else [[arm] for arm in ARMS]:
                folders = {arm: root / f"{arm}{'-first' * (state == 'bytecode')}" for arm in together}
                running = {
                    a: _start(a, batch, width, layers, caches, root / "bytecode") for a, caches in folders.items()
                }
                for arm, time_of_arm in _finish(running, state, seconds).items():
                    found[arm].setdefault(state, []).append(time_of_arm)
    return {
        arm: {state: times for state, times in states.items() if state != "bytecode"} for arm, states in found.items()
    }


def _finish(running: dict[str, subprocess.Popen[str]], state: str, seconds: float) -> dict[str, float]:
    found = {}
    for arm, process in running.items():
        try:
            out, error = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            for other in running.values():
                other.kill()
            raise RuntimeError(f"{arm} {state}: not compiled in {seconds} s") from None
        if process.returncode != 0:
            raise RuntimeError(f"{arm} {state}: {error[-500:]}")
        found[arm] = json.loads(out.splitlines()[-1])
    return found


def _start(
    arm: str, batch: int, width: int, layers: int, caches: Path, bytecode: Path
) -> subprocess.Popen[str]:  # fmt: skip
    env = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
        "PYTHONPYCACHEPREFIX": str(bytecode), "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"), "LOKA_CACHE_DIR": str(caches / "loka"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
    }  # fmt: skip
    command = [sys.executable, __file__, arm, str(batch), str(width), str(layers)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


if __name__ == "__main__":
    print(json.dumps(child(sys.argv[1], *map(int, sys.argv[2:5]))))
