"""Golden: how many kernels Inductor makes of the fused GEMM and its neighbours, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

#: Another ptxas, which spills a few registers more.
TRITON = tuple(int(part) for part in version("triton").split(".")[:2])


@pytest.fixture(scope="module")
def generated() -> dict[str, Any]:
    script = Path(__file__).with_name("codegen_cases.py")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, done.stderr[-4000:]
    return json.loads(lines[0].removeprefix("RESULT"))


@pytest.mark.parametrize(
    ("case", "stores"),
    [
        ("inference", 1),
        ("training", 3),
        ("more tiles than multiprocessors", 3),
        ("short last block", 3),
        ("unaligned", 1),
        ("residual", 1),
        ("residual before the norm", 1),
        ("dynamic batch", 3),
        ("moving rows", 3),
        ("autocast", 3),
        ("SwishNorm", 1),
        ("SwishNorm, training", 3),
        ("SwishNorm, short last block", 3),
        ("SwishNorm, FP8 alone", 2),
        ("SwishNorm, training, two waves", 3),
        ("SwishNorm, FP8 alone, two waves", 2),
        ("SwishNorm, all", 5),
        ("HardSwish, FP8 and y", 4),
    ],
)
def test_gemm_norm_activation_and_quantisation_are_one_kernel(
    generated: dict[str, Any], case: str, stores: int
) -> None:
    found = generated[case]
    assert found["launches"] == 1, found
    assert len(found["kernels"]) == 1
    assert "gemm_block_norm" in found["kernels"][0] or "gemm_norm_activation" in found["kernels"][0]
    # One per result: y, rstd and the FP8 operand in training, the FP8 operand alone in inference; h, and scales.
    assert found["stores"] == stores


@pytest.mark.parametrize(
    "case", ["block scales", "block scales, short last block", "block scales, dynamic batch", "1x128 scales"]
)
def test_scales_in_blocks_are_read_where_they_lie(generated: dict[str, Any], case: str) -> None:
    """Two kernels make the scales; a third would be a copy of them."""
    assert generated[case]["launches"] == 3
    assert sum("gemm_block_norm" in kernel for kernel in generated[case]["kernels"]) == 1


def test_a_fixed_scale_is_no_kernel(generated: dict[str, Any]) -> None:
    found = generated["fixed scale, twice"]
    assert found["launches"] == 2
    assert found["constants"] == 1


def test_what_is_materialised_is_written_by_kernels_that_end_there(generated: dict[str, Any]) -> None:
    """Its two pieces each where they are made, so that the rounding reads one tensor."""
    found = generated["joined"]
    (rounding,) = [kernel for kernel in found["kernels"] if "_amax_" in kernel]
    assert found["launches"] == 3
    assert "_flip_" not in rounding
    assert "_mul_" not in rounding


def test_descriptors_only_where_a_program_has_a_next_tile_to_read_ahead(generated: dict[str, Any]) -> None:
    assert generated["more tiles than multiprocessors"]["descriptors"] == 2
    assert generated["SwishNorm, training, two waves"]["descriptors"] == 2
    assert generated["SwishNorm, training"]["descriptors"] == 0
    assert generated["inference"]["descriptors"] == 0
    assert generated["unaligned"]["descriptors"] == 0


@pytest.mark.parametrize(
    ("case", "stores"),
    [("split", 5), ("split, unaligned", 5), ("split, dynamic batch", 3), ("split twice", 5)],
)
def test_a_gemm_in_parts_is_one_kernel_behind_zeros_that_a_graph_fills_once(
    generated: dict[str, Any], case: str, stores: int
) -> None:
    kernels = generated[case]["kernels"]
    assert len(kernels) == generated[case]["launches"] == (3 if case == "split twice" else 2)
    assert all(kernel.startswith("triton_tem") for kernel in kernels)  # which launch early, the zeros too
    # The zeros, and for each kernel its parts and its results.
    assert generated[case]["stores"] == stores
    assert (generated[case]["descriptors"] > 0) == (case in ("split", "split twice"))


@pytest.mark.parametrize(
    "case",
    ["inference", "training", "moving rows", "more tiles than multiprocessors", "SwishNorm", "HardSwish, FP8 and y"],
)
def test_a_gate_is_one_instruction(generated: dict[str, Any], case: str) -> None:
    """The tensor core waits for the epilogue. With comparisons the tile of "training" did not fit the registers."""
    found = generated[case]
    assert found["gates"] == found["tile"] // found["threads"]
    assert found["stack"] <= (16 if TRITON >= (3, 8) else 0)  # two registers of the last one


def test_tiles_of_few_fit_the_registers(generated: dict[str, Any]) -> None:
    found = {name: case["stack"] for name, case in generated.items() if "few tiles" in name and "stack" in case}
    assert len(found) == 8
    assert max(found.values()) <= (16 if TRITON >= (3, 8) else 0), found


@pytest.mark.parametrize(
    ("case", "spilt"),
    [
        ("paired", 0),
        ("paired, rowwise", 0),
        ("paired, SwishNorm", 0),
        ("paired, SiLU", 32 if TRITON >= (3, 8) else 8),
        ("paired, residual behind, both", 64),
    ],
)
def test_a_multiprocessor_takes_two_programs(generated: dict[str, Any], case: str, spilt: int) -> None:
    """Epilogues with more in them spill a little: a rule knows what is in front of the norm, not what is behind."""
    found = generated[case]
    assert found["stack"] <= max(spilt, 16 if TRITON >= (3, 8) else 0)
    assert 2 * (found["shared"] + 1024) <= 233_472  # and 1 kB of each program is the system's
    assert found["threads"] == 128  # of 255 registers each at most: half of what there is


def test_a_k_that_may_move_has_the_tiles_of_rows_off_16_bytes(generated: dict[str, Any]) -> None:
    """What K was at the first call, 256, says nothing of the next; masked loads take the registers of rows of 16."""
    assert generated["very few tiles"]["rows"] == [16]
    assert generated["dynamic batch"]["rows"] == [64]


def test_nothing_is_written_before_the_kernel_in_front_has_ended(generated: dict[str, Any]) -> None:
    """Descriptors neither: all launches take their scratch from the same memory."""
    compiled = [found for found in generated.values() if "early" in found]
    assert len(compiled) > 10
    assert all(found["early"] == [] for found in compiled)
    assert generated["more tiles than multiprocessors"]["scratch"] > 0
    assert generated["split"]["scratch"] > 0


@pytest.mark.parametrize(
    ("case", "launches"), [("block scales, not split", 3), ("SwishNorm, not split", 1), ("HardSwish, not split", 1)]
)
def test_scales_in_blocks_and_activations_in_the_body_are_not_split(
    generated: dict[str, Any], case: str, launches: int
) -> None:
    assert generated[case]["launches"] == launches
    assert generated[case]["counters"] == 0
    assert generated["split"]["counters"] > 0


def test_the_template_computes_the_same_in_the_interpreter() -> None:
    cases = Path(__file__).with_name("interpreted_template.py")
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", "--show-capture=no"]
    done = subprocess.run(
        [*command, str(cases)], env=env, cwd=cases.parents[2], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "36 passed" in done.stdout


@pytest.mark.parametrize(
    "case",
    [
        "split",
        "split, unaligned",
        "split twice",
        "training",
        "fp32 model",
        "fp32 model, few tiles",
        "fp32 from bf16",
        "fp32 from bf16, few tiles",
        "block scales",
        "1x128 scales",
        "SwishNorm, training",
        "SwishNorm, FP8 alone",
        "SwishNorm, training, two waves",
        "SwishNorm, FP8 alone, two waves",
        "SwishNorm, fp32 model",
        "SwishNorm, fp32 kept",
        "HardSwish, FP8 and y",
    ],
)
def test_kernels_fit_the_shared_memory_of_an_h200(generated: dict[str, Any], case: str) -> None:
    """A persistent kernel that writes fp32 needs twice the room for its tile: Inductor then had no valid config."""
    assert 0 < generated[case]["shared"] <= 232_448
