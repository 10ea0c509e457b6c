"""The two pictures of whole-model throughput: counterparts of the LoKA paper's figures 10 and 11."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from benchmarks.kernel_kinds import KINDS

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def plot_speedup(result: dict[str, Any], path: Path) -> None:
    """Speed-up of each arm over the bf16 original, a picture for each mode."""
    models = list(result["models"])
    modes = [m for m in result["models"][models[0]] if any(result["models"][x][m] for x in models)]
    figure, axes = plt.subplots(1, len(modes), figsize=(5.5 * len(modes), 4), sharey=True, squeeze=False)
    axes = axes[0]
    for axis, mode in zip(axes, modes, strict=True):
        # In the order of their first appearance; one that was left out of a model has no bar there.
        arms = list(dict.fromkeys(a for m in models for a in result["models"][m][mode]))
        width = 0.8 / len(arms)
        for i, arm in enumerate(arms):
            heights = [result["models"][m][mode].get(arm, {}).get("speedup") or 0.0 for m in models]
            axis.bar(np.arange(len(models)) + i * width, heights, width, label=arm)
        axis.axhline(1.0, color="0.4", lw=0.8)
        axis.set_xticks(np.arange(len(models)) + 0.4 - width / 2, models)
        axis.set_title(f"{mode}, {result['device']}")
    axes[0].set_ylabel("speed-up over the bf16 original")
    if axes[0].get_legend_handles_labels()[0]:
        axes[0].legend(fontsize=7)
    _save(figure, path)


def plot_latency(result: dict[str, Any], path: Path) -> None:
    """Time of a training step by kind of kernel, a bar for each model and arm."""
    bars = [(m, a, d["microseconds_by_kind"]) for m, x in result["models"].items() for a, d in x["training"].items()]
    figure, axis = plt.subplots(figsize=(9, 0.4 * len(bars) + 1.5))
    left = np.zeros(len(bars))
    for kind in KINDS:
        widths = np.array([times.get(kind, 0.0) for _, _, times in bars]) / 1e3
        axis.barh(range(len(bars)), widths, left=left, label=kind)
        left += widths
    axis.set_yticks(range(len(bars)), [f"{m} {a}" for m, a, _ in bars], fontsize=7)
    axis.invert_yaxis()
    axis.set_xlabel(f"ms of one training step, {result['device']}")
    axis.legend(fontsize=7)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
