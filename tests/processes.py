"""Two processes of one job, for tests of what happens between ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def run_two(script: Path, arguments: Sequence[str], environment: Mapping[str, str], timeout: float) -> list[str]:
    """Run ``script RANK arguments...`` for ranks 0 and 1 at once; what each printed. Asserts that both succeed.

    Neither outlives the call, also if one of them hangs.
    """
    workers = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script), str(rank), *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    texts = []
    try:
        for worker in workers:
            texts.append(worker.communicate(timeout=timeout)[0])
    finally:
        for worker in workers:
            worker.kill()
    for worker, text in zip(workers, texts, strict=True):
        assert worker.returncode == 0, text[-4000:]
    return texts
