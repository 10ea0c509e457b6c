"""Counterpart of the paper's table VI: single recipes everywhere against the plan, on the GEMMs of a training step.

    python -m benchmarks.table6 --out benchmarks/results/table6_h200.json     # 150 s on one H200

Four parts, all measured with CUDA graphs, quantisation included, bf16 operands of random numbers:

1. all GEMMs of a training step of Wukong (``examples.models``, size h200, batch 8192): bf16, each recipe applied
   everywhere (what it refuses stays bf16), and the plan that follows from the cost table (which pads where that pays);
2. every different layer of which the plan puts something into FP8: bf16, the plan, and the plan with one of its GEMMs
   put back to bf16. A GEMM's speed-up is what putting it back costs, so that a quantisation that it shares with
   another is not counted as its own: none may be below 1;
3. the forward of the 27 layers of ``loka27``, each alone: plan against bf16, geometric mean and worst case;
4. layers whose rows do not start on 16 bytes: what Inductor makes of them in bf16 (the baseline), and padded FP8.

The plan here is by cost alone; what errors a recipe makes is the probe's business.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import rich
import typer
from rich.table import Table as Grid

from benchmarks._console import console
from benchmarks.gemm_steps import (
    Candidate,
    LayerStep,
    LinearLayer,
    linear_layers,
    plan_of,
    step_of,
)
from benchmarks.gemm_steps_run import Group, Run
from loka_compile.bench.workload import read_layers
from loka_compile.costs import CostTable
from loka_compile.gemm import Role
from loka_compile.lowering.providers import get_provider
from loka_compile.plan import Plan
from loka_compile.table import BASELINE

FORWARD, GRAD_INPUT, GRAD_WEIGHT = Role
#: The paper's single recipes and those of the libraries here: kernel by role.
SINGLE: dict[str, dict[Role, Candidate]] = {
    "torchao tensorwise": {
        FORWARD: ("torch", "tensorwise_fast"), GRAD_INPUT: ("torch", "tensorwise"),
        GRAD_WEIGHT: ("torch", "tensorwise"),
    },
    "torchao rowwise": {
        FORWARD: ("torch", "rowwise_fast"), GRAD_INPUT: ("torch", "rowwise"), GRAD_WEIGHT: ("torch", "rowwise"),
    },
    "torchao rowwise_with_gw_hp": {
        FORWARD: ("torch", "rowwise_fast"), GRAD_INPUT: ("torch", "rowwise"), GRAD_WEIGHT: BASELINE,
    },
    "torch tensorwise_fast": dict.fromkeys(Role, ("torch", "tensorwise_fast")),
    "fbgemm rowwise": dict.fromkeys(Role, ("fbgemm", "rowwise_fast")),
    "torch blockwise": {
        FORWARD: ("torch", "blockwise"), GRAD_INPUT: ("torch", "blockwise"), GRAD_WEIGHT: ("torch", "blockwise_1x128"),
    },
    "deepgemm blockwise": {
        FORWARD: ("deepgemm", "blockwise"), GRAD_INPUT: ("deepgemm", "blockwise"),
        GRAD_WEIGHT: ("deepgemm", "blockwise_1x128"),
    },
}  # fmt: skip
#: What is tried where rows do not start on 16 bytes.
ODD: dict[str, Candidate] = {
    "torch tensorwise_fast": ("torch", "tensorwise_fast"),
    "triton rowwise_fast": ("triton", "rowwise_fast"),
}
#: The paper's own figures (table VI), for the same names.
PAPER = {
    "torchao tensorwise": 1.05, "torchao rowwise": 1.01, "torchao rowwise_with_gw_hp": 1.08, "deepgemm blockwise": 0.85,
    "fbgemm rowwise": 0.98, "plan": 1.12,
}  # fmt: skip
#: In this order they are compiled.
DEFAULT = (
    "torch tensorwise_fast", "torchao tensorwise", "torchao rowwise_with_gw_hp", "torchao rowwise", "fbgemm rowwise",
    "torch blockwise", "deepgemm blockwise",
)  # fmt: skip
MODELS = ("wukong", "dlrm", "dcnv2")
SHAPES = Path(__file__).parent / "shapes" / "lrm.csv"
app = typer.Typer(add_completion=False)


def chooser(plan: Plan, site: str) -> Callable[[Role], Candidate]:
    """The plan's kernel of each role of a site."""

    def choose(role: Role) -> Candidate:
        decision = plan.lookup(site, role)
        return BASELINE if decision is None else (decision.provider, decision.recipe)

    return choose


