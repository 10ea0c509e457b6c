"""What was seen at a site, and how it is cut into independent batches of finite rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from loka_compile.errors import ProbeError
from loka_compile.gemm import Gemm, Role

#: A contraction over rows (grad_weight) is cut to a multiple of this where it can be, as FP8 kernels want it.
ALIGN = 16


#: Input, weight and output gradient (None where there is none).
Draw = tuple[Tensor, Tensor, Tensor | None]


@dataclass(frozen=True, kw_only=True)
class SiteSamples:
    """Operands seen by the GEMMs of one linear layer ``y[M, N] = x[M, K] @ W[N, K].T``."""

    #: Rows of the input, [rows, K], one tensor per sampled call.
    inputs: Sequence[Tensor]
    #: The weight [N, K], or one per sampled call.
    weight: Tensor | Sequence[Tensor]
    #: Rows of the output's gradient, [rows, N]; tensor i holds the same rows of the batch as ``inputs[i]``.
    grad_outputs: Sequence[Tensor] = ()
    #: dtype that the GEMM runs in, such as "bfloat16"; samples of another dtype are cast to it first.
    dtype: str = "bfloat16"
    #: The real batch size M, which the costs are for.
    batch: int
    #: Proven upper bound of the input's absolute values, or None.
    input_bound: float | None = None
    #: The GEMMs that the graph holds.
    roles: Collection[Role | str] = field(default_factory=lambda: tuple(Role))
    #: True when M varies from call to call.
    dynamic: bool = False
    #: Batch sizes seen from call to call, where they vary.
    batches: Collection[int] = ()
    #: Operands that are the very tensor of another site: "input", "weight", "grad_output" -> that site. All sites with
    #: one tensor name the same one of them.
    same: Mapping[str, str] = field(default_factory=dict)
    #: Operands that their producer can write in FP8 alone: a proven bound, and none but GEMMs read them.
    written: Collection[str] = ()
    #: What a fused kernel of the target would quantise: "weight", "grad_output", "input" (for grad_weight).
    fused: Collection[str] = ()
    #: "epilogue" where a BlockNorm reads the layer's result and a fused kernel of the target could take it, else "".
    norm: str = ""
    #: Operands drawn from learnt distributions, without end, for a number of rows: x [rows, K], W [N, K] and dy
    #: [rows, N] (or None) each time. None: no distribution was learnt.
    draws: Callable[[int], Iterator[Draw]] | None = None

    @property
    def weights(self) -> list[Tensor]:
        """The weight samples as a list."""
        return [self.weight] if isinstance(self.weight, Tensor) else list(self.weight)

    @property
    def sizes(self) -> list[int]:
        """Batch sizes to take costs at: the real one, and where it varies, up to five over what was seen."""
        if not (self.dynamic and self.batches):
            return [self.batch]
        low, high = min(self.batch, *self.batches), max(self.batch, *self.batches)
        between = {round(math.sqrt(low * self.batch)), round(math.sqrt(self.batch * high))}
        return sorted({low, self.batch, high, *between})

    def gemm(self, site: str, role: Role, batch: int | None = None) -> Gemm:
        """The GEMM of ``role``, with the real batch size or another one."""
        n, k = self.weights[0].shape
        m = self.batch if batch is None else batch
        weight, grad, x = (name in self.fused for name in ("weight", "grad_output", "input"))
        varies = "m" if self.dynamic else ""
        if role is Role.FORWARD:
            return Gemm(
                site, role, m, n, k, self.dtype, varies, a_bound=self.input_bound, b_fused=weight, norm=self.norm
            )
        if role is Role.GRAD_INPUT:
            return Gemm(site, role, m, k, n, self.dtype, varies, a_fused=grad, b_fused=weight)
        varies = "k" if self.dynamic else ""
        return Gemm(site, role, n, k, m, self.dtype, varies, b_bound=self.input_bound, a_fused=grad, b_fused=x)

    def check(self, site: str) -> None:
        """Raise ProbeError unless all samples are matrices of one layer."""
        if not self.weights:
            raise ProbeError(f"site {site!r} has no weight sample")
        n, k = self.weights[0].shape if self.weights[0].dim() == 2 else (-1, -1)
        for what, tensors, width in (("weight", self.weights, k), ("input", self.inputs, k),
                                     ("output gradient", self.grad_outputs, n)):  # fmt: skip
            for x in tensors:
                if x.dim() != 2 or x.shape[1] != width or (what == "weight" and x.shape[0] != n):
                    raise ProbeError(
                        f"site {site!r}: {what} sample of shape {tuple(x.shape)} with a weight of {[n, k]}"
                    )


@dataclass(frozen=True)
class Batch:
    """The same rows of different operands, [rows, features] each."""

    operands: tuple[Tensor, ...]
    #: The first so many rows stand for the data. The rest are there for their magnitude alone: they set the scale of
    #: a tensorwise quantiser as they would in the whole batch, but would be over-represented in a mean.
    representative: int


@dataclass(frozen=True)
class Batches:
    """Independent batches of rows."""

    batches: list[Batch]
    #: Rows looked at, and how many of them held a NaN or an Inf.
    rows: int
    dropped: int


def cut(calls: Sequence[tuple[Tensor, ...]], dtype: torch.dtype, count: int, rows: int) -> Batches:
    """Finite rows of all calls, cut into at most ``count`` batches of at most ``rows`` rows each.

    A row goes with its partners: where one operand of it is not finite, it is left out of all. Of more rows than are
    wanted, evenly spaced ones are taken, and the one with the largest absolute value of each operand. Fewer than
    ``ALIGN`` rows per batch give fewer batches, and a batch of more than that has a multiple of it.

    Args:
        calls: for each sampled call its operands, [rows, features] each; the shorter one decides how many rows count.
    """
    places: list[tuple[int, int]] = []
    peaks: list[list[float]] = []
    seen = 0
    for number, call in enumerate(calls):
        length = min(x.shape[0] for x in call)
        seen += length
        values = [_peak(x[:length].detach().to(dtype)) for x in call]
        for line, peak in enumerate(zip(*values, strict=True)):
            # A NaN or an Inf anywhere in the row is its peak.
            if all(map(math.isfinite, peak)):
                places.append((number, line))
                peaks.append(list(peak))
    total = len(places)
    batches = []
    parts = max(1, min(count, total // ALIGN)) if total else 0
    for part in range(parts):
        start, stop = part * total // parts, (part + 1) * total // parts
        largest = {max(range(start, stop), key=lambda row: peaks[row][which]) for which in range(len(calls[0]))}
        chosen, extra = _choose(range(start, stop), largest, rows)
        lines = [places[row] for row in (*chosen, *extra)]
        operands = tuple(_gather(calls, which, lines).to(dtype) for which in range(len(calls[0])))
        batches.append(Batch(operands, len(chosen)))
    return Batches(batches, seen, seen - total)


def _peak(x: Tensor) -> list[float]:
    """The largest absolute value of each row; NaN or Inf where a row holds one."""
    if not x.shape[1]:
        return [0.0] * x.shape[0]
    peaks: list[float] = x.abs().amax(dim=1).to(torch.float64).tolist()
    return peaks


def _gather(calls: Sequence[tuple[Tensor, ...]], which: int, lines: list[tuple[int, int]]) -> Tensor:
    """Rows of operand ``which``, each given as (call, row)."""
    parts = []
    for number, group in itertools.groupby(lines, key=lambda place: place[0]):
        x = calls[number][which].detach()
        parts.append(x.index_select(0, torch.tensor([line for _, line in group], device=x.device)))
    return torch.cat(parts)


def _choose(of: range, largest: set[int], rows: int) -> tuple[list[int], list[int]]:
    """Representative rows, and the largest ones where those are not among them."""
    limit = min(len(of), rows)
    if limit >= ALIGN:
        limit -= limit % ALIGN
    if limit == len(of):
        return list(of), []
    spaced = {of[index * len(of) // limit] for index in range(max(1, limit - len(largest)))}
    extra = largest - spaced
    for row in of:
        if len(spaced) + len(extra) >= limit:
            break
        if row not in extra:
            spaced.add(row)
    return sorted(spaced), sorted(extra)
