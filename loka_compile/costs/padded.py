"""What a GEMM costs as ``Provider.gemm`` runs it: operands padded to what the kernel takes, the result cut."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from loka_compile.costs.target import CostTable, Latency
from loka_compile.costs.traffic import element_bytes
from loka_compile.gemm import Gemm, Recipe

if TYPE_CHECKING:
    from loka_compile.lowering.providers.base import Provider


def padded_latency(costs: CostTable, gemm: Gemm, provider: Provider, recipe: Recipe) -> Latency | None:
    """Cost of ``gemm`` under a candidate, or None if the candidate was never measured.

    Padding is part of the quantiser's loop; cutting reads and writes the result once more. As without padding, a kernel
    of which no comparable shape was measured counts as no faster than the GEMM in high precision, as it is and not as
    it would be padded.
    """
    padded = provider.padded(gemm, recipe)
    latency = costs.latency(padded, provider.name, recipe)
    if latency is None or padded is gemm:
        return latency
    time = latency.gemm_us if latency.comparable else max(latency.gemm_us, costs.baseline(gemm))
    if (padded.m, padded.n) != (gemm.m, gemm.n):
        time += costs.moving_us(2 * gemm.m * gemm.n * element_bytes(gemm.dtype))
    return replace(latency, gemm_us=time)
