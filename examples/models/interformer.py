"""InterFormer (Zeng et al., arXiv 2411.09852): features and behaviour sequence learn from each other, layer by layer.

Two modes run side by side, features X [B, n, d] and sequence S [B, c + T, d] (c class tokens in front), and a cross
arch exchanges short summaries of them, so that neither is squeezed early:

    interaction  X'    = LN(X + MLP(flatten(cross([X, S_sum]))))                            eq. 7
    sequence     P     = S + S A B,  A [d, r], B [r, d] made of X_sum for each example      eq. 8 (personalised FFN)
                 S'    = LN(P + MHA(P)), rotary positions                                   eq. 9
    cross        X_sum = gate(W X)                                                          eq. 10
                 S_sum = gate([class tokens, PMA(S), most recent])                          eq. 11
    gate(x) = sigmoid(linear(x)) * x

`cross` is a token-axis cross layer, Z * (W Z) + Z, for the interaction that the MLP reads (the paper leaves it open).
The personalised weight is low rank, as a full d x d matrix for each example would cost more than the rest of the
model; rank 0 takes the full matrix. A gate's linear -> sigmoid -> product is not a SwishNorm: there is no norm in it.
With data that know no history, the categories' own tokens are the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.models.attention import AttentionPool, SelfAttention
from examples.models.embedding import EmbeddingTables, Recommender
from examples.models.wukong import MLP, TokenLinear


@dataclass(frozen=True)
class InterFormerConfig:
    """Sizes of an InterFormer.

    Raises:
        ValueError: ``mlp_norm`` is neither "none" nor "inside", or a size is not positive.
    """

    #: Rows of each category's table, numeric features, longest history (0: none); these come from the data.
    table_sizes: tuple[int, ...]
    numerics: int
    history_length: int
    #: Width of every token, and number of layers.
    dim: int
    layers: int
    #: n: feature tokens in every layer; a token-axis linear brings the data's number of fields to it.
    tokens: int
    #: Tokens of X_sum, and of each part of S_sum.
    summary_tokens: int
    class_tokens: int
    pooled_tokens: int
    recent_tokens: int
    #: Hidden widths of the interaction arch's MLP and of the final MLP.
    mlp: tuple[int, ...]
    head: tuple[int, ...]
    #: Rank of the personalised weight (0: full) and heads of the attention.
    rank: int
    heads: int
    #: Tokens that the numeric features are projected to, through hidden layers of these widths.
    numeric_tokens: int
    numeric_mlp: tuple[int, ...]
    #: LayerNorm between each hidden linear and its activation: "inside" or "none".
    mlp_norm: str = "inside"

    def __post_init__(self) -> None:
        if self.mlp_norm not in ("none", "inside"):
            raise ValueError(f'mlp_norm is {self.mlp_norm!r}; legal: "none", "inside"')
        counts = (self.summary_tokens, self.class_tokens, self.pooled_tokens, self.recent_tokens, self.numeric_tokens)
        sizes = (self.numerics, self.dim, self.layers, self.tokens, self.heads, *counts)
        if min(*sizes, *self.mlp, *self.head, *self.numeric_mlp, *self.table_sizes) < 1 or self.rank < 0:
            raise ValueError(f"every size must be at least 1: {self}")
        if self.recent_tokens > self.sequence_length:
            raise ValueError(f"{self.recent_tokens} recent tokens of a sequence of {self.sequence_length}")

    @property
    def sequence_length(self) -> int:
        """T: the history, or the categories in its place."""
        return self.history_length or len(self.table_sizes)

    @property
    def s_summary_tokens(self) -> int:
        """Tokens of S_sum."""
        return self.class_tokens + self.pooled_tokens + self.recent_tokens

    @classmethod
    def named(
        cls, size: str, *, table_sizes: Sequence[int], numerics: int, history_length: int = 0, **changes: Any
    ) -> InterFormerConfig:
        """The sizes called "tiny", "h200" or "paper"; ValueError for any other name."""
        if size not in SIZES:
            raise ValueError(f"no InterFormer of size {size!r}; there are: {', '.join(SIZES)}")
        config = cls(tuple(table_sizes), numerics, history_length, **SIZES[size])
        return replace(config, **changes)


#: The paper's widths are not public; `h200` and `paper` are the proposals whose shapes are in the shape list.
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "dim": 8, "layers": 2, "tokens": 6, "summary_tokens": 2, "class_tokens": 2, "pooled_tokens": 1,
        "recent_tokens": 1, "mlp": (32,), "head": (32,), "rank": 2, "heads": 2,
        "numeric_tokens": 2, "numeric_mlp": (16,),
    },
    "h200": {
        "dim": 128, "layers": 3, "tokens": 64, "summary_tokens": 8, "class_tokens": 4, "pooled_tokens": 2,
        "recent_tokens": 2, "mlp": (1024,), "head": (1024, 512), "rank": 16, "heads": 4,
        "numeric_tokens": 6, "numeric_mlp": (512,),
    },
    "paper": {
        "dim": 256, "layers": 3, "tokens": 64, "summary_tokens": 8, "class_tokens": 4, "pooled_tokens": 2,
        "recent_tokens": 2, "mlp": (1024,), "head": (2048, 1024), "rank": 32, "heads": 8,
        "numeric_tokens": 16, "numeric_mlp": (1024,),
    },
}  # fmt: skip


class Gate(nn.Module):
    """sigmoid(linear(x)) * x on the last dimension: which features of a summary may pass."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.linear(x)) * x


