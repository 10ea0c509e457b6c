"""The sample of raw rows: uniform, deterministic, mergeable, and paired between input and gradient."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
import torch

from loka_compile.errors import ProbeError
from loka_compile.probe.reservoir import MAX_BYTES, Reservoir, draw_rows, seeded


def keys(*parts: object, count: int) -> torch.Tensor:
    return torch.rand(count, generator=seeded(*parts), dtype=torch.float64)


def numbered(start: int, stop: int, features: int = 2) -> torch.Tensor:
    return torch.arange(start, stop, dtype=torch.float32)[:, None].expand(-1, features)


def test_every_row_is_equally_likely_to_be_kept() -> None:
    counts = np.zeros(200)
    for trial in range(600):
        reservoir = Reservoir(2, torch.float32, rows=20)
        for batch, (start, stop) in enumerate([(0, 1), (1, 120), (120, 200)]):
            reservoir.update(numbered(start, stop), keys(trial, batch, count=stop - start))
        kept = reservoir.sample()
        assert len(kept) == 20
        assert len(set(kept[:, 0].tolist())) == 20
        counts[kept[:, 0].long().numpy()] += 1
    # 600 draws without replacement of 20 out of 200: the counts' chi-square, corrected for the fixed total.
    chi = ((counts - 60) ** 2 / (60 * 0.9)).sum()
    assert scipy.stats.chi2.sf(chi, 199) > 1e-3


def test_a_seed_gives_the_same_rows_and_another_seed_others() -> None:
    def run(seed: int) -> torch.Tensor:
        reservoir = Reservoir(2, torch.float32, rows=8)
        for batch in range(5):
            reservoir.update(numbered(batch * 30, batch * 30 + 30), keys(seed, batch, count=30))
        return reservoir.sample()

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


def test_merging_two_ranks_is_one_reservoir_over_both() -> None:
    whole, ranks = Reservoir(2, torch.float32, rows=16), [Reservoir(2, torch.float32, rows=16) for _ in range(2)]
    for rank in range(2):
        for batch in range(3):
            start = rank * 1000 + batch * 50
            for reservoir in (whole, ranks[rank]):
                reservoir.update(numbered(start, start + 50), keys(rank, batch, count=50))
    ranks[0].merge(ranks[1])
    ranks[0].merge(Reservoir(2, torch.float32, rows=16))
    assert torch.equal(ranks[0].sample(), whole.sample())


def test_rows_that_are_not_finite_leave_their_place_to_others() -> None:
    x = numbered(0, 40).clone()
    x[::2, 1] = math.nan
    reservoir = Reservoir(2, torch.float32, rows=16)
    reservoir.update(x, keys("a", count=40), torch.isfinite(x).all(1))
    kept = reservoir.sample()
    assert len(kept) == 16
    assert torch.isfinite(kept).all()
    assert set((kept[:, 0] % 2).tolist()) == {1.0}
    assert torch.isfinite(reservoir.rows).all()


def test_fewer_rows_than_places_are_all_kept_as_they_are() -> None:
    reservoir = Reservoir(3, torch.bfloat16, rows=10)
    reservoir.update(torch.full((0, 3), 1.0), keys("none", count=0))
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    reservoir.update(x, keys("b", count=4))
    assert reservoir.sample().dtype == torch.bfloat16
    assert {tuple(r) for r in reservoir.sample().tolist()} == {tuple(r) for r in x.tolist()}


def test_input_and_gradient_rows_of_the_same_row_find_each_other() -> None:
    inputs, grads = Reservoir(2, torch.float32, rows=32), Reservoir(5, torch.float32, rows=32)
    for batch in range(4):
        start = batch * 25
        common = keys("site", batch, count=25)
        valid = torch.ones(25, dtype=torch.bool)
        inputs.update(numbered(start, start + 25), common, valid)
        valid[::3] = False  # gradients overflowed there
        grads.update(-numbered(start, start + 25, 5), common, valid)
    x, dy = inputs.paired(grads)
    assert 15 < len(x) <= 32
    assert torch.equal(x[:, 0], -dy[:, 0])


def test_wide_rows_are_fewer_and_memory_stays_bounded() -> None:
    wide = Reservoir(123_200, torch.bfloat16)
    assert wide.capacity == MAX_BYTES // (123_200 * 2) == 68
    assert wide.nbytes <= MAX_BYTES + 68 * 8
    assert Reservoir(64, torch.float32).capacity == 256


def test_state_round_trip() -> None:
    reservoir = Reservoir(2, torch.float32, rows=4)
    reservoir.update(numbered(0, 20), keys(0, count=20))
    again = Reservoir.from_state(reservoir.state())
    for r in (reservoir, again):
        r.update(numbered(20, 60), keys(1, count=40))
    assert torch.equal(again.sample(), reservoir.sample())


def test_a_wrong_width_is_named() -> None:
    with pytest.raises(ProbeError, match="for a width of 2"):
        Reservoir(2, torch.float32).update(torch.zeros(4, 3), keys(0, count=4))


def test_drawn_rows_have_the_largest_keys_of_a_batch_and_any_rows_alike() -> None:
    tries, batch, count = 400, 60, 6
    counts, smallest, largest = np.zeros(batch), [], []
    for number in range(tries):
        keys_drawn, rows = draw_rows(batch, count, "test", number)
        assert keys_drawn.dtype == torch.float64
        assert (keys_drawn[:-1] > keys_drawn[1:]).all()
        assert len(set(rows.tolist())) == count
        counts[rows.numpy()] += 1
        largest.append(float(keys_drawn[0]))
        smallest.append(float(keys_drawn[-1]))
    # The j-th largest of n uniform numbers is distributed as Beta(n - j + 1, j).
    assert scipy.stats.kstest(largest, scipy.stats.beta(batch, 1).cdf).pvalue > 1e-3
    assert scipy.stats.kstest(smallest, scipy.stats.beta(batch - count + 1, count).cdf).pvalue > 1e-3
    expected = tries * count / batch
    chi = ((counts - expected) ** 2 / (expected * (1 - count / batch))).sum()
    assert scipy.stats.chi2.sf(chi, batch - 1) > 1e-3
    assert [len(part) for part in draw_rows(5, 9, 0)] == [5, 5]
    assert torch.equal(draw_rows(batch, 3, 1)[1], draw_rows(batch, 3, 1)[1])
