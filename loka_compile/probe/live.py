"""A look at live data: some rows of a layer's input and output gradient, and the error that a kernel makes on them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from loka_compile.errors import ProbeError
from loka_compile.gemm import Gemm, Role
from loka_compile.probe.errors import Interval
from loka_compile.probe.gate import score
from loka_compile.probe.reservoir import draw_rows
from loka_compile.probe.runs import Candidate, Operand, Pair, Runs
from loka_compile.probe.samples import cut
from loka_compile.probe.taps import CallCounter

#: Independent batches that the rows are cut into; the interval comes from their spread.
PAIRS = 4


@dataclass
class Rows:
    """What was copied of one call: rows of the input [rows, K] and of the output's gradient [rows, N], the weight."""

    weight: Tensor
    dtype: torch.dtype
    #: Batch size of the call.
    batch: int
    inputs: Tensor
    grad_outputs: Tensor | None = None


class LiveRows:
    """Listens to the probe's taps and keeps rows of each layer's calls in one window.

    Args:
        names: of the layers, by the numbers that their tokens carry.
        rows: rows of one call.
    """

    def __init__(self, names: list[str], rows: int) -> None:
        """Closed, until a window opens."""
        self.calls = CallCounter()
        self.names, self._rows = names, rows
        self._wanted: frozenset[str] = frozenset()
        self._step = 0
        self._seen: dict[str, Rows] = {}
        self._lock = threading.Lock()

    def open(self, step: int, sites: frozenset[str]) -> None:
        """Begin to listen to these sites."""
        self._seen, self._step, self._wanted = {}, step, sites
        self.calls.begin()

    def close(self) -> dict[str, Rows]:
        """Listen no more; what was seen, by site."""
        self._wanted = frozenset()
        return self._seen

    def on_input(
        self, layer: int, call: int, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        """Copy rows of a site's first call in the window, and its weight."""
        site = f"{self.names[layer]}#{call}"
        with self._lock:
            if site not in self._wanted or site in self._seen:
                return
            rows = self._draw(site, x)
            batch = x.numel() // max(1, x.shape[-1])
            self._seen[site] = Rows(weight.detach().clone(), dtype, batch, rows)

    def on_grad_output(self, layer: int, call: int, grad: Tensor) -> None:
        """Copy the same rows of the gradient."""
        site = f"{self.names[layer]}#{call}"
        with self._lock:
            seen = self._seen.get(site)
            if seen is not None and seen.grad_outputs is None:
                seen.grad_outputs = self._draw(site, grad)

    def _draw(self, site: str, x: Tensor) -> Tensor:
        flat = x.detach().reshape(-1, x.shape[-1])
        _, chosen = draw_rows(flat.shape[0], self._rows, site, self._step)
        chosen = chosen.sort().values
        if flat.is_cuda:
            chosen = chosen.pin_memory()
        return flat.index_select(0, chosen.to(flat.device, non_blocking=True))


def live_error(rows: Rows, gemm: Gemm, provider_name: str, recipe_name: str) -> Interval | None:
    """The gate's metric of a kernel on live rows, or None where there is nothing to measure it on.

    The kernel itself runs where it can; else its rounding is emulated, as when the table was made.

    Args:
        rows: of one call.
        gemm: the GEMM as the graph holds it: its role and the proven bounds of its operands.
        provider_name, recipe_name: the kernel.

    Raises:
        UnknownNameError: no such provider or recipe.
        ProbeError: the kernel raised.
    """
    from loka_compile.lowering.providers import get_provider

    provider = get_provider(provider_name)
    recipe = provider.recipe(recipe_name)
    pairs = _pairs(rows, gemm)
    if not pairs:
        return None
    real = rows.weight.is_cuda and provider.supported(recipe, "cuda") is None
    candidate = Candidate(provider, recipe, real)
    runs = Runs(gemm, {pair.a.base.shape[0] for pair in pairs}, get_provider("emulated"))
    try:
        for pair in pairs:
            runs.add(pair, [candidate])
    except Exception as error:
        raise ProbeError(f"{gemm}: {provider_name}:{recipe_name} failed on live rows: {error}") from error
    if candidate.name in runs.failed:
        raise ProbeError(f"{gemm}: {runs.failed[candidate.name]} on live rows")
    return score(runs.batches(candidate), gemm.role).gate


def _pairs(rows: Rows, gemm: Gemm) -> list[Pair]:
    weight = rows.weight.to(rows.dtype)
    calls: list[tuple[Tensor, ...]] = [(rows.inputs,)]
    if gemm.role is not Role.FORWARD:
        if rows.grad_outputs is None:
            return []
        calls = [(rows.inputs, rows.grad_outputs)]
    build: dict[Role, Callable[[Tensor, Tensor, int], Pair]] = {
        Role.FORWARD: lambda x, _, n: Pair(Operand(x, False, gemm.a_bound), Operand(weight, False), n),
        Role.GRAD_INPUT: lambda _, dy, n: Pair(Operand(dy, False), Operand(weight, True), n),
        Role.GRAD_WEIGHT: lambda x, dy, _: Pair(Operand(dy, True), Operand(x, True, gemm.b_bound)),
    }
    found = cut(calls, rows.dtype, PAIRS, rows.inputs.shape[0])
    return [build[gemm.role](b.operands[0], b.operands[-1], b.representative) for b in found.batches]
