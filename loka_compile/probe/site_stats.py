"""Everything that is known about one site: what its GEMMs' three operands look like."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loka_compile.errors import ProbeError
from loka_compile.probe.activations import ActivationTracker
from loka_compile.probe.norms import NormSeries
from loka_compile.probe.numerics import plain_math
from loka_compile.probe.reservoir import ROWS, Reservoir
from loka_compile.probe.samples import Draw, SiteSamples
from loka_compile.probe.sampling import Sample, SiteSampler, draw
from loka_compile.probe.structured import FULL_LIMIT
from loka_compile.probe.tails import Moments, TailSketch, sketches_available
from loka_compile.probe.weights import MOMENTUM, WeightTracker

#: Weights drawn for one site, 100 of them together. Drawing costs as much as a product of the weight's size.
WEIGHT_BYTES = 1 << 30


@dataclass(frozen=True)
class StatsOptions:
    """How statistics are kept."""

    #: torch.float32, or torch.float64 for covariances, U and V to 1e-10.
    dtype: torch.dtype = torch.float32
    #: Widest layer whose covariance is kept in full.
    full_limit: int = FULL_LIMIT
    #: m of the weights' moving averages.
    momentum: float = MOMENTUM
    #: Raw rows kept of inputs and of gradients.
    reservoir_rows: int = ROWS
    #: Numbers of one batch that go into the tail sketch, in whole rows; 0 keeps none. It works on the CPU and holds
    #: the interpreter meanwhile.
    sketch_values: int = 1 << 14


class RowStats:
    """Statistics of rows: inputs [rows, in_features] or output gradients [rows, out_features]."""

    def __init__(self, features: int, row_dtype: torch.dtype, options: StatsOptions, device: torch.device) -> None:
        """Start with no rows."""
        self.options = options
        self.tracker = ActivationTracker(features, dtype=options.dtype, full_limit=options.full_limit, device=device)
        self.moments = Moments(features, device)
        self.reservoir = Reservoir(features, row_dtype, rows=options.reservoir_rows, device=device)
        self.sketch = TailSketch(features) if options.sketch_values and sketches_available() else None
        #: L2 norm of the batch's mean row over time.
        self.mean_norm = NormSeries()

    @property
    def n(self) -> int:
        """Finite rows seen."""
        return self.tracker.n

    @property
    def skipped(self) -> int:
        """Rows with an Inf or a NaN, which are in none of the statistics."""
        return int(self.tracker.skipped)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        sketch = self.sketch.nbytes if self.sketch is not None else 0
        return self.tracker.nbytes + self.moments.nbytes + self.reservoir.nbytes + sketch

    def update(self, rows: Tensor, keys: Tensor, step: int) -> None:
        """Take in rows [rows, features] with their reservoir keys [rows], on the CPU."""
        if not len(rows):
            return
        with plain_math(rows.device):
            valid = self.tracker.update(rows)
            self.moments.update(rows, valid)
            self.reservoir.update(rows, keys, valid)
            if self.sketch is not None:
                wanted = max(1, self.options.sketch_values // rows.shape[1])
                some = torch.topk(keys, min(wanted, len(rows))).indices.to(rows.device)
                finite = rows.index_select(0, some)[valid.index_select(0, some)]
                self.sketch.update(finite.cpu())
            count = int(valid.sum())
            if count:
                mean = torch.where(valid[:, None], rows, 0).sum(0, dtype=torch.float64) / count
                self.mean_norm.append(step, float(torch.linalg.vector_norm(mean)))

    def merge(self, other: RowStats) -> None:
        """Add the rows that another rank has seen."""
        self.tracker.merge(other.tracker)
        self.moments.merge(other.moments)
        self.reservoir.merge(other.reservoir)
        if self.sketch is not None and other.sketch is not None:
            self.sketch.merge(other.sketch)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Copied tensors by dotted name, and the rest for JSON."""
        tensors = _prefixed(
            tracker=self.tracker.state(),
            moments=self.moments.state(),
            reservoir=self.reservoir.state(),
            sketch=self.sketch.state() if self.sketch is not None else {},
        )
        return tensors, {"mean_norm": self.mean_norm.state()}

    @classmethod
    def from_state(
        cls, tensors: Mapping[str, Tensor], rest: Mapping[str, Any], options: StatsOptions, device: torch.device
    ) -> RowStats:
        """The statistics whose ``state()`` this is."""
        new = cls.__new__(cls)
        new.options = options
        new.tracker = ActivationTracker.from_state(_below(tensors, "tracker"), device)
        new.moments = Moments.from_state(_below(tensors, "moments"), device)
        new.reservoir = Reservoir.from_state(_below(tensors, "reservoir"), device)
        sketch = _below(tensors, "sketch")
        new.sketch = TailSketch.from_state(sketch) if sketch and sketches_available() else None
        new.mean_norm = NormSeries.from_state(rest["mean_norm"])
        return new


