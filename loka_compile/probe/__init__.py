"""Learns what every GEMM of a model sees in training, and measures FP8 on exactly that.

    with loka_compile.probe(model, every=100, dir="stats") as p:
        ...  # train
    table = p.quantify(target="h200")

The package is callable, and stands for :class:`loka_compile.probe.probe.Probe`. Importing it does not import torch.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from loka_compile.probe.norms import Behaviour, classify
    from loka_compile.probe.probe import Probe
    from loka_compile.probe.ranks import merge_across_ranks
    from loka_compile.probe.sampling import Sample
    from loka_compile.probe.site_stats import SiteStats, Stats, StatsOptions
    from loka_compile.probe.storage import load_stats
    from loka_compile.probe.summary import ProbeReport, SiteSummary

_HOME = {
    "Behaviour": "norms",
    "Probe": "probe",
    "ProbeReport": "summary",
    "Sample": "sampling",
    "SiteStats": "site_stats",
    "SiteSummary": "summary",
    "Stats": "site_stats",
    "StatsOptions": "site_stats",
    "classify": "norms",
    "load_stats": "storage",
    "merge_across_ranks": "ranks",
}

__all__ = [
    "Behaviour",
    "Probe",
    "ProbeReport",
    "Sample",
    "SiteStats",
    "SiteSummary",
    "Stats",
    "StatsOptions",
    "classify",
    "load_stats",
    "merge_across_ranks",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)


class _ProbePackage(ModuleType):
    """A package that can be called: ``loka_compile.probe`` is a verb as well as a place."""

    def __call__(self, model: nn.Module, **options: Any) -> Probe:
        """A session over ``model``; the options are those of :class:`loka_compile.probe.probe.Probe`."""
        from loka_compile.probe.probe import Probe

        return Probe(model, **options)


sys.modules[__name__].__class__ = _ProbePackage