def model_group(name: str, layers: Sequence[LinearLayer], plan: Plan, single: Sequence[str]) -> Group:
    """The whole step: bf16, single recipes, the plan."""
    arms: dict[str, list[LayerStep]] = {"bf16": [step_of(layer, lambda _: BASELINE) for layer in layers]}
    # Before the recipes: what is compiled first is ready first.
    arms["plan"] = [step_of(layer, chooser(plan, layer.site)) for layer in layers]
    for recipe in single:
        arms[recipe] = [step_of(layer, SINGLE[recipe].__getitem__, pad=False) for layer in layers]
    return Group(name, arms)


def layer_groups(layers: Sequence[LinearLayer], plan: Plan) -> list[Group]:
    """One group for every different layer of which the plan has something in FP8: bf16, the plan, GEMMs put back."""
    groups: dict[LayerStep, Group] = {}
    for layer in layers:
        planned = step_of(layer, chooser(plan, layer.site))
        fp8 = [role for role, candidate in planned.choices if candidate != BASELINE]
        if not fp8 or planned in groups:
            continue
        arms = {"bf16": [step_of(layer, lambda _: BASELINE)], "plan": [planned]}
        for role in fp8[: len(fp8) if len(fp8) > 1 else 0]:
            choices = tuple((r, BASELINE if r is role else candidate) for r, candidate in planned.choices)
            arms[back(role)] = [dataclasses.replace(planned, choices=choices)]
        kernels = ", ".join(f"{r.value} {':'.join(kernel)}" for r, kernel in planned.choices if r in fp8)
        groups[planned] = Group(f"{layer.batch}x{layer.inputs}x{layer.outputs}: {kernels}", arms)
    return list(groups.values())


def odd_groups(layers: Sequence[LinearLayer]) -> list[Group]:
    """For each different layer that Inductor may pad in bf16: ``torch.mm`` as it is, that, and padded FP8."""
    groups: dict[LayerStep, Group] = {}
    for layer in layers:
        native = step_of(layer, lambda _: BASELINE)
        if native.may_be_padded:
            fp8 = {name: [step_of(layer, lambda _, kernel=kernel: kernel)] for name, kernel in ODD.items()}
            plain = {"torch.mm": [dataclasses.replace(native, plain=True)], "bf16": [native]}
            groups[native] = Group(f"{layer.batch}x{layer.inputs}x{layer.outputs}, rows off 16 bytes", plain | fp8)
    return list(groups.values())


def back(role: Role) -> str:
    """The arm in which this GEMM of a layer is put back."""
    return f"plan, {role.value} in bf16"


def gemm_speedups(groups: Sequence[Group], timings: dict[str, Any]) -> dict[str, float]:
    """For each GEMM in FP8 of :func:`layer_groups` the time without it in FP8 over the time with it; NaN: unknown."""
    found = {}
    for group in groups:
        arms = timings.get(group.name, {})
        (planned,) = group.arms["plan"]
        fp8 = [role for role, candidate in planned.choices if candidate != BASELINE]
        for role in fp8:
            without = arms.get(back(role) if len(fp8) > 1 else "bf16")
            known = isinstance(without, dict) and isinstance(arms.get("plan"), dict)
            found[f"{role.value} of {group.name}"] = without["us"] / arms["plan"]["us"] if known else math.nan
    return found


