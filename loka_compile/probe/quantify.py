"""From samples to a table: the error and the cost of every candidate kernel on what its GEMM really sees.

Paper section III-A.2. Each candidate (site, role, provider, recipe) that does not refuse the GEMM runs on the sampled
operands; its result is compared with an fp64 product of the same operands, in the dtype that the GEMM runs in, so that
only what FP8 adds counts. The provider's own code runs where it works ("real kernel"), unless the plan is for another
device than this one; else the same scaling and FP8 format with fp32 products do ("emulated": the extra error of fast
accumulation is then not seen). What becomes of the errors is in ``gate.py``.

Costs come from the cost table of the target at the real batch size; with ``target="here"`` they are measured on the GPU
at hand, and the shipped table of that GPU stands in for what the time did not suffice for. A candidate that has none
there can never be chosen and its error is not measured. The contraction of grad_weight runs over the batch: its error
is measured on as many rows as were sampled, its cost is for all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING

import torch

from loka_compile import machine
from loka_compile.costs import CostTable, target_of_device_name
from loka_compile.errors import ProbeError
from loka_compile.gemm import Role
from loka_compile.probe.gate import Effort
from loka_compile.probe.samples import SiteSamples
from loka_compile.probe.site_errors import SiteErrors
from loka_compile.selection.operands import tensor
from loka_compile.table import BASELINE, Header, Measurement, Table

if TYPE_CHECKING:
    from loka_compile.lowering.providers.base import Provider
    from loka_compile.probe.site_stats import SiteStats

__all__ = ["MAX_PAIRS", "MAX_ROWS", "Effort", "SiteSamples", "quantify"]

#: Independent batches that the raw rows of a GEMM are cut into, and rows of one. With ``table="auto"`` there is nothing
#: else: a training run waits for its plan, and four batches tell an error of 0.1 from one of 0.2.
MAX_PAIRS = 4
MAX_ROWS = 128
OPERANDS = ("both", "drawn", "raw")
#: The target whose speeds are measured on the GPU at hand, and how long that may take.
HERE = "here"
BENCH_SECONDS = 120.0


def quantify(
    samples: Mapping[str, SiteSamples],
    *,
    target: str | None,
    providers: Iterable[str | Provider] | None = None,
    max_pairs: int = MAX_PAIRS,
    max_rows: int = MAX_ROWS,
    effort: Effort | None = None,
    progress: Callable[[str], None] | None = None,
    bench_seconds: float = BENCH_SECONDS,
    least_speedup: float | None = None,
) -> Table:
    """Measure the error of every candidate on ``samples``, take its cost from ``target``'s table.

    Rows with a NaN or an Inf are left out and counted (``Header.dropped_rows``). A site without a finite row, or whose
    weight is not finite, is refused with a reason that names it, and so stays in high precision.

    Args:
        samples: what was seen, by site: raw rows, and draws where a distribution was learnt.
        target: name of a shipped cost table; "here": speeds are measured on the GPU at hand; or None: errors are
            measured, but no candidate has a cost or is eligible.
        providers: names or instances; None is every registered one. The baseline is always measured too.
        max_pairs: independent batches that the raw rows of a GEMM are cut into. There are only so many rows, so their
            interval is as wide as it is.
        max_rows: rows of one of them.
        effort: how long to go on drawing, where there are draws.
        progress: called with the site's name after each site.
        bench_seconds: for measuring speeds, where ``target`` is "here".
        least_speedup: for a training run that waits: candidates whose kernel alone is not that much faster than high
            precision are refused without measuring them, and kernels that compile at their first call are emulated
            (their self-test has shown that they compute what they should).

    Raises:
        UnknownNameError: no such target or provider.
        ConfigError: speeds shall be measured here and there is no CUDA device.
        ProbeError: samples of one site do not belong together.
    """
    chosen = _providers(providers)
    costs = _costs(target, samples, chosen, bench_seconds)
    rows: list[Measurement] = []
    dropped: dict[str, int] = {}
    device = torch.device("cpu")
    for site, seen in samples.items():
        seen.check(site)
        device = seen.weights[0].device
        at_home = costs is None or target == HERE or target_of_device_name(_device_name(device)) == costs.target
        job = SiteErrors(site, seen, costs, chosen, at_home, (max_pairs, max_rows), effort or Effort(), least_speedup)
        rows += job.measure()
        if job.dropped:
            dropped[site] = job.dropped
        if progress is not None:
            progress(site)
    fingerprint = {site: tuple(seen.weights[0].shape) for site, seen in samples.items()}
    same = {
        tensor(site, what): tensor(first, what)
        for site, seen in samples.items() for what, first in seen.same.items() if first != site
    }  # fmt: skip
    name = None if costs is None else costs.target
    return Table(dataclasses.replace(_header(name, device, chosen, fingerprint, dropped), same=same), rows)


def quantify_stats(
    stats: Mapping[str, SiteStats],
    providers: Iterable[str | Provider] | None = None,
    *,
    target: str | None = None,
    effort: Effort | None = None,
    operands: str = "both",
    progress: Callable[[str], None] | None = None,
    bench_seconds: float = BENCH_SECONDS,
) -> Table:
    """As :func:`quantify`, on what a probe has learnt.

    Args:
        stats: by site, from a session or from files (``load_stats``).
        operands: "drawn" from the learnt distributions, the "raw" rows that were kept, or "both": the worse counts.

    Raises:
        ProbeError: ``operands`` is none of these, or a site's weight was never seen.
    """
    if operands not in OPERANDS:
        raise ProbeError(f"operands is {operands!r}; it must be one of {', '.join(OPERANDS)}")
    samples = {site: one.raw() if operands == "raw" else one.samples() for site, one in stats.items()}
    if operands == "drawn":
        samples = {site: dataclasses.replace(one, inputs=[], grad_outputs=[]) for site, one in samples.items()}
    return quantify(
        samples, target=target, providers=providers, effort=effort, progress=progress, bench_seconds=bench_seconds
    )


def _costs(
    target: str | None, samples: Mapping[str, SiteSamples], providers: Sequence[Provider], seconds: float
) -> CostTable | None:
    if target != HERE:
        return None if target is None else CostTable.load(target)
    from loka_compile.bench.here import measured_costs

    gemms = [
        seen.gemm(site, Role(role), size)
        for site, seen in samples.items() for role in seen.roles for size in {seen.batch, *seen.sizes}
    ]  # fmt: skip
    return measured_costs(gemms, providers, seconds=seconds)


def _providers(given: Iterable[str | Provider] | None) -> list[Provider]:
    from loka_compile.lowering.providers import PROVIDERS, get_provider

    names = [name for name, *_ in PROVIDERS] if given is None else given
    found = [get_provider(p) if isinstance(p, str) else p for p in names]
    return [p for p in found if p.name != BASELINE[0]]


def _header(
    target: str | None,
    device: torch.device,
    providers: Sequence[Provider],
    fingerprint: Mapping[str, tuple[int, ...]],
    dropped: Mapping[str, int],
) -> Header:
    cuda = device.type == "cuda"
    return Header(
        target=target or "",
        device=_device_name(device),
        driver=machine.driver() if cuda else "",
        torch=torch.__version__,
        triton=machine.version("triton"),
        libraries={p.name: p.version() for p in providers if _counts(p, device)},
        fingerprint={site: (n, k) for site, (n, k) in fingerprint.items()},
        dropped_rows=dict(dropped),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def _counts(provider: Provider, device: torch.device) -> bool:
    """Whether the provider's own kernels may have run; torch's version has a place of its own in the header."""
    return provider.distributions != ("torch",) and provider.supported(device=device.type) is None


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
