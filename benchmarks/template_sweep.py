"""Configurations of the fused GEMM as Inductor generates it: template, epilogue and early launch as in a model.

    python benchmarks/template_sweep.py --out results/ --seconds 150
    python benchmarks/template_sweep.py --cases uneven short --out results/ --seconds 150
    python benchmarks/template_sweep.py --cases paired --out results/ --seconds 95

For each case of the lists in template_cases.py (activation, operand dtype, M, N, K, whether y and rstd are written too,
fast accumulation) the shipped configuration of data/fused_h200.json against others, which are the list's (``ROWS``),
and against cuBLASLt's GEMM with what Inductor makes of the rest ("apart"), in medians of CUDA-graph replays,
interleaved, inputs rotated past the L2. "by comparisons" is the shipped one with HardSwish as it was before its gate
was one instruction. With HardSwish the result is FP8, with SwishNorm bf16 or FP8 in 1x128 blocks. Each case compiles in
a process of its own, many at once, and measures alone.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from _at_once import compile_here, configured, keep, measure_alone, parser, run_shapes  # noqa: E402
from _epilogue import hardswish  # noqa: E402
from _timing import capture, copies_past_l2  # noqa: E402
from template_cases import BF16, CASES, Case, apart, by_comparisons, layer  # noqa: E402

from loka_compile import machine  # noqa: E402
from loka_compile.kernels.config import GemmConfig  # noqa: E402
from loka_compile.lowering.fused import configs  # noqa: E402

Row = tuple[int, int, int, int, int, bool]
Graphs = dict[str, tuple[torch.cuda.CUDAGraph, int]]

#: Rows, columns and bytes of K of a tile, warps, stages, by descriptors (and then persistent).
ROUNDS = (
    (64, 256, 128, 8, 4, False),
    (64, 256, 128, 8, 4, True),
    (128, 256, 128, 8, 3, False),
    (128, 256, 128, 8, 3, True),
)
SHAPES = (*ROUNDS, (64, 256, 128, 4, 4, False), (64, 256, 64, 4, 4, False), (64, 256, 128, 4, 4, True))
#: Fewer warps, and rows for the tensor core's instruction of before, which take 16.
TINY = (
    (64, 256, 128, 8, 4, False), (64, 256, 128, 4, 4, False), (64, 256, 128, 4, 2, False),
    (16, 256, 128, 4, 4, False), (16, 256, 256, 4, 2, False), (16, 256, 128, 2, 4, False),
)  # fmt: skip
#: Two programs a multiprocessor: one loads while the other one finishes.
PAIRED = (*ROUNDS, (64, 256, 128, 4, 2, False))
#: What each list of cases is measured with.
ROWS = {"shipped": SHAPES, "tiny": TINY, "paired": PAIRED}


def config_of(shape: Row, itemsize: int) -> GemmConfig:
    """A configuration from a row of SHAPES."""
    m, n, k, warps, stages, tma = shape
    return GemmConfig(m, n, k // itemsize, warps, stages, tma=tma, persistent=tma)


def graphs_of(case: Case, rows: Sequence[Row], log: Callable[[str], None]) -> Graphs:
    """A captured graph by configuration (of ``rows``, and others); one that does not compile is logged and left out."""
    dtype, m, n, k = case.dtype, case.m, case.n, case.k
    one = torch.full((), 1 / 16, device="cuda")
    pairs = [
        tuple(torch.randn(rows, k, device="cuda", dtype=BF16).to(dtype) for rows in (m, n))
        for _ in range(copies_past_l2((m * k + n * k) * dtype.itemsize + 3 * m * n))
    ]
    kernel = configs.gemm_kernel(gated=case.gated, quantised=case.blocks)
    shipped = configs.config_for(kernel, m, n, k, dtype.itemsize, case.fast)
    graphs: Graphs = {}
    others = {str(row): config_of(row, dtype.itemsize) for row in rows}
    if rows is SHAPES and not case.gated:
        others["by comparisons"] = shipped
    for name, config in {"apart": None, "shipped": shipped, **others}.items():
        torch._dynamo.reset()
        try:
            activation = by_comparisons if name == "by comparisons" else hardswish
            compiled = torch.compile(layer(case, activation) if config is not None else apart(case))
            calls = [lambda a=a, b=b, f=compiled: f(a, b, one) for a, b in pairs]
            with configured(config):
                calls[0]()
            # Captured now: the next configuration resets Dynamo, and with it this one's compiled code.
            graphs[name] = (capture(calls, warmup=1), len(calls))
        except Exception as error:
            log(f"    {name}: {type(error).__name__}: {str(error)[:200]}")
    return graphs


def selected(names: list[str], only: str) -> list[tuple[str, Case]]:
    """The cases of some lists in whose name the regular expression ``only`` is found."""
    return [(name, case) for name in names for case in CASES[name] if re.search(only, case.name)]


def one_case(index: int, cases: list[tuple[str, Case]], folder: Path, end: float) -> None:
    """Compile a case's arms, wait until all cases are compiled, measure alone."""
    compile_here()
    lines: list[str] = []
    name, case = cases[index]
    graphs = graphs_of(case, ROWS.get(name, ROUNDS), lines.append)
    keep(folder, index, {"us": measure_alone(graphs, folder, index, len(cases), end), "log": lines})


def main() -> None:
    """Measure, print a line a case, write ``template_sweep.json``."""
    options = parser(__doc__, 150.0)
    options.add_argument("--cases", choices=CASES, nargs="+", default=["shipped"])
    options.add_argument("--only", default="", help="cases in whose name this regular expression is found")
    given = options.parse_args()
    cases, folder = selected(given.cases, given.only), given.out / "template_sweep_parts"
    if given.shape is not None:
        one_case(given.shape, cases, folder, given.end)
        return
    results: dict[str, Any] = {"versions": machine.describe(), "command": " ".join(sys.argv), "us": {}}
    more = ["--cases", *given.cases, "--only", given.only]
    parts = run_shapes(__file__, given.out, folder, len(cases), given.seconds, more)
    for (_, case), found in zip(cases, parts, strict=True):
        if found is None:
            print(f"{case.name}: no result: out of time, or what its process wrote above")
            continue
        results["us"].setdefault(case.name, {}).update(found["us"])  # a case may be in two lists
        print(
            *found["log"], f"{case.name}: " + " | ".join(f"{arm} {us:.1f}" for arm, us in found["us"].items()), sep="\n"
        )
    (given.out / "template_sweep.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
