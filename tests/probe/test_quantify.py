"""Samples to table: errors against numpy, costs, refusals, bad samples."""

import dataclasses
import logging
import math
import time
from typing import ClassVar

import numpy as np
import pytest
import torch

from loka_compile.costs import CostTable
from loka_compile.errors import ProbeError, UnknownNameError
from loka_compile.gemm import ROWWISE, TENSORWISE, Gemm, Recipe, Role
from loka_compile.lowering.providers import get_provider
from loka_compile.lowering.providers.base import Provider
from loka_compile.plan import make_plan
from loka_compile.probe.quantify import SiteSamples, quantify
from loka_compile.probe.samples import cut
from loka_compile.table import Table

torch.set_num_threads(1)


def samples(n=48, k=64, *, calls=4, rows=32, dtype="bfloat16", seed=0, batch=4096, **more):
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=rng)

    values = dict(inputs=[normal(rows, k) for _ in range(calls)], weight=normal(n, k) / k**0.5,
                  grad_outputs=[normal(rows, n) * 1e-3 for _ in range(calls)], dtype=dtype, batch=batch)  # fmt: skip
    return SiteSamples(**{**values, **more})


def run(target="h200", providers=("torch", "emulated"), **sites):
    sites = sites or {"a#0": samples()}
    return quantify({name.replace("__", "#"): s for name, s in sites.items()}, target=target, providers=providers)


def rows_of(table, **wanted):
    return [r for r in table.rows if all(getattr(r, name) == value for name, value in wanted.items())]


def one(table, **wanted):
    (row,) = rows_of(table, **wanted)
    return row


# --- errors against an independent computation ---


def e4m3(values):
    """Round to e4m3 in numpy: 3 mantissa bits, exponents -6..8, subnormal step 2^-9, ties to even."""
    magnitude = np.minimum(np.abs(values), 448.0)
    exponent = np.floor(np.log2(np.maximum(magnitude, 2.0**-30)))
    step = 2.0 ** (np.maximum(exponent, -6.0) - 3.0)
    return np.sign(values) * np.round(magnitude / step) * step


def quantised(x, axis):
    scale = np.maximum(np.abs(x).max(axis=axis, keepdims=axis is not None), 1e-12) / 448.0
    return e4m3(x / scale) * scale


def floored(out, ref, axis=None):
    floor = 0.05 * np.sqrt(np.mean(ref**2, axis=axis, keepdims=axis is not None))
    return np.mean(np.abs(out - ref) / np.maximum(np.abs(ref), floor))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("role", ["forward", "grad_input", "grad_weight"])
def test_error_is_that_of_a_numpy_fp8_product(role, recipe):
    seen = samples(48, 80, calls=1, rows=64, dtype="float32")
    x, w, dy = (np.asarray(t, dtype=np.float64) for t in (seen.inputs[0], seen.weight, seen.grad_outputs[0]))
    a, b = {"forward": (x, w), "grad_input": (dy, w.T), "grad_weight": (dy.T, x.T)}[role]
    axis = None if recipe == "tensorwise" else 1
    out, ref = quantised(a, axis) @ quantised(b, axis).T, a @ b.T
    whole, by_row = floored(out, ref), floored(out, ref, 1)
    table = quantify({"a#0": seen}, target="h200", providers=["torch"], max_pairs=1)
    row = one(table, role=role, recipe=recipe)
    # fp32 products and, on the border between two FP8 numbers, fp32 scales: nothing more may differ.
    assert row.mere_floored == pytest.approx(whole, rel=2e-3)
    assert row.mere_by_row == pytest.approx(by_row, rel=2e-3)
    gate = whole if role == "grad_weight" else max(whole, by_row)
    assert row.mere == row.mere_raw == pytest.approx(gate, rel=2e-3)
    assert math.isnan(row.mere_drawn)
    assert row.samples == 1
    assert row.error_source == "emulated"


