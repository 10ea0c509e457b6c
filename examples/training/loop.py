"""Predict, then train: one pass over a stream, with metrics of windows and checkpoints that resume exactly."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.data.stream import Batch, ComposedStream, Stream
from examples.models.embedding import Recommender
from examples.training.captured import CapturedStep, SideStream
from examples.training.checkpoint import CheckpointError
from examples.training.config import TrainConfig
from examples.training.optimizers import RowwiseAdagrad
from examples.training.windows import Window


class DivergedError(RuntimeError):
    """The log loss of a window is not a finite number."""


@contextlib.contextmanager
def numerics(config: TrainConfig) -> Iterator[None]:
    """The global switches of a run, put back afterwards: TF32 and determinism."""
    precision = torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    torch.use_deterministic_algorithms(config.deterministic or deterministic)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(deterministic)


class Trainer:
    """One model on one stream.

    Args:
        model: on ``device`` already. Only ``model.dense_arch`` is compiled.
        transform: changes the dense part before it is compiled, e.g. `loka_compile.apply_mods` or torchao's conversion.
        device: where batches are moved to.
        capturable: keep Adam's step count on the GPU, so that `step` can be captured in a CUDA graph (as
            ``config.cuda_graph`` wants it, too).
    """

    def __init__(
        self,
        model: Recommender,
        stream: Stream,
        config: TrainConfig,
        *,
        device: str | torch.device = "cpu",
        transform: Callable[[torch.nn.Module], torch.nn.Module] | None = None,
        capturable: bool = False,
    ) -> None:
        self.model, self.stream, self.config = model, stream, config
        self.device = torch.device(device)
        if transform is not None:
            model.dense_arch = transform(model.dense_arch)
        self._capturable = capturable or config.cuda_graph
        self.dense = self._compile(model.dense_arch)
        self._side = SideStream(self.device) if config.cuda_graph else None
        self._begin()

    def _begin(self) -> None:
        """Everything of a run but the model and the stream, as it is before the first step."""
        config = self.config
        self.step_count = 0
        self.seconds = 0.0
        how = {"fused": True, "capturable": self._capturable} if self.device.type == "cuda" else {"foreach": True}
        self.dense_optimizer = torch.optim.Adam(self.model.dense_arch.parameters(), lr=config.lr, **how)
        tables = list(self.model.embed.parameters())
        if config.table_optimizer == "rowwise_adagrad":
            self.table_optimizer: torch.optim.Optimizer = RowwiseAdagrad(tables, lr=config.table_lr)
        else:
            self.table_optimizer = torch.optim.SparseAdam(tables, lr=config.table_lr)
        self._window: Window | None = None
        self._captured: CapturedStep | None = None
        self._steps_here = 0

    def restart(self, weights: Mapping[str, Tensor], stream: Stream) -> None:
        """Begin again with other initial weights (a state_dict of the model) on another stream of the same shapes.

        What was compiled stays: a loka plan that was made for the first weights is used for these, too.
        """
        self.model.load_state_dict(weights)
        self.stream = stream
        self._begin()

    def _compile(self, dense: torch.nn.Module) -> Callable[..., Tensor]:
        config = self.config
        if config.backend == "eager":
            return dense
        if config.backend == "loka":
            # Makes the name known where the package is not installed. Only here: nothing else needs the package.
            importlib.import_module("loka_compile")
        how: dict[str, Any] = {"options": config.options} if config.options else {}
        if config.mode:
            how["mode"] = config.mode
        return torch.compile(dense, backend=config.backend, fullgraph=True, dynamic=False, **how)

    def predict(self, batch: Batch) -> Tensor:
        """Logits [B] float32 of a batch on the trainer's device."""
        history = batch.history if self.model.reads_history else None
        features = self.model.embed(batch.categories, history)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"):
            logits = self.dense(batch.numerics, *features)
        return logits.float()

    def step(self, batch: Batch) -> Tensor:
        """Train on one batch; returns the logits [B] predicted before."""
        warmup = min(1.0, (self.step_count + 1) / self.config.warmup) if self.config.warmup else 1.0
        for optimizer, lr in ((self.dense_optimizer, self.config.lr), (self.table_optimizer, self.config.table_lr)):
            for group in optimizer.param_groups:
                group["lr"] = lr * warmup
        logits = self._train(batch)
        self.step_count += 1
        return logits

    def _train(self, batch: Batch) -> Tensor:
        """A step with the learning rates as they are: work for the device alone."""
        logits = self.predict(batch)
        F.binary_cross_entropy_with_logits(logits, batch.labels).backward()
        for optimizer in (self.dense_optimizer, self.table_optimizer):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return logits.detach()

    def run(
        self, steps: int | None = None, on_step: Callable[[int], None] | None = None
    ) -> Iterator[tuple[dict[str, Any], Tensor]]:
        """Train up to step ``steps`` (None: to the end of the stream) and yield each window when it is full.

        ``on_step`` is called after each step, and after the window that it filled was yielded.

        Yields:
            The window's metrics, with ``step`` (how many have been made), ``examples`` (of the window) and
            ``examples_per_second``; and its losses summed over each step, as `Window.step_losses` gives them.
            An incomplete window at the end of a finite stream is left out.

        Raises:
            DivergedError: after a window whose log loss is not finite.
        """
        started = time.perf_counter()
        with numerics(self.config):
            while steps is None or self.step_count < steps:
                with self._side() if self._side is not None else contextlib.nullcontext():
                    try:
                        logits, batch = self._advance()
                    except StopIteration:
                        break
                    window = self._window or self._new_window(batch)
                    full = window.add(logits, batch.labels, batch.probability)
                    if full:
                        metrics, losses = window.metrics(), window.step_losses()
                if full:
                    # metrics() waits for the device, so the clock covers all of the window's work.
                    self.seconds += time.perf_counter() - started
                    examples = window.steps * window.batch_size
                    record = {"step": self.step_count, "examples": examples, **metrics}
                    record["examples_per_second"] = examples / self.seconds
                    window.clear()
                    self.seconds = 0.0
                    yield record, losses
                    if not math.isfinite(record["log_loss"]):
                        raise DivergedError(f"the log loss of the window up to step {self.step_count} is not finite")
                    started = time.perf_counter()
                if on_step is not None:
                    on_step(self.step_count)
        self.seconds += time.perf_counter() - started

    def _advance(self) -> tuple[Tensor, Batch]:
        """Train on the next batch of the stream; StopIteration at its end."""
        if self._side is None:
            batch = next(self.stream).to(self.device)
            return self.step(batch), batch
        here = isinstance(self.stream, ComposedStream) and self.stream.device.type == self.device.type
        composed = cast(ComposedStream, self.stream) if here else None
        inputs = composed.next_draws() if composed else next(self.stream).to(self.device)
        compose: Callable[[Any], Batch] = composed.compose if composed else _as_it_is
        if self._captured is None and self._steps_here == self.config.steps_before_capture:
            self._captured = self._capture(compose, inputs)
        self._steps_here += 1
        if self._captured is None:
            batch = compose(inputs)
            return self.step(batch), batch
        self.step_count += 1
        return self._captured(inputs)

    def _capture(self, compose: Callable[[Any], Batch], inputs: Any) -> CapturedStep | None:
        """The step as a graph; None, with a warning, where it does not fit into one: the run goes on without."""
        assert self._side is not None
        try:
            return CapturedStep(compose, self._train, inputs, self._side)
        except RuntimeError as error:
            warnings.warn(f"the step is not captured as a CUDA graph: {str(error).splitlines()[0]}", stacklevel=2)
            for optimizer in (self.dense_optimizer, self.table_optimizer):
                optimizer.zero_grad(set_to_none=True)
            return None

    def _new_window(self, batch: Batch) -> Window:
        self._window = Window(
            self.config.window, len(batch.labels), true_probability=batch.probability is not None, device=self.device
        )
        return self._window

    def state_dict(self) -> dict[str, Any]:
        """Everything that what follows depends on."""
        return {
            "config": dataclasses.asdict(self.config),
            "model": self.model.state_dict(),
            "dense_optimizer": self.dense_optimizer.state_dict(),
            "table_optimizer": self.table_optimizer.state_dict(),
            "stream": self.stream.state_dict(),
            "window": self._window.state_dict() if self._window else None,
            "rng": torch.get_rng_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken.

        Raises:
            CheckpointError: it is the state of a run with another configuration.
        """
        if differences := self.config.differences(state["config"]):
            raise CheckpointError(f"the checkpoint is of another run: {'; '.join(differences)}")
        self._captured, self._steps_here = None, 0
        self.model.load_state_dict(state["model"])
        self.dense_optimizer.load_state_dict(state["dense_optimizer"])
        self.table_optimizer.load_state_dict(state["table_optimizer"])
        self.stream.load_state_dict(state["stream"])
        torch.set_rng_state(state["rng"])
        self.step_count = state["step"]
        self._window = None
        if state["window"] is not None:
            rows = state["window"]["rows"]
            self._window = Window(
                self.config.window, rows.shape[2], true_probability=rows.shape[0] == 3, device=self.device
            )
            self._window.load_state_dict(state["window"])


def _as_it_is(batch: Batch) -> Batch:
    return batch
