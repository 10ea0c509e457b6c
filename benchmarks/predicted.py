"""Predicted against measured speed-up of the GEMMs of whole models' training steps.

    python -m benchmarks.predicted --out benchmarks/results/predicted_h200.json     # 60 s on one H200

(``benchmarks.table6 --predicted FILE`` writes the same from its own run.)

For each model (``examples.models``, size h200, batch 8192) the plan follows from the cost table alone. *Predicted* is
the table's time of all GEMMs in bf16 over its time under the plan, quantisation included, one that two GEMMs of a layer
need counted once. *Measured* is the same of the GEMMs themselves, compiled and run as one CUDA graph
(``benchmarks.gemm_steps``), so that both are about the same work: the GEMM part of the step. What lies between the
GEMMs (norms, embeddings, the optimizer) is in ``benchmarks.e2e``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table as Grid

from benchmarks._console import console
from benchmarks.gemm_steps import linear_layers, plan_of, predicted_us
from benchmarks.gemm_steps_run import Group, Run
from benchmarks.table6 import MODELS, chooser, model_group, speedup
from loka_compile.costs import CostTable
from loka_compile.table import BASELINE

app = typer.Typer(add_completion=False)


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="The JSON file to write.")],
    models: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(MODELS),
    batch: int = 8192,
    size: str = "h200",
    costs: Annotated[str, typer.Option(help="A cost table: a target's name or a file.")] = "h200",
    seconds: Annotated[float, typer.Option(help="Seconds for everything; what does not fit is left out.")] = 60.0,
    workers: Annotated[int, typer.Option(help="Processes that compile; -1: one a core.")] = -1,
) -> None:
    """Predict, measure, compare."""
    table = CostTable.from_csv(costs) if costs.endswith(".csv") else CostTable.load(costs)
    predictions, groups = predict(models.split(","), size, batch, table)
    run = Run(out, {"size": size, "batch": batch, "models": predictions})
    run.measure(groups, limit=seconds, workers=workers)
    compare(run.result)
    run.save()


def predict(
    models: Sequence[str], size: str, batch: int, costs: CostTable
) -> tuple[dict[str, dict[str, Any]], list[Group]]:
    """What the table says of each model's GEMMs, and the groups that measure it (bf16 and the plan), named alike."""
    predictions, groups = {}, []
    for model in models:
        layers = linear_layers(model, size, batch)
        plan = plan_of(layers, costs)
        groups.append(model_group(model, layers, plan, []))
        predictions[model] = {
            "plan": plan.counts(),
            "predicted bf16 us": predicted_us(layers, costs, lambda *_: BASELINE),
            "predicted plan us": predicted_us(layers, costs, lambda site, role, p=plan: chooser(p, site)(role)),
        }
    return predictions, groups


def compare(result: dict[str, Any]) -> None:
    """Add predicted and measured speed-up and how far they are apart, and print them."""
    grid = Grid(title=f"GEMMs of a training step, {result.get('gpu', '')}")
    for column in ("model", "predicted", "measured", "off by", "bf16 us", "bf16 us predicted", "plan us", "predicted"):
        grid.add_column(column)
    for model, row in result["models"].items():
        timings = result["timings"].get(model, {})
        row["predicted speed-up"] = row["predicted bf16 us"] / row["predicted plan us"]
        row["measured speed-up"] = speedup(timings, "plan")
        row["off by"] = row["predicted speed-up"] / row["measured speed-up"] - 1
        times = [timings[arm]["us"] if isinstance(timings.get(arm), dict) else math.nan for arm in ("bf16", "plan")]
        grid.add_row(
            model, f"{row['predicted speed-up']:.3f}", f"{row['measured speed-up']:.3f}", f"{row['off by']:+.1%}",
            f"{times[0]:.0f}", f"{row['predicted bf16 us']:.0f}", f"{times[1]:.0f}", f"{row['predicted plan us']:.0f}",
        )  # fmt: skip
    console().print(grid)


if __name__ == "__main__":
    app()
