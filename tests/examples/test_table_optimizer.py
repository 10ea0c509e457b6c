"""Row-wise Adagrad against torch's Adagrad and against loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from examples.training.optimizers import RowwiseAdagrad, sum_by_row


def test_rowwise_adagrad_of_width_one_is_adagrad() -> None:
    start = torch.randn(20, 1)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    mine = RowwiseAdagrad([ours], lr=0.1, eps=1e-6)
    reference = torch.optim.Adagrad([theirs], lr=0.1, eps=1e-6)
    for step in range(5):
        rows = torch.randint(20, (30,), generator=torch.Generator().manual_seed(step))
        for p, optimizer in ((ours, mine), (theirs, reference)):
            optimizer.zero_grad()
            (F.embedding(rows, p, sparse=True) * torch.arange(30.0).sub(15).unsqueeze(1)).sum().backward()
            optimizer.step()
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("sparse", [True, False])
def test_rowwise_adagrad_against_a_loop(sparse: bool) -> None:
    rows, width, lr, eps = 11, 5, 0.05, 1e-3
    p = nn.Parameter(torch.randn(rows, width))
    weight, state = p.detach().double().numpy().copy(), np.zeros(rows)
    optimizer = RowwiseAdagrad([p], lr=lr, eps=eps)
    for step in range(4):
        ids = torch.randint(rows, (7, 3), generator=torch.Generator().manual_seed(step))
        scale = torch.randn(7, 3, width)
        optimizer.zero_grad()
        (F.embedding(ids, p, sparse=sparse) * scale).sum().backward()
        optimizer.step()
        grads = np.zeros((rows, width))
        for i in range(7):
            for j in range(3):
                grads[ids[i, j]] += scale[i, j].numpy()
        for r in set(ids.flatten().tolist()):
            state[r] += (grads[r] ** 2).mean()
            weight[r] -= lr * grads[r] / (np.sqrt(state[r]) + eps)
    np.testing.assert_allclose(p.detach().numpy(), weight, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(optimizer.state[p]["square"].numpy(), state, rtol=1e-5)


@pytest.mark.parametrize("n", [1, 2, 50])
def test_sum_by_row(n: int) -> None:
    rng = np.random.default_rng(n)
    rows, values = rng.integers(0, 7, n), rng.normal(size=(n, 3))
    expected = np.zeros((7, 3))
    np.add.at(expected, rows, values)
    where, sums = sum_by_row(torch.from_numpy(rows), torch.from_numpy(values), 7)
    total = torch.zeros(7, 3, dtype=torch.float64).index_add_(0, where, sums)
    np.testing.assert_allclose(total.numpy(), expected, atol=1e-12)
    # One sum for each distinct row, fillers are zero: squares of sums come out right too.
    squares = torch.zeros(7, 3, dtype=torch.float64).index_add_(0, where, sums.square())
    np.testing.assert_allclose(squares.numpy(), expected**2, atol=1e-12)


def test_gradients_of_two_backward_passes_add_up() -> None:
    p = nn.Parameter(torch.randn(6, 2))
    once = nn.Parameter(p.detach().clone())
    ids = torch.tensor([0, 3, 3, 5])
    for part in (ids[:2], ids[2:]):
        F.embedding(part, p, sparse=True).sum().backward()
    F.embedding(ids, once, sparse=True).sum().backward()
    for q in (p, once):
        RowwiseAdagrad([q]).step()
    torch.testing.assert_close(p, once)


def test_rowwise_adagrad_mistakes() -> None:
    with pytest.raises(ValueError, match=r"not a parameter of shape \(3,\)"):
        RowwiseAdagrad([nn.Parameter(torch.zeros(3))])
    with pytest.raises(ValueError, match="must not be negative"):
        RowwiseAdagrad([nn.Parameter(torch.zeros(3, 1))], lr=-1)
