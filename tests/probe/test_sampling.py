"""Draws agree with the source of the statistics, within the standard errors of both."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from loka_compile.errors import ProbeError
from loka_compile.probe.activations import ActivationTracker
from loka_compile.probe.sampling import RowSampler
from loka_compile.probe.site_stats import SiteStats, Stats

SEEN, DRAWN, K = 6000, 6000, 16
#: Deviations of the largest of some hundred entries, in standard errors.
SIGMAS = 5.0


def source(kind: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Rows, their true mean and covariance, and the kurtosis, which decides how well a covariance can be known."""
    mean = rng.uniform(-3, 3, K)
    if kind == "low rank":
        mixing = rng.standard_normal((3, K))
    else:
        mixing = rng.standard_normal((K, K)) / 4 + np.diag(rng.uniform(0.2, 3, K))
    rank = len(mixing)
    if kind == "heavy tailed":
        z, kurtosis = rng.standard_t(9, (SEEN, rank)) / math.sqrt(9 / 7), 3 + 6 / 5
    else:
        z, kurtosis = rng.standard_normal((SEEN, rank)), 3.0
    return z @ mixing + mean, mean, mixing.T @ mixing, kurtosis


@pytest.mark.parametrize("kind", ["correlated", "low rank", "heavy tailed"])
@pytest.mark.parametrize("form", ["full", "blocks"])
def test_rows_have_the_sources_mean_and_covariance(kind: str, form: str) -> None:
    rng = np.random.default_rng(7)
    x, mean, covariance, kurtosis = source(kind, rng)
    tracker = ActivationTracker(K, form=form)
    for rows in np.array_split(x, 9):
        tracker.update(torch.from_numpy(rows))
    drawn = RowSampler(tracker).draw(DRAWN, torch.Generator().manual_seed(0)).double().numpy()
    deviation = np.sqrt(np.diag(covariance))
    # Both the statistics and the draws scatter.
    se_mean = deviation * math.sqrt(1 / SEEN + 1 / DRAWN)
    assert (np.abs(drawn.mean(0) - mean) / se_mean).max() < SIGMAS
    correlation = covariance / np.outer(deviation, deviation)
    spread = np.sqrt(1 + correlation**2)
    se = spread * math.sqrt((kurtosis - 1) / 2 / SEEN + 1 / DRAWN) * np.outer(deviation, deviation)
    assert (np.abs(np.cov(drawn, rowvar=False) - covariance) / se).max() < SIGMAS
    if kind == "low rank":
        assert np.linalg.matrix_rank(np.cov(drawn, rowvar=False), tol=1e-3) == 3


def site_with(inputs: torch.Tensor, weight: torch.Tensor, grads: torch.Tensor | None = None) -> SiteStats:
    n, k = weight.shape
    site = SiteStats("over.mlp.2#0", k, n, inputs.dtype)
    keys = torch.rand(len(inputs), dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    site.update_input(inputs, keys, 0)
    site.update_weight(weight)
    site.update_weight(weight * 1.01)
    if grads is not None:
        site.update_grad_output(grads, keys, 0)
    return site


def test_a_sites_draws_have_its_shapes_and_follow_the_seed() -> None:
    g = torch.Generator().manual_seed(0)
    site = site_with(torch.randn(50, 5, generator=g), torch.randn(3, 5, generator=g), torch.randn(50, 3, generator=g))
    stats = Stats({site.site: site})
    first, second = list(stats.sample(site.site, 2, 7)), list(stats.sample(site.site, 2, 7))
    other = list(stats.sample(site.site, 2, 7, seed=1))
    assert len(first) == 2
    for sample in first:
        assert sample.grad_output is not None
        assert (sample.input.shape, sample.weight.shape, sample.grad_output.shape) == ((7, 5), (3, 5), (7, 3))
        assert sample.input.dtype == sample.weight.dtype == torch.float32
    assert all(torch.equal(a.input, b.input) and torch.equal(a.weight, b.weight) for a, b in zip(first, second))  # noqa: B905
    assert not torch.equal(first[0].input, first[1].input)
    assert not torch.equal(first[0].input, other[0].input)


def test_draws_stay_within_fp32() -> None:
    tracker = ActivationTracker(2)
    tracker.update(torch.tensor([[3e38, 1.0], [-3e38, 2.0], [3e38, 3.0]]))
    drawn = RowSampler(tracker).draw(100, torch.Generator().manual_seed(0))
    assert torch.isfinite(drawn).all()
    assert drawn[:, 1].std() < 3


def test_quantify_gets_matrices_that_belong_together() -> None:
    g = torch.Generator().manual_seed(0)
    x, dy = torch.randn(40, 6, generator=g).bfloat16(), torch.randn(40, 3, generator=g).bfloat16()
    site = site_with(x, torch.randn(3, 6, generator=g), dy)
    both, raw = site.samples(), site.raw()
    for samples in (both, raw):
        samples.check(site.site)
        assert (samples.dtype, samples.batch) == ("bfloat16", 40)
    assert raw.draws is None
    assert both.draws is not None
    drawn = list(itertools.islice(both.draws(16), 5))
    assert [(x.shape, w.shape, d.shape) for x, w, d in drawn if d is not None] == [((16, 6), (3, 6), (16, 3))] * 5
    assert not torch.equal(drawn[0][0], drawn[1][0])
    assert torch.equal(drawn[3][0], list(itertools.islice(both.draws(16), 5))[3][0])
    seen = {tuple(a.tolist()): tuple(b.tolist()) for a, b in zip(x, dy, strict=True)}
    assert {
        tuple(a.tolist()): tuple(b.tolist()) for a, b in zip(raw.inputs[0], raw.grad_outputs[0], strict=True)
    } == seen
    forward_only = site_with(x, torch.randn(3, 6, generator=g))
    only = forward_only.samples()
    assert tuple(only.roles) == ("forward",)
    assert only.draws is not None
    assert next(only.draws(4))[2] is None
    assert len(forward_only.raw().inputs[0]) == 40


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ProbeError, match="no statistics of site 'x#0'; known are: none"):
        Stats().sample("x#0", 1, 1)
    site = SiteStats("a#0", 2, 3, torch.float32)
    with pytest.raises(ProbeError, match="'a#0' has no weight statistics"):
        next(site.sample(1, 1))
    site.update_weight(torch.ones(3, 2))
    with pytest.raises(ProbeError, match="'a#0' has seen no finite input row"):
        next(site.sample(1, 1))
