"""How well a cost table predicts what it has not seen: each measured shape left out, and predicted from the others.

    python -m benchmarks.leave_one_out --out benchmarks/results/leave_one_out_h200.json       # a minute, no GPU

For every kernel, baseline and quantiser: the median and the 90th percentile of the error, |predicted / measured - 1|.
Then what matters to a plan: at every shape where a comparable one remains, the predicted speed-up (kernel and baseline
left out together, quantisation as measured or interpolated) against the measured one, and how often FP8 would be taken
(speed-up of at least 1.05 predicted) where it is in truth slower than bf16.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track
from rich.table import Table as Grid

from benchmarks._console import console
from loka_compile.costs import CostTable
from loka_compile.costs.file import GemmKey
from loka_compile.costs.surface import MIN_POINTS, Shape, Surface
from loka_compile.gemm import Gemm, Role
from loka_compile.table import BASELINE

app = typer.Typer(add_completion=False)


def without(surface: Surface, shape: Shape) -> Surface | None:
    """The surface that the other points make, or None where too few are left."""
    points = {s: t for s, t in surface.points.items() if s != shape}
    return Surface(points, surface.features, surface.least) if len(points) >= MIN_POINTS else None


def predictions(surface: Surface) -> dict[Shape, tuple[float, bool]]:
    """For every point: the prediction from the others, and whether a comparable one is among them."""
    found = {}
    for shape in surface.points:
        rest = without(surface, shape)
        predicted = None if rest is None else rest(shape)
        if rest is not None and predicted is not None:
            found[shape] = (predicted, rest.comparable(shape))
    return found


def errors(surface: Surface, predicted: Mapping[Shape, tuple[float, bool]]) -> dict[str, Any]:
    """Median and 90th percentile of the relative error, of all points and of those with a comparable one."""
    off = {shape: abs(time / surface.points[shape] - 1) for shape, (time, _) in predicted.items()}
    near = [off[shape] for shape, (_, comparable) in predicted.items() if comparable]
    return {"points": len(surface.points), **_quantiles(list(off.values()), ""), **_quantiles(near, ", comparable")}


def _quantiles(values: Sequence[float], suffix: str) -> dict[str, float | int]:
    if len(values) < 2:
        return {}
    return {
        f"count{suffix}": len(values),
        f"median{suffix}": round(statistics.median(values), 4),
        f"90 %{suffix}": round(statistics.quantiles(values, n=10, method="inclusive")[-1], 4),
    }


def speedups(
    costs: CostTable, predicted: Mapping[GemmKey, Mapping[Shape, tuple[float, bool]]], threshold: float
) -> dict[str, Any]:
    """Predicted against measured speed-ups, quantisation included, where a comparable shape remains."""
    off, taken, wrong, missed, worst = [], 0, [], 0, 1.0
    for (provider, recipe, _, dtype, _), own in predicted.items():
        if (provider, recipe) == BASELINE:
            continue
        for role in Role:
            native = {
                shape: value for odd in (False, True)
                for shape, value in predicted.get((*BASELINE, role.value, dtype, odd), {}).items()
            }  # fmt: skip
            for shape in own.keys() & native.keys():
                gemm = Gemm("", role, *shape, dtype=dtype)
                latency = costs.latency(gemm, provider, recipe)
                if latency is None or not (own[shape][1] and native[shape][1]):
                    continue
                truth = costs.baseline(gemm) / latency.total_us
                claim = min(native[shape][0], costs.padded_us(gemm)) / (latency.quantize_us + own[shape][0])
                off.append(abs(claim / truth - 1))
                if claim >= threshold:
                    taken += 1
                    worst = min(worst, truth)
                    if truth < 1.0:
                        wrong.append([f"{gemm} {provider}:{recipe}", round(claim, 3), round(truth, 3)])
                elif truth >= threshold:
                    missed += 1
    return {
        **_quantiles(off, ""), "FP8 taken": taken, "slower than bf16 in truth": len(wrong),
        "slowest of those taken": round(worst, 3), "missed": missed, "wrong": sorted(wrong, key=lambda row: row[2]),
    }  # fmt: skip


@app.command()
def main(
    costs: Annotated[str, typer.Option(help="A cost table: a target's name or a file.")] = "h200",
    out: Annotated[Path | None, typer.Option(help="A JSON file to write.")] = None,
    threshold: float = 1.05,
) -> None:
    """Print the errors, and write them."""
    table = CostTable.from_csv(costs) if costs.endswith(".csv") else CostTable.load(costs)
    surfaces: dict[tuple[Any, ...], Surface] = {**table.gemms, **table.quantizers}
    predicted = {key: predictions(surface) for key, surface in track(surfaces.items(), console=console())}
    result: dict[str, Any] = {
        **table.meta,
        "surfaces": {" ".join(map(str, key)): errors(surfaces[key], own) for key, own in predicted.items()},
        "speed-ups": speedups(table, {key: own for key, own in predicted.items() if key in table.gemms}, threshold),
    }
    every = [
        abs(time / surfaces[key].points[shape] - 1)
        for key, own in predicted.items()
        for shape, (time, comparable) in own.items()
        if comparable
    ]
    result["all, comparable"] = _quantiles(every, "")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")
    grid = Grid(title=f"leave-one-out errors of {table.target}")
    for column in ("surface", "points", "median", "90 %", "comparable", "median", "90 %"):
        grid.add_column(column)
    for name, row in result["surfaces"].items():
        keys = ("median", "90 %", "count, comparable", "median, comparable", "90 %, comparable")
        cells = [row.get(key) for key in keys]
        shown = ["" if c is None else f"{c:.1%}" if isinstance(c, float) else str(c) for c in cells]
        grid.add_row(name, str(row["points"]), *shown)
    console().print(grid)
    console().print({k: v if k != "wrong" else v[:10] for k, v in result["speed-ups"].items()})
    console().print(result["all, comparable"])


if __name__ == "__main__":
    app()
