"""``table="auto"``: high precision while sampling, one plan, one switch, and a table that the next run finds."""

import copy
import gc
import threading
import warnings
import weakref

import pytest
import torch
from helpers_backend import Watch, close, gradients, train_step
from models_backend import Checkpointed, Plain, Tower, exact, mods_of
from torch import nn
from torch._dynamo.utils import counters

import loka_compile.auto

#: Thresholds at which every small GEMM goes to FP8.
ANY = {"target": "h200", "max_mere": 1e3, "min_speedup": 1e-3}
AUTO = {**ANY, "auto_calls": 3}


def graphs():
    return counters["stats"]["unique_graphs"]


def fp8_sites(report):
    return {(d.site, d.role) for d in report.decisions if d.provider != "high_precision"}


@pytest.mark.parametrize("codegen", [False, True])
def test_samples_then_plans_once(codegen, request):
    """Three calls bit-equal to table="off", then FP8 as by that plan written down, and nothing is compiled again."""
    if not codegen:
        request.getfixturevalue("no_codegen")
    model = Plain((48, 80) if codegen else (48, 160, 80))
    layers = len(model.layers)
    twin = copy.deepcopy(model)
    watch = Watch()
    run = torch.compile(model, backend="loka", options={**AUTO, "mods": "none"})
    off = torch.compile(twin, backend="loka", options={"table": "off", "mods": "none"})
    xs = [torch.randn(64, 48, requires_grad=True) for _ in range(6)]
    for x in xs[:3]:
        got, want = train_step(run, model, x), train_step(off, twin, x)
        assert torch.equal(got[0], want[0])
        assert all(torch.equal(got[1][name], want[1][name]) for name in want[1])
    assert all(r.plan is None for r in watch.reports)
    counters.clear()
    first = train_step(run, model, xs[3])
    planned = watch.last
    assert planned.plan is not None
    assert "planned after sampling 3 calls" in planned.notes
    assert len(fp8_sites(planned)) == 3 * layers, str(planned)
    assert sum(r.plan is not None for r in watch.reports) == 1

    plan = torch.compile(
        copy.deepcopy(model), backend="loka", options={"plan": planned.plan, "target": "h200", "mods": "none"}
    )
    fixed = train_step(plan, model, xs[3])
    assert torch.equal(first[0], fixed[0])
    assert not torch.equal(first[0], train_step(off, twin, xs[3])[0]), "FP8 changes the numbers"
    compiled = graphs()
    for x in xs[4:]:
        train_step(run, model, x)
    assert graphs() == compiled
    assert sum(r.plan is not None for r in watch.reports) == 2  # this one and the one written down


def test_the_default_is_twenty_calls(no_codegen):
    model, watch = Plain(), Watch()
    run = torch.compile(model, backend="loka", options=ANY)
    for call in range(21):
        assert watch.reports == [] or watch.last.plan is None, f"planned before call {call + 1}"
        run(torch.randn(16, 48)).sum().backward()
    assert watch.last.plan is not None


def test_backwards_in_flight_over_the_switch(no_codegen):
    """Backwards of the sampled version, of the planned one, and of both added up."""
    tower = Tower((16, 256))
    reference = exact(tower)
    run = torch.compile(tower, backend="loka", options={**AUTO, "auto_calls": 2})
    xs = [torch.randn(32, 16) for _ in range(4)]
    outs = [run(x) for x in xs]  # two sampled, the third one switches
    wants = [mods_of(reference)(x) for x in xs]
    for index in (3, 1, 0, 2):
        tower.zero_grad()
        reference.zero_grad()
        outs[index].sum().backward()
        wants[index].sum().backward()
        tolerance = 1e-5 if index < 2 else 0.1
        for name, grad in gradients(tower).items():
            want = gradients(reference)[name]
            if name in tower.unused:
                assert not grad.any()
            else:
                close(grad, want, tolerance, f"{name} of call {index}")


