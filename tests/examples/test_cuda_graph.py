"""The step as one CUDA graph: the numbers of the plain loop, no wait for the device, and restarts with new weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from examples.data import nycflights
from examples.data.stream import ComposedStream, DatasetStream
from examples.data.synthetic import SyntheticConfig, SyntheticStream
from examples.models.registry import build
from examples.training.config import TrainConfig
from examples.training.loop import Trainer

STREAM = SyntheticConfig(batch_size=32, categories=4, max_ids=60, day=1000, history_length=3)


def trainer(graph: bool, device: str = "cpu", seed: int = 0, **changes: Any) -> Trainer:
    stream = SyntheticStream(SyntheticConfig(**{**vars(STREAM), "seed": seed}), device)
    model = build("hstu" if device == "cpu" else "wukong", "tiny", stream.schema, seed=seed, device=device)
    config = TrainConfig(
        **{"backend": "eager", "precision": "fp32", "window": 4, "warmup": 3, "cuda_graph": graph, **changes}
    )
    return Trainer(model, stream, config, device=device)


def losses(t: Trainer, steps: int) -> torch.Tensor:
    return torch.cat([loss for _, loss in t.run(steps)], dim=1)


def test_the_same_numbers_as_without() -> None:
    plain, captured = trainer(False), trainer(True)
    assert torch.equal(losses(plain, 16), losses(captured, 16))
    assert captured._captured is not None
    assert captured.step_count == 16
    ours, theirs = captured.model.state_dict(), plain.model.state_dict()
    assert all(torch.equal(ours[k], theirs[k]) for k in theirs)


def test_checkpoints_of_both_are_alike() -> None:
    first, second = trainer(True), trainer(True)
    losses(first, 8)
    second.load_state_dict({"step": 8, **copy.deepcopy(first.state_dict())})
    assert torch.equal(losses(first, 24), losses(second, 24))
    assert second._captured is not None


def test_a_restart_is_a_new_run() -> None:
    used, fresh = trainer(True), trainer(True, seed=5)
    losses(used, 12)
    initial = build("hstu", "tiny", used.stream.schema, seed=5).state_dict()
    used.restart(initial, SyntheticStream(SyntheticConfig(**{**vars(STREAM), "seed": 5})))
    assert used.step_count == 0
    assert torch.equal(losses(used, 12), losses(fresh, 12))


def test_a_stream_of_finished_batches_is_copied_into_place() -> None:
    data = nycflights.load(600)

    def make(graph: bool) -> Trainer:
        stream = DatasetStream(data, 50)
        assert not isinstance(stream, ComposedStream)
        config = TrainConfig(backend="eager", precision="fp32", window=2, warmup=2, cuda_graph=graph)
        return Trainer(build("dlrm", "tiny", stream.schema), stream, config)

    assert torch.equal(losses(make(True), 99), losses(make(False), 99))


def test_a_step_that_cannot_be_captured_is_taken_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr("examples.training.loop.CapturedStep", fail)
    with pytest.warns(UserWarning, match="not captured as a CUDA graph: CUDA error: operation not permitted"):
        failed = losses(trainer(True), 12)
    assert torch.equal(failed, losses(trainer(False), 12))


class Waits(TorchDispatchMode):
    """Collects operators whose result the host needs, or whose result's shape depends on values."""

    BAD = (
        "_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "masked_select", "_coalesce", "is_nonzero", "equal",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in self.BAD:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def test_nothing_in_a_captured_step_waits_for_the_device() -> None:
    t = trainer(True, precision="bf16")
    losses(t, 8)
    # As on a GPU: its step count is a tensor that the host does not read.
    t.dense_optimizer = torch.optim.Adam(t.model.dense_arch.parameters(), lr=1e-3, fused=True)
    with Waits() as waits:
        t._advance()
    assert waits.found == []
    with Waits() as waits:
        torch.ones(3).nonzero()
        t.dense_optimizer.param_groups[0]["params"][0].sum().item()
    assert waits.found == ["aten.nonzero.default", "aten._local_scalar_dense.default"]


def test_loka_has_its_plan_before_the_capture() -> None:
    assert TrainConfig(backend="loka", warmup=0).steps_before_capture > 20
    assert TrainConfig(backend="loka", options={"auto_calls": 40}, warmup=30).steps_before_capture > 40
    assert TrainConfig(warmup=100).steps_before_capture == 100


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["eager", "inductor", "loka"])
def test_on_a_gpu_the_same_numbers_as_without(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    how: dict[str, Any] = {"backend": backend, "deterministic": True, "precision": "bf16"}
    if backend == "loka":
        how["options"] = {"table": "off"}
    plain, captured = (losses(trainer(graph, "cuda", **how), 32) for graph in (False, True))
    assert torch.equal(plain, captured)
