"""Where the fused kernels are on: shapes that were measured to be faster (docs/fused_kernels.md), and no others."""

from __future__ import annotations

import pytest

from loka_compile.lowering.fused.configs import find, gemm_kernel

SMALL, MIDDLE, WIDE = (4096, 512, 512), (4096, 1024, 1024), (4096, 2048, 2048)


@pytest.mark.parametrize(
    ("in_blocks", "gated", "quantised", "itemsize", "on"),
    [
        (True, False, False, 1, {SMALL}),
        (True, False, True, 1, {SMALL, MIDDLE}),
        (True, True, False, 1, {SMALL}),
        (True, True, True, 1, {SMALL}),
        (False, True, False, 1, {SMALL, MIDDLE}),
        (False, True, False, 2, {SMALL, MIDDLE}),
        (False, True, True, 1, {SMALL, MIDDLE}),
        (False, True, True, 2, set()),
        (False, False, True, 1, set()),
    ],
)
def test_on_where_measured(
    in_blocks: bool, gated: bool, quantised: bool, itemsize: int, on: set[tuple[int, ...]]
) -> None:
    kernel = gemm_kernel(in_blocks, gated, quantised)
    assert {shape for shape in (SMALL, MIDDLE, WIDE) if find(kernel, *shape, itemsize) is not None} == on
    if not in_blocks and itemsize == 1:  # without fast accumulation: not measured
        assert find(kernel, *SMALL, 1, False) is None
