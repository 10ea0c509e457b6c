"""The steps that table VI and the comparison of predictions time, and what they make of the timings."""

import json
import math

import pytest
import torch

from benchmarks import gemm_pieces, predicted, table6
from benchmarks.gemm_steps import LayerStep, LinearLayer, linear_layers, plan_of, predicted_us, step_of
from benchmarks.gemm_steps_run import Group, Run, measure
from loka_compile.bench.operands import Operands
from loka_compile.bench.prepare import Preparation
from loka_compile.bench.records import Timing
from loka_compile.costs import CostTable
from loka_compile.costs.file import parse
from loka_compile.gemm import Role
from loka_compile.lowering.providers import get_provider
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


@pytest.mark.parametrize("shape", [(64, 128, 32), (199, 13, 48), (130, 1, 1)])
def test_a_step_computes_the_products_of_the_layer(shape, monkeypatch):
    """As it is, and taken apart into pieces and kernels."""
    monkeypatch.setattr(gemm_pieces.Piece, "compiled", uncompiled)
    m, k, n = shape
    torch.manual_seed(0)
    x, w, g = torch.randn(m, k), torch.randn(n, k), torch.randn(m, n)
    want = {FORWARD: x @ w.t(), GRAD_INPUT: g @ w, GRAD_WEIGHT: g.t() @ x}
    for candidate, tolerance in ((BASELINE, 1e-6), (EMULATED, 0.08)):
        step = LayerStep(m, k, n, tuple((role, candidate) for role in Role), "float32")
        for out, apart, role in zip(step(x, w, g), step.compiled({})(x, w, g), Role, strict=True):
            assert out.shape == want[role].shape
            error = (out - want[role]).norm() / want[role].norm()
            assert error < tolerance
            assert (error > 1e-3) == (candidate == EMULATED)
            torch.testing.assert_close(apart, out)


def uncompiled(piece):
    return gemm_pieces.split(piece.step).pieces[piece.index]


KINDS = [
    *(("torch", recipe) for recipe in ("tensorwise", "tensorwise_fast", "rowwise")),
    ("deepgemm", "blockwise_1x128"), ("triton", "blockwise_128x128"), ("torchao", "blockwise_1x128"),
]  # fmt: skip


@pytest.mark.parametrize("kernel", KINDS, ids=":".join)
def test_pieces_of_real_kernels(kernel, monkeypatch):
    """Custom ops have CPU kernels; a piece returns no tensor twice, and no view of what it was given."""
    if kernel[1] == "rowwise" and get_provider("torch").supported(get_provider("torch").recipe("rowwise"), "cpu"):
        pytest.skip("torch before 2.13")
    monkeypatch.setattr(gemm_pieces.Piece, "compiled", uncompiled)
    torch.manual_seed(0)
    step = LayerStep(256, 512, 256, ((FORWARD, kernel), (GRAD_INPUT, BASELINE), (GRAD_WEIGHT, kernel)))
    tensors = [torch.randn(*shape, dtype=torch.bfloat16) for shape in step.shapes]
    pieces = gemm_pieces.split(step).pieces
    assert set(pieces) == {0, 1, 2}
    for place, piece in pieces.items():
        made = piece(tensors[place])
        memory = [t.untyped_storage().data_ptr() for t in (tensors[place], *made)]
        assert len(set(memory)) == len(memory)
    for apart, out in zip(step.compiled({})(*tensors), step(*tensors), strict=True):
        torch.testing.assert_close(apart, out)


def test_what_is_native_is_compiled_where_inductor_would_pad_it(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda graph, **_: compiled.append(graph) or graph)
    native = tuple((role, BASELINE) for role in Role)
    aligned, odd, thin = (
        LayerStep(*shape, native, "bfloat16") for shape in ((512, 512, 512), (512, 479, 512), (512, 13, 8))
    )
    pieces = {}
    for step in (aligned, odd, thin, odd):
        tensors = [torch.randn(*shape).bfloat16() for shape in step.shapes]
        for out, eager in zip(step.compiled(pieces)(*tensors), step(*tensors), strict=True):
            torch.testing.assert_close(out, eager)
    assert len(compiled) == len(pieces) == 1


