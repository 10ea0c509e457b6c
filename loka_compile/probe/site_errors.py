"""The rows of a table for one site: every candidate of its GEMMs, measured on draws and on raw rows."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from loka_compile.costs.padded import padded_latency
from loka_compile.gemm import NATIVE, Gemm, Recipe, Role, Scaling, refused_for_role
from loka_compile.lowering.providers import COMPILE_AT_FIRST_CALL
from loka_compile.probe.gate import Effort, Score, remarks, score, worse
from loka_compile.probe.runs import Candidate, Operand, Pair, Runs
from loka_compile.probe.samples import Batches, Draw, SiteSamples, cut
from loka_compile.selection.operands import OPERANDS, TRANSPOSED, form
from loka_compile.table import BASELINE, Measurement

if TYPE_CHECKING:
    from loka_compile.costs import CostTable
    from loka_compile.lowering.providers.base import Provider

#: Between two looks at whether the intervals are narrow enough.
PAIRS_BETWEEN_LOOKS = 10

logger = logging.getLogger(__name__)


@dataclass
class _Job:
    """One GEMM: its rows, those of them that are to be measured, and what is measured."""

    gemm: Gemm
    rows: list[tuple[Measurement, Candidate]]
    raw: Runs
    drawn: Runs

    @property
    def wanted(self) -> list[Candidate]:
        return [candidate for row, candidate in self.rows if not row.refused]


class SiteErrors:
    """All GEMMs of one site.

    Args:
        site: its name.
        seen: raw rows, and draws where there are any.
        costs: the target's, or None.
        providers: the candidates', without the baseline.
        at_home: whether what runs here says something about the device that the plan is for.
        limits: batches that raw rows are cut into, and rows of one.
        effort: how long to draw.
    """

    def __init__(
        self,
        site: str,
        seen: SiteSamples,
        costs: CostTable | None,
        providers: Sequence[Provider],
        at_home: bool,
        limits: tuple[int, int],
        effort: Effort,
        least_speedup: float | None = None,
    ) -> None:
        """Nothing is measured yet."""
        from loka_compile.lowering.providers import get_provider

        self.site, self.seen, self.costs, self.providers = site, seen, costs, providers
        self.baseline, self.emulated = get_provider(BASELINE[0]), get_provider("emulated")
        self.at_home, self.limits, self.effort, self.least_speedup = at_home, limits, effort, least_speedup
        self.dtype = getattr(torch, seen.dtype)
        self.weights = [w.detach().to(self.dtype) for w in seen.weights]
        self.device = self.weights[0].device.type
        #: Raw rows that were left out for a NaN or an Inf.
        self.dropped = 0
        self._batches: dict[bool, Batches] = {}

    def measure(self) -> list[Measurement]:
        """Rows of every role, the baseline's first."""
        jobs = []
        for role in Role:
            if role in {Role(r) for r in self.seen.roles}:
                jobs.append(self._job(role))
        self._draw([job for job in jobs if job.wanted])
        self.dropped = max((b.dropped for b in self._batches.values()), default=0)
        if self.dropped:
            looked = max(b.rows for b in self._batches.values())
            logger.warning("site %s: %d of %d rows hold NaN or Inf and are left out", self.site, self.dropped, looked)
        filled = [(self._filled(job, row, candidate), candidate) for job in jobs for row, candidate in job.rows]
        return [self._resized(row, size, candidate) for row, candidate in filled for size in self.seen.sizes]

    def _job(self, role: Role) -> _Job:
        """Decide what is to be measured of one role, and measure it on the raw rows."""
        gemm = self.seen.gemm(self.site, role)
        pairs, reason = self._raw_pairs(role)
        if self.seen.draws is not None and self.seen.batch:
            reason = ""
        lengths = {pair.a.base.shape[0] for pair in pairs}
        job = _Job(
            gemm,
            [self._row(gemm, self.baseline, NATIVE, reason)],
            Runs(gemm, lengths, self.emulated),
            Runs(gemm, {self.effort.rows}, self.emulated),
        )
        for provider in self.providers:
            job.rows += [self._row(gemm, provider, recipe, reason) for recipe in provider.recipes.values()]
        for pair in pairs:
            job.raw.add(pair, job.wanted)
        return job

    def _row(
        self, gemm: Gemm, provider: Provider, recipe: Recipe, reason: str
    ) -> tuple[Measurement, Candidate]:  # fmt: skip
        """A row without errors: its costs, and why it is not measured if that is so."""
        (n, k), m = self.weights[0].shape, self.seen.batch
        row = Measurement(self.site, gemm.role.value, m, m, n, k, gemm.dtype, provider.name, recipe.name)
        row = self._with_cost(row, gemm, provider, recipe)
        is_baseline = provider is self.baseline
        real = self.at_home
        if not is_baseline:
            reason = reason or refused_for_role(recipe.name, gemm.role)
            reason = reason or provider.refuses_shape(provider.padded(gemm, recipe), recipe) or ""
            if self.costs is not None and math.isnan(row.total_us):
                reason = reason or f"no cost known for {row.candidate} on {self.costs.target}"
            reason = reason or self._too_slow(gemm, provider, recipe)
            # Last, because it may load a library.
            if self.at_home and not reason:
                reason = provider.supported(recipe, self.device) or ""
            real = self.at_home and not (self.least_speedup is not None and provider.name in COMPILE_AT_FIRST_CALL)
        candidate = Candidate(provider, recipe, real=real or is_baseline)
        return dataclasses.replace(row, refused=reason), candidate

    def _too_slow(self, gemm: Gemm, provider: Provider, recipe: Recipe) -> str:
        """Why a candidate cannot be chosen at any batch size, were quantising free; "" where it could be."""
        if self.least_speedup is None or self.costs is None:
            return ""
        best = 0.0
        for size in self.seen.sizes:
            sized = self.seen.gemm(self.site, gemm.role, size)
            latency = padded_latency(self.costs, sized, provider, recipe)
            if latency is not None:
                best = max(best, self.costs.baseline(sized) / latency.gemm_us)
        if best >= self.least_speedup:
            return ""
        return f"its kernel alone has {best:.2f}x the speed of high precision; {self.least_speedup:g}x is asked for"

    def _with_cost(self, row: Measurement, gemm: Gemm, provider: Provider, recipe: Recipe) -> Measurement:
        saved = 0
        if gemm.role is Role.FORWARD and recipe.a is not Scaling.NONE:
            saved = gemm.m * gemm.k * (self.dtype.itemsize - 1)
        if self.costs is None:
            return dataclasses.replace(row, saved_bytes=saved)
        latency = padded_latency(self.costs, gemm, provider, recipe)
        a_stored, b_stored = self._stored_us(gemm, recipe)
        row = dataclasses.replace(
            row, baseline_us=self.costs.baseline(gemm), saved_bytes=saved, a_stored_us=a_stored, b_stored_us=b_stored
        )  # fmt: skip
        if latency is None:
            return dataclasses.replace(row, quantize_us=math.nan, gemm_us=math.nan)
        a_form, b_form = forms(gemm, provider, recipe)
        return dataclasses.replace(
            row,
            quantize_us=latency.quantize_us,
            gemm_us=latency.gemm_us,
            speed_source=self.costs.source(provider.padded(gemm, recipe), provider.name, recipe.name),
            a_form=a_form, a_once_us=latency.quantize_a_us - latency.a_layout_us, a_layout_us=latency.a_layout_us,
            b_form=b_form, b_once_us=latency.quantize_b_us - latency.b_layout_us, b_layout_us=latency.b_layout_us,
        )  # fmt: skip

    def _stored_us(self, gemm: Gemm, recipe: Recipe) -> list[float]:
        """What writing A and B in their own dtype costs, where that is done for this candidate's sake alone."""
        assert self.costs is not None
        found = []
        for what, scaling, rows in zip(OPERANDS[gemm.role], (recipe.a, recipe.b), (gemm.m, gemm.n), strict=True):
            needed = what in self.seen.written and scaling is not Scaling.TENSORWISE
            found.append(self.costs.bytes_us(rows * gemm.k * self.dtype.itemsize) if needed else 0.0)
        return found

    def _resized(self, row: Measurement, size: int, candidate: Candidate) -> Measurement:
        """The row at another batch size: the error is the same, the cost is not."""
        if size == row.m_min:
            return row
        gemm = self.seen.gemm(self.site, Role(row.role), size)
        row = dataclasses.replace(row, m_min=size, m_max=size)
        row = self._with_cost(row, gemm, candidate.provider, candidate.recipe)
        padded = candidate.provider.padded(gemm, candidate.recipe)
        refused = row.refused or candidate.provider.refuses_shape(padded, candidate.recipe) or ""
        return dataclasses.replace(row, refused=refused)

    # Operands.

    def _pair(self, role: Role, x: Tensor, weight: Tensor, dy: Tensor | None, rows: int | None) -> Pair:
        bound = self.seen.input_bound
        if role is Role.FORWARD:
            return Pair(Operand(x, False, bound), Operand(weight, False), rows)
        assert dy is not None
        if role is Role.GRAD_INPUT:
            return Pair(Operand(dy, False), Operand(weight, True), rows)
        return Pair(Operand(dy, True), Operand(x, True, bound))

    def _raw_pairs(self, role: Role) -> tuple[list[Pair], str]:
        """Pairs of raw rows, or the reason why there are none."""
        if not self.seen.batch or not self.weights[0].numel():
            return [], f"the product of site {self.site} is empty"
        if not all(bool(torch.isfinite(w).all()) for w in self.weights):
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
        pairs = []
        for index, batch in enumerate(found.batches):
            weight = self.weights[index % len(self.weights)]
            x, dy = batch.operands[0], None if forward else batch.operands[-1]
            pairs.append(self._pair(role, x, weight, dy, batch.representative))
        return pairs, ""

    def _draw(self, jobs: list[_Job]) -> None:
        """Measure on drawn operands until every candidate is settled, or the cap is reached."""
        if self.seen.draws is None or not self.seen.batch:
            return
        active = {job.gemm.role: [*job.wanted, *self._exact(job)] for job in jobs}
        by_role = {job.gemm.role: job for job in jobs}
        draws = self.seen.draws(self.effort.rows)
        for number in range(1, self.effort.cap + 1):
            if not any(active.values()):
                return
            operands = self._cast(next(draws))
            if operands is None:
                continue
            for role, candidates in active.items():
                if candidates:
                    by_role[role].drawn.add(self._pair(role, *operands, None), candidates)
            if number >= self.effort.pairs and (number - self.effort.pairs) % PAIRS_BETWEEN_LOOKS == 0:
                for role, candidates in active.items():
                    runs = by_role[role].drawn
                    scores = {c: self._score(runs, c, role) for c in candidates}
                    active[role] = [c for c, s in scores.items() if s is not None and not s.is_settled(self.effort)]

    def _cast(self, draw: Draw) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """The draw in the GEMM's dtype; None if that has no room for it (fp16)."""
        x, weight, dy = (None if t is None else t.to(self.dtype) for t in draw)
        assert x is not None
        assert weight is not None
        finite = all(bool(torch.isfinite(t).all()) for t in (x, weight, dy) if t is not None)
        return (x, weight, dy) if finite else None

    def _exact(self, job: _Job) -> list[Candidate]:
        """Every recipe that a real kernel runs, in exact arithmetic: what a faulty kernel stands out against."""
        found = {
            c.recipe for c in job.wanted if job.drawn.source(c) == "real kernel" and c.provider is not self.baseline
        }
        return [Candidate(self.emulated, recipe, real=False) for recipe in found if not recipe.fast_accum]

    # Results.

    def _score(self, runs: Runs, candidate: Candidate, role: Role) -> Score | None:
        batches = runs.batches(candidate)
        return score(batches, role) if batches else None

    def _filled(self, job: _Job, row: Measurement, candidate: Candidate) -> Measurement:
        """The row with what was measured."""
        if row.refused:
            return row
        failure = job.raw.failed.get(candidate.name) or job.drawn.failed.get(candidate.name)
        if failure:
            return dataclasses.replace(row, refused=failure)
        role = job.gemm.role
        raw, drawn = (self._score(runs, candidate, role) for runs in (job.raw, job.drawn))
        if raw is None and drawn is None:
            reason = f"what was learnt of site {self.site} does not fit into {self.seen.dtype}"
            return dataclasses.replace(row, refused=reason)
        exact = None
        if not candidate.recipe.fast_accum and job.drawn.source(candidate) == "real kernel":
            exact = self._score(job.drawn, Candidate(self.emulated, candidate.recipe, real=False), role)
        gate = worse(drawn, raw)
        errors = gate.errors
        row = dataclasses.replace(
            row,
            mere=gate.gate.mean, mere_low=gate.gate.low, mere_high=gate.gate.high,
            mere_drawn=math.nan if drawn is None else drawn.gate.mean,
            mere_raw=math.nan if raw is None else raw.gate.mean,
            mere_floored=errors.mere_floored, mere_by_row=errors.mere_by_row, mere_paper=errors.mere,
            frobenius=errors.frobenius, sqnr_db=errors.sqnr_db, max_error=errors.max_error, cosine=errors.cosine,
            samples=gate.pairs, error_source=(job.raw if gate is raw else job.drawn).source(candidate),
            remark=remarks(drawn, raw, exact, self.effort),
        )  # fmt: skip
        if candidate.provider is not self.baseline and self.costs is None:
            row = dataclasses.replace(row, refused=f"no cost known for device {self.device}")
        return row


def forms(gemm: Gemm, provider: Provider, recipe: Recipe) -> tuple[str, str]:
    """The forms that the operands are quantised in. Providers share one quantiser unless they bring their own."""
    from loka_compile.lowering.providers.base import Provider as Common

    own = "" if type(provider).quantize is Common.quantize else provider.name
    a, b = TRANSPOSED[gemm.role]
    m, n, k = (provider.padding(gemm, recipe, letter) for letter in "mnk")
    return form(recipe.a, recipe.a_dtype, a, own, (m, k)), form(recipe.b, recipe.b_dtype, b, own, (n, k))
