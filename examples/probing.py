"""A training run for ``loka probe``: any of the example models on the synthetic click stream.

loka probe examples.probing:synthetic --dir /tmp/stats --steps 1000 --every 100
loka probe examples.probing:synthetic --dir /tmp/stats --arg model=dhen --arg size=tiny --table /tmp/table.json
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from examples.models.registry import build
from examples.training.config import TrainConfig
from examples.training.loop import Trainer
from examples.training.sources import open_source


def synthetic(
    model: str = "wukong", size: str = "tiny", batch_size: int = 256, backend: str = "eager", device: str = ""
) -> tuple[nn.Module, Iterator[Tensor]]:
    """The dense part of a model, and the loop that trains it: each step yields the batch's log loss."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    stream = open_source("synthetic", batch_size, device=device, max_ids=2000)
    net = build(model, size, stream.schema, device=device)
    trainer = Trainer(net, stream, TrainConfig(backend=backend), device=device)

    def train() -> Iterator[Tensor]:
        for batch in stream:
            logits = trainer.step(batch)
            yield nn.functional.binary_cross_entropy_with_logits(logits.detach(), batch.labels)

    return net.dense_arch, train()
