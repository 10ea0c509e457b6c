"""Bias norms over time, and the rule that names their behaviour."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from loka_compile.probe.norms import MIN_POINTS, Behaviour, NormSeries, classify

T = np.linspace(0, 1, 400)


def ar1(rng: np.random.Generator, phi: float) -> np.ndarray:
    out = np.zeros(len(T))
    for i in range(1, len(T)):
        out[i] = phi * out[i - 1] + rng.standard_normal()
    return out / out.std()


Series = Callable[[np.random.Generator], np.ndarray]
SERIES: dict[str, tuple[Behaviour, Series]] = {
    "rises and settles": (Behaviour.CONVERGING, lambda rng: 0.1 * (1 - np.exp(-8 * T))),
    "falls and settles": (Behaviour.CONVERGING, lambda rng: 1 + 2 * np.exp(-8 * T)),
    "never moves": (Behaviour.CONVERGING, lambda rng: np.ones_like(T)),
    "grows exponentially": (Behaviour.DIVERGING, lambda rng: 1e-3 * np.exp(5 * T)),
    "grows faster and faster": (Behaviour.DIVERGING, lambda rng: 0.1 + T**2),
    "settles, then runs away": (Behaviour.DIVERGING, lambda rng: 1 - np.exp(-30 * T) + np.maximum(0, T - 0.7) * 4),
    "rises steadily": (Behaviour.DRIFTING, lambda rng: 1 + 0.5 * T),
    "falls steadily": (Behaviour.DRIFTING, lambda rng: 1 - 0.5 * T),
    "decays to nothing": (Behaviour.VANISHING, lambda rng: np.exp(-8 * T)),
    "is dead": (Behaviour.VANISHING, lambda rng: np.zeros_like(T)),
    "decays hyperbolically": (Behaviour.VANISHING, lambda rng: 1 / (1 + 500 * T)),
    "swings five times": (Behaviour.CYCLING, lambda rng: 1 + 0.3 * np.sin(2 * np.pi * 5 * T)),
    "swings while it rises": (Behaviour.CYCLING, lambda rng: 1 + 0.4 * T + 0.3 * np.sin(2 * np.pi * 12 * T + 1)),
    "square wave": (Behaviour.CYCLING, lambda rng: 1 + 0.2 * np.sign(np.sin(2 * np.pi * 6.5 * T))),
    "white noise": (Behaviour.OSCILLATING, lambda rng: np.abs(1 + 0.2 * rng.standard_normal(len(T)))),
    "wanders around a level": (Behaviour.OSCILLATING, lambda rng: np.abs(1 + 0.2 * ar1(rng, 0.6))),
}


@pytest.mark.parametrize("name", SERIES)
@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_synthetic_series_are_named(name: str, noise: float) -> None:
    want, make = SERIES[name]
    for seed in range(8):
        rng = np.random.default_rng(seed)
        y = make(rng)
        y = np.abs(y + noise * y.max() * rng.standard_normal(len(T)))
        for scale in (1.0, 1e-6, 1e6):
            assert classify(list(y * scale)) is want, (seed, scale)


@pytest.mark.parametrize("points", [30, 100, 2000])
@pytest.mark.parametrize("name", ["rises and settles", "grows exponentially", "rises steadily", "decays to nothing"])
def test_the_length_of_the_series_does_not_matter(name: str, points: int) -> None:
    want, make = SERIES[name]
    y = np.interp(np.linspace(0, 1, points), T, make(np.random.default_rng(0)))
    assert classify(list(y)) is want


def test_too_short_or_not_finite_is_unknown() -> None:
    assert classify([1.0] * (MIN_POINTS - 1)) is Behaviour.UNKNOWN
    assert classify([]) is Behaviour.UNKNOWN
    assert classify([*([1.0] * 100), float("nan")]) is Behaviour.UNKNOWN


def test_the_series_stays_within_its_capacity_and_keeps_its_whole_course() -> None:
    series = NormSeries(capacity=64)
    for step in range(10_000):
        series.append(step * 100, 1.0 + step)
    assert len(series) <= 64
    assert series.steps[0] == 0
    assert series.steps[-1] > 9_000 * 100
    assert len(set(np.diff(series.steps))) == 1
    assert series.values == [1.0 + s / 100 for s in series.steps]
    assert series.behaviour() is Behaviour.DRIFTING


def test_state_round_trip_goes_on_as_if_nothing_had_happened() -> None:
    whole, half = NormSeries(16), NormSeries(16)
    for step in range(100):
        whole.append(step, step**0.5)
        if step < 50:
            half.append(step, step**0.5)
    again = NormSeries.from_state(half.state())
    for step in range(50, 100):
        again.append(step, step**0.5)
    assert again.state() == whole.state()
