"""DistributedDataParallel with its default settings: two gloo processes, no find_unused_parameters."""

from pathlib import Path

from tests.processes import run_two

HERE = Path(__file__).parent


def test_two_processes_in_every_wrapping_order(tmp_path):
    """Every parameter gets its (averaged, or zero) gradient in every step, and the ranks stay together; plans too."""
    environment = {"PYTHONPATH": str(HERE), "LOKA_CACHE_DIR": str(tmp_path / "c")}
    for text in run_two(HERE / "ddp_worker.py", [str(tmp_path / "rendezvous")], environment, timeout=300):
        assert text.count(" graphs, right") == 4, text
