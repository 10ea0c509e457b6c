"""Bandwidth of the FP8 quantisers on a GPU, beside that of a copy and beside what Inductor makes of the plain ops.

    python benchmarks/quantisers.py --out results/
    python benchmarks/quantisers.py --table results/quantisers.json    # as docs/providers.md has it

Bandwidth counts the bytes that must move: x once, one byte for each FP8 number, the scales. Tensorwise, and rowwise
with x.T, have to read x twice; the column "passes" says so, and "of copy" is relative to a copy that moves as many
bytes. Writes ``quantisers.json`` after every line.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from _timing import copies_past_l2, measure

from loka_compile import machine
from loka_compile.gemm import Scaling
from loka_compile.lowering.quantize import quantize
from loka_compile.lowering.quantize_op import launch_quantize_fp8

FP8 = torch.float8_e4m3fn
SHAPES = [(4096, 4096), (8192, 4096), (8192, 8192), (16384, 8192), (4096, 2048), (1024, 7680), (2048, 1024)]
SCALINGS = [Scaling.TENSORWISE, Scaling.ROWWISE, Scaling.BLOCK_1X128, Scaling.BLOCK_128X128]
OUTPUTS = {"x": (True, False), "x.T": (False, True), "both": (True, True)}
Timer = Callable[[dict[str, list[Callable[[], object]]]], dict[str, float]]


def passes(scaling: Scaling, output: str) -> int:
    """How often the quantiser has to read x."""
    return 2 if scaling is Scaling.TENSORWISE or (scaling is Scaling.ROWWISE and output != "x") else 1


def moved(m: int, n: int, scaling: Scaling, output: str) -> int:
    """Bytes for a bf16 x: what is read, and the FP8 numbers and fp32 scales written."""
    rows, groups = (m, n) if output != "x.T" else (n, m)
    scales = {
        Scaling.TENSORWISE: 1, Scaling.ROWWISE: rows, Scaling.BLOCK_1X128: rows * -(-groups // 128),
        Scaling.BLOCK_128X128: -(-m // 128) * -(-n // 128),
    }[scaling]  # fmt: skip
    written = 2 if output == "both" else 1
    return m * n * (2 * passes(scaling, output) + written) + 4 * scales * written


def keeping(call: Callable[[torch.Tensor], object], sets: list[torch.Tensor]) -> list[Callable[[], object]]:
    """A call for each input, whose results stay alive: each is written to memory of its own, as the copy's are.

    Results that are dropped share one buffer, and where that is small L2 absorbs what is written to it.
    """
    kept: list[object] = [None] * len(sets)

    def run(i: int) -> None:
        kept[i] = call(sets[i])

    return [functools.partial(run, i) for i in range(len(sets))]


def one(m: int, n: int, scaling: Scaling, output: str, timer: Timer, copy_gbs: float, compiled: Any = None,
        device: str = "cuda") -> dict[str, Any]:  # fmt: skip
    """Measure one quantiser at one size; ``compiled`` is Inductor's version of the plain ops."""
    with_q, with_qt = OUTPUTS[output]
    sets = [torch.randn(m, n, device=device).bfloat16() for _ in range(copies_past_l2(3 * m * n, most=24))]
    arms: dict[str, list[Callable[[], object]]] = {
        "triton": keeping(lambda x: launch_quantize_fp8(x, scaling.value, FP8, with_q, with_qt), sets)
    }
    if compiled is not None:
        arms["inductor"] = keeping(compiled, sets)
    times = timer(arms)
    size = moved(m, n, scaling, output)
    row = {"m": m, "n": n, "scaling": str(scaling), "output": output, "passes": passes(scaling, output), "bytes": size}
    for name, us in times.items():
        row |= {f"{name}_us": us, f"{name}_of_copy": size / us / 1e3 / copy_gbs}
    return row


