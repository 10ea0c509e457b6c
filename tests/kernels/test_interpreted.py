"""Runs the files ``interpreted_*.py`` in a process of their own: Triton's interpreter has to be chosen before triton is
imported, and torch, which every other test imports first, imports it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def output() -> str:
    """What pytest prints of all of them, a line for each test."""
    folder = Path(__file__).parent
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--no-header",
         *sorted(map(str, folder.glob("interpreted_*.py")))],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=folder.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    return result.stdout


@pytest.mark.parametrize(
    ("name", "least"), [("interpreted_cases", 40), ("interpreted_scaled_gemm", 60), ("interpreted_quantize", 30)]
)
def test_kernels_in_the_interpreter(name: str, least: int, output: str) -> None:
    assert sum(f"{name}.py::" in line and " PASSED" in line for line in output.splitlines()) >= least
