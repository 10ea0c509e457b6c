"""Predict, then train: one pass over a stream, with metrics of windows and checkpoints that resume exactly."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.data.stream import Batch, Stream
from examples.models.embedding import Recommender
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
        capturable: keep Adam's step count on the GPU, so that `step` can be captured in a CUDA graph.
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
        self.step_count = 0
        self.seconds = 0.0
        how = {"fused": True, "capturable": capturable} if self.device.type == "cuda" else {"foreach": True}
        self.dense_optimizer = torch.optim.Adam(model.dense_arch.parameters(), lr=config.lr, **how)
        tables = list(model.embed.parameters())
        if config.table_optimizer == "rowwise_adagrad":
            self.table_optimizer: torch.optim.Optimizer = RowwiseAdagrad(tables, lr=config.table_lr)
        else:
            self.table_optimizer = torch.optim.SparseAdam(tables, lr=config.table_lr)
        self.dense = self._compile(model.dense_arch)
        self._window: Window | None = None

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
        logits = self.predict(batch)
        F.binary_cross_entropy_with_logits(logits, batch.labels).backward()
        for optimizer in (self.dense_optimizer, self.table_optimizer):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step_count += 1
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
                try:
                    batch = next(self.stream).to(self.device)
                except StopIteration:
                    break
                logits = self.step(batch)
                window = self._window or self._new_window(batch)
                if window.add(logits, batch.labels, batch.probability):
                    metrics, losses = window.metrics(), window.step_losses()
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
