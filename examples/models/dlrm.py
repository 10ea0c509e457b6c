"""DLRM (Naumov et al., arXiv 1906.00091): dot products between embeddings, an MLP below and one above.

    z      = bottom(numerics)                                   [B, d], linear -> ReLU
    dots   = strictly lower triangle of T T^T, T = [z; tokens]  (C + 1) C / 2 numbers
    logit  = top([z, dots])                                     linear -> ReLU, the last linear plain

The sizes are those of the Criteo Terabyte benchmark. 13 and 479 = 27 * 26 / 2 + 128 are not multiples of 16, which an
FP8 kernel has to pad. There is no norm between the layers, so of the Mods only the bias removal finds anything.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from examples.models.embedding import EmbeddingTables, Recommender


@dataclass(frozen=True)
class DLRMConfig:
    """Sizes of a DLRM.

    Raises:
        ValueError: a size is not positive.
    """

    #: Rows of each category's embedding table, and the number of numeric features: these come from the data.
    table_sizes: tuple[int, ...]
    numerics: int
    #: Widths of the bottom MLP; the last is also the width d of the embeddings.
    bottom: tuple[int, ...]
    #: Hidden widths of the top MLP; one more linear makes the logit.
    top: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.bottom or min(self.numerics, *self.bottom, *self.top, *self.table_sizes) < 1:
            raise ValueError(f"every size must be at least 1: {self}")

    @property
    def dim(self) -> int:
        """Width of the embeddings."""
        return self.bottom[-1]

    @classmethod
    def named(cls, size: str, *, table_sizes: Sequence[int], numerics: int, **changes: Any) -> DLRMConfig:
        """The sizes called "tiny", "h200" or "paper"; ValueError for any other name."""
        if size not in SIZES:
            raise ValueError(f"no DLRM of size {size!r}; there are: {', '.join(SIZES)}")
        return replace(cls(table_sizes=tuple(table_sizes), numerics=numerics, **SIZES[size]), **changes)


#: h200 and paper are the same network, the published Criteo-TB one; only the tables, which the data decide, differ.
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"bottom": (32, 16, 8), "top": (64, 32)},
    "h200": {"bottom": (512, 256, 128), "top": (1024, 1024, 512, 256)},
    "paper": {"bottom": (512, 256, 128), "top": (1024, 1024, 512, 256)},
}


def relu_mlp(widths: Sequence[int]) -> nn.Sequential:
    """linear -> ReLU for each step between neighbouring widths: [..., widths[0]] -> [..., widths[-1]]."""
    steps: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        steps += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*steps)


class DotInteraction(nn.Module):
    """Dot products of all pairs of tokens: [B, n, d] -> [B, n (n - 1) / 2], row by row of the lower triangle."""

    pairs: Tensor

    def __init__(self, tokens: int) -> None:
        super().__init__()
        row, column = torch.tril_indices(tokens, tokens, offset=-1)
        self.register_buffer("pairs", row * tokens + column, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.bmm(tokens, tokens.transpose(1, 2)).flatten(1).index_select(1, self.pairs)


class DLRMDense(nn.Module):
    """Everything but the tables: numerics [B, F], tokens [B, C, d] -> logits [B]."""

    def __init__(self, config: DLRMConfig) -> None:
        super().__init__()
        tokens = len(config.table_sizes) + 1
        self.bottom = relu_mlp((config.numerics, *config.bottom))
        self.interaction = DotInteraction(tokens)
        widths = (config.dim + tokens * (tokens - 1) // 2, *config.top)
        self.top = relu_mlp(widths)
        self.predict = nn.Linear(widths[-1], 1)

    def forward(self, numerics: Tensor, tokens: Tensor) -> Tensor:
        z = self.bottom(numerics)
        dots = self.interaction(torch.cat([z.unsqueeze(1), tokens.to(z.dtype)], dim=1))
        return self.predict(self.top(torch.cat([z, dots], dim=1))).squeeze(1)


class DLRM(Recommender):
    """The whole model. ``forward(numerics [B, F] float, categories [B, C] int64) -> logits [B]``."""

    def __init__(self, config: DLRMConfig) -> None:
        super().__init__(EmbeddingTables(config.table_sizes, config.dim), DLRMDense(config))
        self.config = config
