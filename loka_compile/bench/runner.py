"""Measures a list of GEMMs under a time budget: kernels, baselines and quantisers, each as soon as it is known."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from loka_compile.bench import arms, workload
from loka_compile.bench.operands import Operands
from loka_compile.bench.prepare import CompileQuantizer, FirstCall, Job, Preparation, SelfTest
from loka_compile.bench.records import Key, Records, Timing, baseline_key, kernel_key, quantizer_key
from loka_compile.bench.timing import Call, DeviceLostError, Timer
from loka_compile.bench.workload import Operand
from loka_compile.gemm import Gemm, Recipe, Role
from loka_compile.lowering.providers import COMPILE_AT_FIRST_CALL
from loka_compile.lowering.providers.base import Provider

logger = logging.getLogger(__name__)

#: What is measured until which share of the time after preparing is used; then the next. What is left follows later.
STAGES = (("gemms", 0.5), ("quantizers", 0.85), ("gemms", 1.0), ("quantizers", 1.0))


@dataclass
class Outcome:
    """What one run did."""

    #: Lines with a time that were added.
    measured: int = 0
    #: Candidate -> why it was left out, at how many shapes.
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    #: Candidate -> what its self-test found.
    failed: dict[str, str] = field(default_factory=dict)
    #: Candidate and shape -> what it raised.
    broken: dict[Key, str] = field(default_factory=dict)
    #: Groups of arms that the budget had no time for, and kernels that were not compiled in time or failed their test.
    left: int = 0


class Bench:
    """One run.

    Args:
        gemms: what to measure, most valuable first.
        providers: whose kernels.
        records: where the results go; what is there is not measured again.
        timer: how arms are timed.
        operands: where their tensors come from.
        seconds: the budget, counted from ``started``.
        prepare: share of the budget that self-tests and first calls may take before timing begins.
        l2: size of the L2 cache in bytes.
        workers: processes that compile; 0 compiles nothing in advance.
        clock: seconds, monotonic.
        started: the clock's time at which the budget began.
        progress: called with the number of finished groups of arms, of all groups, and what is next.
    """

    def __init__(
        self,
        gemms: Sequence[Gemm],
        providers: Sequence[Provider],
        records: Records,
        timer: Timer,
        operands: Operands,
        *,
        seconds: float,
        l2: int,
        prepare: float = 0.25,
        workers: int = 0,
        clock: Callable[[], float] = time.monotonic,
        started: float | None = None,
        progress: Callable[[int, int, str], None] = lambda *_: None,
    ) -> None:
        self.gemms = [g for g in gemms if max(g.m * g.k, g.n * g.k, g.m * g.n) <= operands.elements]
        self.providers, self.records, self.timer, self.operands = providers, records, timer, operands
        self.seconds, self.l2, self.workers, self.clock, self.progress = seconds, l2, workers, clock, progress
        self.started = clock() if started is None else started
        self.prepare, self.device = prepare, operands.device.type
        self.outcome = Outcome()
        self._unready: set[Key] = set()
        self._candidates = {gemm: self._accepted(gemm) for gemm in self.gemms}

    def _accepted(self, gemm: Gemm) -> list[tuple[Provider, Recipe]]:
        accepted = []
        for provider in self.providers:
            for recipe in provider.recipes.values():
                reason = provider.refuses(gemm, recipe, self.device)
                if reason:
                    self.outcome.refused[(f"{provider.name}:{recipe.name}", reason)] += 1
                elif kernel_key(gemm, provider.name, recipe.name) not in self.records.done:
                    accepted.append((provider, recipe))
        return accepted

    def run(self) -> Outcome:
        """Measure until all is done or the budget is used.

        Raises:
            DeviceLostError: an arm broke the device; it is recorded as broken, and another run goes on after it.
        """
        with torch.no_grad():
            self._prepare_kernels()
            groups = [[o for o in group if quantizer_key(o) not in self.records.done]
                      for group in workload.operands(self.gemms)]  # fmt: skip
            groups = [group for group in groups if group]
            compiling = [CompileQuantizer(o) for group in groups for o in group]
            # Two cores stay free for the process that times.
            with Preparation(self.workers - 2, compiling) as preparation:
                self._measure(deque(self._pending()), deque(groups), preparation)
        return self.outcome

    def _pending(self) -> list[Gemm]:
        return [g for g in self.gemms if self._candidates[g] or baseline_key(g) not in self.records.done]

    def _used(self) -> float:
        return self.clock() - self.started

    def _prepare_kernels(self) -> None:
        """Self-test every candidate and call the JIT kernels once, in parallel; what fails or is late is left out."""
        pending = [(g, p, r) for g in self.gemms for p, r in self._candidates[g]]
        tests: list[Job] = list(dict.fromkeys(SelfTest(p.name, r.name, Role.FORWARD) for _, p, r in pending))
        calls: list[Job] = [FirstCall(p.name, r.name, g) for g, p, r in pending if p.name in COMPILE_AT_FIRST_CALL]
        self.progress(0, 1, f"self-tests and first calls ({len(tests)} + {len(calls)})")
        with (
            Preparation(self.workers, tests, apart=True) as testing,
            Preparation(self.workers, calls, patient=True) as calling,
        ):
            testing.wait(tests, self.prepare * self.seconds - self._used())
            calling.wait(calls, self.prepare * self.seconds - self._used())
            for gemm, provider, recipe in pending:
                test, call = (
                    SelfTest(provider.name, recipe.name, Role.FORWARD),
                    FirstCall(provider.name, recipe.name, gemm),
                )
                key = kernel_key(gemm, provider.name, recipe.name)
                if testing.answer(test) or not testing.done(test):
                    # Not recorded with the shapes: a next run tests it again, perhaps with another version.
                    self.outcome.failed[f"{provider.name}:{recipe.name}"] = (
                        testing.answer(test) or "the test did not end"
                    )
                    self._unready.add(key)
                elif calling.answer(call):
                    self._broken(key, gemm.role, calling.answer(call) or "")
                elif not calling.done(call):
                    self._unready.add(key)

    def _measure(self, gemms: deque[Gemm], quantizers: deque[list[Operand]], preparation: Preparation) -> None:
        total, finished = len(gemms) + len(quantizers), 0
        prepared = self._used()
        for kind, share in STAGES:
            queue = gemms if kind == "gemms" else quantizers
            while queue and self._used() < prepared + share * (self.seconds - prepared):
                group = queue.popleft()
                if isinstance(group, Gemm):
                    self.progress(finished, total, str(group))
                    self._gemm(group)
                else:
                    self.progress(finished, total, f"quantisers of {group[0].rows} x {group[0].columns}")
                    self._quantizers(group, preparation)
                finished += 1
        self.progress(finished, total, "done" if finished == total else "out of time")
        self.outcome.left = len(gemms) + len(quantizers) + len(self._unready)

    def _gemm(self, gemm: Gemm) -> None:
        """The baseline of the role and every candidate, in turns."""
        makers: dict[Key, Callable[[], Sequence[Call]]] = {}
        if baseline_key(gemm) not in self.records.done:
            makers[baseline_key(gemm)] = lambda: arms.baseline_calls(gemm, self.operands, self.l2)
        for provider, recipe in self._candidates[gemm]:
            key = kernel_key(gemm, provider.name, recipe.name)
            if key not in self.records.done and key not in self._unready:
                makers[key] = lambda p=provider, r=recipe: arms.kernel_calls(gemm, p, r, self.operands, self.l2)  # type: ignore[misc]
        self._time(makers, gemm.role)

    def _quantizers(self, group: list[Operand], preparation: Preparation) -> None:
        """All quantisers of one stored tensor, in turns."""
        jobs = [CompileQuantizer(operand) for operand in group]
        preparation.wait(jobs, self.seconds - self._used())
        makers: dict[Key, Callable[[], Sequence[Call]]] = {}
        role = Role.GRAD_WEIGHT if group[0].transposed else Role.FORWARD
        for operand, job in zip(group, jobs, strict=True):
            key, reason = quantizer_key(operand), preparation.answer(job)
            if reason:
                self._broken(key, role, reason)
            elif preparation.done(job):
                makers[key] = lambda o=operand: arms.quantizer_calls(o, self.operands, self.l2)  # type: ignore[misc]
        self._time(makers, role)
        torch.compiler.reset()

    def _time(self, makers: dict[Key, Callable[[], Sequence[Call]]], role: Role) -> None:
        trying: list[Key] = []
        keys = {str(key): key for key in makers}

        def on_try(name: str) -> None:
            trying.append(keys[name])
            self.records.trying(keys[name], role)

        try:
            found = self.timer.measure({str(key): make for key, make in makers.items()}, on_try)
        except DeviceLostError as error:
            self._broken(trying[-1], role, str(error))
            self.records.survived()
            raise
        self.records.survived()
        for name, timing in found.items():
            if isinstance(timing, Timing):
                self.records.add(keys[name], role, timing)
                self.outcome.measured += 1
            else:
                self._broken(keys[name], role, timing)

    def _broken(self, key: Key, role: Role, reason: str) -> None:
        logger.warning("%s: %s", " ".join(key), reason)
        self.records.add_broken(key, role, reason)
        self.outcome.broken[key] = reason
