"""What each GEMM's FP8 does to the loss, and the plans that follow: by error, by a budget of loss, and naive ones.

    python -m benchmarks.loss_gate --out benchmarks/results/loss_gate                            # a CPU, emulated FP8
    python -m benchmarks.loss_gate --size mid --batch-size 8192 --steps 2000 --batches 64 --seconds 120 --out ...

A model is trained on the synthetic click stream with ``backend="loka"``, whose table is taken over. Then, on batches
that it has not trained on: the effect of every forward GEMM on the loss (paired, with intervals), the plans of

    error_gate     make_plan: fastest kernel below max_mere
    loss_budget    plan_by_loss: most time saved within --budget
    first_out      as error_gate, but the layers that read raw numerics stay in high precision
    everything     the fastest kernel of every GEMM, whatever its error or gain

and what each does to the loss as a whole, beside the sum of its single effects. The measured ranking of layers is
compared with that of NVIDIA ModelOpt's gradient score. Written: ``loss_gate.json`` and ``plans/*.json``, to train with:

    python -m benchmarks.quality --arms fp32,bf16,mods --plan loss_budget=OUT/plans/loss_budget.json ...
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import rich
import torch
import torch.nn.functional as F
import typer
from rich.table import Table as Printed

import loka_compile
from benchmarks._console import console
from benchmarks.taylor_score import taylor_scores
from examples.models.registry import build
from examples.training.checkpoint import atomic_write
from examples.training.config import TrainConfig
from examples.training.loop import Trainer
from examples.training.sources import open_source
from loka_compile.loss import Effect, Sensitivity
from loka_compile.machine import describe
from loka_compile.plan import Plan
from loka_compile.table import BASELINE

app = typer.Typer(add_completion=False)


def trained(
    model: str, size: str, batch_size: int, steps: int, data_options: dict[str, Any], device: str,
    model_options: dict[str, Any], options: dict[str, Any], say: Callable[[str], None],
) -> tuple[Trainer, Any, loka_compile.Table]:  # fmt: skip
    """A trained model, the stream behind what it saw, and the table of its GEMMs."""
    stream = open_source("synthetic", batch_size, device=device, seed=0, **data_options)
    net = build(model, size, stream.schema, seed=0, device=device, **model_options)
    # Errors of what does not pay are wanted, too; a cached table may lack them.
    options = {"table": "auto", "fx_graph_cache": False, "min_speedup": 1e-9, **options}
    if device == "cpu":
        options["target"] = "h200"
    config = TrainConfig(backend="loka", options=options, window=min(100, steps), cuda_graph=device.startswith("cuda"))
    trainer = Trainer(net, stream, config, device=device)
    for record, _ in trainer.run(steps):
        say(f"step {record['step']} of {steps}, log loss {record['log_loss']:.4f}")
    table = next(r.table for r in reversed(loka_compile.reports()) if r.table is not None)
    return trainer, stream, table


def plans_of(
    table: loka_compile.Table, found: Sensitivity, budget: float, first: list[str]
) -> tuple[dict[str, Plan], Any]:
    """The plans by name, and the outcome of the budget."""
    bought = loka_compile.plan_by_loss(table, found, max_loss_increase=budget)
    gate = loka_compile.make_plan(table)
    everything = loka_compile.make_plan(table, max_mere=math.inf, min_speedup=1e-9)
    first_out = gate.without(first, "it reads raw numerics")
    return {"error_gate": gate, "loss_budget": bought.plan, "first_out": first_out, "everything": everything}, bought


def predicted(plan: Plan, found: Sensitivity) -> float:
    """The sum of the single effects of a plan's forward kernels; gains count."""
    effects = [
        found.effect(d.site, d.role, d.candidate)
        for d in plan.decisions
        if d.role == "forward" and not d.is_high_precision
    ]
    return math.fsum(e.change for e in effects if e is not None)


