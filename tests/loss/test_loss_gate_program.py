"""``python -m benchmarks.loss_gate`` on a tiny model: effects, four plans, and a ranking, on files that load."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.loss_gate import app
from benchmarks.taylor_score import taylor_scores
from loka_compile.plan import Plan
from tests.backend.helpers_backend import Interpreted


@pytest.mark.filterwarnings("ignore::loka_compile.ModsWarning")
def test_tiny(tmp_path, monkeypatch):
    # The effects are measured in eager; generated code of the training has tests of its own, and takes longest.
    Interpreted().install(monkeypatch)
    arguments = ["--out", str(tmp_path), "--batch-size", "256", "--steps", "24", "--batches", "4", "--device", "cpu"]
    arguments += ["--model-options", '{"layers": 1}']
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "loss_gate.json").read_text())
    assert {e["role"] for e in result["effects"]} == {"forward"}
    assert all(e["batches"] == 4 and e["low"] <= e["change"] <= e["high"] for e in result["effects"])
    assert set(result["plans"]) == {"error_gate", "loss_budget", "first_out", "everything"}
    for name, summary in result["plans"].items():
        plan = Plan.load(tmp_path / "plans" / f"{name}.json")
        assert plan.counts() == summary["kernels"]
    assert result["plans"]["everything"]["change"] != 0
    # What is not in FP8 under the gate is in high precision; under "everything" nothing has to be.
    everything = set(result["plans"]["everything"]["kernels"]) | {"high_precision:native"}
    assert set(result["plans"]["error_gate"]["kernels"]) <= everything
    assert -1 <= result["modelopt_gradient_score"]["spearman"] <= 1
    assert "step 24 of 24" in done.output  # a log shows how far it is


def test_taylor_scores_by_hand():
    """One layer: the gradient of the loss by its output, times the rounding of that output, squared and summed."""
    torch.manual_seed(0)
    layer, batch = torch.nn.Linear(32, 16, bias=False), torch.randn(8, 32)
    model = torch.nn.Sequential(layer, torch.nn.Tanh())
    found = taylor_scores(
        model, lambda run, x: run(x).square().sum(), [batch], {("0#0", "forward"): ("torch", "tensorwise")}
    )
    y = layer(batch).double()
    scales = [t.detach().abs().max() / 448 for t in (batch, layer.weight)]
    x8, w8 = (
        (t / s).to(torch.float8_e4m3fn).double() * s.double()
        for t, s in zip((batch, layer.weight), scales, strict=True)
    )
    grad = 2 * y.tanh() * (1 - y.tanh() ** 2)
    want = (grad * (x8 @ w8.t() - y)).square().sum().item()
    assert found["0#0"] == pytest.approx(want, rel=1e-3)
