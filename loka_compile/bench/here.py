"""Speeds of some GEMMs on the GPU at hand, for a table that is to be made now (``quantify(target="here")``).

What is measured is kept beside the cached tables, one file for each GPU and set of versions, so that the next call
measures only what is new. The GPU's shipped cost table, if it has one, stands in for the rest.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from loka_compile import store
from loka_compile.bench.command import header
from loka_compile.bench.operands import Operands
from loka_compile.bench.prepare import configure
from loka_compile.bench.records import Records
from loka_compile.bench.runner import Bench
from loka_compile.bench.timing import GraphTimer, Timer
from loka_compile.costs import CostTable, target_of_device_name
from loka_compile.errors import ConfigError
from loka_compile.gemm import Gemm
from loka_compile.lowering.providers.base import Provider

logger = logging.getLogger(__name__)
#: Processes that compile beside a training run at most.
WORKERS = 8
#: What a device without a shipped table is called.
HERE = "here"


def measured_costs(
    gemms: Iterable[Gemm],
    providers: Sequence[Provider],
    *,
    seconds: float,
    path: Path | None = None,
    timer: Timer | None = None,
) -> CostTable:
    """Measure every provider's kernels at these GEMMs, their baselines and quantisers.

    Args:
        gemms: as they are in the model; the sizes that a provider pads them to are measured too.
        providers: those that do not work here are left out.
        seconds: time for all of it; what it does not suffice for is derived, as always (docs/table_and_plan.md).
        path: the file of measurements, created or continued; by default in the cache.
        timer: how arms are timed; by default CUDA graphs on the current device.

    Raises:
        ConfigError: there is no CUDA device.
        DeviceLostError: a kernel broke the device, and this process can use it no more. It is recorded as broken, so
            that the next process measures the rest.
    """
    if timer is None and not torch.cuda.is_available():
        raise ConfigError(
            'target "here" measures speeds on a CUDA device, and torch sees none; name a target with a shipped cost '
            f"table instead: {', '.join(CostTable.targets())}"
        )
    device = torch.device("cuda" if timer is None else "cpu")
    wanted = list(dict.fromkeys(_sizes(gemms, providers)))
    about = header() if timer is None else {"gpu": "none", "driver": "", "torch": torch.__version__, "triton": ""}
    path = path or store.cache_dir() / f"bench-{_digest(about)}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Two processes that measure at the same time would disturb each other, and the file.
    with store.locked(path.with_suffix(".lock"), patience=2 * seconds + store.PATIENCE):
        _measure(wanted, providers, path, about, seconds, timer, device)
    here = CostTable.from_csv(path, HERE)
    target = target_of_device_name(about["gpu"])
    return (here if target is None else CostTable.load(target)).with_measured(here)


def _measure(
    wanted: list[Gemm], providers: Sequence[Provider], path: Path, about: Mapping[str, str], seconds: float,
    timer: Timer | None, device: torch.device,
) -> None:  # fmt: skip
    able = [p for p in providers if p.supported(device=device.type) is None and p.name != "emulated"]
    records = Records(path, about)
    real = timer is None
    if real:
        configure()
    operands = Operands(device, _room(wanted) if real else 1 << 18)
    run = Bench(
        wanted, able, records, timer or GraphTimer(), operands, seconds=seconds,
        l2=torch.cuda.get_device_properties(device).L2_cache_size if real else 1,
        workers=min(WORKERS, os.cpu_count() or 1) if real else 0,
    )  # fmt: skip
    outcome = run.run()
    if outcome.left:
        logger.warning("%d groups of kernels were not measured within %.0f s", outcome.left, seconds)


def _room(gemms: Sequence[Gemm]) -> int:
    """Elements of the buffers that operands are views of: enough to go past the L2, little beside a training."""
    return max(1 << 27, 8 * max((max(g.m * g.k, g.n * g.k, g.m * g.n) for g in gemms), default=1))


def _sizes(gemms: Iterable[Gemm], providers: Sequence[Provider]) -> Iterable[Gemm]:
    """The GEMMs, and what providers pad them to, by their sizes alone."""
    for gemm in gemms:
        bare = Gemm("", gemm.role, gemm.m, gemm.n, gemm.k, gemm.dtype)
        yield bare
        for provider in providers:
            for recipe in provider.recipes.values():
                padded = provider.padded(gemm, recipe)
                yield dataclasses.replace(bare, m=padded.m, n=padded.n, k=padded.k)


def _digest(about: Mapping[str, str]) -> str:
    """Of the device and all versions: another library's kernels are other kernels."""
    known = {name: text for name, text in about.items() if name not in ("date", "python", "method")}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]