def test_pairs_are_averaged_and_give_the_interval():
    row = one(run(), role="forward", provider="torch", recipe="rowwise")
    assert row.samples == 4
    assert row.mere_low < row.mere < row.mere_high
    assert row.mere == pytest.approx((row.mere_low + row.mere_high) / 2)
    assert 0.08 < row.mere < 0.11  # rowwise e4m3 on normal data
    assert row.sqnr_db == pytest.approx(-20 * math.log10(row.frobenius), abs=0.2)
    assert 0.998 < row.cosine < 1
    assert row.max_error > 0


def test_interval_narrows_with_more_pairs():
    seen = samples(calls=8, rows=128)
    width = [
        (row.mere_high - row.mere_low) / row.mere
        for pairs in (3, 30)
        for row in [one(quantify({"a#0": seen}, target="h200", providers=["torch"], max_pairs=pairs),
                        role="forward", recipe="rowwise")]
    ]  # fmt: skip
    assert width[1] < width[0] / 2


def test_a_feature_with_outliers_hurts_coarse_scales_most():
    """One feature is 1e6 times the others, and nobody reads it: only blocks keep the others alive."""
    seen = samples(128, 512, grad_outputs=[], roles=["forward"])
    seen.weight[:, 7] = 0
    for x in seen.inputs:
        x[:, 7] = 1e6
    table = run(a__0=seen)
    rowwise, blockwise = (one(table, provider="torch", recipe=r) for r in ("rowwise", "blockwise"))
    assert rowwise.mere > 0.9
    assert blockwise.mere < 0.7 * rowwise.mere  # one block of four is lost, not the row


def test_a_huge_row_does_not_hide_from_the_gate_that_all_others_are_lost():
    seen = samples(128, 256, grad_outputs=[], roles=["forward"], calls=1, rows=64)
    seen.inputs[0][3] *= 1e6
    table = quantify({"a#0": seen}, target="h200", providers=["torch"], max_pairs=1)
    row = one(table, recipe="tensorwise")
    assert row.mere_floored < 0.05
    assert row.mere == row.mere_by_row > 0.9
    assert one(table, recipe="rowwise").mere < 0.11
    plan = make_plan(table, min_speedup=0.01)
    assert plan.lookup("a#0", "forward").recipe.startswith("rowwise")
    # The rows of grad_weight are no samples: a weight of which one row's gradient is huge is stepped as a whole.
    seen = samples(128, 256, calls=1, rows=64)
    seen.grad_outputs[0][:, 3] *= 1e6
    row = one(
        quantify({"a#0": seen}, target="h200", providers=["torch"], max_pairs=1),
        role="grad_weight",
        recipe="tensorwise",
    )
    assert row.mere == row.mere_floored < 0.05 < row.mere_by_row


def test_rows_kept_for_their_magnitude_do_not_enter_the_mean():
    """The row that sets the scale of 1000 is one of the 16 sampled, but not one of those that are averaged."""
    seen = samples(128, 256, grad_outputs=[], roles=["forward"], calls=1, rows=1000, dtype="float32")
    seen.inputs[0][777] *= 1e6
    table = quantify({"a#0": seen}, target="h200", providers=["torch"], max_pairs=1, max_rows=16)
    assert one(table, recipe="tensorwise").mere > 0.9  # the scale is the outlier's, the errors are the others'
    assert one(table, recipe="rowwise").mere < 0.11


def test_baseline_row_shows_what_high_precision_itself_loses():
    row = one(run(), role="forward", provider="high_precision")
    assert 1e-4 < row.mere < 3e-3  # one rounding to bf16
    assert one(run(a__0=samples(dtype="float32")), role="forward", provider="high_precision").mere < 1e-5
    assert (row.refused, row.speedup) == ("", 1.0)


# --- real kernels and emulation ---


class Fake(Provider):
    """A library that works anywhere; ``spoil`` is applied to its result."""

    name: ClassVar[str] = "fake"
    recipes: ClassVar[dict[str, Recipe]] = {r.name: r for r in (ROWWISE, TENSORWISE)}
    distributions: ClassVar[tuple[str, ...]] = ("numpy",)

    def __init__(self, spoil=lambda out: out, only=Role, missing=None):
        self.spoil, self.missing, self.calls = spoil, missing, 0
        self.only = only

    def supported(self, recipe=None, device=None):
        return self.missing

    def _refuses_shape(self, gemm: Gemm, recipe: Recipe):
        return None if gemm.role in self.only else f"no {gemm.role} in this library"

    def compute(self, a, b, recipe, out_dtype):
        self.calls += 1
        return self.spoil(get_provider("emulated").compute(a, b, recipe, out_dtype))


