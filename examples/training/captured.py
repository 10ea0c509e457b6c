"""One training step as one CUDA graph: a single launch from the host instead of hundreds.

What changes from step to step is copied into tensors of fixed place before a replay: the random numbers of a batch
where the stream can make a batch of them on the device (`examples.data.stream.ComposedStream`), or the batch.
Everything else (making the batch, lookup, forward, backward, both optimizers) is in the graph. The same numbers come
out as without.

On a CPU, where there are no such graphs, the same steps are taken one by one over the same fixed tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from examples.data.stream import Batch

Inputs = tuple[Tensor | None, ...]


class SideStream:
    """A CUDA stream of its own that steps run on before they are captured, as CUDA wants it; nothing on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Run what is inside on it, after what came before and before what comes behind."""
        if self.stream is None:
            yield
            return
        outer = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(outer)
        with torch.cuda.stream(self.stream):
            yield
        outer.wait_stream(self.stream)


class CapturedStep:
    """A step, recorded once.

    Args:
        compose: inputs -> batch; the stream's part.
        step: batch -> logits [B]; trains.
        example: inputs of the shapes of all that follow.
        side: where the step ran before; the capture runs there, too.

    Recording launches nothing: the first call is the first step.
    """

    def __init__(
        self, compose: Callable[[Any], Batch], step: Callable[[Batch], Tensor], example: Sequence[Tensor | None],
        side: SideStream,
    ) -> None:  # fmt: skip
        self._kind = type(example)
        self._inputs: Inputs = tuple(None if x is None else x.clone() for x in example)
        self._compose, self._step = compose, step
        self._graph: torch.cuda.CUDAGraph | None = None
        if side.stream is not None:
            self._graph = torch.cuda.CUDAGraph()
            # thread_local: what other threads of the process do, e.g. a compiler's, does not end the capture.
            with torch.cuda.graph(self._graph, stream=side.stream, capture_error_mode="thread_local"):
                self._logits, self._batch = self._run()

    def _run(self) -> tuple[Tensor, Batch]:
        batch = self._compose(_like(self._kind, self._inputs))
        return self._step(batch), batch

    def __call__(self, inputs: Sequence[Tensor | None]) -> tuple[Tensor, Batch]:
        """Train on these inputs: logits [B] predicted before, and the batch. Both are overwritten by the next call."""
        for mine, new in zip(self._inputs, inputs, strict=True):
            if mine is not None and new is not None:
                mine.copy_(new)
        if self._graph is None:
            return self._run()
        self._graph.replay()
        return self._logits, self._batch


def _like(kind: type, values: Inputs) -> Any:
    """Back into the NamedTuple that they were."""
    return kind(*values)
