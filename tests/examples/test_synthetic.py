"""The synthetic click stream: repeatable, bounded, heavy-tailed, and true to the probabilities that it returns."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from examples.data.stream import Batch
from examples.data.synthetic import NUMERICS, SyntheticConfig, SyntheticStream, solve_bias
from examples.data.teacher import Teacher

SMALL = SyntheticConfig(batch_size=2048, categories=8, max_ids=2000, day=2048 * 4)


def equal(a: Batch, b: Batch) -> bool:
    return all((x is None and y is None) or torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    config = dataclasses.replace(SMALL, history_length=4)
    stream = SyntheticStream(config)
    straight = [next(stream) for _ in range(3)]
    other = SyntheticStream(config)
    # Asked for out of order, with a global generator in another state.
    torch.manual_seed(99)
    assert [equal(other.batch(i), straight[i]) for i in (2, 0, 1)] == [True] * 3
    assert not torch.equal(straight[0].numerics, straight[1].numerics)
    reseeded = SyntheticStream(dataclasses.replace(config, seed=1)).batch(0)
    assert not torch.equal(reseeded.numerics, straight[0].numerics)
    resumed = SyntheticStream(config)
    resumed.load_state_dict({"step": 2, "config": dataclasses.asdict(config)})
    assert equal(next(resumed), straight[2])
    assert resumed.state_dict()["step"] == 3
    with pytest.raises(ValueError, match="stream is"):
        SyntheticStream(SMALL).load_state_dict(resumed.state_dict())


def test_shapes_and_ranges() -> None:
    config = dataclasses.replace(SMALL, history_length=5, missing_flags=True, max_rows=700)
    stream = SyntheticStream(config)
    assert stream.schema == config.schema
    assert stream.schema.table_sizes[0] == 700
    assert stream.schema.table_sizes[-1] == 16
    for step in (0, 3, 4000):
        batch = stream.batch(step)
        assert batch.numerics.shape == (2048, 26)
        assert batch.categories.shape == (2048, 8)
        assert batch.history is not None
        assert batch.history.shape == (2048, 5)
        assert batch.probability is not None
        assert torch.isfinite(batch.numerics).all()
        sizes = torch.tensor(stream.schema.table_sizes)
        assert (batch.categories >= 0).all()
        assert (batch.categories < sizes).all()
        assert batch.history.max() < 700
        # Right-aligned: what is there is behind what is not.
        there = (batch.history >= 0).long()
        assert (there.diff(dim=1) >= 0).all()
        assert set(there.sum(dim=1).tolist()) == set(range(6))
        assert set(batch.labels.tolist()) == {0.0, 1.0}
        # A flag says "missing", and a missing value is zero.
        assert (batch.numerics[:, :13][batch.numerics[:, 13:] == 1] == 0).all()


def test_mean_click_rate_stays_within_its_band_for_a_hundred_days() -> None:
    config = dataclasses.replace(SMALL, batch_size=4096, day=4096 * 4)
    stream = SyntheticStream(config)
    for day in range(0, 100, 9):
        p = torch.cat([stream.batch(4 * day + i).probability for i in range(4)])
        # 16,384 draws: the standard error of the mean is 0.002, under a fifth of the band.
        assert abs(p.mean().item() - config.ctr) < 0.05 * config.ctr, day


def test_daily_cycle_moves_the_rate_within_the_day() -> None:
    stream = SyntheticStream(dataclasses.replace(SMALL, batch_size=8192, day=8192 * 4, daily_cycle=0.5))
    quarter = [stream.batch(4 * 3 + i).probability.mean().item() for i in range(4)]
    assert quarter[1] > 0.27  # a quarter past midnight: the sine is at its top
    assert quarter[3] < 0.23


def test_labels_follow_the_probability() -> None:
    stream = SyntheticStream(SMALL)
    batches = [stream.batch(i) for i in range(20)]
    p = torch.cat([b.probability for b in batches]).double().numpy()
    y = torch.cat([b.labels for b in batches]).double().numpy()
    for low, high in ((0, 0.05), (0.05, 0.2), (0.2, 0.5), (0.5, 0.8), (0.8, 1)):
        here = (p >= low) & (p < high)
        z = (y[here] - p[here]).sum() / np.sqrt((p[here] * (1 - p[here])).sum())
        assert abs(z) < 4, (low, here.sum())
    # Worth learning: the truth beats the mean rate by far.
    bayes = -np.mean(p * np.log(p) + (1 - p) * np.log1p(-p))
    assert bayes < 0.85 * -(0.25 * np.log(0.25) + 0.75 * np.log(0.75))


def test_tails_zeros_and_missing_values_are_those_asked_for() -> None:
    config = SyntheticConfig(batch_size=40_000, categories=2, max_ids=100, numerics="raw", missing_flags=True)
    x = SyntheticStream(config).batch(0).numerics.double().numpy()
    seen, missing = x[:, :13], x[:, 13:]
    for j, (median, deviation, _, zero, absent) in enumerate(NUMERICS):
        assert abs(missing[:, j].mean() - absent) < 0.01, j
        counts = seen[missing[:, j] == 0, j] * median * np.exp(deviation**2 / 2)
        assert (counts == 0).mean() > zero - 0.01, j
        if median > 30:  # counts large enough that rounding down does not matter
            body = np.median(counts[counts > 0])
            assert 0.85 * median < body < 1.2 * median, j
    # Column 2 has Pareto index 0.9 and a cut at 1,000 times the body's mean. Its log-normal body alone would reach
    # about 200, and its quantiles would be exp(1.6 * (3.09 - 1.64)) = 10 apart.
    assert seen[:, 2].max() == 1000.0
    assert np.quantile(seen[:, 2], 0.999) > 15 * np.quantile(seen[:, 2], 0.95)
    logs = SyntheticStream(dataclasses.replace(config, numerics="log1p")).batch(0).numerics.double().numpy()[:, :13]
    scale = np.array([m * np.exp(s**2 / 2) for m, s, *_ in NUMERICS])
    below = seen < 1000
    np.testing.assert_allclose(np.expm1(logs)[below], (seen * scale)[below], rtol=1e-4, atol=1e-4)


def test_ids_are_zipf_and_slide() -> None:
    stream = SyntheticStream(SyntheticConfig(batch_size=20_000, categories=3, max_ids=5000, day=20_000, lifetime=20.0))
    start, later, again = (stream.batch(step).categories[:, 0] for step in (0, 10, 1))
    counts = torch.bincount(start, minlength=10_000).sort(descending=True).values
    # x ** -s with s = 1.02 over 5,000 values: the first ten hold a good fourth, and nearly all get seen sometimes.
    assert 0.2 < counts[:10].sum() / counts.sum() < 0.4
    assert counts[0] > 1.5 * counts[1]

    def fresh(after: torch.Tensor) -> float:
        return (~torch.isin(after, start)).double().mean().item()

    # After half a lifetime about half of the traffic goes to ids that did not exist before; a day changes a twentieth.
    assert 0.3 < fresh(later) < 0.75
    assert fresh(again) < 0.25
    small = [set(stream.batch(step).categories[:, 2].tolist()) for step in (0, 50)]
    assert small[0] == small[1] == set(range(8))


def test_history_matters() -> None:
    config = dataclasses.replace(SMALL, history_length=8, categories=4)
    stream = SyntheticStream(config)
    teacher = stream._teacher
    ids = torch.randint(2000, (500, 4))
    numerics = torch.zeros(500, len(NUMERICS))
    none = torch.full((500, 8), -1)
    like = none.clone()
    like[:, -1] = ids[:, 0]
    base = teacher.logits(numerics, ids, None, 0.0)
    torch.testing.assert_close(teacher.logits(numerics, ids, none, 0.0), base)
    # A candidate that is its own history is liked: the term is the squared length of its vector.
    assert (teacher.logits(numerics, ids, like, 0.0) > base).all()


def test_drift_turns_the_teacher_but_keeps_the_spread() -> None:
    ids, numerics = torch.randint(2000, (4000, 6)), torch.randn(4000, 13)

    def logits(drift: float, time: float) -> torch.Tensor:
        return Teacher(6, 13, 0, drift, torch.device("cpu")).logits(numerics, ids, None, time)

    assert torch.equal(logits(0.0, 0.0), logits(0.0, 50.0))
    start, soon, later = logits(0.5, 0.0), logits(0.5, 0.1), logits(0.5, 7.0)
    correlation = [torch.corrcoef(torch.stack([start, x]))[0, 1].item() for x in (soon, later)]
    assert correlation[0] > 0.999
    assert correlation[1] < 0.97
    assert 0.85 < later.std() / start.std() < 1.15


def test_solve_bias() -> None:
    logits = torch.randn(10_000) * 3
    for rate in (0.01, 0.25, 0.9):
        assert abs(torch.sigmoid(logits + solve_bias(logits, rate)).mean().item() - rate) < 1e-5


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"numerics": "log"}, 'legal: "log1p", "raw"'),
        ({"min_ids": 1}, "min_ids"),
        ({"ctr": 1.0}, "ctr lies between"),
        ({"seed": -1}, "seed"),
        ({"batch_size": 0}, "positive"),
    ],
)
def test_mistakes_are_named(changes: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SyntheticConfig(**changes)


@pytest.mark.gpu
def test_on_a_gpu_batches_repeat_and_keep_the_rate() -> None:
    config = dataclasses.replace(SMALL, batch_size=8192, day=8192, history_length=4)
    first, second = SyntheticStream(config, "cuda"), SyntheticStream(config, "cuda")
    for step in (7, 0, 3):
        assert equal(first.batch(step), second.batch(step))
        assert all(t is None or t.is_cuda for t in first.batch(step))
    p = torch.cat([first.batch(step).probability for step in range(0, 50, 5)])
    assert abs(p.mean().item() - config.ctr) < 0.05 * config.ctr
    # Nothing waits for the device.
    torch.cuda.set_sync_debug_mode("error")
    try:
        first.batch(60)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_more_columns_and_another_unit() -> None:
    config = dataclasses.replace(SMALL, numerics="raw", raw_clamp=1e7)
    many = SyntheticStream(dataclasses.replace(config, numeric_copies=3))
    other = SyntheticStream(dataclasses.replace(config, numeric_copies=3, raw_unit=0.1))
    assert many.schema.n_numerics == 39
    one, ten = many.batch(2), other.batch(2)
    torch.testing.assert_close(ten.numerics, 10 * one.numerics)
    assert torch.equal(one.labels, ten.labels)
    # Copies of a kind are columns of their own, alike only in distribution.
    assert not torch.equal(one.numerics[:, 3], one.numerics[:, 16])
    with pytest.raises(ValueError, match="raw_unit"):
        dataclasses.replace(config, raw_unit=0.0)


def test_heavier_tails_leave_the_bodies_as_they_are() -> None:
    config = dataclasses.replace(SMALL, batch_size=4096, numerics="raw", raw_clamp=1e7)
    usual = SyntheticStream(config).batch(0).numerics
    heavy = SyntheticStream(dataclasses.replace(config, tail=0.5)).batch(0).numerics
    torch.testing.assert_close(usual.median(dim=0).values, heavy.median(dim=0).values, rtol=0.1, atol=0.02)
    assert heavy.amax() > 10 * usual.amax()