def test_without_a_target_the_providers_own_code_runs_here():
    fake = Fake(spoil=lambda out: out * 1.5)
    table = run(None, [fake, "torch"])
    row = one(table, role="forward", provider="fake", recipe="rowwise")
    assert row.error_source == "real kernel"
    assert row.mere == pytest.approx(0.5, abs=0.1)
    assert fake.calls > 0
    real = one(table, role="forward", provider="torch", recipe="tensorwise")
    emulated = one(run(None), role="forward", provider="emulated", recipe="tensorwise")
    assert real.error_source == "real kernel"
    # Two independent implementations of the same recipe.
    assert real.mere == pytest.approx(emulated.mere, rel=1e-2)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_kernel_that_returns_garbage_is_never_eligible(bad):
    def spoil(out):
        out[0, 0] = bad
        return out

    row = one(run(None, [Fake(spoil)]), role="forward", recipe="rowwise")
    assert row.mere == math.inf
    priced = dataclasses.replace(row, refused="", quantize_us=1.0, gemm_us=1.0, baseline_us=100.0)
    (decision,) = make_plan(Table(run().header, [priced]), max_mere=math.inf).decisions
    assert decision.is_high_precision


def test_kernel_that_fails_on_the_cpu_is_emulated_and_logged(caplog):
    def spoil(out):
        raise RuntimeError("no such instruction")

    with caplog.at_level(logging.INFO, logger="loka_compile.probe"):
        row = one(run(None, [Fake(spoil)]), role="forward", recipe="rowwise")
    assert row.error_source == "emulated"
    assert 0.08 < row.mere < 0.11
    assert "no such instruction" in caplog.text


def test_for_another_device_a_library_that_is_absent_here_is_emulated():
    row = one(run("h200", ["fbgemm"], a__0=samples(256, 256)), role="forward", recipe="rowwise")
    assert get_provider("fbgemm").supported(device="cpu") is not None
    assert row.error_source == "emulated"
    assert row.refused == ""
    assert row.mere < 0.2


def test_without_a_target_an_absent_library_is_refused_with_its_reason():
    row = one(run(None, [Fake(missing="libfoo is not installed")]), role="forward", recipe="rowwise")
    assert row.refused == "libfoo is not installed"
    assert math.isnan(row.mere)


def test_emulation_is_shared_between_candidates(monkeypatch):
    calls = []
    emulated = type(get_provider("emulated"))
    compute = emulated.compute

    def counted(self, a, b, recipe, out_dtype):
        calls.append(recipe.name)
        return compute(self, a, b, recipe, out_dtype)

    monkeypatch.setattr(emulated, "compute", counted)
    table = run("h200", ["torch", "fbgemm"], a__0=samples(256, 256, roles=["forward"]))
    fast = one(table, provider="fbgemm", recipe="rowwise_fast")
    assert fast.mere == one(table, provider="torch", recipe="rowwise").mere
    recipes = ("blockwise", "blockwise_128x128", "blockwise_1x128", "rowwise", "tensorwise")
    assert sorted(calls) == [recipe for recipe in recipes for _ in range(4)]


# --- costs and refusals ---


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


# --- bad samples ---


def test_rows_with_nan_or_inf_are_left_out_and_counted(caplog):
    clean, dirty = samples(), samples()
    for bad, (call, line) in zip((math.nan, math.inf, -math.inf), ((0, 3), (1, 0), (3, 31)), strict=True):
        dirty.inputs[call][line, 5] = bad
    dirty.grad_outputs[2][8, 1] = math.nan
    with caplog.at_level(logging.WARNING, logger="loka_compile.probe"):
        table = quantify({"clean#0": clean, "dirty#0": dirty}, target="h200", providers=["torch"])
    assert table.header.dropped_rows == {"dirty#0": 4}
    assert "site dirty#0: 4 of 128 rows" in caplog.text
    for row in rows_of(table, site="dirty#0", recipe="rowwise"):
        assert row.refused == ""
        assert row.mere == pytest.approx(one(table, site="clean#0", role=row.role, recipe="rowwise").mere, rel=0.1)


