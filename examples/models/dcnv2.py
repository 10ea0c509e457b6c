"""DCNv2 (Wang et al., arXiv 2008.13535): explicit crosses of bounded degree, and an MLP.

    x0      = [numeric token, embeddings], flattened
    x(l+1)  = x0 * (W x(l) + b) + x(l)              full cross layer, W [D, D]
    x(l+1)  = x0 * (U (V x(l)) + b) + x(l)          low rank, V [r, D], U [D, r]
    stacked:  logit = linear(deep(x(L)))            parallel:  logit = linear([x(L), deep(x0)])

The `h200` size is the DLRM-DCNv2 of MLPerf: 27 * 128 = 3456 features, three crosses of rank 512. A cross layer's
linear is followed by a product and a sum, never by a norm; and 3456 is not a multiple of 256.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from examples.models.dlrm import relu_mlp
from examples.models.embedding import EmbeddingTables, Recommender


@dataclass(frozen=True)
class DCNv2Config:
    """Sizes of a DCNv2.

    Raises:
        ValueError: ``structure`` is neither "stacked" nor "parallel", or a size is not positive.
    """

    #: Rows of each category's embedding table, and the number of numeric features: these come from the data.
    table_sizes: tuple[int, ...]
    numerics: int
    #: Widths of the MLP that makes one token of the numerics; the last is also the width of the embeddings.
    bottom: tuple[int, ...]
    #: Cross layers, and the rank of their weights; rank 0 is the full matrix.
    crosses: int
    rank: int
    #: Hidden widths of the deep part; one more linear makes the logit.
    deep: tuple[int, ...]
    structure: str = "stacked"

    def __post_init__(self) -> None:
        if self.structure not in ("stacked", "parallel"):
            raise ValueError(f'structure is {self.structure!r}; legal: "stacked", "parallel"')
        if not self.bottom or min(self.numerics, self.crosses, *self.bottom, *self.deep, *self.table_sizes) < 1:
            raise ValueError(f"every size must be at least 1: {self}")
        if self.rank < 0:
            raise ValueError(f"rank is {self.rank}; legal: 0 (full matrices) or more")

    @property
    def dim(self) -> int:
        """Width of the embeddings."""
        return self.bottom[-1]

    @property
    def features(self) -> int:
        """D, the width of a cross layer."""
        return (len(self.table_sizes) + 1) * self.dim

    @classmethod
    def named(cls, size: str, *, table_sizes: Sequence[int], numerics: int, **changes: Any) -> DCNv2Config:
        """The sizes called "tiny", "h200" or "paper"; ValueError for any other name."""
        if size not in SIZES:
            raise ValueError(f"no DCNv2 of size {size!r}; there are: {', '.join(SIZES)}")
        return replace(cls(table_sizes=tuple(table_sizes), numerics=numerics, **SIZES[size]), **changes)


#: h200 is MLPerf's DLRM-DCNv2; paper is the DCN of the Wukong paper's table 5 (2 crosses of rank 512, MLP 4 x 4096, d =
#: 160; with its 720 features D is 115,360), for shape studies.
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"bottom": (16, 8), "crosses": 2, "rank": 16, "deep": (64, 32)},
    "h200": {"bottom": (512, 256, 128), "crosses": 3, "rank": 512, "deep": (1024, 1024, 512, 256)},
    "paper": {"bottom": (1024, 160), "crosses": 2, "rank": 512, "deep": (4096, 4096, 4096, 4096)},
}


class CrossLayer(nn.Module):
    """One more degree of interaction: x0 [B, D], x [B, D] -> [B, D]."""

    def __init__(self, features: int, rank: int) -> None:
        super().__init__()
        self.compress = nn.Identity() if rank == 0 else nn.Linear(features, rank, bias=False)
        self.expand = nn.Linear(rank or features, features)

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        return x0 * self.expand(self.compress(x)) + x


class DCNv2Dense(nn.Module):
    """Everything but the tables: numerics [B, F], tokens [B, C, d] -> logits [B]."""

    def __init__(self, config: DCNv2Config) -> None:
        super().__init__()
        self.parallel = config.structure == "parallel"
        self.bottom = relu_mlp((config.numerics, *config.bottom))
        self.crosses = nn.ModuleList(CrossLayer(config.features, config.rank) for _ in range(config.crosses))
        widths = (config.features, *config.deep)
        self.deep = relu_mlp(widths)
        self.predict = nn.Linear(widths[-1] + (config.features if self.parallel else 0), 1)

    def forward(self, numerics: Tensor, tokens: Tensor) -> Tensor:
        z = self.bottom(numerics).unsqueeze(1)
        x0 = torch.cat([z, tokens.to(z.dtype)], dim=1).flatten(1)
        x = x0
        for cross in self.crosses:
            x = cross(x0, x)
        x = torch.cat([x, self.deep(x0)], dim=1) if self.parallel else self.deep(x)
        return self.predict(x).squeeze(1)


class DCNv2(Recommender):
    """The whole model. ``forward(numerics [B, F] float, categories [B, C] int64) -> logits [B]``."""

    def __init__(self, config: DCNv2Config) -> None:
        super().__init__(EmbeddingTables(config.table_sizes, config.dim), DCNv2Dense(config))
        self.config = config