def available(recipes: Sequence[str]) -> list[str]:
    """Those of the single recipes whose libraries are here."""
    unknown = [name for name in recipes if name not in SINGLE]
    if unknown:
        raise typer.BadParameter(f"no recipe {unknown[0]!r}; there are: {', '.join(SINGLE)}", param_hint="--recipes")
    names = {provider for recipe in recipes for provider, _ in SINGLE[recipe].values()}
    reasons = {name: get_provider(name).supported() for name in names}
    for name, reason in reasons.items():
        if reason:
            rich.print(f"[yellow]{name} is left out: {reason}")
    return [name for name in recipes if not any(reasons[p] for p, _ in SINGLE[name].values())]


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="The JSON file to write.")],
    predicted: Annotated[Path | None, typer.Option(help="Write the file of benchmarks.predicted as well.")] = None,
    recipes: Annotated[str, typer.Option(help=f"Comma-separated, out of: {', '.join(SINGLE)}.")] = ",".join(DEFAULT),
    batch: int = 8192,
    size: str = "h200",
    costs: Annotated[str, typer.Option(help="A cost table: a target's name or a file.")] = "h200",
    seconds: Annotated[float, typer.Option(help="Seconds for everything; what does not fit is left out.")] = 150.0,
    workers: Annotated[int, typer.Option(help="Processes that compile; -1: one a core.")] = -1,
) -> None:
    """Measure all three parts, the whole step first."""
    from benchmarks.predicted import compare, predict

    table = CostTable.from_csv(costs) if costs.endswith(".csv") else CostTable.load(costs)
    layers = linear_layers("wukong", size, batch)
    plan = plan_of(layers, table)
    shapes = [
        LinearLayer(layer.name, layer.batch, layer.inputs, layer.outputs, (FORWARD,))
        for layer in read_layers(SHAPES, ["loka27"])
    ]
    forward = plan_of(shapes, table)
    run = Run(
        out, {"model": "wukong", "size": size, "batch": batch, "plan": plan.counts(), "loka27 plan": forward.counts()}
    )
    step = model_group("wukong", layers, plan, available(recipes.split(",")))
    shape_groups, step_groups = layer_groups(shapes, forward), layer_groups(layers, plan)
    comparison, others = ({}, []) if predicted is None else predict(MODELS, size, batch, table)
    others = [group for group in others if group.name != step.name]
    odd = odd_groups([layer for name in MODELS for layer in linear_layers(name, size, batch)])
    run.measure([step, *others, *shape_groups, *step_groups, *odd], limit=seconds, workers=workers)
    summarise(run.result, shape_groups, step_groups, loka27=len(shapes))
    run.save()
    if predicted is not None:
        kept = {
            name: value for name, value in run.result.items() if name not in ("model", "plan", "loka27 plan", "summary")
        }
        timings = {name: arms for name, arms in run.result["timings"].items() if name in comparison}
        result = {**kept, "models": comparison, "timings": timings}
        compare(result)
        predicted.write_text(json.dumps(result, indent=1) + "\n")


def summarise(result: dict[str, Any], loka27_groups: list[Group], step_groups: list[Group], *, loka27: int) -> None:
    """Add the summary to the results, and print them."""
    timings = result["timings"]
    step = timings.get("wukong", {})
    grid = Grid(title=f"GEMMs of a training step of {result['model']}, {result.get('gpu', '')}")
    for column in ("arm", "us", "spread", "over bf16", "paper"):
        grid.add_column(column)
    speedups = {name: speedup(step, name) for name in step}
    for name, timing in step.items():
        cells = [timing] if isinstance(timing, str) else [f"{timing['us']:.0f}", f"{timing['spread']:.1%}"]
        paper = f"{PAPER[name]:.2f}" if name in PAPER else ""
        known = "" if math.isnan(speedups[name]) else f"{speedups[name]:.3f}"
        grid.add_row(name, *cells, *[""] * (2 - len(cells)), known, paper)
    console().print(grid)
    single = [s for name, s in speedups.items() if name not in ("bf16", "plan") and not math.isnan(s)]
    per_gemm, forward = (gemm_speedups(groups, timings) for groups in (step_groups, loka27_groups))
    alone = {name: s for name, s in per_gemm.items() if not math.isnan(s)}
    measured = {name: s for name, s in forward.items() if not math.isnan(s)}
    # What the plan leaves in bf16 is the same kernel, so as fast.
    ratios = list(measured.values()) + [1.0] * (loka27 - len(forward))
    result["summary"] = {
        "plan over the best single recipe": speedups.get("plan", math.nan) / max(single, default=math.nan),
        "worst GEMM of the step": min(alone.items(), key=lambda item: item[1], default=None),
        "GEMMs of the step slower than bf16": sorted(name for name, s in alone.items() if s < 1.0),
        "GEMMs of the step not measured": len(per_gemm) - len(alone),
        "loka27 geometric mean": math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan,
        "loka27 worst": min(measured.items(), key=lambda item: item[1], default=None),
        "loka27 in FP8": len(forward),
        "loka27 not measured": len(forward) - len(measured),
        "speed-ups of the GEMMs": {**alone, **measured},
    }
    console().print({k: v for k, v in result["summary"].items() if k != "speed-ups of the GEMMs"})


def speedup(arms: dict[str, Any], name: str) -> float:
    """Of an arm over bf16; NaN where one of them has no time."""
    if isinstance(arms.get("bf16"), dict) and isinstance(arms.get(name), dict):
        return float(arms["bf16"]["us"] / arms[name]["us"])
    return math.nan


if __name__ == "__main__":
    app()