@pytest.mark.parametrize("what", ["inputs", "weight", "grad_outputs"])
def test_site_without_a_finite_sample_stays_in_high_precision_and_is_named(what):
    seen = samples(256, 512)
    bad = getattr(seen, what)
    for x in bad if isinstance(bad, list) else [bad]:
        x[:, 0] = math.nan
    plan = make_plan(run("h200", ["torch"], bad__0=seen, good__0=samples(256, 512)), min_speedup=0.01)
    roles = ("grad_input", "grad_weight") if what == "grad_outputs" else ("forward", "grad_input", "grad_weight")
    for role in roles:
        decision = plan.lookup("bad#0", role)
        assert decision.is_high_precision
        assert "site bad#0" in decision.reason
        assert "NaN or Inf" in decision.reason
        assert not plan.lookup("good#0", role).is_high_precision


def test_sites_without_samples_say_so():
    table = run(a__0=samples(inputs=[], grad_outputs=[]))
    assert {r.refused for r in rows_of(table, role="forward", provider="torch")} == {"no rows were sampled at site a#0"}
    table = run(a__0=samples(grad_outputs=[]))
    assert one(table, role="grad_input", provider="torch", recipe="rowwise").refused == (
        "no rows with output gradients were sampled at site a#0"
    )
    assert one(table, role="forward", provider="torch", recipe="rowwise").refused == ""
    assert "is empty" in one(run(a__0=samples(batch=0)), role="forward", provider="torch", recipe="rowwise").refused


@pytest.mark.parametrize("shape", [(0, 64), (1, 64), (2, 64), (15, 64), (199, 64)])
def test_few_and_odd_numbers_of_rows(shape):
    x = torch.randn(shape)
    table = run(a__0=samples(48, 64, inputs=[x], grad_outputs=[torch.randn(shape[0], 48)]))
    for row in rows_of(table, provider="torch", recipe="rowwise"):
        assert ("no rows" in row.refused) if shape[0] == 0 else (math.isfinite(row.mere) and row.mere < 0.2)


def test_zero_gradients_have_no_error():
    seen = samples()
    for g in seen.grad_outputs:
        g.zero_()
    assert one(run(a__0=seen), role="grad_input", provider="torch", recipe="rowwise").mere == 0.0


def test_fp16_overflow_is_seen_as_infinite():
    seen = samples(48, 64, dtype="float16", weight=torch.full((48, 64), 6e4), inputs=[torch.full((64, 64), 6e4)] * 4)
    table = run(a__0=seen)
    assert one(table, role="forward", provider="torch", recipe="rowwise").mere == math.inf
    assert make_plan(table, min_speedup=0.01).lookup("a#0", "forward").is_high_precision


@pytest.mark.parametrize(
    "change",
    [{"inputs": [torch.zeros(4, 63)]}, {"grad_outputs": [torch.zeros(4, 47)]}, {"weight": torch.zeros(48, 64, 1)},
     {"weight": [torch.zeros(48, 64), torch.zeros(48, 65)]}, {"inputs": [torch.zeros(64)]}, {"weight": []}],
)  # fmt: skip
def test_samples_that_do_not_belong_together_are_named(change):
    with pytest.raises(ProbeError, match="'a#0'"):
        run(a__0=dataclasses.replace(samples(), **change))


def test_unknown_names():
    with pytest.raises(UnknownNameError, match="h200"):
        run("h300")
    with pytest.raises(UnknownNameError, match="torch"):
        run("h200", ["cutlass"])


def test_several_weights_are_used_in_turn():
    good, bad = samples().weight, torch.full((48, 64), math.inf)
    assert one(run(a__0=samples(weight=[good, good * 2])), role="forward", provider="torch", recipe="rowwise").samples
    assert (
        "NaN or Inf"
        in one(run(a__0=samples(weight=[good, bad])), role="forward", provider="torch", recipe="rowwise").refused
    )


# --- header, determinism, speed ---


