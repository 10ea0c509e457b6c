"""Our kernels compile for an H200 on a machine without one: FP8 tensor cores,
nothing spilt, shared memory that fits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

#: Bytes of shared memory and registers that a program of an H200 can have.
SHARED, REGISTERS = 227 * 1024, 65536

#: Another ptxas, which spills a few registers more.
TRITON = tuple(int(part) for part in version("triton").split(".")[:2])


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    cases = Path(__file__).with_name("compiled_cases.py")
    done = subprocess.run(
        [sys.executable, str(cases)], cwd=cases.parents[2], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(cases.parents[2]), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_gemms_use_fp8_tensor_cores(compiled: dict[str, Any]) -> None:
    assert len(compiled["gemms"]) == 6
    for case, kernels in compiled["gemms"].items():
        first = kernels[0]
        assert first["mma"], case
        assert all(op.endswith(".f32.e4m3.e4m3") for op in first["mma"]), case
        assert first["shared"] <= SHARED, case
        # Rows of 13 bytes are read byte by byte; the provider pads them.
        assert first["stack"] == 0 or case.endswith("x13"), case
    # A contraction that is cut has a second kernel; descriptors where the contraction is long and aligned.
    assert [k["kernel"] for k in compiled["gemms"]["rowwise_fast 1024x256x7680"]] == [
        "_scaled_gemm_kernel", "_sum_parts_kernel"
    ]  # fmt: skip
    assert compiled["gemms"]["rowwise_fast 1024x256x7680"][0]["tma"]
    assert not compiled["gemms"]["blockwise_128x128 1x1x13"][0]["tma"]


def test_programs_that_share_a_tile_fit(compiled: dict[str, Any]) -> None:
    assert len(compiled["in parts"]) == 3
    for case, (kernel,) in compiled["in parts"].items():
        assert all(op.endswith(".f32.e4m3.e4m3") for op in kernel["mma"]), case
        assert kernel["mma"], case
        assert kernel["tma"], case
        assert kernel["stack"] == 0, case
        assert kernel["shared"] <= SHARED, case


def test_gemms_in_one_launch_spill_nothing(compiled: dict[str, Any]) -> None:
    assert len(compiled["grouped"]) == 3
    for case, (kernel,) in compiled["grouped"].items():
        assert all(op.endswith(".f32.e4m3.e4m3") for op in kernel["mma"]), case
        assert kernel["mma"], case
        assert kernel["stack"] == 0, case
        assert kernel["shared"] <= SHARED, case


def test_fused_gemms_spill_nothing(compiled: dict[str, Any]) -> None:
    assert compiled["fused"]
    for case, (kernel,) in compiled["fused"].items():
        assert kernel["mma"], case
        assert all(op.endswith(".f32.e4m3.e4m3") for op in kernel["mma"]), case
        # With triton 3.8 four registers of SwishNorm's single wave.
        assert kernel["stack"] <= (16 if TRITON >= (3, 8) else 0), case
        assert kernel["shared"] <= SHARED, case


def test_quantisers_leave_room_for_each_other(compiled: dict[str, Any]) -> None:
    """They wait for memory: a multiprocessor must hold at least two programs of 256 threads."""
    assert len(compiled["quantisers"]) == 12
    for case, kernels in compiled["quantisers"].items():
        for kernel in kernels:
            # A limit on registers costs some that are spilt, into L1: a tenth of the instructions at most.
            assert kernel["stack"] <= (160 if case == "1x128 both" else 16), case
            # Both operands of 1x128 hold a whole tile in registers: few programs, and still the best of all that were
            # measured, because each has twice the bytes on their way.
            threads = 256 if case == "1x128 both" else 512
            assert threads // (32 * kernel["warps"]) * kernel["registers"] * 32 * kernel["warps"] <= REGISTERS, case
            assert kernel["shared"] * 2 <= SHARED, case
        # One pass where a block lies in one tile, or a row in one program; else maxima first.
        two = case.startswith("tensorwise") or case in ("rowwise x.T", "rowwise both")
        names = [kernel["kernel"] for kernel in kernels]
        maxima = "_amax_pairs_kernel" if case == "rowwise both" else "_amax_kernel"
        assert names[:-1] == (["_zero_kernel", maxima] if two else []), case


def test_programs_that_meet_fit_on_the_device_together(compiled: dict[str, Any]) -> None:
    """A cooperative launch fails unless they fit; hardly anything may be spilt."""
    assert len(compiled["meeting"]) == 20
    for case, (kernel,) in compiled["meeting"].items():
        # Four tiles, which is what is kept of 4096 x 2048, are half of all registers; a few addresses have no room: 32
        # bytes with triton 3.6, 72 with 3.8. Unrolled it were a thousand.
        four = case.startswith(("4096x2048", "torch.float16", "torch.bfloat16"))
        assert kernel["stack"] <= (80 if four else 16), case
        resident = kernel.get("resident", 1)
        assert resident * kernel["registers"] * 32 * kernel["warps"] <= REGISTERS, case
        assert resident * kernel["shared"] <= SHARED, case


def test_a_large_gradient_is_read_ahead(compiled: dict[str, Any]) -> None:
    assert len(compiled["gradients"]) == 6
    for case, (kernel,) in compiled["gradients"].items():
        aligned = case.startswith("4096")
        assert not aligned or kernel["ahead"] > 0, "loads are not pipelined"
        assert kernel["stack"] <= (64 if "silu" in case else 16), case
        # Three programs share a multiprocessor (loka_compile.kernels.block_norm_backward.CONFIG).
        if aligned and "bfloat16" in case:
            assert 3 * kernel["registers"] * 32 * kernel["warps"] <= REGISTERS, case
            assert 3 * kernel["shared"] <= SHARED, case


def test_hand_written_kernels_have_the_gate_that_templates_have() -> None:
    """Written twice, as a kernel that reads a global is not found by its launch where a worker has built it."""
    from loka_compile.kernels import config

    assert config.GATE_PTX in Path(config.__file__).with_name("device.py").read_text()
