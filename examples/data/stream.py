"""What a trainer needs of a data source: batches in the order of time, and a position to resume from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from examples.data import Dataset


class Batch(NamedTuple):
    """One batch of examples, all tensors on one device.

    ``numerics`` [B, F] float32; ``categories`` [B, C] int64 rows of the embedding tables; ``labels`` [B] float32 of
    zeros and ones; ``history`` [B, T] int64 rows of the *first* table, the most recent in the last column, -1 in the
    first ones where a history is shorter than T (None: the source knows no histories); ``probability`` [B] float32, the
    true one where the source knows it.
    """

    numerics: Tensor
    categories: Tensor
    labels: Tensor
    history: Tensor | None = None
    probability: Tensor | None = None

    def to(self, device: str | torch.device) -> Batch:
        """The same batch on another device."""
        return Batch(*(None if t is None else t.to(device, non_blocking=True) for t in self))


@dataclass(frozen=True)
class Schema:
    """The widths that a model must be built for."""

    n_numerics: int
    table_sizes: tuple[int, ...]
    history_length: int = 0


class Stream(Protocol):
    """An endless or finite source of batches, read once, in order. All batches have the same size."""

    schema: Schema
    batch_size: int

    def __next__(self) -> Batch:
        """The next batch; raises StopIteration at the end."""

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands: plain numbers and strings."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``: the batches that follow are the ones that would have followed."""


@runtime_checkable
class ComposedStream(Stream, Protocol):
    """A stream whose batches are made on the device, in two halves, of which the second fits into a CUDA graph."""

    device: torch.device

    def next_draws(self) -> Any:
        """A NamedTuple of tensors (or None), always of the same shapes: all that tells the next batch from others."""

    def compose(self, draws: Any) -> Batch:
        """The batch, by tensor operations that read nothing of the host and nothing back to it."""


class DatasetStream:
    """A `Dataset` in memory as a stream: one pass, whole batches only."""

    def __init__(self, dataset: Dataset, batch_size: int) -> None:
        self.schema = Schema(dataset.numerics.shape[1], dataset.table_sizes)
        self.batch_size = batch_size
        self._dataset = dataset
        self._row = 0

    def __iter__(self) -> DatasetStream:
        return self

    def __next__(self) -> Batch:
        rows = slice(self._row, self._row + self.batch_size)
        if rows.stop > len(self._dataset):
            raise StopIteration
        self._row = rows.stop
        data = self._dataset
        return Batch(data.numerics[rows], data.categories[rows], data.labels[rows])

    def state_dict(self) -> dict[str, Any]:
        return {"row": self._row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._row = int(state["row"])