class SelfMask(nn.Module):
    """MaskNet preprocessing of the sequence: MLP(s) * s, then a linear; token by token, [B, T, d] -> the same."""

    def __init__(self, config: InterFormerConfig) -> None:
        super().__init__()
        self.mask = MLP(config.dim, (config.dim,), config.dim, config.mlp_norm)
        self.out = nn.Linear(config.dim, config.dim)

    def forward(self, s: Tensor) -> Tensor:
        return self.out(self.mask(s) * s)


class InteractionArch(nn.Module):
    """Behaviour-aware interactions of the features: X [B, n, d], S_sum [B, k, d] -> X' [B, n, d]."""

    def __init__(self, config: InterFormerConfig) -> None:
        super().__init__()
        seen = config.tokens + config.s_summary_tokens
        self.cross = TokenLinear(seen, seen)
        self.mlp = MLP(seen * config.dim, config.mlp, config.tokens * config.dim, config.mlp_norm)
        self.norm = nn.LayerNorm(config.dim)

    def forward(self, x: Tensor, s_sum: Tensor) -> Tensor:
        z = torch.cat([x, s_sum.to(x.dtype)], dim=1)
        z = z * self.cross(z) + z
        return self.norm(x + self.mlp(z.flatten(1)).view_as(x))


class PersonalisedFFN(nn.Module):
    """A linear of the sequence whose weight the features choose: X_sum [B, k, d], S [B, t, d] -> [B, t, d]."""

    def __init__(self, config: InterFormerConfig) -> None:
        super().__init__()
        self.rank = config.rank
        self.dim = config.dim
        self.scale = config.dim**-0.5
        width = config.dim * (2 * config.rank or config.dim)
        self.weight = nn.Linear(config.summary_tokens * config.dim, width)

    def forward(self, x_sum: Tensor, s: Tensor) -> Tensor:
        weight = self.weight(x_sum.flatten(1)) * self.scale
        if self.rank == 0:
            return s + torch.bmm(s, weight.unflatten(1, (self.dim, self.dim)))
        down, up = weight.unflatten(1, (2, -1)).unbind(1)
        low = torch.bmm(s, down.unflatten(1, (self.dim, self.rank)))
        return s + torch.bmm(low, up.unflatten(1, (self.rank, self.dim)))


class SequenceArch(nn.Module):
    """Context-aware sequence modelling: X_sum [B, k, d], S [B, t, d], mask [B, t] -> S' [B, t, d]."""

    def __init__(self, config: InterFormerConfig) -> None:
        super().__init__()
        self.ffn = PersonalisedFFN(config)
        self.attention = SelfAttention(config.dim, config.heads, config.class_tokens + config.sequence_length)
        self.norm = nn.LayerNorm(config.dim)

    def forward(self, x_sum: Tensor, s: Tensor, mask: Tensor | None) -> Tensor:
        p = self.ffn(x_sum, s)
        return self.norm(p + self.attention(p, mask))


