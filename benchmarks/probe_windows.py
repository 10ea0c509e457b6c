"""What a probe costs, from what its windows cost: an estimate for ``probe_overhead`` where blocks differ too much.

Arm ``all`` does everything in every window, so what a block with it takes longer stands out from the noise. Divided by
the seconds that its worker spent, it is what one of them costs training. Arm ``probe`` opens few windows; how many, and
what share of the time its worker spent, is counted rather than timed. Its cost is then::

    worker's share * cost per worker second  +  hook / step  +  windows per block * extra time of a window / block

The extra time is that of the tapped step and the opening before it, which a window takes whatever the worker then does.
Part of it is in the first term too, and where arm ``all`` waits for its worker at the end of a block, training stands
still as it never does otherwise: the estimate is rather too large than too small. ``by_windows`` takes the share and
the windows of the run. ``by_windows_budget`` is the long run: the whole budget, and so many more or fewer windows than
in the run as it is more or less than the share, but one for a block at most; where no window was opened in the run,
one for each job that arm ``all`` does for that share. Intervals are those of the time lost in arm ``all``; the other
figures are taken as they are. Between windows nothing but the hook's own time is counted: what else might be slower
there, this estimate cannot see.
"""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from loka_compile.probe.errors import Interval, confidence_interval
from loka_compile.probe.probe import Probe

#: What a probe may spend unless told otherwise.
BUDGET: float = inspect.signature(Probe).parameters["budget"].default
#: As ``every``: no window opens.
NEVER = 1 << 40


def hook_us(step: Callable[[], None], probe: Probe, steps: int) -> float:
    """Microseconds that the probe takes at the end of a step between windows, the median of so many.

    In steps as they are: called over and over, the same code took a tenth of it, as it stays in the CPU's caches.
    """
    times = []

    def timed(*args: Any) -> None:
        start = time.perf_counter()
        probe._on_optimizer_step(*args)
        times.append(time.perf_counter() - start)

    _ = probe.stats  # nothing is left for the worker
    every, probe.every = probe.every, NEVER
    probe._hook.remove()
    probe._hook = register_optimizer_step_post_hook(timed)
    for _ in range(steps):
        step()
    probe._hook.remove()
    probe._hook = register_optimizer_step_post_hook(probe._on_optimizer_step)
    probe.every = every
    return 1e6 * statistics.median(times)


def worker_seconds(row: dict[str, Any]) -> float:
    """What the worker spent in a block, on average."""
    return row["worker_share"] * statistics.fmean(row["block_s_with"])


def cost_per_worker_second(row: dict[str, Any]) -> Interval | None:
    """Seconds that training lost for each one that the worker spent; None if it spent none."""
    spent = worker_seconds(row)
    if spent <= 0:
        return None
    lost = [t - t0 for t, t0 in zip(row["block_s_with"], row["block_s_without"], strict=True)]
    # The interval is the numerator's: windows of everything hold equal work, so the denominator hardly varies.
    return Interval(*(value / spent for value in confidence_interval(lost)))


def estimate(probe: dict[str, Any], everything: dict[str, Any], budget: float) -> dict[str, Any] | None:
    """The cost of arm ``probe`` as parts of the time without it; None where arm ``all`` does not tell.

    Args:
        probe: the row of arm ``probe``.
        everything: that of arm ``all``, of the same case and mode.
        budget: part of the time that the worker spends in the long run.
    """
    cost = cost_per_worker_second(everything)
    if cost is None:
        return None
    block = statistics.fmean(probe["block_s_without"])
    measured = (probe["window_extra_ms"], everything["window_extra_ms"])
    # A window of some layers does no more than one of all of them, and none may have been opened in arm "probe".
    extra = max(0.0, min(statistics.median(times) for times in measured if times))
    found = {"case": probe["case"], "mode": probe["mode"], "hook_us": probe["hook_us"], "window_extra_ms": extra}
    found |= _named("cost_per_worker_second", cost)
    if probe["windows"] and probe["worker_share"]:
        windows_per_share = probe["windows"] / probe["rounds"] / probe["worker_share"]
    else:
        jobs = everything["calls_taken"] + everything["weights_taken"]
        windows_per_share = jobs / everything["rounds"] / everything["worker_share"]
    for name, share, windows in (
        ("by_windows", probe["worker_share"], probe["windows"] / probe["rounds"]),
        ("by_windows_budget", budget, min(1.0, windows_per_share * budget)),
    ):
        rest = probe["hook_us"] / 1e3 / probe["step_ms_without"] + windows * extra / 1e3 / block
        found |= _named(name, Interval(*(share * value + rest for value in cost)))
    return found


def _named(name: str, interval: Interval) -> dict[str, float]:
    return {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}


def estimates(rows: Iterable[dict[str, Any]], budget: float = BUDGET) -> list[dict[str, Any]]:
    """One estimate for every case and mode that has both arms."""
    arms: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        arms.setdefault((row["case"], row["mode"]), {})[row["arm"]] = row
    both = [found for found in arms.values() if {"probe", "all"} <= set(found)]
    made = [estimate(found["probe"], found["all"], budget) for found in both]
    return [one for one in made if one is not None]


HEAD = (
    f"{'case':10} {'mode':8} {'hook us':>7} {'window ms':>9} {'per worker second':>17} "
    f"{'by windows %':>22} {'in the long run %':>22}"
)


def line(found: dict[str, Any]) -> str:
    """One row of the printed table."""

    def percent(name: str) -> str:
        mean, low, high = (100 * found[f"{name}{end}"] for end in ("", "_low", "_high"))
        return f"{mean:6.2f} [{low:6.2f},{high:6.2f}]"

    half = found["cost_per_worker_second_high"] - found["cost_per_worker_second"]
    return (
        f"{found['case']:10} {found['mode']:8} {found['hook_us']:7.2f} {found['window_extra_ms']:9.3f} "
        f"{found['cost_per_worker_second']:9.3f} +-{half:5.3f} {percent('by_windows')} {percent('by_windows_budget')}"
    )