def test_layers_with_rows_off_16_bytes_are_measured_in_both_ways():
    layers = [LinearLayer("a", 2048, 479, 512, tuple(Role)), LinearLayer("b", 2048, 479, 512, tuple(Role))]
    (group,) = table6.odd_groups([*layers, LinearLayer("c", 2048, 512, 512, tuple(Role))])
    assert list(group.arms) == ["torch.mm", "bf16", *table6.ODD]
    plain, native, *fp8 = (arm[0] for arm in group.arms.values())
    assert (plain.may_be_padded, native.may_be_padded) == (False, True)
    assert plain.compiled({}) is plain
    assert all(BASELINE not in dict(step.choices).values() for step in fp8)


def test_equal_pieces_of_different_steps_and_kernels_are_compiled_once():
    def keys(step):
        return {piece.index: piece.key for piece in gemm_pieces.pieces_of(step)}

    one = LayerStep(256, 512, 256, tuple((role, ("torch", "tensorwise")) for role in Role))
    other = LayerStep(256, 512, 128, tuple((role, ("triton", "tensorwise_fast")) for role in Role))
    rowwise = LayerStep(256, 512, 256, tuple((role, ("triton", "rowwise")) for role in Role))
    assert keys(one)[0] == keys(other)[0]
    assert keys(one)[1] != keys(other)[1]  # another weight
    assert keys(one)[0] != keys(rowwise)[0]
    alone = LayerStep(
        256, 512, 256, ((FORWARD, ("torch", "tensorwise")), (GRAD_INPUT, BASELINE), (GRAD_WEIGHT, BASELINE))
    )
    assert set(keys(alone)) == {0, 1}
    assert keys(alone)[0] != keys(one)[0]  # without the transposed copy


def test_a_shared_quantisation_is_made_once():
    """Forward and grad_weight both read x."""
    both = LayerStep(64, 128, 32, ((FORWARD, EMULATED), (GRAD_WEIGHT, EMULATED)), "float32")
    of_x = gemm_pieces.split(both).pieces[0]
    assert [n.target for n in of_x.graph.nodes].count(torch.ops.aten.amax.default) == 1


def test_pieces_are_compiled_in_other_processes_into_the_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_FX_GRAPH_CACHE", "1")  # whatever the environment of the tests says
    piece = gemm_pieces.pieces_of(LayerStep(64, 128, 32, ((FORWARD, EMULATED),), "float32"))[0]
    with Preparation(1) as preparation:
        preparation.add([piece, piece])
        preparation.wait([piece], 120)
        assert preparation.done(piece)
        assert preparation.answer(piece) is None
    assert len(list((tmp_path / "fxgraph").glob("*/*"))) == 1


