"""What the taps call: copies some rows and returns; the worker then adds them to the statistics."""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from loka_compile.probe.reservoir import draw_rows
from loka_compile.probe.site_stats import SiteStats, Stats, StatsOptions
from loka_compile.probe.taps import CallCounter
from loka_compile.probe.worker import Budget, Streams, Worker

#: Calls of one layer that are looked at in one window (micro-batches of one optimizer step).
MAX_CALLS = 64
#: Rows copied from one call take at most so many bytes ...
ROW_BYTES = 32 << 20
#: ... and all copies that wait for the worker so many. A single one is taken whatever its size.
STAGE_BYTES = 256 << 20

logger = logging.getLogger(__name__)


class Intake:
    """Listens to the taps of one session and keeps its statistics.

    Args:
        options: how statistics are kept.
        rows: rows taken of one call.
        budget: part of the training time that statistics may take, or None.
        grace: seconds that are free.
        seed: of the choice of rows.
    """

    def __init__(self, options: StatsOptions, *, rows: int, budget: float | None, grace: float, seed: int) -> None:
        """Closed, until a window opens."""
        self.options, self.row_limit, self.seed = options, rows, seed
        self.names: list[str] = []
        self.stats = Stats()
        self.calls = CallCounter()
        self.worker, self.streams = Worker(), Streams()
        half = None if budget is None else budget / 2
        #: Weights have a budget of their own: a flip-flop step costs as much as many updates with rows.
        self.budgets = {"rows": Budget(half, grace / 2), "weight": Budget(half, grace / 2)}
        #: Calls and weights that were not copied because the stage was full.
        self.dropped = 0
        self.most_staged = 0
        self.sampling = False
        self._step = 0
        self._chosen: dict[str, set[object]] = {}
        self._seen: Counter[tuple[str, str]] = Counter()
        self._drawn: dict[tuple[str, int, int], tuple[Tensor, Tensor]] = {}
        self._staged = 0
        self._lock = threading.Lock()
        self._warned = False
        self._told: set[tuple[str, str]] = set()

    def open(self, step: int) -> bool:
        """Begin to listen, to those layers that the budget allows. False if it allows none."""
        names = sorted(set(self.names))
        self._chosen = {what: budget.choose(names) for what, budget in self.budgets.items()}
        if not any(self._chosen.values()):
            return False
        self._step = step
        self._seen.clear()
        self._drawn.clear()
        self.calls.begin()
        self.sampling = True
        return True

    def close(self) -> bool:
        """Listen no more. Whether any layer has shown its input."""
        self.sampling = False
        return bool(self._seen)

    def on_input(
        self, layer: int, call: int, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        """Copy rows of the input, and the weight of the first call, for the worker."""
        if not self.sampling:
            return
        name = self.names[layer]
        site = f"{name}#{call}"
        index = self._next(site, "input")
        if index is None:
            return
        if name in self._chosen["rows"]:
            norm_of = None if bias is None or index else bias.detach().clone()
            shape = weight.shape

            def take(rows: Tensor, keys: Tensor, step: int, batch: int) -> None:
                stats = self._site(site, shape, rows)
                stats.dtype = str(dtype).removeprefix("torch.")
                stats.update_input(rows, keys, step, batch=batch)
                self._tell_bad_rows(site, "input", stats.input.skipped)
                if norm_of is not None:
                    stats.update_bias(norm_of, step)

            self._stage_rows(name, site, index, x, take)
        if name in self._chosen["weight"] and not index and not call:
            self._stage_weight(name, weight)

    def on_grad_output(self, layer: int, call: int, grad: Tensor) -> None:
        """Copy rows of the output's gradient for the worker."""
        if not self.sampling:
            return
        name = self.names[layer]
        site = f"{name}#{call}"
        index = self._next(site, "grad_output")
        if index is not None and name in self._chosen["rows"]:

            def take(rows: Tensor, keys: Tensor, step: int, batch: int) -> None:
                if site in self.stats:
                    stats = self._on(site, rows.device)
                    stats.update_grad_output(rows, keys, step)
                    self._tell_bad_rows(site, "output gradient", stats.grad_output.skipped if stats.grad_output else 0)

            self._stage_rows(name, site, index, grad, take)

    def _next(self, site: str, what: str) -> int | None:
        """The number of this call within the window, None beyond MAX_CALLS."""
        index = self._seen[site, what]
        self._seen[site, what] += 1
        if index < MAX_CALLS:
            return index
        if not self._warned:
            self._warned = True
            logger.warning(
                "layer %s was called more than %d times in one window. Does no torch.optim optimizer with the model's "
                "parameters step? Then call p.step() after each batch.",
                site,
                MAX_CALLS,
            )
        return None

    def _stage_rows(self, name: str, site: str, index: int, x: Tensor, take: Callable[..., None]) -> None:
        x = x.detach()
        batch, width = math.prod(x.shape[:-1]), x.shape[-1]
        size = width * x.element_size()
        count = min(batch, self.row_limit, max(1, ROW_BYTES // max(size, 1)))
        if not count or not self._admit(count * size):
            return
        # The same rows of a call's input and of its gradient, and those that the reservoir prefers.
        drawn = self._drawn.pop((site, index, batch), None)
        if drawn is None:
            parts = (self.seed, rank(), site, self._step, index)
            drawn = self._drawn[site, index, batch] = draw_rows(batch, self.row_limit, *parts)
        keys, chosen = (part[:count] for part in drawn)
        if count == batch:
            rows, keys = x.reshape(batch, width).clone(), torch.empty_like(keys).scatter_(0, chosen, keys)
        else:
            if x.is_cuda:
                chosen = chosen.pin_memory().to(x.device, non_blocking=True)
            if x.is_contiguous() or x.dim() == 2:
                rows = x.reshape(batch, width).index_select(0, chosen)
            else:  # a transposed x must not be copied as a whole
                rows = x[torch.unravel_index(chosen, x.shape[:-1])]
        step = self._step
        self._submit("rows", name, rows, lambda: take(rows, keys, step, batch))

    def _stage_weight(self, name: str, weight: Tensor) -> None:
        if self._admit(weight.numel() * weight.element_size()):
            copied = weight.detach().clone()
            self._submit("weight", name, copied, lambda: self._take_weight(name, copied))

    def _admit(self, size: int) -> bool:
        with self._lock:
            if self._staged and self._staged + size > STAGE_BYTES:
                self.dropped += 1
                return False
            self._staged += size
            self.most_staged = max(self.most_staged, self._staged)
            return True

    def _submit(self, what: str, name: str, copied: Tensor, job: Callable[[], None]) -> None:
        budget, device = self.budgets[what], copied.device
        estimate, ready = budget.reserve(name), self.streams.mark(device)
        size = copied.numel() * copied.element_size()

        def run() -> None:
            cost = 0.0
            try:
                cost = self.streams.timed(device, ready, [copied], job)
            finally:
                budget.settle(name, estimate, cost)
                with self._lock:
                    self._staged -= size

        self.worker.submit(run)

    def _site(self, site: str, shape: torch.Size, rows: Tensor) -> SiteStats:
        if site not in self.stats:
            out_features, in_features = shape
            new = SiteStats(site, in_features, out_features, rows.dtype, options=self.options, device=rows.device)
            sibling = self.stats.get(f"{site.rpartition('#')[0]}#0")
            if sibling is not None and sibling.weight is not None:  # a later call of the same layer
                new.weight = sibling.weight.clone()
            self.stats[site] = new
        return self._on(site, rows.device)

    def _on(self, site: str, device: torch.device) -> SiteStats:
        """The site's statistics, moved to where the model now is (they come from a file on the CPU)."""
        stats = self.stats[site]
        if stats.device != device:
            stats = SiteStats.from_state(site, *stats.state(), options=self.options, device=device)
            self.stats[site] = stats
        return stats

    def _tell_bad_rows(self, site: str, what: str, skipped: int) -> None:
        if skipped and (site, what) not in self._told:
            self._told.add((site, what))
            logger.warning("site %s: rows of its %s hold Inf or NaN; they are counted and left out", site, what)

    def _take_weight(self, name: str, weight: Tensor) -> None:
        for site in [site for site in self.stats if site.rpartition("#")[0] == name]:
            self._on(site, weight.device).update_weight(weight)


def rank() -> int:
    """This process's rank, 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
