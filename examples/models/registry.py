"""All models by name, each cut into its tables and its dense part, built for the widths of a data source."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from examples.data.stream import Schema
from examples.models.dcnv2 import DCNv2, DCNv2Config
from examples.models.dhen import DHEN, DHENConfig
from examples.models.dlrm import DLRM, DLRMConfig
from examples.models.embedding import EmbeddingTables, Recommender
from examples.models.hstu import HSTU, HSTUConfig
from examples.models.interformer import InterFormer, InterFormerConfig
from examples.models.wukong import Wukong, WukongConfig, head_input


class WukongDense(nn.Module):
    """Everything of a Wukong but its table: numerics [B, F], tokens [B, C, d] -> logits [B]."""

    def __init__(self, wukong: Wukong) -> None:
        super().__init__()
        self.dim = wukong.config.dim
        self.wide = wukong.config.wide
        self.numeric = wukong.numeric
        self.layers = wukong.layers
        self.head = wukong.head

    def forward(self, numerics: Tensor, tokens: Tensor) -> Tensor:
        x = torch.cat([tokens, self.numeric(numerics).unflatten(1, (-1, self.dim))], dim=1)
        for layer in self.layers:
            x = layer(x)
        return self.head(head_input(x, numerics, self.wide)).squeeze(1)


class SplitWukong(Recommender):
    """`Wukong` with its table apart, which then has sparse gradients. Same function, same initial weights."""

    def __init__(self, config: WukongConfig) -> None:
        wukong = Wukong(config)
        embed = EmbeddingTables(config.table_sizes, config.dim, weight=wukong.embedding.weight.data)
        super().__init__(embed, WukongDense(wukong))
        self.config = config


#: name -> (configuration class, model class, whether it can read a history).
MODELS: dict[str, tuple[Any, type[Recommender], bool]] = {
    "wukong": (WukongConfig, SplitWukong, False),
    "interformer": (InterFormerConfig, InterFormer, True),
    "dhen": (DHENConfig, DHEN, False),
    "dcnv2": (DCNv2Config, DCNv2, False),
    "dlrm": (DLRMConfig, DLRM, False),
    "hstu": (HSTUConfig, HSTU, True),
}


def build(
    name: str, size: str, schema: Schema, *, seed: int = 0, device: str | torch.device = "cpu", **changes: Any
) -> Recommender:
    """The model of that name and named size for data of that schema.

    Args:
        seed: of the initial weights, which depend on nothing else (but the kind of device).
        changes: fields of the configuration that shall differ from the named size.

    Raises:
        ValueError: there is no such model or size, or an illegal field value.
    """
    if name not in MODELS:
        raise ValueError(f"no model {name!r}; there are: {', '.join(MODELS)}")
    config_class, model_class, reads_history = MODELS[name]
    widths: dict[str, Any] = {"table_sizes": schema.table_sizes, "numerics": schema.n_numerics}
    if reads_history:
        widths["history_length"] = schema.history_length
    config = config_class.named(size, **widths, **changes)
    device = torch.device(device)
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        return model_class(config)
