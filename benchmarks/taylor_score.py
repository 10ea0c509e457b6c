"""The score that NVIDIA ModelOpt's ``auto_quantize`` ranks layers by, for comparison with measured losses.

Its "gradient" method estimates what quantising one layer does to the loss by second-order Taylor expansion with the
Fisher information in the place of the Hessian: the sum over a layer's outputs of ``(dL/dy * (y_quantised - y))**2``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from loka_compile.loss.switches import Kernel, Switchboard

LossFn = Callable[[Callable[..., Any], Any], Tensor]


def taylor_scores(
    model: nn.Module, loss_fn: LossFn, batches: Iterable[Any], kernels: dict[tuple[str, str], Kernel]
) -> dict[str, float]:
    """Score by site, summed over batches; ``kernels`` are forward kernels by (site, "forward")."""
    board = Switchboard()
    scores: dict[str, float] = {}
    outputs: dict[str, tuple[Tensor, Tensor]] = {}

    def watch(layer: nn.Module, inputs: tuple[Any, ...], y: Tensor) -> None:
        key = (layer.site, "forward")
        if y.requires_grad and key in kernels and not board.of(layer.site):
            y.retain_grad()
            with torch.no_grad(), board.on({key: kernels[key]}):
                outputs[layer.site] = (y, layer.forward(*inputs) - y)

    run = board.compile(model)
    hooked: set[int] = set()
    for batch in batches:
        loss_fn(run, batch)  # captures the graph, if that is still to do
        for layer in board.layers:
            if id(layer) not in hooked:
                layer.register_forward_hook(watch)
                hooked.add(id(layer))
        outputs.clear()
        loss_fn(run, batch).mean().backward()
        for site, (y, error) in outputs.items():
            if y.grad is not None:
                scores[site] = scores.get(site, 0.0) + (y.grad.double() * error.double()).square().sum().item()
    model.zero_grad(set_to_none=True)
    torch.compiler.reset()
    return scores
