"""Samples to table: errors against numpy, kernels and their emulation, bad samples."""

import dataclasses
import logging
import math
import time

import numpy as np
import pytest
import torch

from loka_compile.errors import ProbeError, UnknownNameError
from loka_compile.lowering.providers import get_provider
from loka_compile.plan import make_plan
from loka_compile.probe.quantify import quantify
from loka_compile.table import Table
from tests.probe.site_samples import Fake, one, rows_of, run, samples

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
    """Twenty sites, three roles, widths to 2048: 7 to 11 s of one core on the machines seen (CPU time: others use them
    too); the bound is for what would make it several times slower."""
    shapes = [(256, 256), (256, 1024), (512, 512), (128, 512), (1, 128), (384, 256), (256, 2048), (64, 384)]
    sites = {f"s{i}#0": samples(*shapes[i % 8], calls=20, rows=26, seed=i) for i in range(20)}
    start = time.process_time()
    table = quantify(sites, target="h200")
    assert time.process_time() - start < 20.0
    assert len({(r.site, r.role) for r in table.rows}) == 60
