"""The quality protocol: its statistics against scipy and simulation, its words, its arms, and a tiny run of it all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from torch import nn
from typer.testing import CliRunner

from benchmarks.fp8_linear import EmulatedFP8Linear, emulate_fp8, round_to_fp8
from benchmarks.quality import app
from benchmarks.quality_arms import ARMS, everywhere_arm, planned_arm, prepare
from benchmarks.quality_runs import Runs
from benchmarks.quality_stats import (
    Comparison,
    Interval,
    block_bootstrap,
    compare,
    noise_band,
    per_window,
    relative_percent,
    t_interval,
)
from benchmarks.quality_train import ArmTraining
from examples.models.registry import build
from examples.training.config import TrainConfig
from tests.examples.test_models import SMALL, inputs

RNG = np.random.default_rng(0)


def runs(seeds: int, steps: int, effect: float, spread: float = 0.0, noise: float = 2.0) -> tuple[list[Any], list[Any]]:
    """Pairs of runs [2, steps]: the arm is ``effect`` percent worse, give or take ``spread`` from seed to seed."""
    arms, bases = [], []
    for seed in range(seeds):
        rng = np.random.default_rng(seed + 1000)
        base = 4000 + 40 * rng.normal(size=(2, steps))
        here = effect + spread * rng.normal()
        arms.append(base * (1 + here / 100) + noise * rng.normal(size=(2, steps)))
        bases.append(base)
    return arms, bases


def test_relative_log_loss() -> None:
    base, arm = np.array([1.0, 3.0]), np.array([1.1, 2.98])
    assert relative_percent(arm, base) == pytest.approx(100 * (4.08 - 4) / 4)
    assert per_window(np.array([2.0, 2, 3, 3, 9]), np.array([1.0, 1, 2, 2, 2]), 2).tolist() == [100.0, 50.0]


def test_t_interval_is_scipys() -> None:
    values = [0.01, 0.03, -0.02, 0.05]
    found = t_interval(values)
    low, high = scipy.stats.t.interval(0.95, 3, loc=np.mean(values), scale=scipy.stats.sem(values))
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))
    assert np.isnan(t_interval([0.1]).low)
    assert str(t_interval([0.1])) == "+0.100 % (one seed)"


def test_intervals_cover_the_planted_effect() -> None:
    # 95 % intervals: of 40 experiments about 38 should hold the truth.
    hits = {"t": 0, "bootstrap": 0}
    for experiment in range(40):
        rng = np.random.default_rng(experiment)
        bases = [4000 + 40 * rng.normal(size=200) for _ in range(3)]
        arms = [b * 1.0003 + 4 * rng.normal(size=200) for b in bases]
        t = t_interval([relative_percent(a, b) for a, b in zip(arms, bases, strict=True)])
        boot = block_bootstrap(arms, bases, 5, draws=400, seed=experiment)
        hits["t"] += t.low < 0.03 < t.high
        hits["bootstrap"] += boot.low < 0.03 < boot.high
    assert all(34 <= n <= 40 for n in hits.values()), hits


def test_bootstrap_is_wider_for_blocks_that_vary_together() -> None:
    rng = np.random.default_rng(1)
    base = np.full(600, 4000.0)
    arm = base + np.repeat(8 * rng.normal(size=30), 20)
    alone, blocks = (block_bootstrap([arm], [base], n) for n in (1, 20))
    assert blocks.high - blocks.low > 3 * (alone.high - alone.low)
    with pytest.raises(ValueError, match="a bootstrap needs two"):
        block_bootstrap([arm], [base], 400)


@pytest.mark.parametrize(
    ("effect", "spread", "control", "words"),
    [
        (0.0, 0.002, True, "neutral, within the goal"),
        (0.03, 0.002, True, "neutral"),
        (0.0, 0.002, False, "no claim: the positive control shows no loss"),
        (0.3, 0.01, True, "worse"),
        (0.3, 0.01, False, "worse"),
        (0.02, 0.2, True, "not resolved, +-"),
        (-0.3, 0.01, True, "neutral, within the goal"),
    ],
)
def test_the_words_follow_the_interval(effect: float, spread: float, control: bool, words: str) -> None:
    found = compare(*runs(5, 400, effect, spread), batch_size=8192)
    verdict = found.verdict(control)
    assert verdict.startswith(words)
    assert (verdict == words) or words.endswith("+-")
    assert len(found.seeds_truth) == 5


def test_two_seeds_claim_nothing() -> None:
    assert compare(*runs(2, 400, 0.0), batch_size=8192).verdict() == "not resolved: 2 of 3 seeds"


def test_any_interval_that_ends_too_high_forbids_the_claim() -> None:
    fine, wide = Interval(0.0, -0.01, 0.01, 3), Interval(0.0, -0.06, 0.06, 3)
    for intervals in ((wide, fine, fine), (fine, wide, fine), (fine, fine, wide)):
        assert not Comparison(*intervals, (), ()).verdict().startswith("neutral")
    assert Comparison(fine, None, fine, (), ()).verdict() == "neutral, within the goal"


def test_noise_band_holds_nearly_all_of_it() -> None:
    windows = 0.1 * RNG.normal(size=(5, 400))
    assert 0.94 < (np.abs(windows) < noise_band(windows)).mean() < 0.96


# --- plain FP8, emulated


def test_rounding_is_that_of_the_format() -> None:
    x = torch.tensor([[448.0, 1.0, 1.06, 1.07, 0.0], [-224.0, 0.001, 0.0, 0.0, 0.0]])
    values, scale = round_to_fp8(x, None, torch.float8_e4m3fn)
    assert scale.item() == 1.0
    # e4m3 steps by 1/8 above 1, and by 2^-9 at the bottom.
    assert values.tolist() == [[448.0, 1.0, 1.0, 1.125, 0.0], [-224.0, 2**-9 * round(0.001 * 512), 0.0, 0.0, 0.0]]
    values, scale = round_to_fp8(x, 1, torch.float8_e4m3fn)
    assert scale.flatten().tolist() == [1.0, 0.5]
    values, scale = round_to_fp8(torch.zeros(2, 3), 1, torch.float8_e4m3fn)
    assert torch.isfinite(scale).all()
    assert (values == 0).all()


@pytest.mark.parametrize("rowwise", [True, False])
def test_emulated_linear_is_a_linear_with_a_small_error_in_all_three_gemms(rowwise: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 48)
    x = torch.randn(4, 8, 64, requires_grad=True)
    out = linear(x)
    grads = torch.autograd.grad(out.square().sum(), (x, linear.weight, linear.bias))
    emulated = EmulatedFP8Linear(linear, rowwise)
    ours = emulated(x)
    own = torch.autograd.grad(ours.square().sum(), (x, linear.weight, linear.bias))
    for a, b in zip((ours, *own), (out, *grads), strict=True):
        error = ((a - b).norm() / b.norm()).item()
        assert 1e-4 < error < 0.1


def test_rowwise_forgives_one_loud_row_and_tensorwise_does_not() -> None:
    torch.manual_seed(1)
    linear = nn.Linear(64, 64, bias=False)
    x = torch.randn(128, 64)
    x[0] *= 1e5
    quiet = linear(x)[1:]
    error = {r: ((EmulatedFP8Linear(linear, r)(x)[1:] - quiet).norm() / quiet.norm()).item() for r in (True, False)}
    assert error[True] < 0.05
    assert error[False] > 4 * error[True]


def test_only_large_plain_linears_are_replaced() -> None:
    model = build("dcnv2", "tiny", SMALL)
    dense = emulate_fp8(model.dense_arch, rowwise=True, min_features=16)
    replaced = {n for n, m in dense.named_modules() if isinstance(m, EmulatedFP8Linear)}
    # 32 features into the crosses and the deep part; the bottom reads 5, the prediction puts out 1.
    assert replaced == {
        "crosses.0.compress",
        "crosses.0.expand",
        "crosses.1.compress",
        "crosses.1.expand",
        "deep.0",
        "deep.2",
    }
    with pytest.raises(ValueError, match="no linear of DCNv2Dense has 1000 or more"):
        emulate_fp8(build("dcnv2", "tiny", SMALL).dense_arch, rowwise=True, min_features=1000)


# --- arms


def test_arms_differ_only_in_what_they_say() -> None:
    base = TrainConfig(backend="inductor", lr=0.5)
    for arm in ARMS.values():
        config, transform = prepare(arm, base, min_features=16, device="cpu")
        assert config.lr == 0.5
        assert config.precision == arm.precision
        assert (config.backend == "loka") == (arm.kind == "loka")
        assert (transform is not None) == (arm.kind in ("torchao", "emulated"))
    with pytest.raises(ValueError, match="needs a compiler"):
        prepare(ARMS["loka"], TrainConfig(backend="eager"), min_features=16, device="cpu")
    with pytest.raises(ValueError, match="rounds its residual stream"):
        prepare(ARMS["mods16"], TrainConfig(backend="eager"), min_features=16, device="cpu")


def test_the_mods_of_an_eager_arm_are_those_of_the_backend() -> None:
    for name, gone in (("no_bias", "bias"), ("block_norm", "norm"), ("mods", "both")):
        model = build("wukong", "tiny", SMALL)
        numerics, categories, _ = inputs(SMALL)
        features = model.embed(categories)
        before = model.dense_arch(numerics, *features)
        _, transform = prepare(ARMS[name], TrainConfig(backend="eager"), min_features=16, device="cpu")
        rewritten = transform(model.dense_arch)
        assert not torch.allclose(rewritten(numerics, *features), before), gone
    hard_swish = prepare(ARMS["hard_swish"], TrainConfig(backend="eager"), min_features=16, device="cpu")[1]
    assert any(type(m).__name__ == "HardSwish" for m in hard_swish(build("wukong", "tiny", SMALL).dense_arch).modules())


def test_a_plan_of_ones_own_replaces_the_sampling_of_an_arm_and_nothing_else() -> None:
    own = planned_arm("loka_unfused", Path("a.json"))
    assert own.options == {"mods": "all", "fuse": False, "plan": "a.json"}
    assert own.twin == "mods"
    narrow = planned_arm("loka16", Path("a.json"))
    assert narrow.options == {"mods": "all", "residual_dtype": "autocast", "plan": "a.json"}
    assert planned_arm("everything", Path("b.json")).options == {"mods": "all", "plan": "b.json"}


def test_everywhere_arm_keeps_what_it_is_told() -> None:
    dense = build("dlrm", "tiny", SMALL).dense_arch
    arm = everywhere_arm("x", dense, "emulated", "rowwise", keep=("bottom.0", "grad_weight"))
    plan = arm.options["plan"]
    sites = {d.site for d in plan.decisions}
    assert sites == {"bottom.2#0", "bottom.4#0", "top.0#0", "top.2#0"}
    assert {d.role for d in plan.decisions} == {"forward", "grad_input"}


# --- all of it, tiny

ARGUMENTS = [
    "--model", "dcnv2", "--size", "tiny", "--seeds", "3", "--examples", "5120", "--batch-size", "128", "--window", "8",
    "--backend", "eager", "--min-features", "16",
    "--data-options", '{"numerics": "raw", "categories": 3, "max_ids": 50}',
]  # fmt: skip


def test_a_tiny_protocol_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = CliRunner()
    arms = "fp32,fp32_other_seed,bf16,emulated_tensorwise,mods"
    result = runner.invoke(app, ["--out", str(tmp_path), "--arms", arms, *ARGUMENTS])
    assert result.exit_code == 0, result.output
    summary = json.loads((tmp_path / "quality.json").read_text())
    found = summary["arms"]
    assert list(found) == arms.split(",")
    assert found["fp32"]["against_fp32"] is None
    assert found["emulated_tensorwise"]["against_twin"]["labels"]["seeds"] == 3
    # 40 steps, the first 8 are warm-up: four windows.
    assert len(found["mods"]["windows"]) == 4
    assert 0 <= found["mods"]["inside_band"] <= 1
    # What is written follows from the files of the runs.
    losses = {arm: [np.load(tmp_path / f"{arm}-seed{s}.npz")["losses"] for s in range(3)] for arm in ("fp32", "bf16")}
    assert losses["fp32"][0].shape == (2, 40)
    by_hand = [
        100 * (b[1, 20:].sum() / a[1, 20:].sum() - 1) for a, b in zip(losses["fp32"], losses["bf16"], strict=True)
    ]
    assert found["bf16"]["against_fp32"]["truth"]["mean"] == pytest.approx(np.mean(by_hand), rel=1e-9)
    # bf16 differs, but by far less than another seed.
    assert 0 < np.max(np.abs(by_hand)) < 0.3 * summary["band"]
    for name in ("plain_fp8.png", "mods_and_loka.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")

    # A second call trains nothing that is there, and one more arm is added to the same comparison.
    trained = []
    original = ArmTraining.train
    monkeypatch.setattr(
        ArmTraining, "train", lambda self, *args: trained.append(self.arm.name) or original(self, *args)
    )
    result = runner.invoke(app, ["--out", str(tmp_path), "--arms", "fp32,tf32", *ARGUMENTS])
    assert result.exit_code == 0, result.output
    assert trained == ["tf32"] * 3
    # Arms of earlier calls stay in the comparison.
    assert set(json.loads((tmp_path / "quality.json").read_text())["arms"]) == {*arms.split(","), "tf32"}
    # There is no TF32 on a CPU: the same bits.
    tf32 = json.loads((tmp_path / "quality.json").read_text())["arms"]["tf32"]["against_fp32"]
    assert tf32["seeds_labels"] == [0.0] * 3

    # Another protocol must not be mixed with this one.
    other = [a if a != "128" else "64" for a in ARGUMENTS]
    result = runner.invoke(app, ["--out", str(tmp_path), "--arms", "fp32", *other])
    assert result.exit_code == 2
    assert "batch_size: 128 there, 64 now" in " ".join(result.output.replace("│", " ").split())


def test_arms_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    arguments = ["--out", str(tmp_path), "--arms", "fp32,loka", "--jobs", "2", "--device", "cpu", *ARGUMENTS]
    arguments += ["--only-seeds", "0,1"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    # An arm that cannot run (eager has no plan) is named, and the others go on.
    assert "loka failed: ValueError: arm loka needs a compiler" in result.output
    found = json.loads((tmp_path / "quality.json").read_text())["arms"]
    assert found["fp32"]["seeds"] == [0, 1]
    assert found["fp32"]["examples_per_second"] is None
    # The same numbers as in one process.
    setup = json.loads((tmp_path / "setup.json").read_text())
    here, _ = ArmTraining(ARMS["fp32"], setup, Runs(tmp_path / "here", setup), device="cpu", cuda_graph=False).train(1)
    assert np.array_equal(here, np.load(tmp_path / "fp32-seed1.npz")["losses"])


def test_without_time_everything_is_left_for_the_next_call(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["--out", str(tmp_path), "--arms", "fp32", "--seconds", "1e-9", *ARGUMENTS])
    assert result.exit_code == 0, result.output
    assert "no time was left for fp32, seed 2" in result.output
    assert json.loads((tmp_path / "quality.json").read_text())["arms"] == {}


def test_what_is_compiled_for_one_seed_serves_the_next(tmp_path: Path) -> None:
    setup = {
        "model": "dcnv2", "size": "tiny", "model_options": {}, "data": "synthetic", "batch_size": 64, "steps": 12,
        "data_options": {"categories": 3, "max_ids": 50}, "train_options": {"warmup": 2}, "window": 4,
        "score_from": 0.5, "min_features": 16, "backend": "aot_eager",
    }  # fmt: skip

    def arm(name: str) -> ArmTraining:
        return ArmTraining(ARMS["bf16"], setup, Runs(tmp_path / name, setup), device="cpu", cuda_graph=True)

    used, fresh = arm("used"), arm("fresh")
    used.train(0)
    torch._dynamo.utils.counters.clear()
    again, _ = used.train(1)
    assert not torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert np.array_equal(again, fresh.train(1)[0])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(["--arms", "fp16"], "no arm 'fp16'"), (["--examples", "100"], "fewer than two windows")],
)
def test_mistakes_are_named(tmp_path: Path, arguments: list[str], text: str) -> None:
    result = CliRunner().invoke(app, ["--out", str(tmp_path), *ARGUMENTS, *arguments])
    assert result.exit_code == 2
    assert text in " ".join(result.output.replace("│", " ").split())


def test_throughput_beside_plain_fp8_is_that_of_whole_models_where_runs_shared_a_device() -> None:
    from benchmarks.quality_plots import _rates

    arms = {"bf16": 0.0, "torchao_tensorwise": 5.0, "emulated_rowwise": 7.0}
    summary = {
        "setup": {"model": "wukong", "device": "H200"},
        "arms": {name: {"examples_per_second": rate or None} for name, rate in arms.items()},
    }
    assert _rates(summary, list(arms), None) == ({"torchao_tensorwise": 5.0}, "H200")
    measured = {"bf16": {"examples_per_second": 2.0}, "loka": {"examples_per_second": 3.0}}
    e2e = {"device": "H200", "size": "h200", "models": {"wukong": {"training": measured}}}
    assert _rates(summary, list(arms), e2e) == ({"bf16": 2.0}, "H200, size h200")
