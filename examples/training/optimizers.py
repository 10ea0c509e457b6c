"""Row-wise Adagrad, the usual optimizer of embedding tables: one number of state for a whole row."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class RowwiseAdagrad(torch.optim.Optimizer):
    """Adagrad whose accumulator is the mean square gradient of each row of a [R, d] parameter.

    For each row r with gradient g (summed over its appearances in the batch):
    ``state[r] += mean(g^2)``, then ``row[r] -= lr * g / (sqrt(state[r]) + eps)``.

    Sparse gradients (``nn.Embedding(sparse=True)``) touch only their rows and are never coalesced by torch, which would
    make the host wait for the device; dense gradients update every row. The sum over appearances is an ``index_add_``:
    on a GPU it repeats bit by bit only under ``torch.use_deterministic_algorithms(True)``.

    Raises:
        ValueError: ``lr`` or ``eps`` is negative, or a parameter is not a matrix.
    """

    def __init__(self, params: Iterable[Tensor], lr: float = 0.02, eps: float = 1e-8) -> None:
        if lr < 0 or eps < 0:
            raise ValueError(f"lr ({lr}) and eps ({eps}) must not be negative")
        super().__init__(params, {"lr": lr, "eps": eps})
        for group in self.param_groups:
            for p in group["params"]:
                if p.dim() != 2:
                    raise ValueError(
                        f"RowwiseAdagrad takes tables [rows, d], not a parameter of shape {tuple(p.shape)}"
                    )
                self.state[p]["square"] = torch.zeros(p.shape[0], dtype=torch.float32, device=p.device)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                square = self.state[p]["square"]
                if p.grad.is_sparse:
                    self._sparse(p, square, group)
                else:
                    grad = p.grad.float()
                    square.add_(grad.square().mean(dim=1))
                    p.sub_(group["lr"] * grad / (square.sqrt() + group["eps"]).unsqueeze(1))
        return loss

    @staticmethod
    def _sparse(p: Tensor, square: Tensor, group: dict[str, float]) -> None:
        rows, values = sum_by_row(p.grad._indices()[0], p.grad._values().float(), p.shape[0])
        square.index_add_(0, rows, values.square().mean(dim=1))
        scale = group["lr"] / (square[rows].sqrt() + group["eps"])
        p.index_add_(0, rows, (values * -scale.unsqueeze(1)).to(p.dtype))


def sum_by_row(rows: Tensor, values: Tensor, table_rows: int) -> tuple[Tensor, Tensor]:
    """Sum the values [n, d] of equal rows [n], without asking the device how many rows are distinct.

    Returns n rows and n sums: each distinct row once with its sum, then fillers with sum zero, which may be added
    anywhere. Fillers are spread over the table, as adding them all to one row would queue up there.
    """
    ordered, order = rows.sort(stable=True)
    starts = torch.ones_like(ordered)
    starts[1:] = (ordered[1:] != ordered[:-1]).long()
    segment = starts.cumsum(0) - 1
    sums = torch.zeros_like(values).index_add_(0, segment, values[order])
    place = torch.arange(len(rows), device=rows.device) % table_rows
    return place.index_copy_(0, segment, ordered), sums