def copy_bandwidth(m: int, n: int, timer: Timer, device: str = "cuda") -> float:
    """GB/s of a device-to-device copy of bf16 [m, n], read and written bytes together."""
    sets = [(torch.randn(m, n, device=device).bfloat16(), torch.empty(m, n, device=device, dtype=torch.bfloat16))
            for _ in range(copies_past_l2(4 * m * n, most=16))]  # fmt: skip
    return 4 * m * n / timer({"copy": [lambda x=x, y=y: y.copy_(x) for x, y in sets]})["copy"] / 1e3


def inductor(scaling: Scaling, output: str) -> Any:
    """The plain ops for one operand, compiled for each size."""
    torch._dynamo.reset()
    return torch.compile(lambda x: quantize(x, scaling, transpose=output == "x.T"), fullgraph=True, dynamic=False)


def line(row: dict[str, Any]) -> str:
    text = f"{row['m']}x{row['n']:<6} {row['scaling']:>10} {row['output']:>4} {row['passes']} passes"
    for name in ("triton", "inductor"):
        if f"{name}_us" in row:
            text += f" | {name} {row[f'{name}_us']:7.1f} us {100 * row[f'{name}_of_copy']:4.0f} % of copy"
    return text


def table(results: dict[str, Any], least: int = 4096 * 4096) -> str:
    """Markdown: percent of the copy's bandwidth, least to most, of all shapes of at least so many elements."""
    lines = ["| scaling | x | x.T | both |", "|---|---|---|---|"]
    for scaling in SCALINGS:
        cells = []
        for output in OUTPUTS:
            found = [
                100 * row["triton_of_copy"]
                for row in results["rows"]
                if (row["scaling"], row["output"]) == (str(scaling), output)
                and row["m"] * row["n"] >= least
                # Measured a second time, beside Inductor's.
                and "inductor_us" not in row
            ]
            cells.append(f"{min(found):.0f} to {max(found):.0f} %" if found else "not measured")
        lines.append(f"| {scaling} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder to write to")
    parser.add_argument("--table", type=Path, help="print a table of a file that was written before")
    parser.add_argument("--seconds", type=float, default=40, help="nothing is begun after this time")
    options = parser.parse_args(arguments)
    if options.table:
        print(table(json.loads(options.table.read_text())))
        return
    if not options.out:
        parser.error("give --out or --table")
    options.out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    results: dict[str, Any] = {"machine": machine.describe(), "copy_gbs": {}, "rows": []}

    def timer(arms: dict[str, list[Callable[[], object]]]) -> dict[str, float]:
        return measure(arms, rounds=15)

    def keep(row: dict[str, Any]) -> None:
        results["rows"].append(row)
        print(line(row), flush=True)
        (options.out / "quantisers.json").write_text(json.dumps(results, indent=1))

    for m, n in SHAPES:
        results["copy_gbs"][f"{m}x{n}"] = copy = copy_bandwidth(m, n, timer)
        print(f"copy {m}x{n}: {copy:.0f} GB/s", flush=True)
        for scaling in SCALINGS:
            for output in OUTPUTS:
                if time.monotonic() - start > options.seconds:
                    continue
                try:
                    keep(one(m, n, scaling, output, timer, copy))
                except Exception as failure:
                    print(
                        f"{m}x{n} {scaling} {output} failed: {type(failure).__name__}: {str(failure)[:200]}", flush=True
                    )
    for output in ("x", "x.T"):
        for scaling in SCALINGS:
            compiled = inductor(scaling, output)
            for m, n in SHAPES[:2]:
                if time.monotonic() - start > options.seconds:
                    continue
                try:
                    keep(one(m, n, scaling, output, timer, results["copy_gbs"][f"{m}x{n}"], compiled))
                except Exception as failure:
                    print(
                        f"inductor {scaling} {output} failed: {type(failure).__name__}: {str(failure)[:200]}",
                        flush=True,
                    )
    print(f"total {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
