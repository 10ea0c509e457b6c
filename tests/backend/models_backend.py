"""Small models with rewritable chains, and what the Mods make of them, written out by hand in plain torch."""

from __future__ import annotations

import copy
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Tower(nn.Module):
    """linear -> LayerNorm -> SiLU, some times, and a prediction layer. 384 features leave a last block of 128."""

    def __init__(self, widths: tuple[int, ...] = (13, 384, 256), out: int = 1, bias: bool = True) -> None:
        super().__init__()
        pairs = list(pairwise(widths))
        self.linears = nn.ModuleList(nn.Linear(k, n, bias=bias) for k, n in pairs)
        self.norms = nn.ModuleList(nn.LayerNorm(n, eps=1e-3 * (i + 1)) for i, (_, n) in enumerate(pairs))
        self.head = nn.Linear(widths[-1], out)
        with torch.no_grad():
            for p in self.parameters():
                p.add_(0.1 * torch.randn_like(p))  # no norm is left with its trivial weight 1 and bias 0

    def block(self, index: int, x: Tensor) -> Tensor:
        return F.silu(self.norms[index](self.linears[index](x)))

    def forward(self, x: Tensor) -> Tensor:
        for index in range(len(self.linears)):
            x = self.block(index, x)
        return self.head(x)

    @property
    def unused(self) -> set[str]:
        """Parameters that the Mods no longer read."""
        names = {n for n, _ in self.named_parameters()}
        return {n for n in names if n.startswith("norms.") or (n.startswith("linears.") and n.endswith("bias"))}


class Checkpointed(Tower):
    """The same, each block recomputed in the backward; ``context_fn`` makes that selective."""

    context_fn = None

    def forward(self, x: Tensor) -> Tensor:
        more = {} if self.context_fn is None else {"context_fn": self.context_fn}
        for index in range(len(self.linears)):
            x = checkpoint(self.block, index, x, use_reentrant=False, **more)
        return self.head(x)


class Plain(nn.Module):
    """Linear layers with ReLU between: GEMMs, but nothing for the Mods apart from biases."""

    def __init__(self, widths: tuple[int, ...] = (48, 96, 64), bias: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(k, n, bias=bias) for k, n in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x) if index == 0 else layer(torch.relu(x))
        return x


def block_norm(x: Tensor, eps: float, block: int = 256) -> Tensor:
    """Each block of features divided by its root mean square; computed in at least fp32, rounded once."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    parts = [part / torch.sqrt((part * part).mean(-1, keepdim=True) + eps) for part in wide.split(block, dim=-1)]
    return torch.cat(parts, dim=-1).to(x.dtype)


def hard_swish(x: Tensor) -> Tensor:
    """x * relu6(x + 3) / 6."""
    return x * torch.clamp(x + 3, 0, 6) / 6


def mods_of(tower: Tower, block: int = 256):
    """The forward of ``tower`` with all three Mods, reading its parameters as they are (fp64 if they are)."""

    def forward(x: Tensor) -> Tensor:
        x = x.to(tower.head.weight.dtype)
        for linear, norm in zip(tower.linears, tower.norms, strict=True):
            x = hard_swish(block_norm(x @ linear.weight.t(), norm.eps, block))
        return x @ tower.head.weight.t() + tower.head.bias

    return forward


def exact(model: nn.Module) -> nn.Module:
    """An fp64 copy, for references."""
    return copy.deepcopy(model).double()
