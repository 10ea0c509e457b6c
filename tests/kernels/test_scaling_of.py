"""What the shapes of two scales say to the fused kernels."""

from __future__ import annotations

import pytest

from loka_compile.kernels.config import Scaling, scaling_of


@pytest.mark.parametrize(
    ("scale_a", "scale_b", "m", "n", "expected"),
    [
        (None, None, 64, 256, Scaling(0)),
        ((), (), 64, 256, Scaling(1)),
        ((1, 1), (1,), 64, 256, Scaling(1)),
        ((64, 1), (1, 256), 64, 256, Scaling(2)),
        ((64, 1), (256, 1), 64, 256, Scaling(2)),  # 1x128 with one block of k
        ((1, 1), (1, 256), 1, 256, Scaling(2)),
        ((64, 8), (2, 8), 64, 256, Scaling(3, 1, 128)),
        ((64, 1), (2, 4), 64, 256, Scaling(3, 1, 128)),  # one block of k, filled up to four
        ((64, 1), (1, 4), 64, 128, Scaling(3, 1, 128)),
        ((64, 3), (256, 3), 64, 256, Scaling(3, 1, 1)),
        ((1, 3), (256, 3), 1, 256, Scaling(3, 1, 1)),
        ((2, 3), (2, 3), 200, 256, Scaling(3, 128, 128)),
    ],
)
def test_scaling(
    scale_a: tuple[int, ...] | None, scale_b: tuple[int, ...] | None, m: int, n: int, expected: Scaling
) -> None:
    found = scaling_of(scale_a, scale_b, m, n)
    assert found == expected
    assert found.in_blocks == (expected.kind == 3)
