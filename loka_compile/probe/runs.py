"""Runs candidates on operand pairs of one GEMM, pair by pair, and measures them against fp64."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from loka_compile.gemm import Gemm, Recipe, Role, Scaling
from loka_compile.probe.errors import Errors, Reference

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


@dataclass(frozen=True)
class Candidate:
    """A provider's kernel of one recipe."""

    provider: Provider
    recipe: Recipe
    #: Run the provider's own code; else the emulation of its scalings.
    real: bool

    @property
    def name(self) -> str:
        """As in plans."""
        return f"{self.provider.name}:{self.recipe.name}"


class Runs:
    """What the candidates of one GEMM measured on one kind of operands.

    Args:
        gemm: with the real batch.
        rows: the numbers of rows that pairs have. A kernel that refuses one of them is emulated on all pairs.
        emulated: the provider that emulates.
    """

    def __init__(self, gemm: Gemm, rows: Collection[int], emulated: Provider) -> None:
        """Nothing runs yet."""
        self.gemm, self.rows, self.emulated = gemm, rows, emulated
        #: Why a candidate that should work on this GPU raised, by its name.
        self.failed: dict[str, str] = {}
        self._found: dict[tuple[object, ...], list[Errors]] = {}
        self._not_here: set[str] = set()
        self._refusals: dict[str, bool] = {}

    def add(self, pair: Pair, candidates: Iterable[Candidate]) -> None:
        """Measure candidates on one more pair. Those that share scalings share quantised operands and emulation."""
        trial = _Trial(pair)
        for candidate in candidates:
            if candidate.name in self.failed:
                continue
            key = self._key(candidate)
            if key in trial.done:
                continue
            try:
                errors = trial.measure(candidate.provider if key[0] == "real" else self.emulated, candidate.recipe)
            except Exception as error:
                if key[0] != "real":
                    raise
                if pair.a.base.is_cuda:
                    self.failed[candidate.name] = f"{candidate.name} failed: {error}"
                    logger.warning("%s: %s", self.gemm, self.failed[candidate.name])
                    continue
                # The CPU is where kernels of a GPU are planned for, not where they run.
                logger.info("%s cannot run on the CPU (%s); emulated", candidate.name, error)
                self._not_here.add(candidate.name)
                self._found.pop(key, None)
                key = self._key(candidate)
                if key in trial.done:
                    continue
                errors = trial.measure(self.emulated, candidate.recipe)
            trial.done.add(key)
            self._found.setdefault(key, []).append(errors)

    def batches(self, candidate: Candidate) -> list[Errors]:
        """The measures on every pair so far; none if it failed."""
        return [] if candidate.name in self.failed else self._found.get(self._key(candidate), [])

    def source(self, candidate: Candidate) -> str:
        """What ran: "real kernel" or "emulated"."""
        return "real kernel" if self._key(candidate)[0] == "real" else "emulated"

    def _key(self, candidate: Candidate) -> tuple[object, ...]:
        provider, recipe = candidate.provider, candidate.recipe
        real = candidate.real and provider is not self.emulated and candidate.name not in self._not_here
        if real and not self._refuses(candidate):
            return "real", candidate.name
        return "emulated", recipe.a, recipe.b, recipe.a_dtype, recipe.b_dtype

    def _refuses(self, candidate: Candidate) -> bool:
        """Whether the sampled rows, unlike the real batch, make a shape that the kernel cannot take."""
        if candidate.name not in self._refusals:
            letter = "k" if self.gemm.role is Role.GRAD_WEIGHT else "m"
            small = [dataclasses.replace(self.gemm, dynamic="", **{letter: rows}) for rows in self.rows]  # type: ignore[arg-type]
            refused = any(candidate.provider.refuses_shape(gemm, candidate.recipe) is not None for gemm in small)
            self._refusals[candidate.name] = refused
        return self._refusals[candidate.name]


class _Trial:
    """One pair, its reference, and what was quantised of it."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.done: set[tuple[object, ...]] = set()
        self._quantized: dict[tuple[object, ...], Quantized] = {}

    @functools.cached_property
    def reference(self) -> Reference:
        return Reference(self.pair.a.exact()[: self.pair.rows] @ self.pair.b.exact().t())

    def measure(self, provider: Provider, recipe: Recipe) -> Errors:
        pair = self.pair
        a = self._quantize(provider, pair.a, recipe.a, recipe.a_dtype)
        b = self._quantize(provider, pair.b, recipe.b, recipe.b_dtype)
        return self.reference.measure(provider.compute(a, b, recipe, pair.a.base.dtype)[: pair.rows])

    def _quantize(self, provider: Provider, operand: Operand, scaling: Scaling, dtype: str) -> Quantized:
        # The quantiser is shared unless a provider brings its own.
        key = (type(provider).quantize, id(operand.base), operand.transposed, scaling, dtype, operand.bound)
        if key not in self._quantized:
            self._quantized[key] = provider.quantize(
                operand.base, scaling, getattr(torch, dtype), operand.transposed, operand.bound
            )
        return self._quantized[key]
