"""From samples to a table: the error and the cost of every candidate kernel on what its GEMM really sees.

Paper section III-A.2. Each candidate (site, role, provider, recipe) that does not refuse the GEMM runs on the sampled
operands; its result is compared with an fp64 product of the same operands, in the dtype that the GEMM runs in, so that
only what FP8 adds counts. The provider's own code runs where it works ("real kernel"), unless the plan is for another
device than this one; else the same scaling and FP8 format with fp32 products do ("emulated": the extra error of fast
accumulation is then not seen).

Costs come from the cost table of the target at the real batch size. A candidate that has none there can never be chosen
and its error is not measured. The contraction of grad_weight runs over the batch: its error is measured on as many
rows as were sampled, its cost is for all of them.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from loka_compile import machine
from loka_compile.costs import CostTable, target_of_device_name
from loka_compile.gemm import NATIVE, Gemm, Recipe, Role, Scaling
from loka_compile.operands import TRANSPOSED, form, tensor
from loka_compile.probe.runs import KernelFailed, Operand, Pair, Runs
from loka_compile.probe.samples import Batches, SiteSamples, cut
from loka_compile.table import BASELINE, Header, Measurement, Table

if TYPE_CHECKING:
    from loka_compile.lowering.providers.base import Provider

__all__ = ["MAX_PAIRS", "MAX_ROWS", "SiteSamples", "quantify"]

#: Operand pairs (independent batches of rows) per GEMM; the confidence interval comes from their spread.
MAX_PAIRS = 4
#: Rows of one pair.
MAX_ROWS = 128

logger = logging.getLogger(__name__)


def quantify(
    samples: Mapping[str, SiteSamples],
    *,
    target: str | None,
    providers: Iterable[str | Provider] | None = None,
    max_pairs: int = MAX_PAIRS,
    max_rows: int = MAX_ROWS,
    progress: Callable[[str], None] | None = None,
) -> Table:
    """Measure the error of every candidate on ``samples``, take its cost from ``target``'s table.

    Rows with a NaN or an Inf are left out and counted (``Header.dropped_rows``). A site without a finite row, or whose
    weight is not finite, is refused with a reason that names it, and so stays in high precision.

    Args:
        samples: what was seen, by site.
        target: name of a shipped cost table, or None: errors are measured, but no candidate has a cost or is eligible.
        providers: names or instances; None is every registered one. The baseline is always measured too.
        max_pairs: independent batches of rows per GEMM.
        max_rows: rows of one batch.
        progress: called with the site's name after each site.

    Raises:
        UnknownNameError: no such target or provider.
        ProbeError: samples of one site do not belong together.
    """
    costs = None if target is None else CostTable.load(target)
    chosen = _providers(providers)
    rows: list[Measurement] = []
    dropped: dict[str, int] = {}
    device = torch.device("cpu")
    for site, seen in samples.items():
        seen.check(site)
        device = seen.weights[0].device
        job = _Site(site, seen, costs, chosen, max_pairs, max_rows)
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
    return Table(dataclasses.replace(_header(target, device, chosen, fingerprint, dropped), same=same), rows)


def _providers(given: Iterable[str | Provider] | None) -> list[Provider]:
    from loka_compile.lowering.providers import PROVIDERS, get_provider

    names = [name for name, *_ in PROVIDERS] if given is None else given
    found = [get_provider(p) if isinstance(p, str) else p for p in names]
    return [p for p in found if p.name != BASELINE[0]]


class _Site:
    """All GEMMs of one site."""

    def __init__(
        self,
        site: str,
        seen: SiteSamples,
        costs: CostTable | None,
        providers: Sequence[Provider],
        max_pairs: int,
        max_rows: int,
    ) -> None:
        from loka_compile.lowering.providers import get_provider

        self.site, self.seen, self.costs, self.providers = site, seen, costs, providers
        self.baseline = get_provider(BASELINE[0])
        self.emulated = get_provider("emulated")
        self.dtype = getattr(torch, seen.dtype)
        self.weights = [w.detach().to(self.dtype) for w in seen.weights]
        self.bad_weight = not all(bool(torch.isfinite(w).all()) for w in self.weights)
        #: Whether what runs here says something about the device that the plan is for.
        self.at_home = costs is None or target_of_device_name(_device_name(seen.weights[0].device)) == costs.target
        self.limits = (max_pairs, max_rows)
        self.dropped = 0
        self._batches: dict[bool, Batches] = {}

    def measure(self) -> list[Measurement]:
        """Rows of every role, the baseline's first."""
        rows: list[Measurement] = []
        for role in Role:
            if role in {Role(r) for r in self.seen.roles}:
                rows += self._role(role)
        self.dropped = max((b.dropped for b in self._batches.values()), default=0)
        if self.dropped:
            looked = max(b.rows for b in self._batches.values())
            logger.warning("site %s: %d of %d rows hold NaN or Inf and are left out", self.site, self.dropped, looked)
        return rows

    def _role(self, role: Role) -> list[Measurement]:
        gemm = self.seen.gemm(self.site, role)
        pairs, reason = self._pairs(role)
        runs = Runs(gemm, pairs, self.emulated)
        candidates = [(self.baseline, NATIVE)]
        candidates += [(provider, recipe) for provider in self.providers for recipe in provider.recipes.values()]
        rows = []
        for provider, recipe in candidates:
            row = self._row(gemm, provider, recipe, runs, reason)
            rows += [self._resized(row, size, provider, recipe) for size in self.seen.sizes]
        return rows

    def _resized(self, row: Measurement, size: int, provider: Provider, recipe: Recipe) -> Measurement:
        """The row at another batch size: the error is the same, the cost is not."""
        if size == row.m_min:
            return row
        gemm = self.seen.gemm(self.site, Role(row.role), size)
        row = self._with_cost(dataclasses.replace(row, m_min=size, m_max=size), gemm, provider, recipe)
        refused = row.refused or provider.refuses_shape(provider.padded(gemm, recipe), recipe) or ""
        return dataclasses.replace(row, refused=refused)

    def _pairs(self, role: Role) -> tuple[list[Pair], str]:
        """Operand pairs of the role, or the reason why there are none."""
        if not self.seen.batch or not self.weights[0].numel():
            return [], f"the product of site {self.site} is empty"
        if self.bad_weight:
            return [], f"the weight of site {self.site} holds NaN or Inf"
        forward = role is Role.FORWARD
        calls: list[tuple[Tensor, ...]] = [(x,) for x in self.seen.inputs]
        if not forward:
            calls = list(zip(self.seen.inputs, self.seen.grad_outputs, strict=False))
        if forward not in self._batches:
            self._batches[forward] = cut(calls, self.dtype, *self.limits)
        found = self._batches[forward]
        if not found.batches:
            what = "" if forward else " with output gradients"
            if found.rows:
                return [], f"all {found.rows} sampled rows{what} of site {self.site} hold NaN or Inf"
            return [], f"no rows{what} were sampled at site {self.site}"
        bound = self.seen.input_bound
        pairs = []
        for index, batch in enumerate(found.batches):
            weight = self.weights[index % len(self.weights)]
            x, dy = batch.operands[0], batch.operands[-1]
            if forward:
                pairs.append(Pair(Operand(x, False, bound), Operand(weight, False), batch.representative))
            elif role is Role.GRAD_INPUT:
                pairs.append(Pair(Operand(dy, False), Operand(weight, True), batch.representative))
            else:
                pairs.append(Pair(Operand(dy, True), Operand(x, True, bound)))
        return pairs, ""

    def _row(self, gemm: Gemm, provider: Provider, recipe: Recipe, runs: Runs, reason: str) -> Measurement:
        n, k = self.weights[0].shape
        row = Measurement(
            self.site, gemm.role.value, self.seen.batch, self.seen.batch, n, k, gemm.dtype, provider.name, recipe.name
        )
        row = self._with_cost(row, gemm, provider, recipe)
        device = self.weights[0].device.type
        absent = provider.supported(recipe, device) or ""
        candidate = provider is not self.baseline
        if candidate:
            refused = provider.refuses_shape(provider.padded(gemm, recipe), recipe)
            reason = reason or refused or (absent if self.at_home else "")
        if candidate and self.costs is not None and math.isnan(row.total_us):
            reason = reason or f"no cost known for {row.candidate} on {self.costs.target}"
        if reason:
            return dataclasses.replace(row, refused=reason)
        try:
            found = runs.errors(provider, recipe, real=self.at_home or not candidate)
        except KernelFailed as failure:
            logger.warning("%s: %s", gemm, failure)
            return dataclasses.replace(row, refused=str(failure))
        errors, interval, source = found
        row = dataclasses.replace(
            row,
            mere=interval.mean, mere_low=interval.low, mere_high=interval.high,
            mere_by_row=errors.mere_by_row, mere_paper=errors.mere,
            frobenius=errors.frobenius, sqnr_db=errors.sqnr_db, max_error=errors.max_error, cosine=errors.cosine,
            samples=len(runs.pairs), error_source=source,
        )  # fmt: skip
        if candidate and self.costs is None:
            row = dataclasses.replace(row, refused=f"no cost known for device {device}")
        return row

    def _with_cost(self, row: Measurement, gemm: Gemm, provider: Provider, recipe: Recipe) -> Measurement:
        saved = 0
        if gemm.role is Role.FORWARD and recipe.a is not Scaling.NONE:
            saved = gemm.m * gemm.k * (self.dtype.itemsize - 1)
        if self.costs is None:
            return dataclasses.replace(row, saved_bytes=saved)
        padded = provider.padded(gemm, recipe)
        latency = self.costs.latency(padded, provider.name, recipe)
        row = dataclasses.replace(row, baseline_us=self.costs.baseline(gemm), saved_bytes=saved)
        if latency is None:
            return dataclasses.replace(row, quantize_us=math.nan, gemm_us=math.nan)
        a_form, b_form = _forms(gemm.role, provider, recipe)
        # A padded result is cut: read and written once more.
        cut = 2 * gemm.m * gemm.n * self.dtype.itemsize if (padded.m, padded.n) != (gemm.m, gemm.n) else 0
        return dataclasses.replace(
            row,
            quantize_us=latency.quantize_us,
            gemm_us=latency.gemm_us + self.costs.moving_us(cut),
            speed_source=f"cost table {self.costs.target}",
            a_form=a_form, a_once_us=latency.quantize_a_us - latency.a_layout_us, a_layout_us=latency.a_layout_us,
            b_form=b_form, b_once_us=latency.quantize_b_us - latency.b_layout_us, b_layout_us=latency.b_layout_us,
        )  # fmt: skip


def _forms(role: Role, provider: Provider, recipe: Recipe) -> tuple[str, str]:
    """The forms that the operands are quantised in. Providers share one quantiser unless they bring their own."""
    from loka_compile.lowering.providers.base import Provider as Common

    own = "" if type(provider).quantize is Common.quantize else provider.name
    a, b = TRANSPOSED[role]
    return form(recipe.a, recipe.a_dtype, a, own), form(recipe.b, recipe.b_dtype, b, own)


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
