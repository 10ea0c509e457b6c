"""The paper's figure 13: one layer forward at batch 1024, and what each Mod contributes (benchmarks/chain.py runs it).

    python benchmarks/chain.py --only fig13 --out results/

Stacked as in the paper: no bias, then BlockNorm, then HardSwish, then FP8 with fusion. The last is the best of what a
plan chooses from (tensorwise or rowwise FP8, or fusion alone in bf16; weights quantised once), quantisation of the bf16
input included.
"""

from __future__ import annotations

import copy
import functools
import json
import math
import sys
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from _timing import measure  # noqa: E402
from chain_arms import DEVICE, BlockNorm, bare, loka, original, plan_of, step  # noqa: E402

BATCH = 1024
PAIRS = ((512, 512), (7680, 256), (4096, 2048), (256, 7680), (2560, 4096), (256, 256), (7680, 512), (2048, 4096),
         (4096, 2560))  # fmt: skip
MODS = ("original", "no bias", "BlockNorm", "HardSwish")
LOKA = {
    "FP8 + fusion, tensorwise": "torch:tensorwise_fast",
    "FP8 + fusion, rowwise": "torch:rowwise_fast",
    "fusion alone": "high_precision:native",
}
#: cuBLASLt's GEMM alone, which bounds the layer from below; in FP8 on an input that is in FP8 already.
BARE = {"bare GEMM, bf16": False, "bare GEMM, FP8": True}


def stages(k: int, n: int) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """One layer [k] -> [n] as the Mods change it one after another."""
    like = {"device": DEVICE, "dtype": torch.bfloat16}
    weight, block = torch.randn(n, k, **like) / math.sqrt(k), BlockNorm()
    bias, gain = torch.zeros(n, **like), torch.ones(n, **like)

    def norm(z: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(z, (n,), gain, bias)

    return {
        "original": lambda x: F.silu(norm(F.linear(x, weight, bias))),
        "no bias": lambda x: F.silu(norm(F.linear(x, weight))),
        "BlockNorm": lambda x: F.silu(block(F.linear(x, weight))),
        "HardSwish": lambda x: F.hardswish(block(F.linear(x, weight))),
    }


def calls_of(k: int, n: int, batch: int = BATCH) -> dict[str, list[Callable[[], object]]]:
    """Calls of every stage for one (in, out) pair, on inputs that together are past the L2."""
    torch._dynamo.reset()
    count = max(3, min(32, (120 << 20) // (2 * (batch * k + n * k))))
    xs = [torch.randn(batch, k, device=DEVICE, dtype=torch.bfloat16) for _ in range(count)]
    calls: dict[str, list[Callable[[], object]]] = {
        name: [functools.partial(torch.compile(fn), x) for x in xs] for name, fn in stages(k, n).items()
    }
    model = original(k, n, 1).eval().requires_grad_(False)
    for label, candidate in LOKA.items():
        compiled = loka(copy.deepcopy(model), plan_of(model, candidate, candidate), freeze_weights=True)
        calls[label] = [step(compiled, x, None) for x in xs]
    for label, fp8 in BARE.items():
        calls[label] = list(bare(fp8, xs, model[0].weight.data))
    return calls


def pair(k: int, n: int) -> dict[str, float]:
    """Microseconds of every stage for one (in, out) pair."""
    with torch.no_grad():
        return measure(calls_of(k, n), rounds=20)


def compile_pair(k: int, n: int) -> None:
    """Fill the caches for one pair."""
    with torch.no_grad():
        for calls in calls_of(k, n).values():
            calls[0]()


def contributions(us: Mapping[str, float]) -> dict[str, float]:
    """Speed-up over the original that each step adds to the one before; they sum to the whole minus 1."""
    best = min(us[label] for label in LOKA if label in us)
    times = [*(us[name] for name in MODS), best]
    speedups = [us["original"] / t for t in times]
    names = [*MODS[1:], "FP8 + fusion"]
    return {name: after - before for name, (before, after) in zip(names, pairwise(speedups), strict=True)}


def run(log: Callable[[str], None], in_time: Callable[[], bool], save: Callable[[list[dict]], None]) -> list[dict]:
    """Every pair while there is time; a pair that fails is logged and left out."""
    rows: list[dict] = []
    for k, n in PAIRS:
        if not in_time():
            log(f"fig13 {k}x{n}: not run in time")
            continue
        try:
            us = pair(k, n)
        except Exception as error:
            log(f"fig13 {k}x{n}: {type(error).__name__}: {str(error)[:300]}")
            continue
        parts = contributions(us)
        rows.append({"pair": [k, n], "us": us, "contributions": parts})
        log(f"fig13 {k}x{n}: {1 + sum(parts.values()):.2f}x | " + " | ".join(f"{s} {t:.1f}" for s, t in us.items()))
        save(rows)
    if rows:
        whole = [1 + sum(row["contributions"].values()) for row in rows]
        log(f"fig13: {math.prod(whole) ** (1 / len(whole)):.2f}x in geometric mean, least {min(whole):.2f}x")
    return rows


def plot(rows: list[dict], path: Path, title: str) -> None:
    """Stacked bars of the contributions; what makes a layer slower hangs below 1."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4.5))
    up, down = [1.0] * len(rows), [1.0] * len(rows)
    at = range(len(rows))
    for name in (*MODS[1:], "FP8 + fusion"):
        parts = [row["contributions"][name] for row in rows]
        axes.bar(at, parts, bottom=[u if p >= 0 else d for u, d, p in zip(up, down, parts, strict=True)], label=name)
        up = [u + max(p, 0.0) for u, p in zip(up, parts, strict=True)]
        down = [d + min(p, 0.0) for d, p in zip(down, parts, strict=True)]
    for x, row, top in zip(at, rows, up, strict=True):
        axes.text(x, top + 0.02, f"{1 + sum(row['contributions'].values()):.2f}x", ha="center")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(list(at), [f"{k}, {n}" for k, n in (row["pair"] for row in rows)], rotation=20)
    axes.set(xlabel="in, out", ylabel="speed-up over bias + LayerNorm + SiLU, bf16", title=title)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    """Plot again what a run of chain.py wrote: ``python benchmarks/figure13.py chain.json figure13.png``."""
    source, target = map(Path, sys.argv[1:3])
    found = json.loads(source.read_text())
    versions = found["versions"]
    plot(found["fig13"], target, f"{versions['gpu']}, torch {versions['torch']}, batch {BATCH}, forward")


if __name__ == "__main__":
    main()
