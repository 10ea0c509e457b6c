"""What backend="loka" does to each model family: rewritten chains, refusals and their reasons, GEMMs. No GPU needed.

    python -m benchmarks.model_reports --size h200 --out benchmarks/results/model_reports

Each dense part is compiled for training, on a CPU and with a small batch: what is rewritten depends on neither. Takes
some minutes per model, as C++ is made of it. Written: ``<model>.json`` and ``summary.md``.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track

from examples.data.stream import Schema
from examples.models.registry import MODELS, build
from examples.training.checkpoint import atomic_write

#: Criteo's widths, with tables of a few rows: only the dense part is looked at.
SCHEMA = Schema(13, (8,) * 26, 128)
app = typer.Typer(add_completion=False)


def report_of(name: str, size: str, batch_size: int = 4) -> dict[str, Any]:
    """Compile one model's training step as `loka_compile.explain` does, without a plan."""
    import loka_compile

    model = build(name, size, SCHEMA)
    numerics = torch.randn(batch_size, SCHEMA.n_numerics)
    categories = torch.zeros(batch_size, len(SCHEMA.table_sizes), dtype=torch.int64)
    history = torch.zeros(batch_size, SCHEMA.history_length, dtype=torch.int64)
    features = [f.detach() for f in model.embed(categories, history if model.reads_history else None)]
    # Embeddings are trained, so their gradient is wanted.
    features = [f.requires_grad_() if f.is_floating_point() else f for f in features]
    with torch._inductor.config.patch(fx_graph_cache=False):
        report = loka_compile.explain(model.dense_arch, numerics, *features, options={"table": "off"}, show=False)
    return {
        "model": name,
        "size": size,
        "parameters": sum(p.numel() for p in model.dense_arch.parameters()),
        "chains": report.chains,
        "biases_removed": report.unused("bias"),
        "norm_parameters_unused": report.unused("norm"),
        "refused": [{"reason": r.reason, "source": _relative(r.source)} for r in report.refusals],
        "gemms": [{"site": g.gemm.site, "role": str(g.gemm.role), "n": g.gemm.n, "k": g.gemm.k} for g in report.gemms],
        "unmapped": report.unmapped,
    }


def _relative(source: str) -> str:
    """A source line without the machine's own folders."""
    root = str(Path(__file__).resolve().parents[1]) + "/"
    return source.replace(root, "")


def table(reports: list[dict[str, Any]]) -> str:
    """The reports as a Markdown table."""
    lines = [
        "| model | dense parameters | linears | chains rewritten | biases removed | left alone because |",
        "|---|---|---|---|---|---|",
    ]
    for r in reports:
        linears = len({g["site"] for g in r["gemms"]})
        chains = ", ".join(f"{n} {kind}" for kind, n in Counter(r["chains"].values()).most_common()) or "none"
        reasons = Counter(_general(x["reason"]) for x in r["refused"])
        refused = "; ".join(f"{reason} ({n})" for reason, n in reasons.most_common())
        size = f"{r['parameters'] / 1e6:.1f} M"
        lines.append(f"| {r['model']} | {size} | {linears} | {chains} | {r['biases_removed']} | {refused} |")
    return "\n".join(lines)


def _general(reason: str) -> str:
    """A reason without the names of nodes and sites, so that equal reasons count together."""
    reason = reason.partition(": its input comes from")[0]
    if "final prediction layer" in reason:
        return "the bias of the final prediction layer is kept"
    if " is also used by" in reason:
        return "the output of the linear layer is also used elsewhere"
    return reason


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Folder for the reports.")],
    size: str = "h200",
    models: Annotated[str, typer.Option(help=f"Comma-separated, out of {', '.join(MODELS)}.")] = ",".join(MODELS),
) -> None:
    """Report on each model, and sum up all reports in the folder."""
    out.mkdir(parents=True, exist_ok=True)
    for name in track(models.split(","), description="models"):
        report = report_of(name, size)
        torch._dynamo.reset()
        atomic_write(out / f"{name}.json", lambda f, r=report: f.write((json.dumps(r, indent=1) + "\n").encode()))
    # Also those of earlier calls.
    reports = [json.loads(path.read_text()) for name in MODELS if (path := out / f"{name}.json").exists()]
    text = f"`python -m benchmarks.model_reports --size {size}`, torch {torch.__version__}\n\n{table(reports)}\n"
    atomic_write(out / "summary.md", lambda f: f.write(text.encode()))
    print(text)


if __name__ == "__main__":
    app()
