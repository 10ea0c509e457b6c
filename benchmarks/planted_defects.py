"""Which planted defects of FP8 kernels standard-normal test inputs miss, and the probe's inputs find (issue 3).

    python -m benchmarks.planted_defects --out benchmarks/results        # a CPU, two minutes

A bias-free layer, small at first, learns 256 counts from 2048 positive features: features of very different size, users
of very different activity, a mean-reduced loss, as in a recommendation model. The probe watches. Then each faulty
kernel of ``benchmarks/defects.py`` runs all three GEMMs of the layer on standard-normal operands, and on the probe's. A
defect is found where the gate's metric is more than 1.2 times that of the same recipe in exact arithmetic, which is
what the table's remark asks about. All operands have 112 rows, so that a batch does not fill its last tile.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import loka_compile.probe
from benchmarks.defects import DEFECTS, Faulty, Sound
from loka_compile.jsonio import atomic_write, dumps
from loka_compile.machine import describe
from loka_compile.probe.gate import FAULTY, Effort
from loka_compile.probe.quantify import quantify
from loka_compile.probe.samples import Draw, SiteSamples
from loka_compile.probe.site_stats import SiteStats

FEATURES, TASKS, BATCH, ROWS = 2048, 256, 256, 112


class Counts:
    """Batches of positive features [B, 2048] and the counts [B, 256] that depend on them."""

    def __init__(self, seed: int = 0) -> None:
        self.random = torch.Generator().manual_seed(seed)
        # 16 groups of features, each of its own unit: from 0.1 to 10.
        units = torch.logspace(-1, 1, 16)[torch.randperm(16, generator=self.random)]
        self.units = units.repeat_interleave(FEATURES // 16)
        self.rates = torch.rand(TASKS, generator=self.random) + 0.5

    def batch(self) -> tuple[Tensor, Tensor]:
        """Features in bf16, counts in fp32."""
        activity = torch.exp(1.2 * torch.randn(BATCH, 1, generator=self.random))
        noise = torch.rand(BATCH, FEATURES, generator=self.random)
        return (activity * self.units * (0.7 + 0.6 * noise)).bfloat16(), activity * self.rates


def learn(steps: int) -> SiteStats:
    """Train the layer with the probe on; its statistics."""
    data, layer = Counts(), nn.Linear(FEATURES, TASKS, bias=False).bfloat16()
    nn.init.normal_(layer.weight, std=2e-5)
    optimizer = torch.optim.Adam(layer.parameters(), lr=2e-6)
    with loka_compile.probe(layer, every=max(1, steps // 3), budget=None, momentum=0.5, full_limit=512) as p:
        for _ in range(steps):
            features, counts = data.batch()
            (layer(features).float() - counts).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return next(iter(p.stats.values()))


def standard_normal(stats: SiteStats) -> SiteSamples:
    """What a kernel's usual test feeds it, in the layer's shapes."""

    def draws(rows: int) -> Iterator[Draw]:
        random = torch.Generator().manual_seed(0)
        for _ in itertools.count():
            yield tuple(
                torch.randn(shape, generator=random) for shape in ((rows, FEATURES), (TASKS, FEATURES), (rows, TASKS))
            )  # type: ignore[misc]

    return SiteSamples(
        inputs=[], weight=torch.zeros(TASKS, FEATURES), dtype=stats.dtype, batch=stats.batch, draws=draws
    )


def ratios(provider: Faulty, samples: SiteSamples, pairs: int) -> dict[str, float]:
    """By role, how many times the error of exact arithmetic the kernel has."""
    recipe, effort = provider.recipe_used.name, Effort(pairs, pairs, rows=ROWS)
    sound = Sound(provider.recipe_used)
    table = quantify({"layer#0": samples}, target=None, providers=[provider, sound], effort=effort)
    rows = {(row.role, row.provider): row for row in table.rows if row.recipe == recipe}
    found = {}
    for role in (role for role, name in rows if name == provider.name):
        faulty, exact = rows[role, provider.name], rows[role, sound.name]
        found[role] = faulty.mere_drawn / exact.mere_drawn
        assert ("a faulty kernel?" in faulty.remark) == (found[role] > FAULTY), faulty
    return found


def run(steps: int, pairs: int) -> list[dict[str, Any]]:
    """One row per defect."""
    stats = learn(steps)
    inputs = {"normal": standard_normal(stats), "probe": stats.samples()}
    rows = []
    for defect in DEFECTS:
        by_role = {name: ratios(defect.provider(), samples, pairs) for name, samples in inputs.items()}
        normal, probe = (max(found.values()) for found in by_role.values())
        verdict = "missed" if normal <= FAULTY else "understated" if normal < probe / 2 else "found"
        rows.append({
            "defect": defect.name, "recipe": defect.provider.recipe_used.name, "what": defect.what,
            "normal": normal, "probe": probe, "by_role": by_role,
            "normal_verdict": verdict, "probe_verdict": "found" if probe > FAULTY else "missed",
        })  # fmt: skip
    return rows


def markdown(rows: list[dict[str, Any]], command: str) -> str:
    """The matrix."""
    head = [
        "# Planted defects", "",
        f"`{command}`, emulated on a CPU.", "",
        "The number is how many times the error of the same recipe in exact arithmetic the faulty kernel has, in the",
        f"worst of the layer's three GEMMs. Up to {FAULTY:g} a defect is missed; below half of what the probe's inputs",
        "show it is understated.", "",
        "| defect | recipe | standard-normal inputs | the probe's inputs |", "|---|---|---|---|",
    ]  # fmt: skip
    body = [
        f"| {r['defect']} | {r['recipe']} | {_cell(r['normal_verdict'], r['normal'])} | "
        f"{_cell(r['probe_verdict'], r['probe'])} |"
        for r in rows
    ]
    return "\n".join([*head, *body, "", *(f"* **{r['defect']}**: {r['what']}" for r in rows), ""])


def _cell(verdict: str, ratio: float) -> str:
    return verdict if verdict == "missed" else f"{verdict} ({ratio:.3g} x)"


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Train, measure, print and write the matrix."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for planted_defects.md and .json")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=50)
    options = parser.parse_args(argv)
    command = "python -m benchmarks.planted_defects " + " ".join(sys.argv[1:] if argv is None else argv)
    rows = run(options.steps, options.pairs)
    text = markdown(rows, command)
    print(text)
    if options.out is not None:
        atomic_write(options.out / "planted_defects.md", text)
        atomic_write(
            options.out / "planted_defects.json", dumps({"command": command, **describe(), "rows": rows}, indent=1)
        )
    return rows


if __name__ == "__main__":
    main()
