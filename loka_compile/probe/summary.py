"""What a probe knows, and what it costs, as text and as plain values."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loka_compile.probe.site_stats import SiteStats


@dataclass(frozen=True)
class SiteSummary:
    """One site. Magnitudes are those of the input; NaN where nothing was seen."""

    site: str
    in_features: int
    out_features: int
    dtype: str
    #: How the input's covariance is kept: "full", "blocks" or "diagonal".
    form: str
    calls: int
    input_rows: int
    grad_rows: int
    weight_updates: int
    #: Rows and weights with an Inf or a NaN.
    skipped: int
    amax: float
    #: 99.9 % quantile of |x|.
    q999: float
    #: The largest kurtosis of any feature.
    kurtosis: float
    #: Behaviour of the bias norm (figure 6 of the paper), "none" without a bias.
    bias: str
    bytes: int

    @classmethod
    def of(cls, stats: SiteStats) -> SiteSummary:
        """Read off one site (waits for the device)."""
        grad, weight, seen = stats.grad_output, stats.weight, stats.input.n > 0
        sketch = stats.input.sketch
        return cls(
            site=stats.site,
            in_features=stats.in_features,
            out_features=stats.out_features,
            dtype=stats.dtype,
            form=stats.input.tracker.form,
            calls=stats.calls,
            input_rows=stats.input.n,
            grad_rows=grad.n if grad is not None else 0,
            weight_updates=weight.updates if weight is not None else 0,
            skipped=stats.skipped,
            amax=float(stats.input.moments.amax.max()) if seen else math.nan,
            q999=sketch.site_quantile(0.999) if sketch is not None else math.nan,
            kurtosis=float(stats.input.moments.kurtosis().max()) if seen else math.nan,
            bias=str(stats.bias_norm.behaviour()) if len(stats.bias_norm) else "none",
            bytes=stats.nbytes,
        )


@dataclass(frozen=True)
class ProbeReport:
    """The state of a session."""

    steps: int
    #: Sampled windows, and those that were due but over the budget.
    windows: int
    over_budget: int
    #: Calls and weights that were not copied because too many copies were waiting.
    dropped: int
    #: Seconds that statistics have taken beside the training, and how many they may have taken by now.
    spent_s: float
    allowance_s: float
    saved: int
    #: The last failure of saving, or "".
    save_error: str
    sites: tuple[SiteSummary, ...]
    #: Linear layers that were never called in a sampled window.
    unseen: tuple[str, ...]
    #: Linear layers that cannot be tapped, with the reason.
    unsupported: dict[str, str]
    #: Bytes of all statistics, and the most that copies waiting for the worker have taken.
    bytes: int
    most_staged_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        lines = [
            f"{self.windows} of {self.steps} steps sampled; {self.over_budget} windows were over the budget, "
            f"{self.dropped} calls found no room",
            f"time beside the training: {self.spent_s:.2f} s of {self.allowance_s:.2f} s allowed",
            f"memory: {_size(self.bytes)} of statistics, at most {_size(self.most_staged_bytes)} of copies waiting",
            f"saved {self.saved} times" + (f"; the last time failed: {self.save_error}" if self.save_error else ""),
        ]
        head = ("site", "K", "N", "dtype", "form", "rows", "grads", "weights", "bad", "amax", "q99.9", "kurt", "bias")
        table: list[tuple[str, ...]] = [(*head, "memory")]
        for s in self.sites:
            counts = (s.input_rows, s.grad_rows, s.weight_updates, s.skipped)
            values = (s.site, s.in_features, s.out_features, s.dtype, s.form, *counts)
            magnitudes = (f"{s.amax:.3g}", f"{s.q999:.3g}", f"{s.kurtosis:.3g}")
            table.append((*map(str, values), *magnitudes, s.bias, _size(s.bytes)))
        widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
        ]
        if self.unseen:
            lines.append("never called in a sampled window: " + ", ".join(self.unseen))
        lines += [f"not tapped: {name}: {reason}" for name, reason in self.unsupported.items()]
        return "\n".join(lines)


def _size(count: int) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count = count / 1000  # type: ignore[assignment]
    return f"{count:.3g} GB"
