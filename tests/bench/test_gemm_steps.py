"""The steps that table VI and the comparison of predictions time, and what they make of the timings."""

import json
import math

import pytest
import torch

from benchmarks import predicted, table6
from benchmarks.gemm_steps import Group, LayerStep, LinearLayer, linear_layers, plan_of, predicted_us, step_of
from benchmarks.gemm_steps_run import Run
from loka_compile.bench.operands import Operands
from loka_compile.bench.prepare import compile_only
from loka_compile.bench.records import Timing
from loka_compile.costs import CostTable
from loka_compile.costs.file import parse
from loka_compile.gemm import Role
from loka_compile.table import BASELINE

FORWARD, GRAD_INPUT, GRAD_WEIGHT = Role
EMULATED = ("emulated", "tensorwise")


class CountingTimer:
    """Runs the first call of every arm and gives it the time that was agreed on."""

    def __init__(self, us):
        self.us, self.ran = us, []

    def measure(self, arms, on_try):
        found = {}
        for name, make in arms.items():
            make()[0]()
            self.ran.append(name)
            found[name] = Timing(self.us[name], 0.01)
        return found


def table(speedup=2.0):
    """FP8 by that factor faster at every shape of a grid; quantising a tensor takes 1 us."""
    sizes = (64, 256, 1024)
    lines = []
    for m in sizes:
        for n in sizes:
            for k in sizes:
                for role in Role:
                    lines.append(f"{m},{n},{k},{role.value},bfloat16,high_precision,native,,,,20")
                lines.append(f"{m},{n},{k},forward,bfloat16,torch,tensorwise,1,,{20 / speedup},")
    lines += [f"{m},0,{k},grad_weight,bfloat16,quantize,tensorwise,1,,," for m in sizes for k in sizes]
    columns = "m,n,k,role,dtype,provider,recipe,quantize_a_us,quantize_b_us,gemm_us,baseline_us"
    return CostTable("grid", *parse("\n".join([columns, *lines]), "grid"))


def test_layers_of_a_model():
    layers = {layer.site: layer for layer in linear_layers("dlrm", "tiny", 48)}
    first = layers["bottom.0"]
    assert (first.batch, first.inputs, first.outputs) == (48, 13, 32)
    assert first.roles == (FORWARD, GRAD_WEIGHT)  # the numerics need no gradient
    assert all(layer.roles == tuple(Role) for site, layer in layers.items() if site != "bottom.0")
    assert len(layers) == 6
    # Wukong's token mixers contract over tokens: as many rows as embedding features.
    mixer = next(x for x in linear_layers("wukong", "tiny", 48) if x.site.endswith("lcb"))
    assert (mixer.batch, mixer.inputs) == (48 * 8, 28)


@pytest.mark.parametrize("shape", [(64, 128, 32), (199, 13, 48)])
def test_a_step_computes_the_products_of_the_layer(shape):
    m, k, n = shape
    torch.manual_seed(0)
    x, w, g = torch.randn(m, k), torch.randn(n, k), torch.randn(m, n)
    want = {FORWARD: x @ w.t(), GRAD_INPUT: g @ w, GRAD_WEIGHT: g.t() @ x}
    for candidate, tolerance in ((BASELINE, 1e-6), (EMULATED, 0.08)):
        step = LayerStep(m, k, n, tuple((role, candidate) for role in Role), "float32")
        for out, traced, role in zip(step(x, w, g), step.traced(x, w, g)(x, w, g), Role, strict=True):
            assert out.shape == want[role].shape
            error = (out - want[role]).norm() / want[role].norm()
            assert error < tolerance
            assert (error > 1e-3) == (candidate == EMULATED)
            torch.testing.assert_close(traced, out)


def test_a_shared_quantisation_is_the_same_operators_twice():
    """Forward and grad_weight both read x: Inductor merges what is equal."""
    tensors = torch.randn(64, 128), torch.randn(32, 128), torch.randn(64, 32)
    both = LayerStep(64, 128, 32, ((FORWARD, EMULATED), (GRAD_WEIGHT, EMULATED)), "float32").traced(*tensors)
    x = next(n for n in both.graph.nodes if n.op == "placeholder")
    amax = [n for n in both.graph.nodes if n.target is torch.ops.aten.amax.default and n.all_input_nodes]
    of_x = [n for n in amax if n.args[0].args[0] is x or x in n.args[0].args[0].args]
    assert (len(amax), len(of_x)) == (4, 2)
    assert of_x[0].args[1:] == of_x[1].args[1:]


def test_a_step_is_compiled_into_the_caches_without_running(monkeypatch):
    """And what is compiled where it is timed is found there."""
    from torch._inductor import compile_fx

    graphs = []

    def pretend(gm, inputs, **_):
        graphs.append([(n.op, str(n.target)) for n in gm.graph.nodes])
        return gm.forward

    monkeypatch.setattr(compile_fx, "compile_fx", pretend)
    step = LayerStep(64, 128, 32, ((FORWARD, EMULATED), (GRAD_WEIGHT, EMULATED)), "float32")
    tensors = [torch.randn(*shape) for shape in step.shapes]
    with torch.no_grad():
        compile_only(step.traced(*tensors), *tensors)
        step.compiled(*tensors)(*tensors)
    assert len(graphs) == 2
    assert graphs[0] == graphs[1]

    def fail(*_, **__):
        raise RuntimeError("no code for this")

    monkeypatch.setattr(compile_fx, "compile_fx", fail)
    with pytest.raises(Exception, match="no code for this"):
        compile_only(step.traced(*tensors), *tensors)


