"""The two halves of every model here: embedding tables, and the dense part that is worth compiling.

features = model.embed(categories, history)         lookups; their gradients are sparse, their optimizer its own
logits   = model.dense_arch(numerics, *features)    all GEMMs; torch.compile takes this part alone
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class EmbeddingTables(nn.Module):
    """All categories' tables stacked into one: one lookup, one gradient. A column's rows begin at its offset.

    ``forward(categories [B, C] int64, history [B, T] int64 or None)`` gives the tokens [B, C, d] alone, or, with a
    history of rows of the first table (-1 where there is none), also its tokens [B, T, d] and its mask [B, T] bool.

    Args:
        sparse: gradients as sparse tensors, one value per looked-up row, for `RowwiseAdagrad` or SparseAdam.
        weight: a table to take over, [sum(table_sizes), d]; without it rows are drawn from a normal of variance 1 / d.
    """

    offsets: Tensor

    def __init__(
        self, table_sizes: Sequence[int], dim: int, *, sparse: bool = True, weight: Tensor | None = None
    ) -> None:
        super().__init__()
        sizes = torch.tensor(table_sizes)
        self.register_buffer("offsets", sizes.cumsum(0) - sizes, persistent=False)
        if weight is None:
            weight = torch.randn(sum(table_sizes), dim) * dim**-0.5
        self.table = nn.Embedding.from_pretrained(weight, freeze=False, sparse=sparse)

    def forward(self, categories: Tensor, history: Tensor | None = None) -> tuple[Tensor, ...]:
        rows = categories + self.offsets
        if history is None:
            return (self.table(rows),)
        # One lookup for both, so that the table has one gradient.
        tokens = self.table(torch.cat([rows, history.clamp(min=0)], dim=1))
        fields = categories.shape[1]
        return tokens[:, :fields], tokens[:, fields:], history >= 0


class Recommender(nn.Module):
    """A click model: ``forward(numerics [B, F], categories [B, C], history [B, T] or None) -> logits [B]``.

    ``history`` is left out for a model that reads none (``reads_history`` is False).
    """

    def __init__(self, embed: EmbeddingTables, dense_arch: nn.Module, *, reads_history: bool = False) -> None:
        super().__init__()
        self.embed = embed
        self.dense_arch = dense_arch
        self.reads_history = reads_history

    def forward(self, numerics: Tensor, categories: Tensor, history: Tensor | None = None) -> Tensor:
        features = self.embed(categories, history if self.reads_history else None)
        return self.dense_arch(numerics, *features)
