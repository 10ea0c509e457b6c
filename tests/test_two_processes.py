"""Two processes: DDP over NCCL on two GPUs with real FP8 kernels, FSDP2 on the CPU too, and the probe's statistics
merged to what one process would have seen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


def run(folder: Path, kind: str, *names: str) -> None:
    """Both workers through all wrappings."""
    file, path = str(Path(__file__).with_name("two_processes_worker.py")), os.environ.get("PYTHONPATH", "")
    # A graph from a compile cache is not lowered again, and its report would hold no GEMMs.
    more = {name: "0" for name in ("TORCHINDUCTOR_FX_GRAPH_CACHE", "TORCHINDUCTOR_AUTOGRAD_CACHE")}
    more |= {"LOKA_CACHE_DIR": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", file, str(rank), str(folder / "rendezvous"), kind, *names],
            env={**os.environ, **more, "PYTHONPATH": os.pathsep.join([str(ROOT), path])},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    texts = []
    try:
        for worker in workers:
            texts.append(worker.communicate(timeout=240)[0])
    finally:
        for worker in workers:
            worker.kill()
    for worker, text in zip(workers, texts, strict=True):
        assert worker.returncode == 0, text[-4000:]
        assert text.count(", right") == len(names), text


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_two_gpus(tmp_path: Path) -> None:
    run(tmp_path, "cuda", "DDP, loka", "FSDP2, loka", "DDP, eager")


def test_fsdp2_on_the_cpu(tmp_path: Path) -> None:
    run(tmp_path, "cpu", "FSDP2, loka")
