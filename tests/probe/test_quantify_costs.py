"""Samples to table: costs at the real batch, padding, and what is refused and why."""

import dataclasses
import math

import pytest
import torch

from loka_compile.costs import CostTable
from loka_compile.gemm import Gemm, Role
from loka_compile.plan import make_plan
from loka_compile.probe.quantify import quantify
from tests.probe.site_samples import Fake, one, rows_of, run, samples


def test_costs_are_the_targets_at_the_real_batch():
    costs = CostTable.load("h200")
    table = run(a__0=samples(2048, 2048, calls=1, rows=16, batch=4096))
    for role, (m, n, k) in {"forward": (4096, 2048, 2048), "grad_weight": (2048, 2048, 4096)}.items():
        row = one(table, role=role, provider="torch", recipe="rowwise")
        expected = costs.latency(Gemm("a#0", Role(role), m, n, k), "torch", "rowwise")
        assert (row.quantize_us, row.gemm_us) == (expected.quantize_us, expected.gemm_us)
        assert row.baseline_us == costs.baseline(Gemm("a#0", Role(role), m, n, k))
        assert row.speed_source == "cost table h200"


def test_rows_speak_of_the_linear_layer_in_every_role():
    table = run(a__0=samples(48, 80, batch=199 * 16))
    assert {(r.m_min, r.m_max, r.n, r.k) for r in table.rows} == {(3184, 3184, 48, 80)}
    assert {r.role for r in table.rows} == {"forward", "grad_input", "grad_weight"}
    assert {r.saved_bytes for r in rows_of(table, role="forward", provider="torch")} == {3184 * 80}
    assert {r.saved_bytes for r in rows_of(table, role="grad_weight")} == {0}
    assert one(table, role="forward", provider="high_precision").saved_bytes == 0


def test_bound_of_the_input_reaches_costs_and_quantisation():
    x = torch.full((64, 64), 1.0 + 1 / 16)  # exact in e4m3 at any power-of-two scale, not at 448/amax
    seen = samples(32, 64, inputs=[x], calls=1, grad_outputs=[], roles=["forward"], dtype="float32")
    free = one(run(a__0=dataclasses.replace(seen, input_bound=16.0)), provider="torch", recipe="tensorwise")
    paid = one(run(a__0=seen), provider="torch", recipe="tensorwise")
    assert free.quantize_us < paid.quantize_us
    weight = CostTable.load("h200").latency(Gemm("a#0", Role.FORWARD, 4096, 32, 64, "float32"), "torch", "tensorwise")
    assert free.quantize_us == weight.quantize_b_us
    assert free.mere != paid.mere


def test_bound_of_the_input_reaches_grad_weight_too():
    seen = samples(32, 64, inputs=[torch.full((64, 64), 1.0 + 1 / 16)], grad_outputs=[torch.ones(64, 32)], calls=1,
                   roles=["grad_weight"], dtype="float32")  # fmt: skip
    free = one(run(a__0=dataclasses.replace(seen, input_bound=16.0)), provider="torch", recipe="tensorwise")
    paid = one(run(a__0=seen), provider="torch", recipe="tensorwise")
    # 17/16 * 16 = 17 lies halfway between two e4m3 numbers; at 448/amax it is 448 exactly.
    assert free.mere == pytest.approx(1 / 17, rel=1e-6)
    assert paid.mere < 1e-6
    assert free.quantize_us < paid.quantize_us


def test_no_target_means_no_cost_and_nothing_eligible():
    table = run(None)
    for row in rows_of(table, provider="emulated"):
        if row.role == "grad_weight" and row.recipe == "blockwise":
            continue
        assert row.refused == "no cost known for device cpu"
        assert row.speed_source == "none"
        assert math.isfinite(row.mere)
    assert set(make_plan(table).counts()) == {"high_precision:native"}
    assert "no cost known for device cpu" in make_plan(table).lookup("a#0", "forward").reason


def test_candidate_that_the_target_never_measured_is_refused():
    row = one(run(), role="forward", provider="emulated", recipe="rowwise")
    assert row.refused == "no cost known for emulated:rowwise on h200"


def test_padding_counts():
    """K = 13 and N = 20 cost what 16 and 32 do, and the result is cut; the error is that of the GEMM as it is."""
    table = run(a__0=samples(20, 13))
    row = one(table, provider="torch", role="forward", recipe="rowwise")
    assert row.refused == ""
    assert (row.n, row.k) == (20, 13)
    costs = CostTable.load("h200")
    gemm = Gemm("a#0", Role.FORWARD, row.m_min, 32, 16, row.dtype)
    latency = costs.latency(gemm, "torch", "rowwise")
    # Read and written in bf16 at the bandwidth of the data sheet, by a kernel of its own.
    cut = 2 * row.m_min * 20 * 2 * 1e3 / 4800 * 1e-6
    assert latency.gemm_us + cut + 0.5 < row.gemm_us < latency.gemm_us + cut + 2.0
    assert costs.moving_us(0) == 0.0
    assert row.quantize_us == pytest.approx(latency.quantize_us)
    assert math.isfinite(row.mere)


def test_shape_refusals_carry_the_providers_reason():
    table = run("h200", [Fake(only=[Role.FORWARD])])
    assert one(table, role="grad_input", recipe="rowwise").refused == "no grad_input in this library"


