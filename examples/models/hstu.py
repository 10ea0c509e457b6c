"""HSTU (Zhai et al., arXiv 2402.17152) as a ranker: what has been seen so far, then the candidate, in one sequence.

    sequence = [features, history, candidate]   the categories' and numerics' tokens in front, the first category last
    layer:   u, v, q, k = split(SiLU(linear(LN(x))))
             a          = (SiLU(q k^T) / T  masked) v         pointwise attention: no softmax, T the longest sequence
             x'         = x + linear([u, a, LN(a) * u])       or linear(LN(a) * u) alone
    logit    = MLP(LN(x at the candidate))

Around the stack stand MLPs with the activation x * sigmoid(LN(x)) ("SwishLayerNorm": linear -> SwishLayerNorm ->
linear -> LayerNorm), which is where open production code has the chain that the LoKA paper rewrites. In the stack
itself the norm comes *before* the linear, so the Mods must leave it alone. With data that know no history, the
sequence holds the features and the candidate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.models.embedding import EmbeddingTables, Recommender


@dataclass(frozen=True)
class HSTUConfig:
    """Sizes of an HSTU.

    Raises:
        ValueError: a size is not positive.
    """

    #: Rows of each category's table, numeric features, longest history (0: none); these come from the data.
    table_sizes: tuple[int, ...]
    numerics: int
    history_length: int
    #: Width of every token, number of layers and of attention heads.
    dim: int
    layers: int
    heads: int
    #: Per head: width of u and v, and of q and k.
    linear_dim: int
    qk_dim: int
    #: Hidden widths of the MLP before the stack, of the candidate's MLP, and of the head.
    content_mlp: int
    candidate_mlp: int
    head: int
    #: Whether a layer's output linear also reads u and a, as production code has it.
    concat_ua: bool = True

    def __post_init__(self) -> None:
        widths = (self.linear_dim, self.qk_dim, self.content_mlp, self.candidate_mlp, self.head)
        if min(self.numerics, self.dim, self.layers, self.heads, *widths, *self.table_sizes) < 1:
            raise ValueError(f"every size must be at least 1: {self}")

    @property
    def context(self) -> int:
        """Tokens in front of the history: one per category and one for the numerics."""
        return len(self.table_sizes) + 1

    @property
    def sequence_length(self) -> int:
        """Context, history and candidate."""
        return self.context + self.history_length + 1

    @classmethod
    def named(
        cls, size: str, *, table_sizes: Sequence[int], numerics: int, history_length: int = 0, **changes: Any
    ) -> HSTUConfig:
        """The sizes called "tiny", "h200" or "paper"; ValueError for any other name."""
        if size not in SIZES:
            raise ValueError(f"no HSTU of size {size!r}; there are: {', '.join(SIZES)}")
        return replace(cls(tuple(table_sizes), numerics, history_length, **SIZES[size]), **changes)


#: paper has the sizes of the open production configuration (d = 512, 5 layers: uvqk 512 -> 2048, output 1536 -> 512);
#: h200 has the same widths and three layers.
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "dim": 16, "layers": 2, "heads": 2, "linear_dim": 8, "qk_dim": 4,
        "content_mlp": 16, "candidate_mlp": 16, "head": 16,
    },
    "h200": {
        "dim": 512, "layers": 3, "heads": 4, "linear_dim": 128, "qk_dim": 128,
        "content_mlp": 256, "candidate_mlp": 512, "head": 512,
    },
    "paper": {
        "dim": 512, "layers": 5, "heads": 4, "linear_dim": 128, "qk_dim": 128,
        "content_mlp": 256, "candidate_mlp": 512, "head": 512,
    },
}  # fmt: skip


class SwishLayerNorm(nn.Module):
    """x * sigmoid(LayerNorm(x)) over the last dimension."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.norm(x))


def swish_norm_mlp(in_features: int, hidden: int, out: int) -> nn.Sequential:
    """linear -> SwishLayerNorm -> linear -> LayerNorm."""
    return nn.Sequential(
        nn.Linear(in_features, hidden), SwishLayerNorm(hidden), nn.Linear(hidden, out), nn.LayerNorm(out)
    )


class HSTULayer(nn.Module):
    """One layer: x [B, t, d], hidden [t, t] or [B, 1, t, t] bool -> [B, t, d]; True hides a column from a row."""

    def __init__(self, config: HSTUConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.length = config.sequence_length
        self.concat_ua = config.concat_ua
        inner = config.linear_dim * config.heads
        self.widths = [inner, inner, config.qk_dim * config.heads, config.qk_dim * config.heads]
        self.norm = nn.LayerNorm(config.dim)
        self.uvqk = nn.Linear(config.dim, sum(self.widths))
        self.attention_norm = nn.LayerNorm(inner)
        self.out = nn.Linear(inner * (3 if config.concat_ua else 1), config.dim)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        u, v, q, k = F.silu(self.uvqk(self.norm(x))).split(self.widths, dim=-1)
        v, q, k = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (v, q, k))
        weights = (F.silu(q @ k.transpose(-2, -1)) / self.length).masked_fill(hidden, 0.0)
        attended = (weights @ v).transpose(1, 2).flatten(2)
        gated = self.attention_norm(attended).to(u.dtype) * u
        return x + self.out(torch.cat([u, attended, gated], dim=-1) if self.concat_ua else gated)


class HSTUDense(nn.Module):
    """Everything but the tables: numerics [B, F], tokens [B, C, d], history [B, T, d] and mask [B, T] -> logits [B]."""

    hidden: Tensor

    def __init__(self, config: HSTUConfig) -> None:
        super().__init__()
        self.reads_history = config.history_length > 0
        self.numeric = swish_norm_mlp(config.numerics, config.content_mlp, config.dim)
        if self.reads_history:
            self.content = swish_norm_mlp(config.dim, config.content_mlp, config.dim)
        self.candidate = swish_norm_mlp(config.dim, config.candidate_mlp, config.dim)
        self.position = nn.Parameter(torch.randn(config.sequence_length, config.dim) * config.dim**-0.5)
        self.layers = nn.ModuleList(HSTULayer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Sequential(nn.Linear(config.dim, config.head), SwishLayerNorm(config.head))
        self.predict = nn.Linear(config.head, 1)
        # Context tokens see each other; after them everyone sees the past and itself.
        hidden = torch.ones(config.sequence_length, config.sequence_length).triu(1).bool()
        hidden[: config.context, : config.context] = False
        self.register_buffer("hidden", hidden, persistent=False)

    def forward(
        self, numerics: Tensor, tokens: Tensor, history: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        parts = [tokens, self.numeric(numerics).to(tokens.dtype).unsqueeze(1)]
        hidden = self.hidden
        if self.reads_history:
            parts.append(self.content(history).to(tokens.dtype))
            absent = F.pad(~mask, (tokens.shape[1] + 1, 1), value=False)
            hidden = hidden | absent[:, None, None, :]
        parts.append(self.candidate(tokens[:, 0]).to(tokens.dtype).unsqueeze(1))
        x = torch.cat(parts, dim=1) + self.position
        for layer in self.layers:
            x = layer(x, hidden)
        return self.predict(self.head(self.norm(x[:, -1]))).squeeze(1)


class HSTU(Recommender):
    """The whole model. ``forward(numerics [B, F], categories [B, C], history [B, T] or None) -> logits [B]``."""

    def __init__(self, config: HSTUConfig) -> None:
        tables = EmbeddingTables(config.table_sizes, config.dim)
        super().__init__(tables, HSTUDense(config), reads_history=config.history_length > 0)
        self.config = config
