"""``with loka_compile.guard(model):`` around a training loop watches whether FP8 stays accurate on live data.

A plan is made from what was seen when it was made. Every ``every``-th step the guard looks, through the probe's taps,
at some rows of what each FP8 layer sees now, and measures the planned kernel's error on them beside the training,
within a time budget. A site that has left its safe range (strikes.py) goes back to high precision at the next step
boundary.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from loka_compile.drift.in_use import Watched, layers_of, watched_gemms
from loka_compile.drift.put_back import put_back, restore
from loka_compile.drift.strikes import Check, Departure, Drift
from loka_compile.errors import ProbeError
from loka_compile.plan import Plan
from loka_compile.probe import taps as tapping
from loka_compile.probe.intake import world_size
from loka_compile.probe.live import LiveRows, Rows, live_error
from loka_compile.probe.worker import Budget, Streams, Worker

logger = logging.getLogger(__name__)


class Guard:
    """A guarding session over one model. Use it as a context manager, from the thread that trains.

    Args:
        model: the module that is trained: compiled with ``backend="loka"``, plain or wrapped (DDP).
        plan: what the model was compiled with; None takes it from the reports of the compiles.
        every: optimizer steps from one look to the next.
        rows: rows of one call that are looked at.
        patience: looks in a row in which a GEMM must lie above its limit before its site is put back.
        max_recompiles: how often sites may be put back, all that leave at the same time counting once. Each time the
            model is compiled once more (and its tapped version once, at the next look). After that the guard only
            warns: Dynamo stops compiling a function that it has compiled too often.
        budget: part of the training time that measuring may take beside it; None is no limit. Where it does not
            suffice, sites take turns.
        grace: seconds of measuring that are free before the budget counts.

    Raises:
        ProbeError: an argument is out of range; on entering: the model has no linear layer, or is being probed.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan | None = None,
        *,
        every: int = 100,
        rows: int = 128,
        patience: int = 2,
        max_recompiles: int = 3,
        budget: float | None = 0.005,
        grace: float = 2.0,
    ) -> None:
        """Nothing is touched before the context is entered."""
        for name, value, least in (("every", every, 1), ("rows", rows, 2), ("patience", patience, 1),
                                   ("max_recompiles", max_recompiles, 0)):  # fmt: skip
            if not isinstance(value, int) or value < least:
                raise ProbeError(f"{name} is {value!r}; it must be a whole number of at least {least}")
        if budget is not None and not 0 < budget < 1:
            raise ProbeError(f"budget is {budget!r}; it must be None or between 0 and 1")
        self.root = tapping.unwrapped(model)
        self.every, self.patience, self.max_recompiles = every, patience, max_recompiles
        #: Steps so far, looks that saw a layer, and how often sites were put back.
        self.steps = self.looks = self.recompiles = 0
        self._given = plan
        self._drift: Drift | None = None
        self._watched: dict[str, list[Watched]] = {}
        self._layers: list[tuple[str, nn.Linear, Tensor]] = []
        self._worker, self._streams, self._budget = Worker(), Streams(), Budget(budget, grace)
        self._checks: deque[Check] = deque()
        self._leaving: list[Departure] = []
        #: Sites that are in high precision by now.
        self._back: set[str] = set()
        self._live = LiveRows([], rows)
        self._open = self._entered = False
        self._clock: weakref.ref[Optimizer] | None = None
        self._hook: Any = None
        self._compiling = ExitStack()
        self._last_tick = 0.0

    # ------------------------------------------------------------------ what the user asks
    @property
    def departed(self) -> dict[str, Departure]:
        """The sites that were put back, with the check that decided."""
        return {} if self._drift is None else dict(self._drift.departed)

    @property
    def errors(self) -> dict[tuple[str, str], tuple[float, float, float]]:
        """By (site, role) of every GEMM looked at: its error on live data, the table's, and its limit."""
        self._collect(wait=True)
        return {} if self._drift is None else dict(self._drift.summary())

    @property
    def plan(self) -> Plan | None:
        """The plan with the departed sites in high precision; save it to start the next run from."""
        if self._drift is None:
            return self._given
        return self._drift.plan.without(set(self.departed), "put back by the drift guard")

    def restore(self) -> None:
        """Let the plan be carried out again everywhere. The marks outlive the context until then."""
        for _, module, _ in self._layers:
            restore(module)

    def step(self) -> None:
        """End a step: for loops without a ``torch.optim`` optimizer that holds the model's parameters."""
        self._tick()

    # ------------------------------------------------------------------ the session
    def __enter__(self) -> Guard:
        """Find the layers and begin to count steps."""
        if self._entered:
            raise ProbeError("this guard was entered before; make a new one")
        names, layers = layers_of(self.root)
        session = tapping.register(self._live)
        self._live.names = names
        self._layers = [(names[number], module, torch.tensor([session, number])) for module, number in layers]
        self._root_token = torch.tensor([session, -1])
        self._entered = True
        self._parameters = {id(p) for p in self.root.parameters()}
        self._hook = register_optimizer_step_post_hook(self._on_optimizer_step)
        self._last_tick = time.perf_counter()
        self._look()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the taps away. What was put back stays so; see :meth:`restore`."""
        self._hook.remove()
        if self._open:
            self._close()
        self._worker.close()

    def _on_optimizer_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """The first optimizer that steps and holds one of the model's parameters is the clock."""
        clock = None if self._clock is None else self._clock()
        if clock is None:
            if not any(id(p) in self._parameters for group in optimizer.param_groups for p in group["params"]):
                return
            self._clock, clock = weakref.ref(optimizer), optimizer
        if clock is optimizer:
            self._tick()

    def _tick(self) -> None:
        now = time.perf_counter()
        self._budget.earn(min(now - self._last_tick, 10.0))  # a pause earns nothing
        self._last_tick = now
        if self._open:
            self._close()
        self.steps += 1
        if self._worker.pending:
            self._worker.release(-(-self._worker.pending // self.every))
        alone = world_size() == 1
        # With several ranks all must compile anew in the same step: they agree where a look begins.
        if alone or self.steps % self.every == 0:
            self._collect(wait=not alone)
            self._put_back()
        self._look()

    # ------------------------------------------------------------------ looks
    def _look(self) -> None:
        if self.steps % self.every or self._worker.error is not None or not self._learn_plan():
            return
        sites = sorted(set(self._watched) - set(self.departed))
        chosen = frozenset(map(str, self._budget.choose(sites)))
        if not chosen:
            return
        self._compiling.enter_context(tapping.between_cuda_graphs())
        # Always the same layers, so that there is one tapped graph; the listener takes those whose turn it is.
        names = {site.rpartition("#")[0] for site in set(self._watched) - self._back}
        for name, module, token in self._layers:
            if name in names:
                tapping.attach(module, token, training_only=self.root.training)
        tapping.attach(self.root, self._root_token, training_only=self.root.training, root=True)
        self._live.open(self.steps, chosen)
        self._open = True

    def _close(self) -> None:
        self._open = False
        self._compiling.close()
        for _, module, _ in self._layers:
            tapping.detach(module)
        tapping.detach(self.root)
        seen = self._live.close()
        self.looks += bool(seen)
        for site, rows in seen.items():
            self._submit(site, rows)

    def _learn_plan(self) -> bool:
        """Which FP8 kernels run. A plan may come late (``table="auto"`` samples first), and part by part."""
        plan, watched = watched_gemms(self._given, {name: module for name, module, _ in self._layers}, self.steps > 0)
        if plan is not None and self._drift is None:
            self._drift = Drift(plan, self.patience)
        elif plan is not None and self._drift is not None:
            self._drift.plan = plan
        self._watched = watched
        return bool(watched)

    def _submit(self, site: str, rows: Rows) -> None:
        device, estimate = rows.weight.device, self._budget.reserve(site)
        ready = self._streams.mark(device)
        tensors = [rows.weight, rows.inputs] + ([] if rows.grad_outputs is None else [rows.grad_outputs])

        def measure() -> None:
            for watched in self._watched.get(site, ()):
                kernel = watched.kernel_at(rows.batch)
                found = None if kernel is None else live_error(rows, watched.gemm, *kernel)
                if kernel is not None and found is not None:
                    role, name = watched.gemm.role.value, ":".join(kernel)
                    self._checks.append(Check(site, role, name, found.mean, found.low, found.high))

        def run() -> None:
            cost = 0.0
            try:
                cost = self._streams.timed(device, ready, tensors, measure)
            finally:
                self._budget.settle(site, estimate, cost)

        self._worker.submit(run)

    # ------------------------------------------------------------------ putting back
    def _collect(self, wait: bool) -> None:
        """Judge the checks that have come in; ``wait`` for those that were submitted."""
        if wait and self._worker.error is None:
            self._worker.drain()
        while self._checks and self._drift is not None:
            departure = self._drift.add(self._checks.popleft())
            if departure is not None:
                self._leaving.append(departure)

    def _put_back(self) -> None:
        sites = agreed({departure.site for departure in self._leaving}, sorted(self._watched), self.root)
        if not sites:
            return
        reasons = [str(d) for d in self._leaving] or [f"{', '.join(sorted(sites))}: another rank saw it drift"]
        self._leaving = []
        if self.recompiles == self.max_recompiles:
            logger.warning("drift: %s. Left as it is: sites were put back %d times already", "; ".join(reasons),
                           self.recompiles)  # fmt: skip
            return
        self.recompiles += 1
        self._back |= sites
        names = {site.rpartition("#")[0] for site in sites}
        for name, module, _ in self._layers:
            if name in names:
                put_back(module)
        logger.warning("drift: %s. Back to high precision from step %d on; the model is compiled once more",
                       "; ".join(reasons), self.steps)  # fmt: skip


def agreed(leaving: set[str], sites: list[str], root: nn.Module) -> set[str]:
    """The sites that leave on any rank; every rank must ask in the same step."""
    if world_size() == 1:
        return leaving
    device = next((p.device for p in root.parameters()), torch.device("cpu"))
    flags = torch.tensor([site in leaving for site in sites], dtype=torch.int32, device=device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return {site for site, flag in zip(sites, flags.tolist(), strict=True) if flag}


def guard(model: nn.Module, plan: Plan | None = None, **options: Any) -> Guard:
    """A session over ``model``; see :class:`Guard` for the options.

    with loka_compile.guard(model, every=100) as g:
        ...  # train
    g.plan.save("plan.json")
    """
    return Guard(model, plan, **options)
