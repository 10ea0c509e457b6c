"""Runs candidates on the operand pairs of one GEMM and measures them against fp64."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from loka_compile.gemm import Gemm, Recipe, Role, Scaling
from loka_compile.probe.errors import Errors, Interval, Reference, pool

if TYPE_CHECKING:
    from loka_compile.lowering.providers.base import Provider, Quantized

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Operand:
    """One operand of a GEMM: ``base`` as stored, or its transpose, with a proven bound of its absolute values."""

    base: Tensor
    transposed: bool
    bound: float | None = None

    def exact(self) -> Tensor:
        """The operand [rows, contraction] in fp64."""
        wide = self.base.to(torch.float64)
        return wide.t() if self.transposed else wide


@dataclass(frozen=True)
class Pair:
    """Both operands of one product ``A @ B.T``, of whose result the first ``rows`` rows count (None: all)."""

    a: Operand
    b: Operand
    rows: int | None = None


class KernelFailed(Exception):
    """A provider that says it works here raised."""


class Runs:
    """Results of candidates on the pairs of one GEMM. Quantised operands and emulated results are shared."""

    def __init__(self, gemm: Gemm, pairs: list[Pair], emulated: Provider) -> None:
        """Take the pairs; nothing runs yet."""
        self.gemm, self.pairs, self.emulated = gemm, pairs, emulated
        self._references: list[Reference] = []
        self._quantized: dict[tuple[object, ...], Quantized] = {}
        self._emulated: dict[tuple[object, ...], tuple[Errors, Interval]] = {}

    def errors(self, provider: Provider, recipe: Recipe, real: bool) -> tuple[Errors, Interval, str]:
        """Pooled errors, the interval of the gate's metric, and what ran.

        Raises:
            KernelFailed: a kernel that should work on this GPU raised.
        """
        if real and provider is not self.emulated and not self._refuses_samples(provider, recipe):
            try:
                return *self._measure(provider, recipe), "real kernel"
            except Exception as error:
                if self.pairs[0].a.base.is_cuda:
                    raise KernelFailed(f"{provider.name}:{recipe.name} failed: {error}") from error
                # The CPU is where kernels of a GPU are planned for, not where they run.
                logger.info("%s:%s cannot run on the CPU (%s); emulated", provider.name, recipe.name, error)
        key = (recipe.a, recipe.b, recipe.a_dtype, recipe.b_dtype)
        if key not in self._emulated:
            self._emulated[key] = self._measure(self.emulated, recipe)
        return *self._emulated[key], "emulated"

    def _refuses_samples(self, provider: Provider, recipe: Recipe) -> bool:
        """Whether the sampled rows, unlike the real batch, make a shape that the kernel cannot take."""
        for pair in self.pairs:
            rows = pair.a.base.shape[0]
            if self.gemm.role is Role.GRAD_WEIGHT:
                small = dataclasses.replace(self.gemm, k=rows, dynamic="")
            else:
                small = dataclasses.replace(self.gemm, m=rows, dynamic="")
            if provider.refuses_shape(small, recipe):
                return True
        return False

    def _measure(self, provider: Provider, recipe: Recipe) -> tuple[Errors, Interval]:
        if not self._references:
            self._references = [Reference(p.a.exact()[: p.rows] @ p.b.exact().t()) for p in self.pairs]
        found = []
        for pair, reference in zip(self.pairs, self._references, strict=True):
            a = self._quantize(provider, pair.a, recipe.a, recipe.a_dtype)
            b = self._quantize(provider, pair.b, recipe.b, recipe.b_dtype)
            found.append(reference.measure(provider.compute(a, b, recipe, pair.a.base.dtype)[: pair.rows]))
        return pool(found)

    def _quantize(self, provider: Provider, operand: Operand, scaling: Scaling, dtype: str) -> Quantized:
        # The quantiser is shared unless a provider brings its own.
        key = (type(provider).quantize, id(operand.base), operand.transposed, scaling, dtype, operand.bound)
        if key not in self._quantized:
            self._quantized[key] = provider.quantize(
                operand.base, scaling, getattr(torch, dtype), operand.transposed, operand.bound
            )
        return self._quantized[key]
