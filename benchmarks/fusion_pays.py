"""Where one kernel for GEMM, BlockNorm and HardSwish beats cuBLASLt and a kernel of Inductor's, in bf16 and in FP8.

    python benchmarks/fusion_pays.py --out results/ --seconds 100

One layer forward, as the backend compiles it with ``fuse`` off ("apart") and on ("fused"), weights quantised once, for
the batches and widths of recommendation models: the pairs of the paper's figure 13 at batch 1024, and the long
contractions of DHEN and Wukong at batch 8192. In FP8 both arms quantise the bf16 input in the same way, with one scale
or by rows. "GEMM" is cuBLASLt's bare GEMM on operands of that dtype, which bounds what fusion can reach. Medians of
CUDA-graph replays, arms interleaved, inputs rotated past the L2. Shapes at which "fused" loses are those that
``data/fused_h200.json`` leaves to "apart"; ``--all-fused`` measures them nevertheless.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from _at_once import MEASURING, keep, measure_alone, run_shapes  # noqa: E402
from _timing import capture, copies_past_l2  # noqa: E402
from chain_arms import DEVICE, bare, loka, original, plan_of, step  # noqa: E402
from figure13 import BATCH, PAIRS  # noqa: E402

from loka_compile import machine  # noqa: E402
from loka_compile.lowering.fused import configs  # noqa: E402

#: M, K, N.
SHAPES = (
    *((BATCH, k, n) for k, n in PAIRS),
    *((8192, k, n) for k in (512, 1024, 2048, 3072, 4096, 5616, 8192, 12256) for n in (1024, 2048)),
    (4096, 4096, 4096), (4096, 8192, 2048), (4096, 2048, 256), (4096, 7680, 256), (1024, 2048, 512), (2048, 4096, 512),
)  # fmt: skip
PLANS = {"bf16": "high_precision:native", "FP8": "torch:tensorwise_fast", "rows": "torch:rowwise_fast"}


def arms(m: int, k: int, n: int) -> dict[str, Callable[[], list[Callable[[], Any]]]]:
    """How to make the calls of every arm."""
    torch.manual_seed(0)
    model = original(k, n, 1).eval().requires_grad_(False)
    xs = [
        torch.randn(m, k, device=DEVICE, dtype=torch.bfloat16)
        for _ in range(copies_past_l2(2 * (m * k + n * k), most=16))
    ]

    def compiled(kind: str, fuse: bool) -> list[Callable[[], Any]]:
        torch._dynamo.reset()
        plan = plan_of(model, PLANS[kind], PLANS[kind])
        run = loka(copy.deepcopy(model), plan, freeze_weights=True, fuse=fuse)
        return [step(run, x, None) for x in xs]

    made: dict[str, Callable[[], list[Callable[[], Any]]]] = {}
    for kind in PLANS:
        made[f"{kind} apart"] = lambda kind=kind: compiled(kind, False)
        made[f"{kind} fused"] = lambda kind=kind: compiled(kind, True)
        if kind != "rows":
            made[f"{kind} GEMM"] = lambda kind=kind: bare(kind == "FP8", xs, model[0].weight.data)
    return made


def one_shape(index: int, shapes: Sequence[tuple[int, int, int]], folder: Path, end: float, all_fused: bool) -> None:
    """Compile the arms of a shape, wait until all shapes are compiled, measure alone."""
    import torch._inductor.config as inductor_config

    inductor_config.compile_threads = 1
    if all_fused:
        for rules in configs._rules().values():
            rules[:] = [rule for rule in rules if not rule.get("apart")]
    graphs, kept, failed = {}, [], {}
    for name, make in arms(*shapes[index]).items():
        if time.time() > end - MEASURING:
            failed[name] = "not compiled in time"
            continue
        try:
            calls = make()
            graphs[name] = (capture(calls), len(calls))
            kept.append(calls)  # what graphs read lives as long as they do
        except Exception as error:  # an arm that fails must not end the others
            failed[name] = f"{type(error).__name__}: {str(error)[:300]}"
    keep(folder, index, {"us": measure_alone(graphs, folder, index, len(shapes), end), "failed": failed})


def main() -> None:
    """Measure, print a table, write ``fusion_pays.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--seconds", type=float, default=110.0)
    parser.add_argument("--all-fused", action="store_true")
    parser.add_argument("--least-k", type=int, default=0, help="only shapes with contractions of that length")
    parser.add_argument("--shape", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--end", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = options.out / "fusion_pays_parts"
    shapes = [shape for shape in SHAPES if shape[1] >= options.least_k]
    if options.shape is not None:
        one_shape(options.shape, shapes, folder, options.end, options.all_fused)
        return
    results: dict[str, Any] = {"versions": machine.describe(), "command": " ".join(sys.argv), "shapes": []}
    more = ["--all-fused"] * options.all_fused + ["--least-k", str(options.least_k)]
    parts = run_shapes(__file__, options.out, folder, len(shapes), options.seconds, more)
    print(f"{'M x K x N':>18}", *(f"{kind + ' GEMM':>9} {'apart':>7} {'fused':>7} gain" for kind in PLANS), sep=" | ")
    for (m, k, n), found in zip(shapes, parts, strict=True):
        if found is None:
            print(f"{m}x{k}x{n}: not measured in time")
            continue
        results["shapes"].append({"m": m, "k": k, "n": n, **found})
        us = found["us"]
        line = f"{f'{m}x{k}x{n}':>18}"
        for kind in PLANS:
            gemm, apart, fused = (us.get(f"{kind} {what}", float("nan")) for what in ("GEMM", "apart", "fused"))
            line += f" | {gemm:9.1f} {apart:7.1f} {fused:7.1f} {apart / fused:4.2f}"
        print(line, *(f"\n    {name}: {why}" for name, why in found["failed"].items()), sep="")
    (options.out / "fusion_pays.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
