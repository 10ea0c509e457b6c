"""Where the fused kernels are on: shapes that were measured to be faster (docs/fused_kernels.md), and no others."""

from __future__ import annotations

import pytest

from loka_compile.lowering.fused.configs import config_for, find, gemm_kernel

SMALL, MIDDLE, WIDE = (4096, 512, 512), (4096, 1024, 1024), (4096, 2048, 2048)


@pytest.mark.parametrize(
    ("in_blocks", "gated", "quantised", "itemsize", "on"),
    [
        (True, False, False, 1, {SMALL}),
        (True, False, True, 1, {SMALL, MIDDLE}),
        (True, True, False, 1, {SMALL}),
        (True, True, True, 1, {SMALL}),
        (False, True, False, 1, {SMALL, MIDDLE, WIDE}),
        (False, True, False, 2, {SMALL, MIDDLE, WIDE}),
        (False, True, True, 1, {SMALL, MIDDLE, WIDE}),
        (False, True, True, 2, set()),
        (False, False, True, 1, set()),
    ],
)
def test_on_where_measured(
    in_blocks: bool, gated: bool, quantised: bool, itemsize: int, on: set[tuple[int, ...]]
) -> None:
    kernel = gemm_kernel(in_blocks, gated, quantised)
    assert {shape for shape in (SMALL, MIDDLE, WIDE) if find(kernel, *shape, itemsize) is not None} == on
    if not in_blocks and itemsize == 1:  # without fast accumulation wide ones were not measured
        exact = {shape for shape in (SMALL, MIDDLE, WIDE) if find(kernel, *shape, 1, False) is not None}
        assert exact == ({SMALL, MIDDLE} if gated and not quantised else set())
        assert find(kernel, 4096, 512, 2048, 1, False) is None


def test_parts_and_launches_shared_only_where_they_were_faster() -> None:
    """docs/fused_kernels.md: few tiles and a long K are the library's, but for one class; exact sums of wide
    grad_weights are faster one by one."""
    assert config_for("gemm_block_norm", 2048, 256, 18480, 1).splits == 8
    assert find("gemm_block_norm", 4096, 256, 18480, 1) is None
    assert find("gemm_block_norm", 2048, 256, 18480, 1, False) is None
    assert find("gemm_block_norm", 8192, 2048, 12256, 1) is not None
    # Tiles that fill the device once in part: in bf16. torch's GEMM of rows with a scale each is no match.
    assert [find("gemm_block_norm", 1024, 2560, 4096, size) is None for size in (1, 2)] == [False, True]
    assert [find("gemm_block_norm", 1024, 256, 7680, 1, True, rows) is None for rows in (False, True)] == [True, False]
    # Neither was measured without fast accumulation, nor rows of a few tiles with SwishNorm.
    assert find("gemm_block_norm", 1024, 2560, 4096, 1, False) is None
    assert find("gemm_block_norm", 1024, 256, 7680, 1, False, True) is None
    assert find("gemm_swish_norm", 1024, 256, 7680, 1, True, True) is None
    grouped = {(n, fast): find("grouped_gemm", n, n, 4096, 1, fast) is not None for n in (512, 1024) for fast in (0, 1)}
    assert grouped == {(512, 0): True, (512, 1): True, (1024, 0): False, (1024, 1): True}