def test_dynamic_batch_is_told_to_the_provider():
    """torch pads the contraction of grad_weight; a library that pads nothing has to refuse it."""

    class Rigid(Fake):
        def _refuses_shape(self, gemm, recipe):
            return "the batch is dynamic" if gemm.dynamic == "k" else super()._refuses_shape(gemm, recipe)

    table = run("h200", ["torch", Rigid()], a__0=samples(dynamic=True))
    assert one(table, role="grad_weight", provider="torch", recipe="rowwise").refused == ""
    assert one(table, role="grad_weight", provider="fake", recipe="rowwise").refused == "the batch is dynamic"
    assert one(table, role="forward", provider="torch", recipe="rowwise").refused == ""


def test_only_the_graphs_gemms_are_measured():
    table = run(a__0=samples(roles=[Role.FORWARD], grad_outputs=[]))
    assert {r.role for r in table.rows} == {"forward"}
    assert {r.role for r in run(a__0=samples(roles={"forward", "grad_weight"})).rows} == {"forward", "grad_weight"}


def test_every_gemm_has_a_baseline_row_even_without_providers():
    table = run("h200", [])
    assert [(r.role, r.provider) for r in table.rows] == [
        ("forward", "high_precision"), ("grad_input", "high_precision"), ("grad_weight", "high_precision")
    ]  # fmt: skip
    assert make_plan(table).counts() == {"high_precision:native": 3}


def test_what_cannot_be_chosen_by_its_cost_is_not_measured():
    """Neither the error nor the self-test of a kernel that is too slow; and nothing is lost that a plan could take."""
    seen = {"a__0": samples(2048, 2048, calls=2, rows=16, batch=4096), "b__0": samples(64, 4096, calls=2, batch=512)}
    everything = run(providers=("torch", "triton", "deepgemm", "torchao"), **seen)
    named = {name.replace("__", "#"): s for name, s in seen.items()}
    quick = quantify(named, target="h200", providers=("torch", "triton", "deepgemm", "torchao"), least_speedup=1.05)
    slow = [r for r in quick.rows if "kernel alone has" in r.refused]
    assert slow
    assert all(r.samples == 0 and math.isnan(r.mere) for r in slow)
    for row in slow:
        whole = one(everything, site=row.site, role=row.role, provider=row.provider, recipe=row.recipe)
        assert whole.baseline_us / whole.gemm_us < 1.05
        assert whole.mere > 0
    kept = {(r.site, r.role, r.candidate): r for r in quick.rows if not r.refused}
    assert any(key[2].startswith("triton:") for key in kept)
    for key, row in kept.items():
        assert row.mere == one(everything, site=key[0], role=key[1], provider=row.provider, recipe=row.recipe).mere
    limits = {"max_mere": 0.2, "min_speedup": 1.05}
    chosen = [[(d.site, d.role, d.candidate) for d in make_plan(t, **limits).decisions] for t in (everything, quick)]
    assert chosen[0] == chosen[1]


def test_kernels_that_compile_at_their_first_call_do_not_do_so_while_a_training_run_waits(monkeypatch):
    """The GPU at hand is the target, so its kernels would run for real: the slow ones are emulated all the same."""
    from loka_compile.lowering.providers import get_provider
    from loka_compile.probe import quantify as module

    triton, torch_ = get_provider("triton"), get_provider("torch")
    monkeypatch.setattr(module, "target_of_device_name", lambda name: "h200")
    for provider in (triton, torch_):
        monkeypatch.setattr(type(provider), "supported", lambda self, *args, **more: None)

    calls = []

    def compute(*args, **more):
        calls.append(args)
        raise RuntimeError("there is no GPU here")

    monkeypatch.setattr(type(triton), "compute", compute)
    seen = {"a#0": samples(2048, 2048, calls=1, rows=16, batch=4096)}
    quick = quantify(seen, target="h200", providers=("torch", "triton"), least_speedup=1.0)
    rows = [r for r in rows_of(quick, provider="triton") if not r.refused]
    assert {r.error_source for r in rows} == {"emulated"}
    assert not calls
    quantify(seen, target="h200", providers=("triton",))
    assert calls, "without a run that waits, the kernel itself is measured"


def test_a_kernel_that_pays_at_another_batch_is_measured():
    seen = samples(2048, 2048, calls=1, rows=16, batch=64, dynamic=True, batches=[64, 8192])
    quick = quantify({"a#0": seen}, target="h200", providers=("torch",), least_speedup=1.05)
    rows = rows_of(quick, role="forward", provider="torch", recipe="tensorwise_fast")
    assert {r.m_min for r in rows} > {64, 8192}
    assert all(not r.refused and r.mere > 0 for r in rows)
    alone = quantify({"a#0": samples(2048, 2048, calls=1, rows=16, batch=64)}, target="h200", providers=("torch",),
                     least_speedup=1.05)  # fmt: skip
    assert "kernel alone has" in one(alone, role="forward", provider="torch", recipe="tensorwise_fast").refused


def test_what_no_plan_gives_to_a_role_is_not_measured():
    seen = {"a#0": samples(2048, 2048, calls=1, rows=16, batch=4096)}
    table = quantify(seen, target="h200", providers=("torch",))
    fast = one(table, role="grad_weight", provider="torch", recipe="tensorwise_fast")
    assert "sums over the batch" in fast.refused
    assert fast.mere != fast.mere
    for role, recipe in (("grad_weight", "tensorwise"), ("forward", "tensorwise_fast")):
        row = one(table, role=role, provider="torch", recipe=recipe)
        assert not row.refused
        assert row.mere > 0
