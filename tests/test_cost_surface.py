"""The surface through measured points, by itself: kriging, smoothing, bounds."""

import math

import numpy as np
import pytest
from scipy.spatial.distance import cdist

from loka_compile.costs.surface import Surface

POINTS = {(m, n): 4.0 + 0.01 * m * n for m in (10, 30, 90) for n in (10, 30, 90)}


def surface_of(points, least=lambda s: 0.0):
    return Surface(points, lambda s: (1.0, s[0] * s[1] * 1.0), least)


def test_a_bad_tile_is_learnt_where_it_is_and_forgotten_far_away():
    slow = {shape: time * (1.5 if shape == (90, 90) else 1.0) for shape, time in POINTS.items()}
    surface = surface_of(slow)
    assert surface((90, 90)) == slow[(90, 90)]
    for near in ((91, 90), (80, 95)):
        assert 1.2 < surface(near) / (4.0 + 0.01 * near[0] * near[1]) < 1.55
    assert surface((31, 30)) == pytest.approx(4.0 + 0.01 * 31 * 30, rel=0.12)
    far = (90_000, 90_000)
    assert surface(far) == pytest.approx(surface.model(far), rel=1e-6)


def test_noise_is_smoothed_but_a_measured_shape_answers_with_its_measurement():
    rng = np.random.default_rng(0)
    truth = {(m, n): 4.0 + 0.01 * m * n for m in range(10, 100, 10) for n in range(10, 100, 10)}
    noisy = {shape: time * math.exp(0.05 * rng.normal()) for shape, time in truth.items()}
    surface = surface_of(noisy)
    errors = [math.log(surface((m, n)) / (4.0 + 0.01 * m * n)) for m in range(15, 90, 10) for n in range(15, 90, 10)]
    assert np.std(errors) < 0.03
    assert all(surface(shape) == time for shape, time in noisy.items())


def test_interpolation_equals_the_textbook_formula():
    """Kriging of log(time / model), written out with scipy."""
    times = {shape: time * (1 + 0.1 * math.sin(sum(shape))) for shape, time in POINTS.items()}
    surface = surface_of(times)
    logs = np.log(np.array(list(times)))
    missed = np.array([math.log(time / surface.model(shape)) for shape, time in times.items()])
    for shape in ((10, 11), (55, 20), (200, 200)):
        query = np.log(np.array([shape]))
        near = np.exp(-0.5 * cdist(query / 1.4, logs / 1.4, "sqeuclidean"))[0]
        covariance = np.exp(-0.5 * cdist(logs / 1.4, logs / 1.4, "sqeuclidean")) + 0.1 * np.eye(len(logs))
        weights = np.linalg.inv(covariance) @ missed
        assert surface(shape) == pytest.approx(surface.model(shape) * math.exp(near @ weights), rel=1e-9)


def test_comparable_shapes():
    surface = surface_of({(1000, 400): 5.0, (10, 4000): 5.0})
    assert all(map(surface.comparable, [(1000, 400), (500, 200), (4000, 1600), (500, 1600), (5, 2000), (40, 16000)]))
    assert not any(map(surface.comparable, [(499, 400), (1000, 199), (4001, 400), (1000, 1601), (10, 400), (1, 1)]))
    assert not surface.comparable((0, 400))


def test_surface_keeps_the_floor_that_physics_sets():
    points = {(2**i,): 3.0 for i in range(6)}  # flat: the fit sees a launch and nothing else
    surface = Surface(points, lambda s: (1.0, s[0] * 1.0), lambda s: 0.5 * s[0])
    assert surface.model((1000,)) == pytest.approx(3.0 + 500.0)