def test_samples_are_what_the_gemms_saw(no_codegen, monkeypatch):
    """Rows of the true inputs, with the gradients of the very same rows, and the weight as [N, K], however stored."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(24, 40, bias=False)
            self.v = nn.Parameter(torch.randn(40, 16) / 6)  # [K, N]

        def forward(self, x):
            return torch.tanh(self.lin(x)) @ self.v

    seen = {}

    def quantify(samples, **kwargs):
        seen.update(samples)
        raise RuntimeError("seen enough")

    monkeypatch.setattr(loka_compile.auto, "quantify", quantify)
    model = Two()
    run = torch.compile(model, backend="loka", options={**AUTO, "auto_calls": 2})
    inputs, weights = [], []
    for _ in range(2):
        x = torch.randn(600, 24)
        loss = torch.randn(600, 16)
        inputs.append(x)
        weights.append(loss)
        (run(x) * loss).sum().backward()
    with pytest.warns(RuntimeWarning, match="seen enough"):
        run(inputs[0])
    assert set(seen) == {"lin#0", "v#0"}
    torch.testing.assert_close(seen["lin#0"].weight, model.lin.weight.detach())
    torch.testing.assert_close(seen["v#0"].weight, model.v.detach().t())
    for site, of in (("lin#0", lambda x: x), ("v#0", lambda x: torch.tanh(x @ model.lin.weight.t()).detach())):
        sample = seen[site]
        assert sample.batch == 600
        assert len(sample.inputs) == len(sample.grad_outputs) == 2
        for call in range(2):
            full = of(inputs[call])
            grads = weights[call]
            if site == "lin#0":
                grads = (grads @ model.v.t()) * (1 - torch.tanh(full @ model.lin.weight.t()) ** 2)
            rows, grad_rows = sample.inputs[call], sample.grad_outputs[call]
            assert 16 <= rows.shape[0] < 600
            distance = torch.cdist(rows, full, compute_mode="donot_use_mm_for_euclid_dist")
            assert float(distance.min(1).values.max()) < 1e-4, "a sampled row is not a row of the input"
            index = distance.argmin(1)
            assert len(set(index.tolist())) == len(index)
            torch.testing.assert_close(grad_rows, grads[index].detach(), rtol=1e-4, atol=1e-5)


def test_checkpointed_layers_are_sampled_once_per_call(no_codegen, monkeypatch):
    seen = {}

    def quantify(samples, **kwargs):
        seen.update(samples)
        raise RuntimeError("seen enough")

    monkeypatch.setattr(loka_compile.auto, "quantify", quantify)
    model = Checkpointed((16, 256, 256))
    run = torch.compile(model, backend="loka", options={**AUTO, "auto_calls": 2})
    for _ in range(2):
        run(torch.randn(32, 16)).sum().backward()
    with pytest.warns(RuntimeWarning, match="seen enough"):
        run(torch.randn(32, 16))
    for site in ("linears.0#0", "linears.1#0"):
        assert len(seen[site].inputs) == len(seen[site].grad_outputs) == 2


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_serving(mode, no_codegen):
    """Without gradients there are forward GEMMs only, sampled and planned all the same."""
    model, watch = Plain((48, 80)), Watch()
    run = torch.compile(model, backend="loka", options={**AUTO, "auto_calls": 2})
    x = torch.randn(32, 48)
    with mode():
        for _ in range(2):
            assert torch.equal(run(x), model(x))
        y = run(x)
    assert fp8_sites(watch.last) == {("layers.0#0", "forward")}
    close(y, exact(model)(x.double()), 0.1)


def test_autocast_is_that_of_the_first_version(no_codegen):
    """The planned version is compiled outside of Dynamo, yet under the same autocast."""
    tower, watch = Tower((16, 256)), Watch()
    reference = exact(tower)
    run = torch.compile(tower, backend="loka", options={**AUTO, "auto_calls": 2})
    x = torch.randn(32, 16)
    for _ in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = run(x)
        y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    assert watch.last.plan is not None
    assert {g.gemm.dtype for g in watch.last.gemms} == {"bfloat16"}
    assert all(p.grad.dtype == torch.float32 for p in tower.parameters())
    close(y, mods_of(reference)(x), 0.15)


def test_failed_planning_keeps_training_in_high_precision(no_codegen, monkeypatch):
    def quantify(*args, **kwargs):
        raise ZeroDivisionError("out of luck")

    monkeypatch.setattr(loka_compile.auto, "quantify", quantify)
    tower, watch = Tower((16, 256)), Watch()
    reference = exact(tower)
    run = torch.compile(tower, backend="loka", options={**AUTO, "auto_calls": 1})
    x = torch.randn(8, 16)
    run(x).sum().backward()
    with pytest.warns(RuntimeWarning, match="out of luck"):
        close(run(x), mods_of(reference)(x), 1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        close(run(x), mods_of(reference)(x), 1e-5)
    assert any("out of luck" in note for note in watch.last.notes)


def test_micro_batches_of_different_sizes(no_codegen):
    """Forwards before backwards, a short last batch, a forward without backward: sampling takes what it gets."""
    model, watch = Plain((48, 160, 80)), Watch()
    run = torch.compile(model, backend="loka", options={**AUTO, "auto_calls": 4}, dynamic=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for _ in range(2):
            outs = [run(torch.randn(rows, 48)) for rows in (32, 7)]
            outs[0].sum().backward()
        model.zero_grad()
        for rows in (40, 3, 129):
            x = torch.randn(rows, 48)
            close(run(x), exact(model)(x.double()), 0.15)
    assert watch.last.plan is not None


def test_dynamic_batch(no_codegen):
    """The graph for changing sizes samples for itself, switches, and serves every size without another compile."""
    tower, watch = Tower((16, 256)), Watch()
    reference = exact(tower)
    run = torch.compile(tower, backend="loka", options=AUTO)
    counters.clear()
    for rows in (0, 32, 48, 5, 64, 33, 128, 199, 1, 2, 0, 500):
        x = torch.randn(rows, 16)
        got = train_step(run, tower, x)
        # Every GEMM is in FP8, the head (N = 1, padded) too.
        close(got[0], mods_of(reference)(x), 0.25, f"{rows} rows")
    assert graphs() <= 4  # no row, 32 rows, any number, one row
    planned = [r for r in watch.reports if r.plan is not None]
    assert ("linears.0#0", "forward") in fp8_sites(planned[0])


# ------------------------------------------------------------------ what goes wrong while probing
class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.good, self.bad = nn.Linear(48, 160, bias=False), nn.Linear(48, 160, bias=False)

    def forward(self, x, z):
        return self.good(x), self.bad(z)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_site_that_sees_only_nan_stays_in_high_precision(value, no_codegen):
    model, watch = Branches(), Watch()
    run = torch.compile(model, backend="loka", options=AUTO)
    x, z = torch.randn(64, 48), torch.full((64, 48), value)
    for _ in range(4):
        good, bad = run(x, z)
        (good.sum() + bad.sum()).backward()
    report = watch.last
    assert {site for site, _ in fp8_sites(report)} == {"good#0"}
    reasons = {d.role: d.reason for d in report.decisions if d.site == "bad#0"}
    assert all("NaN or Inf" in reason for reason in reasons.values()), reasons
    assert "NaN or Inf" in str(report)
    # The site itself computes what it would have computed.
    z = torch.randn(64, 48)
    close(run(x, z)[1], (z.double() @ exact(model).bad.weight.t()), 1e-5)


def test_some_rows_with_nan_are_left_out_and_counted(no_codegen):
    model, watch = Branches(), Watch()
    run = torch.compile(model, backend="loka", options={**AUTO, "auto_calls": 2})
    x, z = torch.randn(64, 48), torch.randn(64, 48)
    z[::4, 3] = float("nan")
    for _ in range(3):
        good, bad = run(x, z)
        (good.sum() + bad[1::4].sum()).backward()
    report = watch.last
    assert {site for site, role in fp8_sites(report) if role == "forward"} == {"good#0", "bad#0"}
    assert set(report.table.header.dropped_rows) == {"bad#0"}
    assert report.table.header.dropped_rows["bad#0"] > 0


# ------------------------------------------------------------------ threads
def test_concurrent_calls_at_the_switch(no_codegen):
    """Each thread gets its own right answer before, at and after the switch, and only one of them switches."""
    model, watch = Plain((48, 160, 80)), Watch()
    reference = exact(model)
    run = torch.compile(model, backend="loka", options={**AUTO, "auto_calls": 8})
    xs = [torch.randn(32, 48) for _ in range(4)]
    with torch.no_grad():
        wants = [reference(x.double()) for x in xs]
        run(xs[0])
    failures = []
    barrier = threading.Barrier(4)

    def serve(index):
        try:
            barrier.wait()
            with torch.no_grad():
                for _ in range(8):
                    close(run(xs[index]), wants[index], 0.1)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=serve, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert sum(r.plan is not None for r in watch.reports) == 1
    assert fp8_sites(watch.last)


# ------------------------------------------------------------------ where there is nothing to plan for
def test_cpu_without_target_says_so_and_does_not_sample(no_codegen):
    watch = Watch()
    torch.compile(Tower((16, 256)), backend="loka")(torch.randn(4, 16))
    assert len(watch.reports) == 1
    assert any("no cost table for this cpu device" in note and '"target": "h200"' in note for note in watch.last.notes)


def test_nothing_of_the_first_calls_stays_alive(no_codegen, tmp_path, monkeypatch):
    """Dynamo wraps the function that switches and copies its attributes: the first batch, with the autograd graph of
    what made it, must not live on there. (Its gradient would then wait for the stream of the first call, which breaks
    the capture of a CUDA graph.)"""
    monkeypatch.setenv("LOKA_CACHE_DIR", str(tmp_path))
    table = nn.Embedding(10, 48)
    run = torch.compile(Plain((48, 160, 80)), backend="loka", options={**AUTO, "mods": "none"})
    watch = Watch()
    alive = []
    for _ in range(6):
        x = table(torch.randint(10, (64,)))
        alive.append(weakref.ref(x))
        run(x).sum().backward()
        del x
    assert watch.last.plan is not None
    gc.collect()
    assert [ref() for ref in alive] == [None] * 6
