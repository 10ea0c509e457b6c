"""The runs of a quality folder, and what they say together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks._console import console
from benchmarks.quality_arms import Arm
from benchmarks.quality_runs import Runs
from benchmarks.quality_stats import MARGIN, Comparison, Floats, compare, noise_band, per_window

BASE = "fp32"
NOISE = "fp32_other_seed"


def summarise(runs: Runs, arms: Sequence[Arm], seeds: Sequence[int], setup: dict[str, Any]) -> dict[str, Any]:
    """All comparisons that the finished runs allow."""
    score_from = int(setup["steps"] * setup["score_from"])
    warm = int(setup["steps"] * setup["warm_up"])
    by_name = {arm.name: arm for arm in arms}

    def usable(name: str) -> list[int]:
        return [s for s in seeds if runs.done(name, s) and not runs.facts(name, s)["diverged"]]

    def comparison(name: str, base: str) -> Comparison | None:
        both = sorted(set(usable(name)) & set(usable(base)))
        if not both or name == base:
            return None
        rows = [[runs.losses(n, s)[:, score_from:] for s in both] for n in (name, base)]
        return compare(*rows, setup["batch_size"])

    def trajectory(name: str) -> Floats | None:
        """RLL of each window after the warm-up, [seeds, windows], by the sharpest score."""
        both = sorted(set(usable(name)) & set(usable(BASE)))
        if not both or name == BASE:
            return None
        return np.stack(
            [
                per_window(runs.losses(name, s)[-1, warm:], runs.losses(BASE, s)[-1, warm:], setup["window"])
                for s in both
            ]
        )

    against_base = {name: comparison(name, BASE) for name in by_name}
    controls = [c for name, c in against_base.items() if c is not None and by_name[name].control]
    control = any(c.low > MARGIN for c in controls)
    noise = trajectory(NOISE) if NOISE in by_name else None
    band = None if noise is None else noise_band(noise)
    out: dict[str, Any] = {"setup": setup, "band": band, "control_shows_a_loss": control, "arms": {}}
    for name, arm in by_name.items():
        finished = [s for s in seeds if runs.done(name, s)]
        if not finished:
            continue
        facts = [runs.facts(name, s) for s in finished]
        windows = trajectory(name)
        entry: dict[str, Any] = {
            "text": arm.text, "figure": arm.figure, "seeds": finished,
            "diverged": [f["seed"] for f in facts if f["diverged"]],
            "examples_per_second": _median([f["examples_per_second"] for f in facts]),
            "against_fp32": None, "against_twin": None, "twin": arm.twin,
            "scored": {k: float(np.mean([f["scored"][k] for f in facts])) for k in facts[0]["scored"]},
            "windows": None if windows is None else windows.mean(axis=0).tolist(),
        }  # fmt: skip
        if windows is not None and band is not None:
            inside = np.abs(windows.mean(axis=0)) <= band
            entry["inside_band"] = float(inside.mean())
        if "loka" in facts[-1]:
            entry["loka"] = facts[-1]["loka"]
        for key, found in (("against_fp32", against_base[name]), ("against_twin", comparison(name, arm.twin))):
            if found is not None:
                verdict = "diverged" if entry["diverged"] else found.verdict(control)
                entry[key] = {**found.to_json(), "verdict": verdict}
        out["arms"][name] = entry
    return out


def _median(values: Sequence[float | None]) -> float | None:
    """None if there is none: runs that share a GPU have no throughput."""
    known = [v for v in values if v is not None]
    return float(np.median(known)) if known else None


def show(summary: dict[str, Any]) -> None:
    """The table for a person."""
    table = Table(title="relative log loss, percent (95 % interval over seeds); positive is worse")
    for column in (
        "arm",
        "by labels",
        "by true probability",
        "bootstrap",
        "against its bf16 twin",
        "verdict",
        "examples/s",
    ):
        table.add_column(column)

    def text(interval: dict[str, Any] | None) -> str:
        if interval is None:
            return "-"
        ends = "" if math.isnan(interval["low"]) else f" [{interval['low']:+.3f}, {interval['high']:+.3f}]"
        return f"{interval['mean']:+.3f}{ends}"

    for name, arm in summary["arms"].items():
        base, twin = arm["against_fp32"], arm["against_twin"]
        cells = [text(base[k]) if base else "-" for k in ("labels", "truth", "bootstrap")]
        own = text(twin["truth"] or twin["labels"]) + f" {twin['verdict']}" if twin else "-"
        verdict = base["verdict"] if base else ("diverged" if arm["diverged"] else "base")
        rate = f"{arm['examples_per_second']:,.0f}" if arm["examples_per_second"] else "-"
        table.add_row(name, *cells, own, verdict, rate)
    console().print(table)
    if summary["band"] is not None:
        for name, arm in summary["arms"].items():
            if arm["figure"] == 9 and "inside_band" in arm:
                console().print(
                    f"{name}: {arm['inside_band']:.0%} of windows inside the noise band of +-{summary['band']:.3f} %"
                )


def strict(value: Any) -> Any:
    """NaN as null: JSON has none."""
    if isinstance(value, dict):
        return {k: strict(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
