"""Runs the files ``interpreted_*.py`` in processes of their own: Triton's interpreter has to be chosen before triton is
imported, and torch, which every other test imports first, imports it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("name", "least"), [("interpreted_cases", 40), ("interpreted_scaled_gemm", 60), ("interpreted_quantize", 30)]
)
def test_kernels_in_the_interpreter(name: str, least: int) -> None:
    cases = Path(__file__).with_name(f"{name}.py")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", str(cases)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=cases.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    passed = re.search(r"(\d+) passed", result.stdout)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert passed is not None
    assert int(passed[1]) >= least
