"""What was seen at a site, and how it is cut into independent batches of finite rows."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from loka_compile.errors import ProbeError
from loka_compile.gemm import Gemm, Role

#: A contraction over rows (grad_weight) is cut to a multiple of this where it can be, as FP8 kernels want it.
ALIGN = 16


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

    @property
    def weights(self) -> list[Tensor]:
        """The weight samples as a list."""
        return [self.weight] if isinstance(self.weight, Tensor) else list(self.weight)

    def gemm(self, site: str, role: Role) -> Gemm:
        """The GEMM of ``role``, with the real batch size."""
        n, k = self.weights[0].shape
        m = self.batch
        if role is Role.FORWARD:
            return Gemm(site, role, m, n, k, self.dtype, "m" if self.dynamic else "", a_bound=self.input_bound)
        if role is Role.GRAD_INPUT:
            return Gemm(site, role, m, k, n, self.dtype, "m" if self.dynamic else "")
        return Gemm(site, role, n, k, m, self.dtype, "k" if self.dynamic else "", b_bound=self.input_bound)

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
class Batches:
    """Independent batches of rows; in each, the tensors hold the same rows of different operands."""

    batches: list[tuple[Tensor, ...]]
    #: Rows looked at, and how many of them held a NaN or an Inf.
    rows: int
    dropped: int


def cut(calls: Sequence[tuple[Tensor, ...]], dtype: torch.dtype, count: int, rows: int) -> Batches:
    """Finite rows of all calls, cut into at most ``count`` batches of at most ``rows`` rows each.

    A row goes with its partners: where one operand of it is not finite, it is left out of all. Of more rows than are
    wanted, evenly spaced ones are taken, and always the one with the largest absolute value of each operand, because
    that alone sets a tensorwise scale. Fewer than ``ALIGN`` rows per batch give fewer batches.

    Args:
        calls: for each sampled call its operands, [rows, features] each; the shorter one decides how many rows count.
    """
    kept: list[tuple[Tensor, ...]] = []
    seen = dropped = 0
    for call in calls:
        length = min(x.shape[0] for x in call)
        operands = tuple(x.detach()[:length].to(dtype) for x in call)
        finite = torch.stack([torch.isfinite(x).all(dim=1) for x in operands]).all(dim=0)
        bad = length - int(finite.sum())
        seen, dropped = seen + length, dropped + bad
        if bad:
            operands = tuple(x[finite] for x in operands)
        share = -(-count * rows // len(calls))
        kept.append(_thin(operands, share))
    joined = tuple(torch.cat(parts) for parts in zip(*kept, strict=True)) if kept else ()
    total = joined[0].shape[0] if joined else 0
    batches = []
    number = max(1, min(count, total // ALIGN))
    for index in range(number if total else 0):
        start, stop = index * total // number, (index + 1) * total // number
        batches.append(_align(_thin(tuple(x[start:stop] for x in joined), rows)))
    return Batches(batches, seen, dropped)


def _thin(operands: tuple[Tensor, ...], rows: int) -> tuple[Tensor, ...]:
    """At most ``rows`` rows (but one per operand at least): those of the largest magnitude, and evenly spaced ones."""
    total = operands[0].shape[0]
    if total <= rows:
        return operands
    largest = {int(x.abs().amax(dim=1).argmax()) for x in operands if x.shape[1]}
    spaced = [index * total // rows for index in range(rows)]
    chosen = [index for index in spaced if index not in largest][: max(0, rows - len(largest))]
    index = torch.tensor(sorted({*chosen, *largest}), device=operands[0].device)
    return tuple(x.index_select(0, index) for x in operands)


def _align(operands: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Cut to a multiple of ``ALIGN`` rows, the largest ones kept."""
    total = operands[0].shape[0]
    return operands if total < ALIGN else _thin(operands, total // ALIGN * ALIGN)
