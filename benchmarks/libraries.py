"""What each kernel library adds: plans for the layers of shapes/lrm.csv with torch's kernels alone, and with others.

    python -m benchmarks.libraries --out benchmarks/results/libraries_h200.json       # half a minute, no GPU

For every group of layers the time that the cost table predicts for all three GEMMs of each layer in bf16, over that
under the plan; quantisation is included, what two GEMMs of a layer share once. By cost alone: errors are not looked at.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table as Grid

from benchmarks._console import console
from benchmarks.gemm_steps import LinearLayer, plan_of, predicted_us
from benchmarks.table6 import chooser
from loka_compile.bench.workload import read_layers
from loka_compile.costs import CostTable
from loka_compile.gemm import Role
from loka_compile.table import BASELINE

SHAPES = Path(__file__).parent / "shapes" / "lrm.csv"
app = typer.Typer(add_completion=False)


def speedup(
    layers: Sequence[LinearLayer], costs: CostTable, providers: Collection[str]
) -> tuple[float, dict[str, int]]:
    """Of the plan over bf16, as predicted, and how many GEMMs each kernel has."""
    plan = plan_of(layers, costs, providers=providers)
    native = predicted_us(layers, costs, lambda *_: BASELINE)
    planned = predicted_us(layers, costs, lambda site, role: chooser(plan, site)(role))
    return native / planned, plan.counts()


@app.command()
def main(
    out: Annotated[Path | None, typer.Option(help="A JSON file to write.")] = None,
    costs: Annotated[str, typer.Option(help="A cost table: a target's name or a file.")] = "h200",
) -> None:
    """Print the speed-ups, and write them."""
    table = CostTable.from_csv(costs) if costs.endswith(".csv") else CostTable.load(costs)
    names = list(dict.fromkeys(name for name, _ in table.candidates()))
    sets = {
        "torch": ["torch"],
        **{f"torch + {name}": ["torch", name] for name in names if name != "torch"},
        "all": names,
    }
    groups: dict[str, list[LinearLayer]] = {}
    for layer in read_layers(SHAPES):
        own = groups.setdefault(layer.group, [])
        own.append(LinearLayer(str(len(own)), layer.batch, layer.inputs, layer.outputs, tuple(Role)))
    grid = Grid(title=f"predicted speed-up of the GEMMs over bf16, {table.meta.get('gpu', '')}")
    for column in ("group", "layers", *sets):
        grid.add_column(column)
    rows: dict[str, Any] = {}
    counts: Counter[str] = Counter()
    for group, layers in groups.items():
        found = {name: speedup(layers, table, providers) for name, providers in sets.items()}
        counts.update(found["all"][1])
        rows[group] = {name: round(value, 4) for name, (value, _) in found.items()} | {"kernels": found["all"][1]}
        grid.add_row(group, str(len(layers)), *(f"{value:.3f}" for value, _ in found.values()))
    console().print(grid)
    console().print(dict(counts))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        result = {**table.meta, "predicted speed-up": rows, "kernels": dict(counts)}
        out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    app()
