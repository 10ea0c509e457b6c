"""DHEN (Zhang et al., arXiv 2203.11014): a deep stack whose layers are ensembles of unlike interaction modules.

Each layer gives the same tokens X [B, n, d] to several modules, puts their outputs side by side (or adds them), and
normalises the sum with a shortcut:

    X' = LN(ensemble(module_1(X), ..., module_k(X)) + shortcut(X)),   shortcut a token-axis linear where n changes

    fm_mlp     MLP([flatten(X), dot products of all pairs of tokens]) as tokens          (the paper's AdvancedDLRM)
    dcn        one low-rank cross of flatten(X), mixed down to tokens                    (section "deep cross net")
    attention  multi-head self-attention over the tokens, residual and norm, mixed down
    linear     W X, a linear map over the token axis

Inside the MLPs the order is linear -> LayerNorm -> SiLU, as the LoKA paper has it (section III-B), behind a switch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from examples.models.attention import SelfAttention
from examples.models.dcnv2 import CrossLayer
from examples.models.dlrm import DotInteraction
from examples.models.embedding import EmbeddingTables, Recommender
from examples.models.wukong import MLP, TokenLinear, head_input


@dataclass(frozen=True)
class DHENConfig:
    """Sizes of a DHEN.

    Raises:
        ValueError: an unknown module or ensemble, "sum" over modules of unlike size, or a size that is not positive.
    """

    #: Rows of each category's embedding table, and the number of numeric features: these come from the data.
    table_sizes: tuple[int, ...]
    numerics: int
    #: Width of every token, and number of layers.
    dim: int
    layers: int
    #: (module, tokens that it puts out) for each member of a layer's ensemble.
    modules: tuple[tuple[str, int], ...]
    #: "concat": outputs side by side; "sum": added, all of one size.
    ensemble: str
    #: Hidden widths of the FM-MLP module and of the final MLP.
    mlp: tuple[int, ...]
    head: tuple[int, ...]
    #: Rank of the dcn module's weight, heads of the attention module.
    rank: int
    heads: int
    #: Tokens that the numeric features are projected to, through hidden layers of these widths.
    numeric_tokens: int
    numeric_mlp: tuple[int, ...]
    #: LayerNorm between each hidden linear and its activation: "inside" or "none".
    mlp_norm: str = "inside"
    #: The final MLP also reads the numerics, as they are, beside the tokens, as in `WukongConfig`.
    wide: bool = False

    def __post_init__(self) -> None:
        for name, _ in self.modules:
            if name not in MODULES:
                raise ValueError(f"no DHEN module {name!r}; there are: {', '.join(MODULES)}")
        if self.ensemble not in ("concat", "sum") or not self.modules:
            raise ValueError(f'ensemble is {self.ensemble!r} of {len(self.modules)} modules; legal: "concat", "sum"')
        if self.ensemble == "sum" and len({tokens for _, tokens in self.modules}) > 1:
            raise ValueError(f"modules that are summed must put out equally many tokens: {self.modules}")
        if self.mlp_norm not in ("none", "inside"):
            raise ValueError(f'mlp_norm is {self.mlp_norm!r}; legal: "none", "inside"')
        sizes = (self.dim, self.layers, self.rank, self.heads, self.numeric_tokens, self.numerics)
        if min(*sizes, *self.mlp, *self.head, *self.numeric_mlp, *self.table_sizes, *dict(self.modules).values()) < 1:
            raise ValueError(f"every size must be at least 1: {self}")

    @property
    def out_tokens(self) -> int:
        """Tokens that a layer puts out."""
        return sum(n for _, n in self.modules) if self.ensemble == "concat" else self.modules[0][1]

    @classmethod
    def named(cls, size: str, *, table_sizes: Sequence[int], numerics: int, **changes: Any) -> DHENConfig:
        """The sizes called "tiny", "mid", "h200" or "paper"; ValueError for any other name."""
        if size not in SIZES:
            raise ValueError(f"no DHEN of size {size!r}; there are: {', '.join(SIZES)}")
        return replace(cls(table_sizes=tuple(table_sizes), numerics=numerics, **SIZES[size]), **changes)


#: The paper's own widths are not public; `paper` has its depth of 6 layers and the width of its family's shapes.
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "dim": 8, "layers": 2, "modules": (("fm_mlp", 4), ("dcn", 2), ("attention", 2), ("linear", 4)),
        "ensemble": "concat", "mlp": (32, 32), "head": (32,), "rank": 8, "heads": 2,
        "numeric_tokens": 2, "numeric_mlp": (16,),
    },
    "mid": {
        "dim": 64, "layers": 2, "modules": (("fm_mlp", 8), ("dcn", 4), ("linear", 4)),
        "ensemble": "concat", "mlp": (2048,), "head": (1024,), "rank": 512, "heads": 4,
        "numeric_tokens": 6, "numeric_mlp": (512,),
    },
    "h200": {
        "dim": 160, "layers": 3, "modules": (("fm_mlp", 32), ("dcn", 16), ("linear", 16)),
        "ensemble": "concat", "mlp": (2048, 2048), "head": (2048, 1024), "rank": 512, "heads": 5,
        "numeric_tokens": 6, "numeric_mlp": (512,),
    },
    "paper": {
        "dim": 160, "layers": 6, "modules": (("fm_mlp", 64), ("dcn", 64), ("attention", 64), ("linear", 64)),
        "ensemble": "sum", "mlp": (4096, 4096), "head": (4096, 2048), "rank": 1024, "heads": 5,
        "numeric_tokens": 16, "numeric_mlp": (1024,),
    },
}  # fmt: skip


class FMModule(nn.Module):
    """[B, n, d] -> [B, out, d]: an MLP that reads the tokens and their pairwise dot products."""

    def __init__(self, config: DHENConfig, tokens: int, out: int) -> None:
        super().__init__()
        self.dim = config.dim
        self.interaction = DotInteraction(tokens)
        features = tokens * config.dim + tokens * (tokens - 1) // 2
        self.mlp = MLP(features, config.mlp, out * config.dim, config.mlp_norm)

    def forward(self, x: Tensor) -> Tensor:
        dots = self.interaction(x) * self.dim**-0.5
        return self.mlp(torch.cat([x.flatten(1), dots.to(x.dtype)], dim=1)).unflatten(1, (-1, self.dim))


class CrossModule(nn.Module):
    """[B, n, d] -> [B, out, d]: a cross of all features with themselves, then mixed over the token axis."""

    def __init__(self, config: DHENConfig, tokens: int, out: int) -> None:
        super().__init__()
        self.cross = CrossLayer(tokens * config.dim, config.rank)
        self.mix = TokenLinear(tokens, out)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        return self.mix(self.cross(flat, flat).view_as(x))


class AttentionModule(nn.Module):
    """[B, n, d] -> [B, out, d]: one attention layer with residual and norm, then mixed over the token axis."""

    def __init__(self, config: DHENConfig, tokens: int, out: int) -> None:
        super().__init__()
        self.attention = SelfAttention(config.dim, config.heads)
        self.norm = nn.LayerNorm(config.dim)
        self.mix = TokenLinear(tokens, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.norm(x + self.attention(x)))


class LinearModule(TokenLinear):
    """[B, n, d] -> [B, out, d]: linear over the token axis."""

    def __init__(self, config: DHENConfig, tokens: int, out: int) -> None:
        super().__init__(tokens, out)


MODULES: dict[str, type[nn.Module]] = {
    "fm_mlp": FMModule,
    "dcn": CrossModule,
    "attention": AttentionModule,
    "linear": LinearModule,
}


class DHENLayer(nn.Module):
    """One ensemble: [B, n, d] -> [B, out_tokens, d]."""

    def __init__(self, config: DHENConfig, tokens: int) -> None:
        super().__init__()
        self.concat = config.ensemble == "concat"
        self.experts = nn.ModuleList(MODULES[name](config, tokens, out) for name, out in config.modules)
        out = config.out_tokens
        self.shortcut = nn.Identity() if tokens == out else TokenLinear(tokens, out)
        self.norm = nn.LayerNorm(config.dim)

    def forward(self, x: Tensor) -> Tensor:
        outputs = [expert(x) for expert in self.experts]
        new = torch.cat(outputs, dim=1) if self.concat else torch.stack(outputs).sum(dim=0)
        return self.norm(new + self.shortcut(x))


class DHENDense(nn.Module):
    """Everything but the tables: numerics [B, F], tokens [B, C, d] -> logits [B]."""

    def __init__(self, config: DHENConfig) -> None:
        super().__init__()
        self.dim = config.dim
        self.numeric = MLP(config.numerics, config.numeric_mlp, config.numeric_tokens * config.dim, config.mlp_norm)
        widths = [len(config.table_sizes) + config.numeric_tokens] + [config.out_tokens] * (config.layers - 1)
        self.layers = nn.ModuleList(DHENLayer(config, tokens) for tokens in widths)
        self.wide = config.wide
        features = config.out_tokens * config.dim + (config.numerics if config.wide else 0)
        self.head = MLP(features, config.head, 1, config.mlp_norm)

    def forward(self, numerics: Tensor, tokens: Tensor) -> Tensor:
        x = torch.cat([tokens, self.numeric(numerics).unflatten(1, (-1, self.dim))], dim=1)
        for layer in self.layers:
            x = layer(x)
        return self.head(head_input(x, numerics, self.wide)).squeeze(1)


class DHEN(Recommender):
    """The whole model. ``forward(numerics [B, F] float, categories [B, C] int64) -> logits [B]``."""

    def __init__(self, config: DHENConfig) -> None:
        super().__init__(EmbeddingTables(config.table_sizes, config.dim), DHENDense(config))
        self.config = config
