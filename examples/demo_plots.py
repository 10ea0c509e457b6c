"""The two figures of the demo: the loss curves of both arms, and error against speed-up of every candidate kernel."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from examples.data import Dataset
from examples.metrics import RelativeLogLoss, relative_log_loss

if TYPE_CHECKING:
    from examples.demo import Outcome

DPI = 150
#: Windows that the curves are averaged over.
WINDOWS = 40
# Okabe and Ito's colours, which colour-blind readers can tell apart.
BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#7F7F7F"
RECIPE_COLOURS = {"tensorwise": BLUE, "rowwise": ORANGE, "blockwise": GREEN}
ROLES = {
    "forward": "forward, y = x Wᵀ",
    "grad_input": "grad_input, dx = dy W",
    "grad_weight": "grad_weight, dW = dyᵀ x",
}


def plot_losses(
    path: Path,
    losses: Mapping[str, np.ndarray],
    batch: int,
    warm_up: int,
    relative: RelativeLogLoss,
    data: Dataset,
    planned: int = 0,
) -> Path:
    """Log loss of both arms over the stream, and the second arm's relative difference with two standard errors.

    Args:
        path: the PNG to write.
        losses: name -> loss of each example [N], base first, both over the same examples.
        batch: examples per step; windows are whole steps.
        warm_up: examples that are not scored.
        relative: the difference over everything scored, for the title.
        data: for the months along the axis.
        planned: examples after which the plan took effect; 0 draws no mark.
    """
    (base_name, base), (arm_name, arm) = losses.items()
    steps = len(base) // batch
    width = max(1, math.ceil(steps / WINDOWS)) * batch
    starts = np.arange(0, steps * batch - width + 1, width)
    centres = (starts + width / 2) / 1000
    figure = Figure(figsize=(9, 6), dpi=DPI, layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])

    for name, values, colour, style in ((base_name, base, GREY, "-"), (arm_name, arm, BLUE, "--")):
        means = [values[s : s + width].mean() for s in starts]
        top.plot(centres, means, style, color=colour, label=name, linewidth=1.8)
    top.set_ylabel("log loss (nats)")
    top.set_title(f"Late flights, predicted before trained on: {arm_name} against {base_name}", loc="left")
    low, high = top.get_ylim()
    top.set_ylim(low, high + 0.15 * (high - low))  # room for the legend above the curves
    top.legend(frameon=False, loc="upper right", ncols=2)

    windows = [relative_log_loss(arm[s : s + width], base[s : s + width]) for s in starts]
    percent = np.array([w.percent for w in windows])
    band = 2 * np.array([w.standard_error for w in windows])
    bottom.axhline(0, color=GREY, linewidth=0.8)
    bottom.fill_between(centres, percent - band, percent + band, color=BLUE, alpha=0.2, linewidth=0)
    bottom.plot(centres, percent, color=BLUE, linewidth=1.5)
    bottom.set_ylabel("relative log loss (%)")
    bottom.set_xlabel("flights seen (thousands)")
    bottom.set_title(
        f"{arm_name} against {base_name}, after the warm-up: {relative} (standard error); "
        "band: 2 standard errors of each window",
        loc="left",
        fontsize=9,
    )
    scored = centres >= warm_up / 1000
    # Early differences are large and mean nothing; the axis belongs to what is scored.
    extent = max(1.3 * np.abs(np.concatenate([percent + band, percent - band])[np.tile(scored, 2)]).max(), 0.01)
    bottom.set_ylim(-extent, extent)
    for axes in (top, bottom):
        axes.axvspan(0, warm_up / 1000, color=GREY, alpha=0.12, linewidth=0)
        axes.set_xlim(0, steps * batch / 1000)
        _plain(axes)
    top.text(
        warm_up / 2000,
        0.97,
        "warm-up, not scored",
        transform=top.get_xaxis_transform(),
        ha="center",
        va="top",
        fontsize=9,
    )
    if planned:
        for axes in (top, bottom):
            axes.axvline(planned / 1000, color=BLUE, linestyle=":", linewidth=1.2)
        top.text(
            planned / 1000,
            0.03,
            f" {arm_name}'s plan from here on",
            transform=top.get_xaxis_transform(),
            color=BLUE,
            fontsize=9,
        )
    _months(top, data)
    figure.savefig(path)
    return path


def _months(axes: Axes, data: Dataset) -> None:
    """Months above the axis, each where its flights begin."""
    if len(data.marks) < 2:
        return
    above = axes.secondary_xaxis("top")
    above.set_xticks([row / 1000 for row, _ in data.marks], [text for _, text in data.marks], fontsize=8, ha="left")
    above.tick_params(length=3)


def plot_plan(path: Path, outcome: Outcome, target: str) -> Path:
    """Error against speed-up of every candidate of every GEMM, a panel per role; what the plan chose is filled."""
    figure = Figure(figsize=(12, 5), dpi=DPI, layout="constrained")
    panels = figure.subplots(1, len(ROLES), sharex=True, sharey=True)
    for axes, (role, title) in zip(panels, ROLES.items(), strict=True):
        gemms = [g for g in outcome.gemms if g["role"] == role]
        _panel(axes, gemms, outcome)
        chosen = sum(g["fp8"] for g in gemms)
        axes.set_title(f"{title}\n{chosen} of {len(gemms)} GEMMs in FP8", loc="left", fontsize=10)
        axes.set_xlabel("error of the GEMM's output (MERE)")
        axes.xaxis.set_major_locator(MaxNLocator(5))
        _plain(axes)
    panels[0].set_ylabel(f"speed-up on {target}")
    figure.legend(handles=_legend(), loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(path)
    return path


def _panel(axes: Axes, gemms: list[dict[str, Any]], outcome: Outcome) -> None:
    for gemm in gemms:
        for candidate in gemm["candidates"]:
            x, y = candidate["mere"], candidate["speedup"]
            if not (_finite(x) and _finite(y)):
                continue
            colour = _colour(candidate["kernel"])
            if gemm["fp8"] and candidate["kernel"] == gemm["kernel"]:
                axes.scatter(x, y, s=60, color=colour, edgecolor="black", linewidth=1, zorder=3)
            else:
                axes.scatter(x, y, s=16, facecolor="none", edgecolor=colour, linewidth=0.8, alpha=0.7, zorder=2)
    axes.axvline(outcome.max_mere, color=GREY, linestyle=":", linewidth=1)
    axes.axhline(outcome.min_speedup, color=GREY, linestyle=":", linewidth=1)
    axes.set_xlim(0, 1.05 * outcome.max_mere)


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _colour(kernel: str) -> str:
    recipe = kernel.split(":")[-1]
    return next((colour for start, colour in RECIPE_COLOURS.items() if recipe.startswith(start)), PURPLE)


def _legend() -> list[Line2D]:
    recipes = [
        Line2D([], [], marker="o", linestyle="", color=colour, label=recipe)
        for recipe, colour in RECIPE_COLOURS.items()
    ]
    return [
        *recipes,
        Line2D([], [], marker="o", linestyle="", color=GREY, markeredgecolor="black", markersize=8, label="chosen"),
        Line2D([], [], marker="o", linestyle="", color=GREY, markerfacecolor="none", markersize=4, label="not chosen"),
        Line2D([], [], linestyle=":", color=GREY, label="thresholds of the plan"),
    ]


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.5)
