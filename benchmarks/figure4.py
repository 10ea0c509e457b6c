"""Counterpart of the paper's figure 4: TFLOP/s of the kernels over the layers of loka27, with and without quantising.

    python -m benchmarks.figure4 --out benchmarks/results          # from the shipped cost table; no GPU

Written: ``figure4_<target>.json`` (microseconds, TFLOP/s and speed-up of every candidate at every layer, and geometric
means) and ``figure4_<target>.png``. What the table measured is marked as such; a quantiser that was not measured at a
tensor's size is interpolated (costs/).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table as Grid

from benchmarks._console import console
from loka_compile.bench.workload import Layer, read_layers
from loka_compile.costs import CostTable
from loka_compile.gemm import Role
from loka_compile.lowering.providers import get_provider

SHAPES = Path(__file__).parent / "shapes" / "lrm.csv"
BF16 = "bf16"
app = typer.Typer(add_completion=False)


def rates(costs: CostTable, layers: Sequence[Layer]) -> dict[str, Any]:
    """For bf16 and every candidate: times and rates at each layer's forward, where the candidate was measured there."""
    gemms = [layer.gemm(Role.FORWARD, "bfloat16") for layer in layers]
    found: dict[str, Any] = {BF16: [_point(g.flops, 0.0, costs.baseline(g), costs.baseline(g)) for g in gemms]}
    for provider, name in costs.candidates():
        recipe = get_provider(provider).recipe(name)
        points = []
        for gemm in gemms:
            latency = costs.latency(gemm, provider, name)
            refused = get_provider(provider).refuses_shape(gemm, recipe)
            known = latency is not None and latency.measured and not refused
            points.append(
                _point(gemm.flops, latency.quantize_us, latency.gemm_us, costs.baseline(gemm))
                if known and latency is not None
                else None
            )
        if any(points):
            found[f"{provider}:{name}"] = points
    best = [
        min((points[i] for name, points in found.items() if points[i]), key=lambda p: p["us"])
        for i in range(len(gemms))
    ]  # fmt: skip
    return {
        "layers": [f"{g.m}x{g.k} @ {g.k}x{g.n}" for g in gemms],
        "points": found,
        "geometric mean": {name: _means(points) for name, points in {**found, "best of all": best}.items()},
    }


def _point(flops: int, quantize_us: float, gemm_us: float, baseline_us: float) -> dict[str, float]:
    us = quantize_us + gemm_us
    return {
        "quantize us": round(quantize_us, 3), "gemm us": round(gemm_us, 3), "us": round(us, 3),
        "TFLOP/s without quantising": round(flops / gemm_us / 1e6, 1), "TFLOP/s": round(flops / us / 1e6, 1),
        "speed-up without quantising": round(baseline_us / gemm_us, 4), "speed-up": round(baseline_us / us, 4),
        "share of quantising": round(quantize_us / us, 4),
    }  # fmt: skip


def _means(points: Sequence[dict[str, float] | None]) -> dict[str, float]:
    """Geometric means over the layers that were measured (of the share: the mean), and how many those are."""
    known = [p for p in points if p]
    names = ("TFLOP/s without quantising", "TFLOP/s", "speed-up without quantising", "speed-up")
    means = {name: round(math.exp(sum(math.log(p[name]) for p in known) / len(known)), 4) for name in names}
    share = round(sum(p["share of quantising"] for p in known) / len(known), 4)
    worst = min(p["speed-up"] for p in known)
    return {**means, "worst speed-up": worst, "share of quantising": share, "layers": len(known)}


def plot(result: dict[str, Any], path: Path) -> None:
    """Two panels, the kernels alone and with quantising; layers in the order of their operations in bf16."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    points = result["points"]
    work = [p["us"] * p["TFLOP/s"] for p in points[BF16]]
    order = sorted(range(len(work)), key=work.__getitem__)
    figure, panels = pyplot.subplots(2, 1, figsize=(12, 9), sharex=True, sharey=True)
    for panel, key in zip(panels, ("TFLOP/s without quantising", "TFLOP/s"), strict=True):
        for name, own in points.items():
            xs = [x for x, i in enumerate(order) if own[i]]
            style = {"color": "black", "linewidth": 2.5} if name == BF16 else {"linewidth": 1, "marker": "."}
            panel.plot(xs, [own[order[x]][key] for x in xs], label=name, **style)
        panel.set_yscale("log")
        panel.set_ylabel(key)
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize=7, ncols=3)
    panels[0].set_title(f"loka27 forward, {result['gpu']}, torch {result['torch']}")
    panels[1].set_xticks(range(len(order)), [result["layers"][i] for i in order], rotation=60, ha="right", fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Folder for results.")],
    costs: Annotated[str, typer.Option(help="A cost table: a target's name or a file.")] = "h200",
) -> None:
    """Write the JSON and the plot, print the means."""
    table = CostTable.from_csv(costs) if costs.endswith(".csv") else CostTable.load(costs)
    result = {**table.meta, **rates(table, read_layers(SHAPES, ["loka27"]))}
    out.mkdir(parents=True, exist_ok=True)
    (out / f"figure4_{table.target}.json").write_text(json.dumps(result, indent=1) + "\n")
    plot(result, out / f"figure4_{table.target}.png")
    grid = Grid(title=f"loka27 forward, {table.meta.get('gpu', '')}: geometric means")
    for column in ("kernel", "layers", "TFLOP/s alone", "TFLOP/s", "speed-up alone", "speed-up", "worst", "quantising"):
        grid.add_column(column)
    for name, mean in result["geometric mean"].items():
        grid.add_row(
            name, str(mean["layers"]), f"{mean['TFLOP/s without quantising']:.0f}", f"{mean['TFLOP/s']:.0f}",
            f"{mean['speed-up without quantising']:.2f}", f"{mean['speed-up']:.2f}", f"{mean['worst speed-up']:.2f}",
            f"{mean['share of quantising']:.0%}",
        )  # fmt: skip
    console().print(grid)


if __name__ == "__main__":
    app()
