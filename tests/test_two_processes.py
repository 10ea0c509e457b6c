"""Two processes: DDP over NCCL on two GPUs with real FP8 kernels, FSDP2 on the CPU too, and the probe's statistics
merged to what one process would have seen."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.processes import run_two

ROOT = Path(__file__).parents[1]


def run(folder: Path, kind: str, *names: str) -> None:
    """Both workers through all wrappings."""
    # A graph from a compile cache is not lowered again, and its report would hold no GEMMs.
    environment = {name: "0" for name in ("TORCHINDUCTOR_FX_GRAPH_CACHE", "TORCHINDUCTOR_AUTOGRAD_CACHE")}
    environment["LOKA_CACHE_DIR"] = str(folder / "cache")
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    script = Path(__file__).with_name("two_processes_worker.py")
    for text in run_two(script, [str(folder / "rendezvous"), kind, *names], environment, timeout=240):
        assert text.count(", right") == len(names), text


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_two_gpus(tmp_path: Path) -> None:
    run(tmp_path, "cuda", "DDP, loka", "FSDP2, loka", "DDP, eager")


def test_fsdp2_on_the_cpu(tmp_path: Path) -> None:
    run(tmp_path, "cpu", "FSDP2, loka")