class FeatureSummary(nn.Module):
    """What the features tell the sequence: X [B, n, d] -> X_sum [B, k, d]."""

    def __init__(self, config: InterFormerConfig) -> None:
        super().__init__()
        self.compress = TokenLinear(config.tokens, config.summary_tokens)
        self.gate = Gate(config.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(self.compress(x))


class SequenceSummary(nn.Module):
    """What the sequence tells the features: S [B, t, d], mask [B, t] -> S_sum [B, class + pooled + recent, d]."""

    def __init__(self, config: InterFormerConfig) -> None:
        super().__init__()
        self.class_tokens = config.class_tokens
        self.recent_tokens = config.recent_tokens
        self.pool = AttentionPool(config.dim, config.heads, config.pooled_tokens)
        self.gate = Gate(config.dim)

    def forward(self, s: Tensor, mask: Tensor | None) -> Tensor:
        pooled = self.pool(s, mask).to(s.dtype)
        recent = s[:, -self.recent_tokens :]
        if mask is not None:
            # A history shorter than the recent tokens leaves zeros in their place.
            recent = recent * mask[:, -self.recent_tokens :].unsqueeze(-1).to(s.dtype)
        return self.gate(torch.cat([s[:, : self.class_tokens], pooled, recent], dim=1))


class InterFormerLayer(nn.Module):
    """Both modes summarise themselves for the other and take one step."""

    def __init__(self, config: InterFormerConfig) -> None:
        super().__init__()
        self.x_summary = FeatureSummary(config)
        self.s_summary = SequenceSummary(config)
        self.interaction = InteractionArch(config)
        self.sequence = SequenceArch(config)

    def forward(self, x: Tensor, s: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.interaction(x, self.s_summary(s, mask)), self.sequence(self.x_summary(x), s, mask)


class InterFormerDense(nn.Module):
    """Everything but the tables: numerics [B, F], tokens [B, C, d], history [B, T, d] and mask [B, T] -> logits [B]."""

    def __init__(self, config: InterFormerConfig) -> None:
        super().__init__()
        self.dim = config.dim
        self.reads_history = config.history_length > 0
        self.class_tokens = config.class_tokens
        fields = len(config.table_sizes) + config.numeric_tokens
        self.numeric = MLP(config.numerics, config.numeric_mlp, config.numeric_tokens * config.dim, config.mlp_norm)
        self.compress = nn.Identity() if fields == config.tokens else TokenLinear(fields, config.tokens)
        self.preprocess = SelfMask(config)
        self.start = TokenLinear(config.tokens, config.class_tokens)
        self.layers = nn.ModuleList(InterFormerLayer(config) for _ in range(config.layers))
        self.summary = SequenceSummary(config)
        width = (config.tokens + config.s_summary_tokens) * config.dim
        self.head = MLP(width, config.head, 1, config.mlp_norm)

    def forward(
        self, numerics: Tensor, tokens: Tensor, history: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        sequence = history if self.reads_history else tokens
        # The class tokens are always there, so no row of the attention is empty.
        shown = F.pad(mask, (self.class_tokens, 0), value=True) if self.reads_history else None
        x = self.compress(torch.cat([tokens, self.numeric(numerics).unflatten(1, (-1, self.dim))], dim=1))
        first = self.start(x)
        s = torch.cat([first, self.preprocess(sequence).to(first.dtype)], dim=1)
        for layer in self.layers:
            x, s = layer(x, s, shown)
        s_sum = self.summary(s, shown).flatten(1)
        return self.head(torch.cat([x.flatten(1), s_sum.to(x.dtype)], dim=1)).squeeze(1)


class InterFormer(Recommender):
    """The whole model. ``forward(numerics [B, F], categories [B, C], history [B, T] or None) -> logits [B]``."""

    def __init__(self, config: InterFormerConfig) -> None:
        tables = EmbeddingTables(config.table_sizes, config.dim)
        super().__init__(tables, InterFormerDense(config), reads_history=config.history_length > 0)
        self.config = config