class SiteStats:
    """Statistics of one linear layer's call: ``y[M, N] = x[M, K] @ W[N, K].T``.

    Attributes:
        site: "<module FQN>#<call index>".
        input: of x.
        weight: of W, or None before the first.
        grad_output: of dy, or None before the first.
        bias_norm: L2 norm of the bias over time; empty where there is none.
        dtype: what the GEMM runs in, such as "bfloat16".
        batch: M of the last call seen.
        calls: calls whose rows were taken.
    """

    def __init__(
        self,
        site: str,
        in_features: int,
        out_features: int,
        row_dtype: torch.dtype,
        *,
        options: StatsOptions | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """Start with nothing seen."""
        self.site, self.in_features, self.out_features = site, in_features, out_features
        self.options = options or StatsOptions()
        self.device = torch.device(device)
        self.input = RowStats(in_features, row_dtype, self.options, self.device)
        self.weight: WeightTracker | None = None
        self.grad_output: RowStats | None = None
        self.bias_norm = NormSeries()
        self.dtype = str(row_dtype).removeprefix("torch.")
        self.batch = 0
        self.calls = 0

    def update_input(self, rows: Tensor, keys: Tensor, step: int, *, batch: int | None = None) -> None:
        """Take in rows of x [rows, in_features]; ``batch`` is the whole call's M where these are a part of it."""
        self.input.update(rows, keys, step)
        self.batch = len(rows) if batch is None else batch
        self.calls += 1

    def update_grad_output(self, rows: Tensor, keys: Tensor, step: int) -> None:
        """Take in rows of dy [rows, out_features]; the same keys as the input's for the same rows."""
        if self.grad_output is None:
            self.grad_output = RowStats(self.out_features, rows.dtype, self.options, self.device)
        self.grad_output.update(rows, keys, step)

    def update_weight(self, weight: Tensor) -> None:
        """Take in the weight [out_features, in_features] as it is now."""
        if self.weight is None:
            self.weight = WeightTracker(
                self.out_features,
                self.in_features,
                momentum=self.options.momentum,
                dtype=self.options.dtype,
                full_limit=self.options.full_limit,
                device=self.device,
            )
        self.weight.update(weight)

    def update_bias(self, bias: Tensor, step: int) -> None:
        """Take in the bias [out_features] as it is now."""
        self.bias_norm.append(step, float(torch.linalg.vector_norm(bias.detach(), dtype=torch.float64)))

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        grad = self.grad_output.nbytes if self.grad_output is not None else 0
        return self.input.nbytes + grad + (self.weight.nbytes if self.weight is not None else 0)

    @property
    def skipped(self) -> int:
        """Rows and weights that held an Inf or a NaN."""
        grad = self.grad_output.skipped if self.grad_output is not None else 0
        return self.input.skipped + grad + (self.weight.skipped if self.weight is not None else 0)

    def merge(self, other: SiteStats) -> None:
        """Add what another rank has seen of the same site. Norms over time stay this rank's."""
        if (other.site, other.in_features, other.out_features) != (self.site, self.in_features, self.out_features):
            raise ProbeError(f"statistics of {other!r} do not belong to {self!r}")
        self.input.merge(other.input)
        if other.grad_output is not None:
            if self.grad_output is None:
                kept = other.grad_output.reservoir.rows.dtype
                self.grad_output = RowStats(self.out_features, kept, self.options, self.device)
            self.grad_output.merge(other.grad_output)
        if other.weight is not None:
            if self.weight is None:
                self.weight = other.weight.clone(self.device)
            else:
                self.weight.merge(other.weight)
        self.calls += other.calls

    def sample(self, n: int, batch: int, *, seed: int = 0) -> Iterator[Sample]:
        """``n`` draws from the learnt distributions, ``batch`` rows each (see :mod:`loka_compile.probe.sampling`)."""
        return draw(self, n, batch, seed=seed)

    def samples(self, *, seed: int = 0) -> SiteSamples:
        """The raw rows, and draws from the learnt distributions without end, as input for ``quantify``.

        Of a weight so large that 100 would take more than WEIGHT_BYTES, some pairs in a row share a draw.
        """
        raw = self.raw()
        together = -(-100 * 4 * self.in_features * self.out_features // WEIGHT_BYTES)

        def draws(rows: int) -> Iterator[Draw]:
            sampler = SiteSampler(self, seed=seed)
            for number in itertools.count():
                if number % together == 0:
                    weight = sampler.weight()
                x, grad = sampler.rows(rows)
                yield x, weight, grad

        return dataclasses.replace(raw, draws=draws)

    def raw(self) -> SiteSamples:
        """The reservoir's raw rows beside the mean weight, as input for ``quantify``."""
        if self.weight is None or not self.weight.updates:
            raise ProbeError(f"site {self.site!r} has no weight statistics")
        weight = self.weight.mean().float()
        inputs, grads = [self.input.reservoir.sample()], []
        if self.grad_output is not None:
            x, dy = self.input.reservoir.paired(self.grad_output.reservoir)
            inputs, grads = [x], [dy]
        return SiteSamples(
            inputs=inputs, weight=weight, grad_outputs=grads, dtype=self.dtype, batch=self.batch, roles=self._roles()
        )

    def _roles(self) -> tuple[str, ...]:
        return ("forward",) if self.grad_output is None else ("forward", "grad_input", "grad_weight")

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Copied tensors by dotted name, and the rest for JSON."""
        tensors, rows = self.input.state()
        out = _prefixed(input=tensors)
        rest: dict[str, Any] = {
            "in_features": self.in_features,
            "out_features": self.out_features,
            "dtype": self.dtype,
            "batch": self.batch,
            "calls": self.calls,
            "bias_norm": self.bias_norm.state(),
            "input": rows,
        }
        if self.weight is not None:
            out |= _prefixed(weight=self.weight.state())
        if self.grad_output is not None:
            tensors, rest["grad_output"] = self.grad_output.state()
            out |= _prefixed(grad_output=tensors)
        return out, rest

    @classmethod
    def from_state(
        cls,
        site: str,
        tensors: Mapping[str, Tensor],
        rest: Mapping[str, Any],
        *,
        options: StatsOptions | None = None,
        device: torch.device | str = "cpu",
    ) -> SiteStats:
        """The statistics whose ``state()`` this is."""
        new = cls.__new__(cls)
        new.site, new.in_features, new.out_features = site, rest["in_features"], rest["out_features"]
        new.options, new.device = options or StatsOptions(), torch.device(device)
        new.input = RowStats.from_state(_below(tensors, "input"), rest["input"], new.options, new.device)
        weight, new.grad_output = _below(tensors, "weight"), None
        new.weight = WeightTracker.from_state(weight, new.device) if weight else None
        if "grad_output" in rest:
            grads = _below(tensors, "grad_output")
            new.grad_output = RowStats.from_state(grads, rest["grad_output"], new.options, new.device)
        new.bias_norm = NormSeries.from_state(rest["bias_norm"])
        new.dtype, new.batch, new.calls = rest["dtype"], rest["batch"], rest["calls"]
        return new

    def __repr__(self) -> str:
        return f"SiteStats({self.site!r}, {self.in_features} -> {self.out_features})"


class Stats(dict[str, SiteStats]):
    """All sites, by name."""

    def sample(self, site: str, n: int, batch: int, *, seed: int = 0) -> Iterator[Sample]:
        """``n`` draws of the site's operands, ``batch`` rows each.

        Raises:
            ProbeError: there is no such site, or nothing is known of it yet.
        """
        if site not in self:
            raise ProbeError(f"no statistics of site {site!r}; known are: {', '.join(sorted(self)) or 'none'}")
        return self[site].sample(n, batch, seed=seed)

    def merge(self, other: Mapping[str, SiteStats]) -> None:
        """Add what another rank has seen."""
        for site, theirs in other.items():
            if site in self:
                self[site].merge(theirs)
            else:
                tensors, rest = theirs.state()
                self[site] = SiteStats.from_state(site, tensors, rest, options=theirs.options, device=theirs.device)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(s.nbytes for s in self.values())


def _prefixed(**parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{part}.{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}


def _below(tensors: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    return {name.removeprefix(part + "."): t for name, t in tensors.items() if name.startswith(part + ".")}