def test_header_describes_the_run(tmp_path):
    table = quantify({"a#0": samples(48, 64), "b#0": samples(1, 13)}, target="h200", providers=[Fake(), "torch"])
    header = table.header
    assert header.fingerprint == {"a#0": (48, 64), "b#0": (1, 13)}
    assert (header.target, header.device, header.driver) == ("h200", "cpu", "")
    assert header.torch == torch.__version__
    assert header.libraries == {"fake": f"numpy {np.__version__}"}
    assert header.created.startswith("20")
    table.check(fingerprint={"a#0": [48, 64]}, target="h200", device="cpu", torch=torch.__version__)
    table.save(tmp_path / "t.json")
    assert Table.load(tmp_path / "t.json").digest() == table.digest()
    assert run(None).header.target == ""


def test_same_samples_same_table_and_inputs_untouched():
    seen = samples()
    before = [x.clone() for x in (*seen.inputs, seen.weight, *seen.grad_outputs)]
    assert run(a__0=seen).digest() == run(a__0=seen).digest()
    assert all(torch.equal(a, b) for a, b in zip(before, (*seen.inputs, seen.weight, *seen.grad_outputs), strict=True))


def test_progress_names_each_site():
    names = []
    quantify({"a#0": samples(), "b#0": samples()}, target=None, providers=[], progress=names.append)
    assert names == ["a#0", "b#0"]


def test_quick_enough_for_a_first_training_step():
    """Twenty sites, three roles, widths to 2048: under 8 s of one core (CPU time: the machine may be shared)."""
    shapes = [(256, 256), (256, 1024), (512, 512), (128, 512), (1, 128), (384, 256), (256, 2048), (64, 384)]
    sites = {f"s{i}#0": samples(*shapes[i % 8], calls=20, rows=26, seed=i) for i in range(20)}
    start = time.process_time()
    table = quantify(sites, target="h200")
    assert time.process_time() - start < 8.0
    assert len({(r.site, r.role) for r in table.rows}) == 60


# --- cutting samples into batches ---


def test_batches_are_disjoint_aligned_and_hold_partners():
    x = torch.arange(200.0).reshape(200, 1)
    found = cut([(x[:90], x[:90] * 2), (x[90:], x[90:] * 2)], torch.float32, 4, 32)
    assert (len(found.batches), found.rows, found.dropped) == (4, 200, 0)
    values = [set(b.operands[0].flatten().tolist()) for b in found.batches]
    assert all(len(v) == 32 for v in values)
    assert len(set.union(*values)) == 4 * 32
    assert all(torch.equal(b.operands[1], b.operands[0] * 2) for b in found.batches)
    assert all(b.representative in (31, 32) for b in found.batches)  # the largest row may be an extra one


def test_row_with_the_largest_value_of_each_operand_is_always_kept():
    torch.manual_seed(0)
    for line in (0, 17, 999):
        x, y = torch.randn(1000, 8), torch.randn(1000, 4)
        x[line, 3] = -1e4
        y[500 + line // 2, 0] = 1e5
        found = cut([(x, y)], torch.float32, 2, 16)
        assert max(b.operands[0].abs().max() for b in found.batches) == 1e4
        assert max(b.operands[1].abs().max() for b in found.batches) == 1e5
        assert all(b.operands[0].shape[0] == 16 and b.representative in (14, 15, 16) for b in found.batches)


def test_extra_rows_stand_behind_the_representative_ones():
    x = torch.ones(320, 1)
    x[3] = 9.0
    (batch,) = cut([(x,)], torch.float32, 1, 32).batches
    assert batch.representative == 31
    assert batch.operands[0][:, 0].tolist() == [1.0] * 31 + [9.0]


def test_shorter_partner_decides_and_few_rows_make_few_batches():
    found = cut([(torch.zeros(40, 2), torch.zeros(33, 2))], torch.float32, 4, 128)
    assert [b.operands[0].shape[0] for b in found.batches] == [16, 16]
    assert found.rows == 33
    assert [b.representative for b in cut([(torch.zeros(7, 2),)], torch.float32, 4, 128).batches] == [7]
    assert cut([], torch.float32, 4, 128).batches == []
