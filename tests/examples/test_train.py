"""The trainer: exact resume, checkpoints that survive a crash, the command line."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from benchmarks.e2e_arm import capture
from examples.data.synthetic import SyntheticConfig, SyntheticStream
from examples.models.registry import build
from examples.train import app
from examples.training.checkpoint import CheckpointError, atomic_write, checkpoints, load_checkpoint, save_checkpoint
from examples.training.config import TrainConfig
from examples.training.folder import RunFolder
from examples.training.loop import DivergedError, Trainer
from examples.training.sources import open_source
from loka_compile.probe import load_stats

STREAM = SyntheticConfig(batch_size=64, categories=4, max_ids=60, day=4096, history_length=3)


def trainer(model: str = "dlrm", **changes: Any) -> Trainer:
    stream = SyntheticStream(STREAM)
    config = TrainConfig(**{"backend": "eager", "precision": "fp32", "window": 4, "warmup": 3, **changes})
    return Trainer(build(model, "tiny", stream.schema, seed=config.seed), stream, config)


def windows(t: Trainer, steps: int) -> list[dict[str, float]]:
    return [{k: v for k, v in record.items() if k != "examples_per_second"} for record, _ in t.run(steps)]


# --- the loop


def test_predicts_before_it_trains() -> None:
    t = trainer()
    batch = t.stream.batch(0)
    before = t.model(batch.numerics, batch.categories).detach()
    assert torch.equal(t.step(batch), before)
    assert not torch.allclose(t.model(batch.numerics, batch.categories), before)


def test_warm_up_and_learning_rates() -> None:
    t = trainer(warmup=4, lr=0.01, table_lr=0.1)
    seen = []
    for _ in range(6):
        t.step(next(t.stream))
        seen.append((t.dense_optimizer.param_groups[0]["lr"], t.table_optimizer.param_groups[0]["lr"]))
    assert seen == [(pytest.approx(0.01 * s), pytest.approx(0.1 * s)) for s in (0.25, 0.5, 0.75, 1, 1, 1)]


def test_loss_falls_on_the_stream() -> None:
    stream = SyntheticStream(SyntheticConfig(batch_size=512, categories=4, max_ids=60, day=10**5))
    config = TrainConfig(backend="eager", precision="fp32", window=40, warmup=10, lr=3e-3, table_lr=0.05)
    t = Trainer(build("dcnv2", "tiny", stream.schema), stream, config)
    records = windows(t, 240)
    assert records[-1]["excess"] < 0.6 * records[0]["excess"]
    assert records[-1]["auc"] > 0.65
    assert abs(records[-1]["calibration"] - 1) < 0.1
    assert [r["step"] for r in records] == [40, 80, 120, 160, 200, 240]
    assert records[0]["examples"] == 40 * 512


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("dlrm", {"table_optimizer": "sparse_adam"}),
        ("wukong", {"precision": "bf16"}),
        ("hstu", {}),
        ("dcnv2", {"backend": "aot_eager"}),
    ],
    ids=["sparse_adam", "bf16", "history", "compiled"],
)
def test_resume_is_exact(tmp_path: Path, model: str, changes: dict[str, Any]) -> None:
    straight = trainer(model, **changes)
    expected = windows(straight, 13)
    stopped = trainer(model, **changes)
    folder = RunFolder(tmp_path)
    for record, _ in stopped.run(7):  # in the middle of a window
        folder.append(record)
    folder.save(stopped)
    for record, _ in stopped.run(12):  # what a killed run did after its last checkpoint is done again
        folder.append(record)
    resumed = trainer(model, **changes)
    torch.manual_seed(1234)
    assert folder.resume(resumed) == 7
    for record, _ in resumed.run(13):
        folder.append(record)
    found = [{k: v for k, v in r.items() if k != "examples_per_second"} for r in folder.records()]
    assert found == json.loads(json.dumps(expected))
    ours, theirs = resumed.model.state_dict(), straight.model.state_dict()
    assert all(torch.equal(ours[k], theirs[k]) for k in theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_resume_is_exact_on_a_gpu(tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    def make() -> Trainer:
        stream = SyntheticStream(STREAM, "cuda")
        config = TrainConfig(backend=backend, window=4, deterministic=True)
        return Trainer(build("wukong", "tiny", stream.schema, device="cuda"), stream, config, device="cuda")

    straight, stopped, resumed = make(), make(), make()
    windows(straight, 13)
    windows(stopped, 7)
    folder = RunFolder(tmp_path)
    folder.save(stopped)
    assert folder.resume(resumed) == 7
    windows(resumed, 13)
    ours, theirs = resumed.model.state_dict(), straight.model.state_dict()
    assert all(torch.equal(ours[k], theirs[k]) for k in theirs)


@pytest.mark.gpu
def test_a_training_step_fits_into_one_cuda_graph() -> None:
    stream = SyntheticStream(STREAM, "cuda")
    config = TrainConfig(backend="eager", precision="fp32", warmup=0)
    pair = [
        Trainer(build("dlrm", "tiny", stream.schema, device="cuda"), stream, config, device="cuda", capturable=True)
        for _ in range(2)
    ]
    batches = [stream.batch(i) for i in range(4)]
    for batch in batches[:1] * 3 + batches:
        pair[0].step(batch)
    replay, _ = capture(pair[1].step, batches)  # steps three times on the first batch before it captures
    assert replay is not None
    for i in range(4):
        replay(i)
    for a, b in zip(pair[0].model.parameters(), pair[1].model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_resume_refuses_another_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.save(trainer())
    with pytest.raises(CheckpointError, match=r"another run: lr: 0.001 there, 0.1 here"):
        folder.resume(trainer(lr=0.1))
    assert RunFolder(tmp_path / "empty").resume(trainer()) == 0


def test_an_incomplete_last_window_is_left_out() -> None:
    class Short(SyntheticStream):
        def __next__(self) -> Any:
            if self._step == 6:
                raise StopIteration
            return super().__next__()

    stream = Short(STREAM)
    t = Trainer(build("dlrm", "tiny", stream.schema), stream, TrainConfig(backend="eager", window=4))
    assert [r["step"] for r, _ in t.run()] == [4]
    assert t.step_count == 6


def test_divergence_is_reported_after_its_window() -> None:
    t = trainer()
    with torch.no_grad():
        t.model.dense_arch.predict.bias.fill_(float("nan"))
    seen = []
    with pytest.raises(DivergedError, match="up to step 4 is not finite"):
        seen.extend(r for r, _ in t.run(20))
    assert len(seen) <= 1


def test_precision_and_switches() -> None:
    seen: list[tuple[torch.dtype, str]] = []

    class Spy(nn.Module):
        def __init__(self, dense: nn.Module) -> None:
            super().__init__()
            self.dense = dense

        def forward(self, *args: Tensor) -> Tensor:
            out = self.dense(*args)
            seen.append((out.dtype, torch.get_float32_matmul_precision()))
            return out

    before = torch.get_float32_matmul_precision()
    for precision, tf32 in (("fp32", False), ("fp32", True), ("bf16", False)):
        stream = SyntheticStream(STREAM)
        config = TrainConfig(precision=precision, tf32=tf32, backend="eager", window=1)
        t = Trainer(build("dlrm", "tiny", stream.schema), stream, config, transform=Spy)
        list(t.run(1))
        assert all(p.dtype == torch.float32 for p in t.model.parameters())
    assert seen == [(torch.float32, "highest"), (torch.float32, "high"), (torch.bfloat16, "highest")]
    assert torch.get_float32_matmul_precision() == before


def test_config_mistakes_are_named() -> None:
    for changes, text in (
        ({"precision": "fp16"}, "legal: fp32, bf16"),
        ({"table_optimizer": "sgd"}, "legal: rowwise_adagrad, sparse_adam"),
        ({"window": 0}, "window is at least 1"),
        ({"backend": "eager", "options": {"a": 1}}, "does not compile"),
    ):
        with pytest.raises(ValueError, match=text):
            TrainConfig(**changes)
    for arguments, text in (
        (("movies", 4), "no data source 'movies'"),
        (("criteo", 4), "reads files"),
        (("synthetic", 4, {"depth": 3}), "unexpected keyword argument 'depth'"),
    ):
        with pytest.raises(ValueError, match=text):
            open_source(*arguments[:2], **(arguments[2] if len(arguments) > 2 else {}))


# --- checkpoints


def test_a_crash_while_writing_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    atomic_write(path, lambda f: f.write(b"old"))

    def crash(file: Any) -> None:
        file.write(b"ne")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        atomic_write(path, crash)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    for step in (5, 100, 20):
        save_checkpoint(tmp_path, step, {"x": torch.ones(2)})
    assert [s for s, _ in checkpoints(tmp_path)] == [20, 100]
    assert torch.equal(load_checkpoint(tmp_path / "checkpoint-100.pt")["x"], torch.ones(2))


def test_damaged_and_foreign_checkpoints_are_named(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 3, {"x": torch.ones(1000)})
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(CheckpointError, match=r"checkpoint-3.pt cannot be read"):
        load_checkpoint(path)
    torch.save({"format": 0}, tmp_path / "checkpoint-4.pt")
    with pytest.raises(CheckpointError, match="not a checkpoint of format 1"):
        load_checkpoint(tmp_path / "checkpoint-4.pt")


def test_a_line_that_a_crash_cut_off_is_left_out(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.append({"step": 1, "auc": float("nan")})
    with folder.metrics_file.open("a") as file:
        file.write('{"step": 2, "au')
    assert folder.records() == [{"step": 1, "auc": None}]


# --- the command line

SMALL_DATA = ["--data-options", '{"categories": 4, "max_ids": 60}', "--batch-size", "64", "--window", "5"]


@pytest.fixture
def run() -> Callable[..., Any]:
    runner = CliRunner()
    return lambda *args: runner.invoke(app, [str(a) for a in args])


def test_command_line_trains_and_resumes(run: Any, tmp_path: Path) -> None:
    common = ["--model", "dcnv2", "--backend", "eager", *SMALL_DATA, "--seed", 3]
    assert run("--out", tmp_path / "a", "--steps", 15, *common).exit_code == 0
    assert run("--out", tmp_path / "b", "--steps", 7, "--checkpoint-every", 3, *common).exit_code == 0
    assert [s for s, _ in checkpoints(tmp_path / "b")] == [6, 7]
    again = run("--out", tmp_path / "b", "--steps", 15, *common)
    assert again.exit_code == 2
    assert "--resume" in again.output
    assert "step 7" in run("--out", tmp_path / "b", "--steps", 15, "--resume", *common).output
    a, b = (load_checkpoint(tmp_path / x / "checkpoint-15.pt")["model"] for x in "ab")
    assert all(torch.equal(a[k], b[k]) for k in a)
    records = [RunFolder(tmp_path / x).records() for x in "ab"]
    assert [[r["step"] for r in rs] for rs in records] == [[5, 10, 15]] * 2
    assert records[0][2]["log_loss"] == records[1][2]["log_loss"]
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["model"] == "dcnv2"
    assert config["seed"] == 3


def test_command_line_reads_criteo_files(run: Any, tmp_path: Path) -> None:
    rng = random.Random(0)
    lines = ["\t".join([str(rng.randint(0, 1)), *("3",) * 13, *("ab12",) * 26]) for _ in range(200)]
    lines[150] = "oops"
    (tmp_path / "day_0").write_text("\n".join(lines))
    result = run(
        "--out", tmp_path / "run", "--data", "criteo", "--files", tmp_path / "day_0", "--model", "dlrm", "--backend",
        "eager", "--batch-size", 40, "--window", 2, "--data-options", '{"table_size": 20}',
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert [r["step"] for r in RunFolder(tmp_path / "run").records()] == [2, 4]
    assert "1 bad lines" in " ".join(result.output.split())
    (tmp_path / "day_0").write_text("nonsense\n" * 50)
    result = run("--out", tmp_path / "other", "--data", "criteo", "--files", tmp_path / "day_0", "--backend", "eager")
    assert result.exit_code == 1
    assert "not in Criteo's format" in " ".join(result.output.split())


def test_probe_learns_and_leaves_the_training_as_it_is(run: Any, tmp_path: Path) -> None:
    common = ["--model", "dcnv2", "--backend", "eager", "--steps", 12, *SMALL_DATA]
    assert run("--out", tmp_path / "plain", *common).exit_code == 0
    result = run("--out", tmp_path / "probed", "--probe", tmp_path / "stats", "--probe-every", 3, *common)
    assert result.exit_code == 0, result.output
    a, b = (load_checkpoint(tmp_path / x / "checkpoint-12.pt")["model"] for x in ("plain", "probed"))
    assert all(torch.equal(a[k], b[k]) for k in a)
    stats = load_stats(tmp_path / "stats")
    dense = build("dcnv2", "tiny", open_source("synthetic", 4).schema).dense_arch
    linears = {f"{name}#0" for name, module in dense.named_modules() if isinstance(module, nn.Linear)}
    assert set(stats) == linears


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--model", "wukon"], "no model 'wukon'"),
        (["--options", "{"], "not JSON"),
        (["--options", "[1]"], "must be a JSON object"),
        (["--data-options", '{"depth": 3}'], "depth"),
        (["--model-options", '{"depth": 3}'], "depth"),
        (["--precision", "fp8"], "legal: fp32, bf16"),
        (["--files", "/nowhere", "--data", "criteo"], "no file"),
    ],
)
def test_command_line_mistakes_are_named(run: Any, tmp_path: Path, arguments: list[str], text: str) -> None:
    result = run("--out", tmp_path, "--steps", 1, *arguments)
    assert result.exit_code == 2
    assert text in " ".join(result.output.replace("│", " ").split())
