"""Data for the examples, all in one form: time-ordered rows of numerics, category indices and a 0/1 label."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Dataset:
    """Examples in the order of time, held in memory.

    Shapes and dtypes: ``numerics`` [N, F] float32, ``categories`` [N, C] int64 with column ``c`` in
    ``range(table_sizes[c])``, ``labels`` [N] float32 of zeros and ones.
    """

    numerics: Tensor
    categories: Tensor
    labels: Tensor
    numeric_names: tuple[str, ...]
    category_names: tuple[str, ...]
    table_sizes: tuple[int, ...]
    #: (row, text) pairs that mark the first row of a month, for the axes of plots.
    marks: tuple[tuple[int, str], ...] = ()

    def __len__(self) -> int:
        return self.labels.shape[0]

    def head(self, rows: int) -> Dataset:
        """The first ``rows`` examples (all of them when there are fewer)."""
        return replace(
            self,
            numerics=self.numerics[:rows],
            categories=self.categories[:rows],
            labels=self.labels[:rows],
            marks=tuple(mark for mark in self.marks if mark[0] < rows),
        )

    def to(self, device: str | torch.device) -> Dataset:
        """The same data on another device."""
        return replace(
            self,
            numerics=self.numerics.to(device),
            categories=self.categories.to(device),
            labels=self.labels.to(device),
        )

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield (numerics, categories, labels) of ``size`` rows each, in order; a last short batch is left out."""
        for start in range(0, len(self) - size + 1, size):
            rows = slice(start, start + size)
            yield self.numerics[rows], self.categories[rows], self.labels[rows]
