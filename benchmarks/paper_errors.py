r"""Tables II and V and figure 6 of the LoKA paper, with our numbers beside the paper's (issue 3).

    python -m benchmarks.paper_errors --out benchmarks/results/paper                         # a CPU, five minutes
    python -m benchmarks.paper_errors --size h200 --device cuda --batch 4096 --steps 1200 --every 20 --rows 256 \
        --train-seconds 40 --seconds 80 --out benchmarks/results/paper_h200                     # a GPU, 90 s

A Wukong is trained on the synthetic click stream with the probe on. Figure 6 is what its biases do meanwhile. Then the
forward GEMM of every linear layer is computed by each library's kernel, on standard-normal operands, on operands drawn
from the learnt distributions, and on the raw rows that the probe kept. The reference is the fp64 product of the fp32
operands, so that rounding to bf16 counts, as against the paper's TF32 reference. On a machine that cannot run a kernel
its recipe is emulated. Written: ``paper_errors.json`` (as it goes), ``figure6.png``.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import loka_compile.probe
from benchmarks.bias_norms import plot_bias_norms
from benchmarks.defects import WrongRowScale
from examples.models.registry import build
from examples.training.config import TrainConfig
from examples.training.loop import Trainer
from examples.training.sources import open_source
from loka_compile.errors import LokaError
from loka_compile.gemm import Gemm, Recipe, Role
from loka_compile.jsonio import atomic_write, dumps
from loka_compile.lowering.providers import get_provider
from loka_compile.lowering.providers.base import Provider
from loka_compile.machine import describe
from loka_compile.probe.errors import Errors, Reference, pool
from loka_compile.probe.site_stats import SiteStats, Stats

#: The paper's name of a library and recipe, the candidate, and the paper's MERE of its four layers: on standard-normal
#: and on learned inputs (table II).
ARMS: tuple[tuple[str, str, tuple[float, float] | None], ...] = (
    ("PyTorch BF16", "high_precision:native", (0.03, 0.04)),
    ("TorchAO RW", "torch:rowwise_fast", (0.47, 0.53)),
    ("DeepGEMM BW", "deepgemm:blockwise", (0.49, 0.56)),
    ("FBGEMM RW", "fbgemm:rowwise_fast", (0.48, 0.52)),
    ("TorchAO TW", "torch:tensorwise_fast", None),
)
#: Table V, faulty and fixed test code, on standard-normal and on learned inputs.
PAPER_V = {"faulty": (0.42, 17.04), "fixed": (0.42, 0.37)}
INPUTS = ("normal", "learned", "raw")
METRICS = ("mere", "mere_floored", "mere_by_row", "frobenius")
IMPORTANT = 4


def learn(options: argparse.Namespace) -> tuple[Stats, int]:
    """Train with the probe on; the statistics, and the steps that there was time for."""
    device = torch.device(options.device)
    stream = open_source("synthetic", options.batch, device=device, numerics=options.numerics, max_ids=options.ids)
    model = build("wukong", options.size, stream.schema, device=device)
    config = TrainConfig(backend="eager", precision="bf16", lr=options.lr)
    trainer = Trainer(model, stream, config, device=device)
    start, steps = time.perf_counter(), 0
    # Most of the time may go into statistics: this is no production run, and its steps are few.
    with loka_compile.probe(model.dense_arch, every=options.every, budget=options.budget or None) as p:
        while steps < options.steps and time.perf_counter() - start < options.train_seconds:
            trainer.step(next(stream))
            steps += 1
    return p.stats, steps


def pairs(stats: SiteStats, inputs: str, count: int, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Operands x [rows, K] and W [N, K] in fp32."""
    n, k = stats.out_features, stats.in_features
    if inputs == "normal":
        random = torch.Generator(stats.device).manual_seed(0)
        for _ in range(count):
            x = torch.randn(rows, k, generator=random, device=stats.device)
            yield x, torch.randn(n, k, generator=random, device=stats.device)
    elif inputs == "learned":
        for draw in stats.sample(count, rows):
            yield draw.input, draw.weight
    else:
        seen = stats.raw()
        for part in torch.split(seen.inputs[0].float(), max(16, len(seen.inputs[0]) // 4)):
            yield part, seen.weights[0]


class Arm:
    """A library's kernel of one layer, or the emulation of its recipe where that kernel cannot run."""

    def __init__(self, candidate: str, gemm: Gemm, device: str) -> None:
        name, _, recipe = candidate.partition(":")
        self.provider: Provider = get_provider(name)
        self.recipe: Recipe = self.provider.recipe(recipe)
        self.source = "real kernel"
        if self.provider.refuses(gemm, self.recipe, device):
            self.provider, self.source = get_provider("emulated"), "emulated"

    def product(self, x: Tensor, w: Tensor) -> Tensor:
        """``x @ W.T`` in bf16."""
        x, w = x.bfloat16(), w.bfloat16()
        return self.provider.gemm(x, False, w, False, self.recipe, torch.bfloat16)


def measure(stats: SiteStats, arms: dict[str, Any], inputs: str, count: int, rows: int) -> dict[str, Errors]:
    """The pooled errors of every arm on one layer; an arm that raises is left out and said."""
    found: dict[str, list[Errors]] = {}
    broken: set[str] = set()
    for x, w in pairs(stats, inputs, count, rows):
        reference = Reference(x.double() @ w.double().t())
        for label, arm in arms.items():
            if label in broken:
                continue
            try:
                found.setdefault(label, []).append(reference.measure(arm(x, w)))
            except Exception:
                broken.add(label)
                found.pop(label, None)
                print(f"{stats.site} {label} on {inputs} inputs:")
                traceback.print_exc()
    return {label: pool(batches)[0] for label, batches in found.items()}


def faulty_product(x: Tensor, w: Tensor) -> Tensor:
    """Rowwise FP8 with the scale of a wrong row: our stand-in for the paper's faulty test code, which it only names."""
    provider = WrongRowScale()
    return provider.gemm(x.bfloat16(), False, w.bfloat16(), False, provider.recipe_used, torch.bfloat16)


def geometric_mean(values: Iterable[float]) -> float:
    """NaN of nothing and of a non-positive value, infinity if there is one."""
    values = list(values)
    if not values or any(not v > 0 for v in values):
        return math.nan
    return math.inf if math.inf in values else math.exp(math.fsum(map(math.log, values)) / len(values))


def summarise(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """Table II over the largest layers, table V over all of them, in every metric."""
    largest = sorted(layers, key=lambda r: -r["n"] * r["k"])[:IMPORTANT]

    def cell(rows: list[dict[str, Any]], label: str, inputs: str, metric: str) -> float:
        return geometric_mean(r["errors"][inputs][label][metric] for r in rows if label in r["errors"].get(inputs, {}))

    def table(rows: list[dict[str, Any]], labels: Iterable[str]) -> dict[str, Any]:
        return {x: {i: {m: cell(rows, x, i, m) for m in METRICS} for i in INPUTS} for x in labels}

    names = [label for label, *_ in ARMS]
    return {
        "table2_layers": [r["site"] for r in largest],
        "table2": table(largest, names),
        "all_layers": table(layers, names),
        "table5": table(layers, ("faulty", "fixed")),
    }


def show(results: dict[str, Any]) -> None:
    """The tables as text, the paper's numbers beside ours."""
    paper = {label: numbers for label, _, numbers in ARMS} | PAPER_V
    tables = (
        ("table II, geometric mean of the largest layers", "table2"),
        ("all layers", "all_layers"),
        ("table V, all layers", "table5"),
    )
    for title, key in tables:
        print(f"\n{title}")
        head = [f"{m} {i}" for m in ("mere", "mere_floored", "mere_by_row") for i in INPUTS]
        print(f"{'':14}{'paper':>14}" + "".join(f"{h.replace('mere_', ''):>16}" for h in head))
        for label, row in results[key].items():
            known = None if key == "all_layers" else paper.get(label)
            text = "-" if known is None else f"{known[0]:.2f} {known[1]:.2f}"
            cells = [row[i][m] for m in ("mere", "mere_floored", "mere_by_row") for i in INPUTS]
            print(f"{label:14}{text:>14}" + "".join(f"{c:16.4f}" for c in cells))
    print("\nbiases:", ", ".join(f"{n} {name}" for name, n in results["figure6"]["counts"].items()))


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Train, draw figure 6, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", default="demo", help="of the Wukong: tiny, demo, h200")
    parser.add_argument("--numerics", default="log1p", choices=("log1p", "raw"))
    parser.add_argument("--ids", type=int, default=20_000, help="live ids of the largest category")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--every", type=int, default=10, help="steps from one sampled one to the next")
    parser.add_argument("--budget", type=float, default=0.9, help="of the probe, part of the time; 0: no limit")
    parser.add_argument("--train-seconds", type=float, default=100.0)
    parser.add_argument("--seconds", type=float, default=300.0, help="for everything; layers are left out beyond it")
    parser.add_argument("--pairs", type=int, default=50, help="per layer, as in the paper")
    parser.add_argument("--rows", type=int, default=128)
    options = parser.parse_args(argv)
    start = time.perf_counter()
    command = "python -m benchmarks.paper_errors " + " ".join(sys.argv[1:] if argv is None else argv)
    results: dict[str, Any] = {"command": command, **describe(), "left_out": [], "layers": []}

    def save() -> None:
        atomic_write(options.out / "paper_errors.json", dumps(results, indent=1))

    print(json.dumps(describe()), flush=True)
    stats, results["steps"] = learn(options)
    print(f"{time.perf_counter() - start:.0f} s: trained {results['steps']} steps", flush=True)
    results["figure6"] = plot_bias_norms(stats, options.out / "figure6.png")
    save()
    # The largest first: table II is about them.
    for site in sorted(stats, key=lambda s: -stats[s].in_features * stats[s].out_features):
        if time.perf_counter() - start > options.seconds:
            results["left_out"].append(site)
            continue
        one = stats[site]
        if one.weight is None or not one.input.n:
            results["left_out"].append(site)
            continue
        gemm = Gemm(site, Role.FORWARD, options.rows, one.out_features, one.in_features)
        made = {label: Arm(candidate, gemm, options.device) for label, candidate, _ in ARMS}
        fixed = Arm("emulated:rowwise", gemm, options.device)
        arms = {label: arm.product for label, arm in made.items()}
        arms |= {"fixed": fixed.product, "faulty": faulty_product}
        try:
            errors = {i: measure(one, arms, i, options.pairs, options.rows) for i in INPUTS}
        except (LokaError, RuntimeError):  # nothing can be drawn like this site
            traceback.print_exc()
            results["left_out"].append(site)
            continue
        row = {
            "site": site, "n": one.out_features, "k": one.in_features,
            "sources": {label: arm.source for label, arm in made.items()},
            "errors": {i: {label: e._asdict() for label, e in found.items()} for i, found in errors.items()},
        }  # fmt: skip
        results["layers"].append(row)
        results |= summarise(results["layers"])
        save()
    show(results)
    real = sum(source == "real kernel" for row in results["layers"] for source in row["sources"].values())
    total = sum(len(row["sources"]) for row in results["layers"])
    print(f"{time.perf_counter() - start:.0f} s; {real} of {total} kernels real, the others emulated; "
          f"layers left out: {results['left_out'] or 'none'}")  # fmt: skip
    return results


if __name__ == "__main__":
    main()