def ranking(found: Sensitivity, scores: dict[str, float], kernels: dict[tuple[str, str], Any]) -> dict[str, Any]:
    """Spearman's rank correlation of ModelOpt's score and of the error with the measured effects."""
    from scipy.stats import spearmanr

    sites = [site for site, _ in kernels if site in scores]
    effects = [found.effect(site, "forward", ":".join(kernels[site, "forward"])) for site in sites]
    pairs = [(scores[s], e.change) for s, e in zip(sites, effects, strict=True) if e is not None]
    if len(pairs) < 3:
        return {"sites": len(pairs)}
    rho, p = spearmanr([a for a, _ in pairs], [b for _, b in pairs])
    return {"sites": len(pairs), "spearman": float(rho), "p_value": float(p)}


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Folder for results and plans.")],
    model: str = "wukong",
    size: Annotated[str, typer.Option(help="tiny, h200, paper")] = "tiny",
    batch_size: int = 1024,
    steps: Annotated[int, typer.Option(help="Training steps before anything is measured.")] = 300,
    batches: Annotated[int, typer.Option(help="Batches that effects are measured on.")] = 48,
    budget: Annotated[float, typer.Option(help="Relative increase of the loss.")] = 2e-4,
    first: Annotated[
        str, typer.Option(help="Sites that read raw numerics, by their beginnings, comma-separated.")
    ] = "numeric",
    data_options: Annotated[str, typer.Option(help="Fields of the stream, as JSON.")] = '{"numerics": "raw"}',
    model_options: Annotated[str, typer.Option(help="Fields of the model's configuration, as JSON.")] = "{}",
    options: Annotated[str, typer.Option(help="Options of backend loka in the training, as JSON.")] = "{}",
    providers: Annotated[
        str, typer.Option(help="Kernel libraries whose recipes are measured, comma-separated; default: all.")
    ] = "",
    seconds: Annotated[
        float, typer.Option(help="Measure on as many batches as fit into this time, at least 2; 0: on all.")
    ] = 0.0,
    device: str = "",
) -> None:
    """Measure, choose, check, print and write."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    began = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)

    def spent() -> float:
        return time.perf_counter() - began

    def say(text: str) -> None:
        print(f"[{spent():.0f} s] {text}", flush=True)

    def in_time(data: Sequence[Any], share: float) -> Iterator[Any]:
        """As many batches as there is time for, until that share of it is spent."""
        for index, batch in enumerate(data):
            if seconds and index >= 2 and spent() > share * seconds:
                say(f"no time was left after {index} of {len(data)} batches")
                return
            yield batch

    chosen = tuple(providers.split(",")) if providers else None
    trainer, stream, table = trained(
        model, size, batch_size, steps, json.loads(data_options), device, json.loads(model_options),
        {**json.loads(options), **({"providers": chosen} if chosen else {})}, say,
    )  # fmt: skip
    if chosen:  # a cached table may hold others, too
        table = loka_compile.Table(table.header, [row for row in table.rows if row.provider in (*chosen, BASELINE[0])])
    table.save(out / "table.json")
    net = trainer.model
    data = [stream.batch(step).to(trainer.device) for step in range(steps, steps + batches)]

    def loss_fn(run: Any, batch: Any) -> torch.Tensor:
        features = net.embed(batch.categories, batch.history if net.reads_history else None)
        with torch.autocast(trainer.device.type, torch.bfloat16):
            logits = run(batch.numerics, *features)
        return F.binary_cross_entropy_with_logits(logits.float(), batch.labels, reduction="none")

    dense = net.dense_arch
    # Gates wide open: what an error gate would refuse has an effect, too.
    found = loka_compile.loss_sensitivity(
        dense, loss_fn, in_time(data, 0.7), table, max_mere=math.inf, min_speedup=1e-9, path=out / "sensitivity.json"
    )
    say(f"measured {len(found.effects())} effects on {found.batches} batches")
    sites = sorted({d.site for d in loka_compile.make_plan(table).decisions})
    plans, bought = plans_of(table, found, budget, [s for s in sites if s.startswith(tuple(first.split(",")))])
    (out / "plans").mkdir(parents=True, exist_ok=True)
    whole: dict[str, Effect] = {}
    for name, plan in plans.items():
        plan.save(out / "plans" / f"{name}.json")
        share = 0.7 + 0.3 * (len(whole) + 1) / len(plans)
        whole[name] = loka_compile.loss_of_plan(dense, loss_fn, in_time(data, share), plan)
        say(f"{name}: {whole[name].change:+.4%}")
    kernels = {
        (d.site, "forward"): (d.provider, d.recipe)
        for d in plans["everything"].decisions
        if d.role == "forward" and not d.is_high_precision
    }
    rank = ranking(found, taylor_scores(dense, loss_fn, data[:8], kernels), kernels)
    printed = Printed(title=f"{model} {size}: change of the log loss with all forward GEMMs of a plan in FP8")
    for column in ("plan", "FP8 GEMMs (forward)", "measured", "95 % interval", "sum of single effects"):
        printed.add_column(column)
    for name, plan in plans.items():
        effect = whole[name]
        count = sum(d.role == "forward" and not d.is_high_precision for d in plan.decisions)
        printed.add_row(
            name, str(count), f"{effect.change:+.4%}", f"{effect.low:+.4%} .. {effect.high:+.4%}",
            f"{predicted(plan, found):+.4%}",
        )  # fmt: skip
    console().print(printed)
    rich.print(found.to_text(8))
    rich.print(str(bought))
    rich.print(f"ModelOpt's gradient score against the measured effects: {rank}")
    result = {
        "machine": describe(), "model": model, "size": size, "batch_size": batch_size, "steps": steps,
        "batches": found.batches, "examples": found.batches * batch_size, "budget": budget,
        "model_options": json.loads(model_options), "providers": chosen,
        "data_options": json.loads(data_options),
        "base_loss": found.base_loss, "seconds": spent(),
        "effects": [vars(e) for e in found.effects()],
        "skipped": [[*key, reason] for key, reason in found.skipped.items()],
        "plans": {n: {**vars(whole[n]), "sum_of_single_effects": predicted(p, found), "kernels": p.counts()}
                  for n, p in plans.items()},
        "budget_outcome": str(bought), "modelopt_gradient_score": rank,
    }  # fmt: skip
    atomic_write(out / "loss_gate.json", lambda f: f.write((json.dumps(result, indent=1) + "\n").encode()))


if __name__ == "__main__":
    app()
