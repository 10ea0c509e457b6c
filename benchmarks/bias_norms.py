"""Figure 6 of the LoKA paper: what the norms of a model's biases do in training, one panel per behaviour."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import matplotlib

from loka_compile.probe.norms import Behaviour
from loka_compile.probe.site_stats import Stats

matplotlib.use("Agg")
import matplotlib.pyplot as plt

#: The paper's six panels, in its order.
PANELS = ("oscillating", "vanishing", "cycling", "drifting", "converging", "diverging")
#: Curves in one panel.
CURVES = 4


def plot_bias_norms(stats: Stats, path: Path) -> dict[str, Any]:
    """Draw every behaviour that occurs; the counts and all series, as plain values.

    Args:
        stats: of a training run; sites without a bias are left out.
        path: of the PNG. A panel whose behaviour does not occur says so.
    """
    series = {site: s.bias_norm for site, s in stats.items() if len(s.bias_norm)}
    classes = {site: str(norm.behaviour()) for site, norm in series.items()}
    figure, axes = plt.subplots(2, 3, figsize=(10, 5), sharex=True, constrained_layout=True)
    for axis, behaviour in zip(axes.flat, PANELS, strict=True):
        members = [site for site, name in classes.items() if name == behaviour]
        axis.set_title(f"{behaviour}: {len(members)} of {len(series)}", fontsize=9)
        for site in members[:CURVES]:
            axis.plot(series[site].steps, series[site].values, lw=0.9, label=site.removesuffix("#0"))
        if members:
            axis.legend(fontsize=6)
        else:
            axis.text(0.5, 0.5, "does not occur", ha="center", transform=axis.transAxes, fontsize=8, color="0.5")
    for axis in axes[1]:
        axis.set_xlabel("step")
    for axis in axes[:, 0]:
        axis.set_ylabel("L2 norm of the bias")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    counts = Counter(classes.values())
    return {
        "counts": {name: counts[name] for name in (*PANELS, str(Behaviour.UNKNOWN)) if counts[name]},
        "behaviour": classes,
        "steps": {site: norm.steps for site, norm in series.items()},
        "values": {site: norm.values for site, norm in series.items()},
    }
