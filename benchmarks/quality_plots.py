"""The two pictures of the quality protocol: counterparts of the LoKA paper's figures 3 and 9."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def _millions(summary: dict[str, Any], count: int) -> np.ndarray:
    """Middle of each window of a trajectory, in million examples."""
    setup = summary["setup"]
    step = int(setup["steps"] * setup["warm_up"]) + setup["window"] * (np.arange(count) + 0.5)
    return step * setup["batch_size"] / 1e6


def _trajectories(axis: Any, summary: dict[str, Any], names: list[str]) -> None:
    band = summary["band"]
    if band is not None:
        axis.axhspan(-band, band, color="0.9", label="another fp32 seed (95 %)")
    axis.axhline(0, color="0.4", lw=0.8)
    for name in names:
        windows = summary["arms"][name]["windows"]
        axis.plot(_millions(summary, len(windows)), windows, lw=1.2, label=name)
    axis.set_xlabel("million examples")
    axis.set_ylabel("relative log loss, %")
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7)


def _having_windows(summary: dict[str, Any], figure: int) -> list[str]:
    return [n for n, a in summary["arms"].items() if a["figure"] == figure and a["windows"]]


def plot_plain_fp8(summary: dict[str, Any], path: Path, e2e: dict[str, Any] | None = None) -> None:
    """Figure 3: loss of plain FP8 on the unchanged model over the run, and its training throughput beside bf16's.

    Runs that shared a device have no throughput of their own; ``e2e`` is what `benchmarks.e2e` found for the model.
    """
    names = _having_windows(summary, 3)
    rates, where = _rates(summary, names, e2e)
    figure, axes = plt.subplots(1, 2 if rates else 1, figsize=(11 if rates else 7.5, 4), squeeze=False,
                                width_ratios=(2, 1) if rates else (1,))  # fmt: skip
    _trajectories(axes[0, 0], summary, names)
    axes[0, 0].set_title(f"{summary['setup']['model']}, {summary['setup']['size']}: plain FP8 against fp32")
    if rates:
        right = axes[0, 1]
        right.barh(list(rates), list(rates.values()), color="0.6")
        for i, rate in enumerate(rates.values()):
            right.text(rate, i, f"{rate:,.0f} ", va="center", ha="right", fontsize=7)
        right.set_xlabel("examples per second in training")
        right.set_title(where)
    _save(figure, path)


def _rates(summary: dict[str, Any], names: list[str], e2e: dict[str, Any] | None) -> tuple[dict[str, float], str]:
    """Examples per second by arm, and what and where that is of. Emulation says nothing about speed."""
    setup = summary["setup"]
    if e2e is None:
        own = {n: summary["arms"][n]["examples_per_second"] for n in names if not n.startswith("emulated")}
        return {n: rate for n, rate in own.items() if rate}, setup["device"]
    found = e2e["models"][setup["model"]]["training"]
    return {n: found[n]["examples_per_second"] for n in names if n in found}, f"{e2e['device']}, size {e2e['size']}"


def plot_mods_and_loka(summary: dict[str, Any], path: Path) -> None:
    """Figure 9: the Mods one by one and together in bf16, and loka in FP8, with the noise of another seed."""
    figure, axis = plt.subplots(figsize=(8, 4))
    _trajectories(axis, summary, _having_windows(summary, 9))
    axis.set_title(f"{summary['setup']['model']}, {summary['setup']['size']}: Mods and loka against fp32")
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
