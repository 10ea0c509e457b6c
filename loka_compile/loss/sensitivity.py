"""Measures what FP8 does to a model's loss: GEMM by GEMM, or a whole plan at once."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from loka_compile.config import LokaConfig
from loka_compile.errors import ConfigError
from loka_compile.gemm import Role
from loka_compile.loss.effects import Arm, Effect, Running, Sensitivity, student
from loka_compile.loss.switches import Kernel, Key, Switchboard
from loka_compile.plan import Plan
from loka_compile.selection.candidates import candidates_of
from loka_compile.selection.thresholds import Limits, PerSite
from loka_compile.table import Table

#: ``loss_fn(model, batch)``: runs the model it is given and returns the batch's loss, one number or one per example.
LossFn = Callable[[Callable[..., Any], Any], Tensor]
#: Seconds between two writes of the file that a run can be gone on with.
SAVE_EVERY = 10.0


def loss_sensitivity(
    model: nn.Module,
    loss_fn: LossFn,
    batches: Iterable[Any],
    table: Table,
    *,
    roles: Collection[Role | str] = (Role.FORWARD,),
    step: float | None = None,
    max_mere: float = 0.2,
    min_speedup: float = 1.05,
    providers: Collection[str] | None = None,
    per_site: PerSite | None = None,
    options: Mapping[str, Any] | None = None,
    path: str | os.PathLike[str] | None = None,
    confidence: float = 0.95,
    progress: bool = True,
) -> Sensitivity:
    """The change of the loss when one GEMM alone runs in FP8, for every candidate that the error gate would take.

    All candidates see the same batches, with the same weights, and are compared with the model's high precision batch
    by batch: the spread between batches drops out. The model is rewritten by the Mods first, as ``backend="loka"``
    does, so that the change is FP8's alone. Kernels that do not run here are emulated. Scales come from each operand's
    own maximum, also where a plan would use a fixed one.

    The forward is measured on the loss itself. ``grad_input`` and ``grad_weight`` do not touch it; with ``step`` they
    are measured by what they do in one step of plain gradient descent: the loss of the *next* batch after a step along
    the gradient with that GEMM in FP8, against the step along the exact one. That is a proxy for training.

    Args:
        model: as it is trained; its mode (train or eval) and its parameters are left as they are.
        loss_fn: ``loss_fn(run, batch)`` calls ``run`` as it would the model, and returns a scalar or [examples].
        batches: all of one kind; each is an independent sample, so ten or more are wanted for an interval.
        table: of the model, from the probe.
        roles: which GEMMs to measure.
        step: length of the gradient step for the backward's roles; required for them.
        max_mere: as for :func:`make_plan`: what the error gate refuses is not measured; ``min_speedup``, ``providers``
            and ``per_site`` likewise.
        options: options of ours for the rewriting, such as ``{"mods": "none"}``.
        path: file to keep the state in. If it exists, as many batches as it saw are skipped, and it goes on.
        confidence: of the intervals.
        progress: show a bar.

    Raises:
        ConfigError: a backward role without ``step``, or an option that is not one of ours.
        StaleTableError: the file at ``path`` was begun with other candidates; CorruptFileError: it is damaged.
    """
    wanted = {str(Role(role)) for role in roles}
    if wanted - {"forward"} and step is None:
        raise ConfigError("roles grad_input and grad_weight need step=: the length of a gradient step, such as 0.01")
    limits = Limits.of(max_mere, min_speedup, providers, per_site)
    arms = _arms(table, limits, wanted)
    state = Sensitivity(confidence, arms={arm: Running() for arm in arms})
    if path is not None and Path(path).exists():
        state = Sensitivity.load(path)
        state.check(arms, path)
    board = Switchboard(_config(options))
    saved = time.monotonic()
    previous: Any = None
    with _Run(model, loss_fn, board) as run:
        for index, batch in enumerate(_shown(batches, progress, "loss sensitivity", state.batches)):
            if index >= state.batches:
                _forward(run, batch, state)
                if step is not None and previous is not None:
                    _backward(run, previous, batch, state, step)
                state.batches += 1
                _note_skipped(board, state)
                if path is not None and time.monotonic() - saved > SAVE_EVERY:
                    state.save(path)
                    saved = time.monotonic()
            previous = batch
    if path is not None:
        state.save(path)
    return state


def loss_of_plan(
    model: nn.Module,
    loss_fn: LossFn,
    batches: Iterable[Any],
    plan: Plan,
    *,
    options: Mapping[str, Any] | None = None,
    confidence: float = 0.95,
    progress: bool = True,
) -> Effect:
    """The change of the loss when the forward GEMMs of a whole plan run in FP8 together; see :func:`loss_sensitivity`.

    Single effects need not add up: this is the check.
    """
    kernels: dict[Key, Kernel] = {
        (d.site, d.role): (d.provider, d.recipe)
        for d in plan.decisions
        if d.role == "forward" and not d.is_high_precision
    }
    base, change = Running(), Running()
    board = Switchboard(_config(options))
    with _Run(model, loss_fn, board) as run:
        for batch in _shown(batches, progress, "loss of the plan", 0):
            exact = run.loss(batch)
            base.add(exact)
            change.add(run.loss(batch, kernels) - exact)
    relative, stderr = change.mean / base.mean, change.stderr / abs(base.mean)
    half = student(confidence, change.count) * stderr
    return Effect("all", "forward", "plan", relative, stderr, relative - half, relative + half, change.count)


def _arms(table: Table, limits: Limits, roles: Collection[str]) -> list[Arm]:
    """Candidates that the error gate takes, fast accumulation and exact one together."""
    found: dict[Arm, None] = {}
    for (site, role), candidates in candidates_of(table, limits).items():
        for candidate in candidates:
            if role in roles and candidate.usable:
                verdict = candidate.verdict
                found[site, role, f"{verdict.provider}:{verdict.recipe.removesuffix('_fast')}"] = None
    return list(found)


def _config(options: Mapping[str, Any] | None) -> LokaConfig:
    config, others = LokaConfig.from_options(options)
    if others:
        raise ConfigError(f"these are not options of loka_compile's rewriting: {', '.join(others)}")
    return config


class _Run:
    """A model with switches, whose loss can be asked for; parameters, gradients and buffers are as before afterwards,
    and every call sees the same random numbers, so that dropout drops the same."""

    def __init__(self, model: nn.Module, loss_fn: LossFn, board: Switchboard) -> None:
        self.model, self.loss_fn, self.board = model, loss_fn, board
        self.parameters: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        self.switched = board.compile(model)
        self._buffers = list(model.buffers())
        devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
        self._devices = sorted(d.index or 0 for d in devices)

    @contextlib.contextmanager
    def _undisturbed(self, kernels: Mapping[Key, Kernel] | None) -> Iterator[None]:
        kept = [b.detach().clone() for b in self._buffers]
        try:
            with torch.random.fork_rng(self._devices), self.board.on(kernels or {}):
                torch.manual_seed(0)
                yield
        finally:
            with torch.no_grad():
                for buffer, value in zip(self._buffers, kept, strict=True):
                    buffer.copy_(value)

    def __enter__(self) -> _Run:
        self._gradients = [p.grad for p in self.parameters]
        return self

    def __exit__(self, *_: object) -> None:
        for parameter, grad in zip(self.parameters, self._gradients, strict=True):
            parameter.grad = grad
        torch.compiler.reset()

    def loss(self, batch: Any, kernels: Mapping[Key, Kernel] | None = None) -> float:
        """Mean loss of a batch, with these GEMMs in FP8."""
        with torch.no_grad(), self._undisturbed(kernels):
            return self.loss_fn(self.switched, batch).double().mean().item()

    def gradients(self, batch: Any, kernels: Mapping[Key, Kernel] | None = None) -> list[Tensor]:
        """Gradient of the mean loss by parameter."""
        with self._undisturbed(kernels):
            loss = self.loss_fn(self.switched, batch).mean()
            found = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(self.parameters, found, strict=True)]

    def loss_after(self, gradients: list[Tensor], step: float, batch: Any) -> float:
        """Mean loss of a batch after a step along these gradients, which is taken back."""
        kept = [p.detach().clone() for p in self.parameters]
        try:
            with torch.no_grad():
                for parameter, gradient in zip(self.parameters, gradients, strict=True):
                    parameter.sub_(gradient, alpha=step)
            return self.loss(batch)
        finally:
            with torch.no_grad():
                for parameter, value in zip(self.parameters, kept, strict=True):
                    parameter.copy_(value)


def _forward(run: _Run, batch: Any, state: Sensitivity) -> None:
    exact = run.loss(batch)
    state.base.add(exact)
    for (site, role, candidate), running in state.arms.items():
        if role == "forward":
            running.add(run.loss(batch, {(site, role): _kernel(candidate)}) - exact)


def _backward(run: _Run, batch: Any, following: Any, state: Sensitivity, step: float) -> None:
    exact: float | None = None
    for (site, role, candidate), running in state.arms.items():
        if role != "forward":
            if exact is None:
                exact = run.loss_after(run.gradients(batch), step, following)
            gradients = run.gradients(batch, {(site, role): _kernel(candidate)})
            running.add(run.loss_after(gradients, step, following) - exact)


def _note_skipped(board: Switchboard, state: Sensitivity) -> None:
    """GEMMs that no graph holds, or whose kernel refused, were not in FP8: they have no effect to tell of."""
    for arm in list(state.arms):
        reason = board.refused.get(arm[:2])
        if reason is None and arm[0] not in board.sites:
            reason = "no captured graph holds this site"
        if reason is not None:
            state.skipped[arm[:2]] = reason
            state.arms[arm] = Running()


def _kernel(candidate: str) -> Kernel:
    provider, _, recipe = candidate.partition(":")
    return provider, recipe


def _shown(batches: Iterable[Any], progress: bool, what: str, done: int) -> Iterable[Any]:
    if not progress:
        return batches
    from rich.progress import track

    total = len(batches) if isinstance(batches, Sized) else None
    return track(batches, what if not done else f"{what} (goes on after {done} batches)", total=total)