def test_the_first_group_that_is_ready_is_timed_first(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.sleep", lambda _: now.__setitem__(0, now[0] + 1.0))
    monkeypatch.setattr(gemm_pieces.Piece, "compiled", uncompiled)
    slow, quick = (LayerStep(64, 64, n, ((FORWARD, EMULATED),), "float32") for n in (32, 48))
    native = LayerStep(64, 64, 32, ((FORWARD, BASELINE),), "float32")

    class Late:
        """Has everything but the slow step's weight."""

        def __init__(self, *_, **__):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def add(self, jobs):
            pass

        def done(self, job):
            return job.index == 0 or "(48, 64)" in job.key

        def answer(self, job):
            return None

    monkeypatch.setattr("benchmarks.gemm_steps_run.Preparation", Late)
    found = []
    measure(
        [Group("slow", {"bf16": [native], "plan": [slow]}), Group("quick", {"plan": [quick]})],
        CountingTimer({"bf16": 2.0, "plan": 1.0}), Operands(torch.device("cpu"), 1 << 20), l2=1, workers=2,
        compile_until=7.0, limit=10.0, found=lambda group, timings: found.append((group.name, timings, now[0])),
        clock=lambda: now[0],
    )  # fmt: skip
    assert found[0] == ("quick", {"plan": Timing(1.0, 0.01)}, 0.0)
    assert found[1] == ("slow", {"plan": "not compiled in time", "bf16": Timing(2.0, 0.01)}, 7.0)


def test_what_a_kernel_refuses_stays_native():
    layer = LinearLayer("a", 48, 13, 32, tuple(Role))
    assert step_of(layer, lambda _: ("torch", "tensorwise"), pad=False).is_native  # K = 13 is n or k of every role
    assert not step_of(layer, lambda _: ("torch", "tensorwise")).is_native  # padded, as the lowering does it
    layer = LinearLayer("a", 50, 32, 32, tuple(Role))
    step = step_of(layer, lambda _: ("torch", "tensorwise"), pad=False)
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
    monkeypatch.setattr(gemm_pieces.Piece, "compiled", uncompiled)
    layers = [LinearLayer("a", 256, 256, 64, tuple(Role)), LinearLayer("twin", 256, 256, 64, tuple(Role))]
    plan = plan_of(layers, table())
    step = table6.model_group("wukong", layers, plan, ["torchao tensorwise"])
    assert list(step.arms) == ["bf16", "plan", "torchao tensorwise"]
    alone = table6.layer_groups(layers, plan)
    kernels = "forward torch:tensorwise, grad_input torch:tensorwise, grad_weight torch:tensorwise"
    assert [group.name for group in alone] == [f"256x256x64: {kernels}"]
    assert list(alone[0].arms)[2:] == [f"plan, {role.value} in bf16" for role in Role]
    assert dict(alone[0].arms["plan, grad_input in bf16"][0].choices) == {
        FORWARD: ("torch", "tensorwise"), GRAD_INPUT: BASELINE, GRAD_WEIGHT: ("torch", "tensorwise")
    }  # fmt: skip
    forward = table6.layer_groups([LinearLayer("f", 256, 256, 64, (FORWARD,))], plan_of(layers, table()))
    assert forward == []  # the plan is of other sites
    shapes = [LinearLayer("f", 64, 256, 64, (FORWARD,))]
    forward = table6.layer_groups(shapes, plan_of(shapes, table()))
    assert list(forward[0].arms) == ["bf16", "plan"]
    run = Run(tmp_path / "out.json", {"model": "two layers"})
    us = {"bf16": 112.0, "torchao tensorwise": 107.0, "plan": 100.0}
    us |= {"plan, forward in bf16": 101.0, "plan, grad_input in bf16": 99.0, "plan, grad_weight in bf16": 110.0}
    operands = Operands(torch.device("cpu"), 1 << 20)
    run.measure([step, *alone, *forward], limit=100, workers=0, timer=CountingTimer(us), operands=operands)
    table6.summarise(run.result, forward, alone, loka27=4)
    run.save()
    saved = json.loads((tmp_path / "out.json").read_text())
    assert saved["timings"]["wukong"]["plan"] == {"us": 100.0, "spread": 0.01}
    summary = saved["summary"]
    assert summary["plan over the best single recipe"] == pytest.approx(1.07)
    assert summary["GEMMs of the step slower than bf16"] == [f"grad_input of {alone[0].name}"]
    assert summary["worst GEMM of the step"] == [f"grad_input of {alone[0].name}", pytest.approx(0.99)]
    assert summary["GEMMs of the step not measured"] == 0
    # One of four layers is in FP8, the others count as 1.
    assert summary["loka27 geometric mean"] == pytest.approx(1.12**0.25)
    assert (summary["loka27 in FP8"], summary["loka27 not measured"]) == (1, 0)


def test_an_arm_that_does_not_compile_is_named_and_the_others_are_timed(tmp_path, monkeypatch):
    def problem(preparation, jobs):
        return "no kernel" if jobs else None

    monkeypatch.setattr("benchmarks.gemm_steps_run._problem", problem)
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
