"""DistributedDataParallel with its default settings: two gloo processes, no find_unused_parameters."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_two_processes_in_every_wrapping_order(tmp_path):
    """Every parameter gets its (averaged, or zero) gradient in every step, and the ranks stay together; plans too."""
    workers = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(HERE / "ddp_worker.py"), str(rank), str(tmp_path / "rendezvous")],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE), "LOKA_CACHE_DIR": str(tmp_path / "c")},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    texts = []
    try:
        for worker in workers:
            texts.append(worker.communicate(timeout=300)[0])
    finally:
        for worker in workers:
            worker.kill()
    for worker, text in zip(workers, texts, strict=True):
        assert worker.returncode == 0, text[-4000:]
        assert text.count(" graphs, right") == 4, text