def test_what_a_kernel_refuses_stays_native():
    layer = LinearLayer("a", 48, 13, 32, tuple(Role))
    assert step_of(layer, lambda _: ("torch", "tensorwise")).is_native  # K = 13 is n or k of every role
    layer = LinearLayer("a", 50, 32, 32, tuple(Role))
    step = step_of(layer, lambda _: ("torch", "tensorwise"))
    assert dict(step.choices)[FORWARD] == ("torch", "tensorwise")
    assert dict(step.choices)[GRAD_WEIGHT] == BASELINE  # a batch of 50 is its contraction


def test_plan_and_prediction():
    layers = [LinearLayer("a", 256, 256, 256, tuple(Role)), LinearLayer("b", 256, 13, 256, (FORWARD, GRAD_WEIGHT))]
    costs = table()
    plan = plan_of(layers, costs)
    assert plan.counts() == {"torch:tensorwise": 3, "high_precision:native": 2}
    native = predicted_us(layers, costs, lambda *_: BASELINE)
    assert native == pytest.approx(5 * 20, rel=0.1)
    planned = predicted_us(layers, costs, lambda site, role: table6.chooser(plan, site)(role))
    # Three kernels of 10 us, x, W and dy quantised once each; the transposed copies are free in this table.
    assert native - planned == pytest.approx(3 * 20 - (3 * 10 + 3 * 1), rel=1e-3)
    assert plan_of(layers, table(1.01)).counts() == {"high_precision:native": 5}


def test_table6_from_plan_to_summary(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    layers = [LinearLayer("a", 256, 256, 64, tuple(Role)), LinearLayer("twin", 256, 256, 64, tuple(Role))]
    plan = plan_of(layers, table())
    step = table6.model_group("wukong", layers, plan, ["torchao tensorwise"])
    assert list(step.arms) == ["bf16", "plan", "torchao tensorwise"]
    alone = table6.gemm_groups(layers, plan)
    assert [group.name for group in alone] == [
        "forward 256x64x256 torch:tensorwise", "grad_input 256x256x64 torch:tensorwise",
        "grad_weight 64x256x256 torch:tensorwise",
    ]  # fmt: skip
    run = Run(tmp_path / "out.json", {"model": "two layers"})
    timer = CountingTimer({"bf16": 112.0, "torchao tensorwise": 107.0, "plan": 100.0})
    groups = [step, *alone]
    run.measure(groups, limit=100, workers=0, timer=timer, operands=Operands(torch.device("cpu"), 1 << 20))
    table6.summarise(run.result, [alone[2].name], [g.name for g in alone[:2]], loka27=4)
    run.save()
    saved = json.loads((tmp_path / "out.json").read_text())
    assert saved["timings"]["wukong"]["plan"] == {"us": 100.0, "spread": 0.01}
    summary = saved["summary"]
    assert summary["plan over the best single recipe"] == pytest.approx(1.07)
    assert summary["GEMMs of the step slower than bf16"] == []
    assert summary["worst GEMM of the step"][1] == pytest.approx(1.12)
    # One of four layers is in FP8, the others count as 1.
    assert summary["loka27 geometric mean"] == pytest.approx(1.12**0.25)
    assert (summary["loka27 in FP8"], summary["loka27 not measured"]) == (1, 0)


def test_an_arm_that_does_not_compile_is_named_and_the_others_are_timed(tmp_path, monkeypatch):
    def problem(preparation, step):
        return None if step.is_native else "no kernel"

    monkeypatch.setattr("benchmarks.gemm_steps._problem", problem)
    native, emulated = (LayerStep(64, 64, 64, ((FORWARD, kernel),)) for kernel in (BASELINE, EMULATED))
    run = Run(tmp_path / "out.json", {})
    run.measure(
        [Group("g", {"bf16": [native], "x": [emulated]})], limit=100, workers=0,
        timer=CountingTimer({"bf16": 5.0}), operands=Operands(torch.device("cpu"), 1 << 20),
    )  # fmt: skip
    assert run.result["timings"]["g"] == {"x": "no kernel", "bf16": {"us": 5.0, "spread": 0.01}}
    assert math.isnan(table6.speedup(run.result["timings"]["g"], "x"))


def test_prediction_against_measurement(capsys):
    result = {
        "models": {"m": {"predicted bf16 us": 150.0, "predicted plan us": 100.0}},
        "timings": {"m": {"bf16": {"us": 120.0, "spread": 0}, "plan": {"us": 100.0, "spread": 0}}},
    }
    predicted.compare(result)
    assert result["models"]["m"]["off by"] == pytest.approx(1.5 / 1.2 - 1)
    assert "+25.0%" in capsys.readouterr().out
    result["timings"] = {}
    predicted.compare(result)
    assert math.isnan(result["models"]["m"]["off by"])


def test_the_paper_and_the_recipes_are_named_alike():
    assert set(table6.PAPER) - {"plan"} <= set(table6.SINGLE)
    assert all(set(kernels) == set(Role) for kernels in table6.SINGLE.values())
