"""A small model, its training, and what ordinary hooks see of it: shared by the tests of the probe's sessions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    """Linear, norm, activation; one layer is called twice."""

    def __init__(self, checkpointed: bool | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(13, 24)
        self.norm = nn.LayerNorm(24)
        self.shared = nn.Linear(24, 24)
        self.last = nn.Linear(24, 1, bias=False)
        self.reentrant = checkpointed

    def middle(self, h: Tensor) -> Tensor:
        return torch.relu(self.shared(torch.relu(self.shared(h))))

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.silu(self.norm(self.first(x)))
        h = self.middle(h) if self.reentrant is None else checkpoint(self.middle, h, use_reentrant=self.reentrant)
        return self.last(h)


SITES = ["first#0", "last#0", "shared#0", "shared#1"]


def batch(step: int, rows: int = 20) -> Tensor:
    return torch.randn(rows, 13, generator=torch.Generator().manual_seed(step)) * 2 + 1


def train(
    model: nn.Module,
    steps: int,
    run: Callable[[Tensor], Tensor] | None = None,
    rows: Callable[[int], int] = lambda _: 20,
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = model if run is None else run
    for step in range(steps):
        run(batch(step, rows(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def net(seed: int = 0, **options: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**options)


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(13, 8), nn.SiLU(), nn.Linear(8, 1))


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def recorded(model: Net, steps: int, every: int) -> dict[str, list[np.ndarray]]:
    """The operands of every layer in the sampled steps, by ordinary hooks on a run of its own."""
    seen: dict[str, list[np.ndarray]] = defaultdict(list)
    step, calls = [0], defaultdict(int)

    def hook(module: nn.Module, args: Any, y: Tensor, name: str) -> None:
        if step[0] % every:
            return
        site = f"{name}#{calls[name]}"
        calls[name] += 1
        seen[site + " x"].append(args[0].detach().double().numpy())
        y.register_hook(lambda grad: seen[site + " dy"].append(grad.double().numpy()))

    for name, module in model.named_children():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda m, a, y, name=name: hook(m, a, y, name))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step[0] in range(steps):
        calls.clear()
        model(batch(step[0])).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return seen


def check_against_hooks(stats: Any, seen: dict[str, list[np.ndarray]], tolerance: float = 1e-5) -> None:
    assert sorted(stats) == SITES
    for site, one in stats.items():
        for rows, what in ((one.input, " x"), (one.grad_output, " dy")):
            want = np.concatenate(seen[site + what])
            assert rows.n == len(want)
            covariance = np.cov(want, rowvar=False).reshape(want.shape[1], -1)
            scale = np.abs(np.diag(covariance)).max()
            np.testing.assert_allclose(rows.tracker.mean().numpy(), want.mean(0), atol=tolerance * np.abs(want).max())
            np.testing.assert_allclose(rows.tracker.covariance().numpy(), covariance, atol=tolerance * scale)
            np.testing.assert_allclose(rows.moments.amax.numpy(), np.abs(want).max(0), rtol=tolerance, atol=1e-12)
