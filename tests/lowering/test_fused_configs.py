"""Where the fused kernels are on: shapes measured to be faster (docs/fused_configurations.md), and no others."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from loka_compile.kernels.config import GemmConfig
from loka_compile.lowering.fused.configs import config_for, find, gemm_kernel

MEASURED = Path(__file__).parents[2] / "benchmarks" / "results" / "template_sweep_h200.json"
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
    """docs/fused_configurations.md: few tiles and a long K are the library's, but for one class; exact sums of wide
    grad_weights are faster one by one."""
    assert config_for("gemm_block_norm", 2048, 256, 18480, 1).splits == 8
    assert find("gemm_block_norm", 4096, 256, 18480, 1) is None
    assert find("gemm_block_norm", 2048, 256, 18480, 1, False) is None
    assert find("gemm_block_norm", 8192, 2048, 12256, 1) is not None
    # Tiles that fill the device once in part, or once and a little more: in bf16. torch's GEMM of rows with a scale
    # each is no match.
    assert [find("gemm_block_norm", 1024, 2560, 4096, size) is None for size in (1, 2)] == [False, True]
    assert [find("gemm_block_norm", 4096, 1280, 2048, size) is None for size in (1, 2)] == [False, True]
    assert find("gemm_block_norm", 4096, 1536, 1536, 2) is not None
    assert [find("gemm_block_norm", 1024, 256, 7680, 1, True, rows) is None for rows in (False, True)] == [True, False]
    # Neither was measured without fast accumulation, nor rows of a few tiles with SwishNorm.
    assert find("gemm_block_norm", 1024, 2560, 4096, 1, False) is None
    assert find("gemm_block_norm", 1024, 256, 7680, 1, False, True) is None
    assert find("gemm_swish_norm", 1024, 256, 7680, 1, True, True) is None
    # Few tiles and a K that is not long, where the library's GEMM is as fast as one with an epilogue.
    assert [find("gemm_block_norm", 1024, 512, 1024, size) is None for size in (1, 2)] == [False, True]
    assert [find("gemm_block_norm", 1024, 256, 1024, 1, True, rows) is None for rows in (False, True)] == [True, False]
    assert find("gemm_swish_norm", 1024, 256, 512, 1) is None
    grouped = {(n, fast): find("grouped_gemm", n, n, 4096, 1, fast) is not None for n in (512, 1024) for fast in (0, 1)}
    assert grouped == {(512, 0): True, (512, 1): True, (1024, 0): False, (1024, 1): True}


@pytest.mark.parametrize("kernel", ["gemm_block_norm", "gemm_swish_norm"])
@pytest.mark.parametrize("itemsize", [1, 2])
@pytest.mark.parametrize(
    ("m", "n", "k", "rows", "persistent"),
    [
        (1024, 512, 256, 16, False),  # 16 tiles of 128 x 256, in eight parts
        (1024, 768, 256, 64, False),
        (4096, 512, 512, 64, False),  # 64 tiles of 128 x 256: half of the device
        (4096, 1024, 512, 128, False),
        (4096, 1024, 1024, 128, False),  # 128 tiles: a round of 132
        (4096, 1280, 1024, 64, True),  # 160: two rounds, or three of half the time
        (4096, 1536, 1536, 64, True),  # 192
        (2048, 3456, 3456, 128, True),  # 224: two rounds either way
        (8192, 1280, 1280, 64, True),  # 320: three rounds, or five
        (4096, 3328, 1024, 128, True),  # 416: four, or seven, which is no gain
        (8192, 2048, 512, 128, True),
        (1024, 7680, 512, 128, True),
    ],
)
def test_tiles_have_the_rows_that_fill_the_device(
    kernel: str, itemsize: int, m: int, n: int, k: int, rows: int, persistent: bool
) -> None:
    """A short contraction is no exception; once it was, and took up to half more time."""
    config = config_for(kernel, m, n, k, itemsize)
    assert (config.block_m, config.persistent, config.tma) == (rows, persistent, persistent)
    assert config.block_k * itemsize == 128


@pytest.mark.parametrize("kernel", ["gemm_block_norm", "gemm_swish_norm"])
def test_two_programs_share_a_multiprocessor_where_k_is_short(kernel: str) -> None:
    """In FP8, of 128 tiles of 128 x 256 to 256: what was measured, rows with a scale each behind a BlockNorm alone."""
    paired = GemmConfig(64, 256, 128, 4, 2)
    sizes = ((128 * 128, 256, 256), (1024, 7680, 256), (256 * 128, 256, 256), (4096, 1024, 144))
    assert [config_for(kernel, *size, 1) for size in sizes] == [paired] * 4
    others = ((4096, 1024, 272), (127 * 128, 256, 256), (257 * 128, 256, 256), (4096, 1024, 128), (4096, 1024, 250))
    assert all(config_for(kernel, *size, 1) != paired for size in others)
    assert config_for(kernel, 1024, 7680, 256, 2) == GemmConfig(128, 256, 64, 8, 3, tma=True, persistent=True)
    assert config_for(kernel, 1024, 7680, 256, 1, crowded=True).warps == 8
    assert config_for(kernel, 1024, 7680, 256, 1, fast=False) != paired
    assert (config_for(kernel, 1024, 7680, 256, 1, rowwise=True) == paired) == (kernel == "gemm_block_norm")


def test_rows_that_are_not_known_to_begin_on_16_bytes_count_as_such_that_do_not() -> None:
    """Loads are masked then, which takes registers that four warps do not have."""
    assert config_for("gemm_block_norm", *SMALL, 1).warps == 4
    assert config_for("gemm_block_norm", *SMALL, 1, aligned=False).warps == 8


def test_rules_choose_what_was_measured_to_be_fastest() -> None:
    """Over all cases of benchmarks/template_sweep.py in which a choice was measured, "apart" among them."""
    cases = json.loads(MEASURED.read_text())["rounds"]["us"]
    slower: dict[str, float] = {}
    for name, us in cases.items():
        m, n, k = map(int, re.findall(r"\d+", name.split(" ")[1].replace("x", " ")))
        itemsize = 1 if name.startswith("float8") else 2
        rule = find(gemm_kernel(gated="SwishNorm" in name), m, n, k, itemsize)
        config = rule["config"] if rule is not None else {}
        row = [config.get(key, False) for key in ("block_m", "block_n", "block_k", "warps", "stages", "tma")]
        row[2] *= itemsize
        chosen = us["apart" if rule is None else str(tuple(row))]
        slower[name] = chosen / min(time for arm, time in us.items() if arm != "shipped before")
    assert len(slower) > 270
    assert max(slower.values()) < 1.08
    assert sum(slower.values()) / len(slower) < 1.01
    before = [us["shipped before"] / min(us.values()) for us in cases.values() if "shipped before" in us]
    assert sum(before) / len(before) > 1.1  # which the check would have found


def test_a_thread_has_the_registers_that_it_needs() -> None:
    """Four warps spill where something is added in front of the norm, results are in fp32 or loads are masked; rows of
    16 where loads are."""
    assert config_for("gemm_block_norm", *SMALL, 1).warps == 4
    assert config_for("gemm_block_norm", *SMALL, 1, True, False, True).warps == 8
    assert config_for("gemm_swish_norm", *SMALL, 2, True, False, True).warps == 8
    assert config_for("gemm_block_norm", 1024, 2048, 4096, 1).warps == 8  # four were measured up to K = 1024
    assert [config_for("gemm_block_norm", 1024, 256, k, 2).block_m for k in (256, 252)] == [16, 64]
    assert config_for("gemm_block_norm", 1024, 256, 252, 2).warps == 8
    # Sums without fast accumulation and rows with a scale each were not measured with so few tiles.
    assert find("gemm_swish_norm", 1024, 256, 512, 1, False) is not None
    assert find("gemm_swish_norm", 1024, 256, 512, 1, True, True) is not None
