"""Dynamic batch: one graph, the kernel of the range at every size, at both sides of a boundary and outside of all."""

import pytest
import torch
from fp8_reference import Layer
from helpers_backend import Watch, close, plan_for, train_step
from models_backend import Plain, exact
from torch._dynamo.utils import counters

from loka_compile.config import LokaConfig
from loka_compile.gemm import Role
from loka_compile.lowering import hooks
from loka_compile.lowering.by_batch import encode, gemm_by_batch, gemm_of_quantised_by_batch, kernel_of
from loka_compile.lowering.providers import get_provider
from loka_compile.plan import BatchRange, Decision, Plan
from loka_compile.report import Report

SITE = "layers.1#0"
NATIVE = ("high_precision", "native")
#: High precision, then rowwise from 100 rows on, then tensorwise from 300 on.
RANGES = (BatchRange(0, *NATIVE), BatchRange(100, "emulated", "rowwise"), BatchRange(300, "emulated", "tensorwise"))


def recipe_at(m):
    return None if m < 100 else "rowwise" if m < 300 else "tensorwise"


def plan(roles=tuple(Role), ranges=RANGES):
    kernel = ranges[1]
    return Plan(Decision(SITE, role, kernel.provider, kernel.recipe, ranges=ranges) for role in roles)


def reference(model, m, roles=tuple(Role)):
    """The forward of ``Plain`` with the second layer's GEMMs as the plan says for batch size m, in fp64."""
    recipe = recipe_at(m)
    recipes = {} if recipe is None else {str(role): recipe for role in roles}

    def forward(x):
        h = torch.relu(x.double() @ model.layers[0].weight.t())
        return Layer.apply(h, model.layers[1].weight, recipes, None)

    return forward


def check(run, model, exact_model, m, tol=None):
    """One step at batch size m, against the kernels of m and (to be sure that they differ) of the other ranges."""
    x = torch.randn(m, 48, requires_grad=True)
    weight = torch.randn(m, 72, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    got = train_step(run, model, x, weight)

    def distance(of):
        want = train_step(reference(exact_model, of), exact_model, x.double(), weight)
        pairs = [(got[0], want[0]), *((got[1][name], grad) for name, grad in want[1].items())]
        return max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs)

    mine = distance(m)
    others = [distance(of) for of in (1, 100, 300) if recipe_at(of) != recipe_at(m)]
    assert mine < 0.3 * min(others), f"at {m} rows: {mine} from its own kernels, {others} from the others"


SIZES = (150, 99, 100, 2, 299, 300, 500)


def test_one_graph_serves_every_size(no_codegen):
    model = Plain((48, 200, 72))
    exact_model, watch = exact(model), Watch()
    run = torch.compile(model, backend="loka", options={"plan": plan(), "mods": "none"}, dynamic=True)
    counters.clear()
    for m in SIZES:
        check(run, model, exact_model, m)
    assert len(watch.reports) == 1, "compiled again"
    assert counters["stats"]["unique_graphs"] == 1
    assert no_codegen.targets()["loka.gemm_by_batch.default"] == 3
    assert {d.kernels for d in watch.last.decisions if d.site == SITE} == {
        "high_precision:native, from M = 100 emulated:rowwise, from M = 300 emulated:tensorwise"
    }
    assert "from M = 100" in str(watch.last)


def test_with_real_code_single_rows_and_none():
    """Through Inductor's code generation. Dynamo specialises on one row and on none: those graphs are static."""
    model = Plain((48, 200, 72))
    exact_model, watch = exact(model), Watch()
    run = torch.compile(model, backend="loka", options={"plan": plan(), "mods": "none"}, dynamic=True)
    for m in (150, 99, 100, 300):
        check(run, model, exact_model, m)
    assert len(watch.reports) == 1
    check(run, model, exact_model, 1)
    out, grads = train_step(run, model, torch.randn(0, 48, requires_grad=True))
    assert out.shape == (0, 72)
    assert not grads["layers.1.weight"].any()


def test_a_static_batch_is_decided_when_compiling(no_codegen):
    """No operator in the graph, and the same numbers."""
    for m in (99, 100):
        torch._dynamo.reset()
        no_codegen.graphs.clear()
        model = Plain((48, 200, 72))
        watch = Watch()
        run = torch.compile(model, backend="loka", options={"plan": plan(), "mods": "none"}, dynamic=False)
        check(run, model, exact(model), m)
        assert no_codegen.targets()["loka.gemm_by_batch.default"] == 0
        (kernel,) = {d.kernels for d in watch.last.decisions if d.site == SITE}
        assert kernel == ("high_precision:native" if m < 100 else f"emulated:{recipe_at(m)}")


def test_only_some_roles_and_a_bias(no_codegen):
    model = torch.nn.Sequential(torch.nn.Linear(48, 64), torch.nn.ReLU())
    ranges = (BatchRange(0, *NATIVE), BatchRange(50, "emulated", "rowwise"))
    given = Plan([Decision("0#0", "forward", "emulated", "rowwise", ranges=ranges)])
    run = torch.compile(model, backend="loka", options={"plan": given, "mods": "none"}, dynamic=True)
    with torch.no_grad():
        for m in (20, 70):
            x = torch.randn(m, 48)
            want = torch.relu(x.double() @ model[0].weight.double().t() + model[0].bias.double())
            error = float((run(x).double() - want).abs().max() / want.abs().max())
            assert (error < 1e-5) == (m < 50), (m, error)
            assert error < 0.1


def test_a_weight_stored_the_other_way_round(no_codegen):
    class Stored(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.v = torch.nn.Parameter(torch.randn(48, 72))

        def forward(self, x):
            return x @ self.v

    model = Stored()
    ranges = (BatchRange(0, *NATIVE), BatchRange(50, "emulated", "tensorwise"))
    given = Plan(Decision("v#0", role, "emulated", "tensorwise", ranges=ranges) for role in Role)
    run = torch.compile(model, backend="loka", options={"plan": given, "mods": "none"}, dynamic=True)
    for m in (20, 70, 49, 50):
        x, grad = torch.randn(m, 48, requires_grad=True), torch.randn(m, 72, dtype=torch.float64)
        got = train_step(run, model, x, grad)
        v, x = model.v.detach().double(), x.detach().double()
        for out, want in ((got[0], x @ v), (got[1]["x"], grad @ v.t()), (got[1]["v"], x.t() @ grad)):
            error = float((out.double() - want).abs().max() / want.abs().max())
            assert (error < 1e-5) == (m < 50), (m, error)
            close(out, want, 0.2)


def test_a_range_whose_kernel_is_refused_stays_in_high_precision(no_codegen):
    """A library that is not here, or computes no fp32: its range only."""
    model = Plain((48, 200, 72))
    ranges = (RANGES[0], BatchRange(100, "fbgemm", "rowwise"), RANGES[2])
    kernel = ranges[2]
    given = Plan([Decision(SITE, "forward", kernel.provider, kernel.recipe, ranges=ranges)])
    watch = Watch()
    run = torch.compile(model, backend="loka", options={"plan": given, "mods": "none"}, dynamic=True)
    with torch.no_grad():
        for m in (20, 150, 400):
            x = torch.randn(m, 48)
            h = torch.relu(x.double() @ model.layers[0].weight.double().t())
            want = h @ model.layers[1].weight.double().t()
            error = float((run(x).double() - want).abs().max() / want.abs().max())
            assert (error < 1e-5) == (m < 300), (m, error)
    (decision,) = [d for d in watch.last.decisions if d.site == SITE]
    assert decision.kernels == "high_precision:native, from M = 300 emulated:tensorwise"
    assert "from M = 100: fbgemm:rowwise was planned, but:" in decision.reason


def test_the_table_of_kernels_is_in_the_cache_key():
    """Another boundary is other code: a cached graph must not serve it."""
    keys = {
        hooks.Lowering(LokaConfig(), Report(), plan=plan(ranges=(RANGES[0], BatchRange(m, "emulated", "rowwise")))).key
        for m in (50, 50, 100)
    }
    assert len(keys) == 2


def test_auto_makes_ranges_for_a_batch_that_varies(no_codegen, monkeypatch):
    """Sizes seen while sampling become the table's sizes; where high precision wins below, the plan has a boundary."""
    from loka_compile.costs import CostTable, Latency

    monkeypatch.setattr(CostTable, "baseline", lambda self, gemm: 4 + 0.1 * min(gemm.m, gemm.k))
    monkeypatch.setattr(CostTable, "latency", lambda self, gemm, provider, recipe: (
        Latency(0.0, 0.0, 4 + 0.1 * min(gemm.m, gemm.k)) if provider == "high_precision"
        else Latency(1.0, 1.0, 8 + 0.04 * min(gemm.m, gemm.k)) if provider == "emulated" else None))  # fmt: skip
    model = Plain((2048, 2048))
    options = {"target": "h200", "max_mere": 1e3, "min_speedup": 1.0, "auto_calls": 3, "mods": "none",
               "providers": ("emulated",)}  # fmt: skip
    watch = Watch()
    run = torch.compile(model, backend="loka", options=options, dynamic=True)
    with torch.no_grad():
        for m in (64, 32, 512, 40, 400):
            x = torch.randn(m, 2048)
            error = float((run(x) - model(x)).abs().max())
            if watch.last.plan is not None:
                assert (error < 1e-3) == (m < 100), (m, error)
    assert {row.m_min for row in watch.last.table.rows} >= {32, 64, 512}
    (decision,) = watch.last.plan.decisions
    # 4 + 0.1 M against 10 + 0.04 M.
    assert [r.m_from for r in decision.ranges] in ([0, 100], [0, 101])
    assert decision.ranges[0].candidate == "high_precision:native"
    # The next compile finds the table, with all of its sizes.
    torch._dynamo.reset()
    again = Watch()
    with torch.no_grad():
        torch.compile(model, backend="loka", options=options, dynamic=True)(torch.randn(300, 2048))
    assert again.last.plan.digest() == watch.last.plan.digest()


def test_ranges_of_the_same_operands_quantise_in_the_graph(no_codegen, monkeypatch):
    """Forward and grad_input in one of two rowwise kernels; grad_weight, whose contraction one of them pads, inside."""
    reason = get_provider("torch").supported(get_provider("torch").recipe("rowwise"), "cpu")
    if reason:
        pytest.skip(reason)
    ran = []
    for name in ("emulated", "torch"):
        kind = type(get_provider(name))

        def compute(self, a, b, recipe, out_dtype, original=kind.compute, name=name):
            ran.append((name, tuple(a.data.shape)))
            return original(self, a, b, recipe, out_dtype)

        monkeypatch.setattr(kind, "compute", compute)
    model = Plain((48, 208, 80))
    exact_model = exact(model)
    given = plan(ranges=(BatchRange(0, "emulated", "rowwise"), BatchRange(100, "torch", "rowwise")))
    run = torch.compile(model, backend="loka", options={"plan": given, "mods": "none"}, dynamic=True)
    rowwise = {str(role): "rowwise" for role in Role}
    for m in (150, 99, 100, 2):
        x = torch.randn(m, 48, requires_grad=True)
        grad = torch.randn(m, 80, dtype=torch.float64)
        ran.clear()
        got = train_step(run, model, x, grad)
        kernel = "torch" if m >= 100 else "emulated"
        assert {name for name, _ in ran} == {kernel}
        assert {(kernel, (m, 208)), (kernel, (m, 80))} < set(ran)

        def forward(x):
            h = torch.relu(x.double() @ exact_model.layers[0].weight.t())
            return Layer.apply(h, exact_model.layers[1].weight, rowwise, None)

        want = train_step(forward, exact_model, x.double(), grad)
        for mine, other in ((got[0], want[0]), *((got[1][name], value) for name, value in want[1].items())):
            assert float((mine.double() - other).abs().max() / other.abs().max()) < 1e-2
    targets = no_codegen.targets()
    assert targets["loka.gemm_of_quantised_by_batch.default"] == 2
    assert targets["loka.gemm_by_batch.default"] == 1
    # In the graph: both operands of two GEMMs.
    assert targets["aten.amax.default"] == 4


# ------------------------------------------------------------------ the operator
def test_kernel_of_a_size():
    text = encode(RANGES)
    assert text == "0=high_precision:native;100=emulated:rowwise;300=emulated:tensorwise"
    for m, kernel in ((0, NATIVE), (99, NATIVE), (100, ("emulated", "rowwise")), (10**9, ("emulated", "tensorwise"))):
        assert kernel_of(text, m) == kernel
    assert kernel_of("64=emulated:rowwise", 3) == ("emulated", "rowwise")


@pytest.mark.parametrize("m", [1, 13, 199])
@pytest.mark.parametrize("ranges", ["0=high_precision:native", "0=emulated:rowwise"])
def test_opcheck(m, ranges):
    a, b = torch.randn(m, 13), torch.randn(384, 13)
    args = (a, False, b, False, "m", ranges, torch.float32, None, None)
    torch.library.opcheck(gemm_by_batch, args)
    torch.library.opcheck(gemm_by_batch, (a.t(), True, b.t(), True, "m", ranges, torch.bfloat16, 16.0, None))
    assert gemm_by_batch(*args).shape == (m, 384)


@pytest.mark.parametrize("m", [1, 13, 199])
def test_opcheck_of_quantised_operands(m):
    provider = get_provider("emulated")
    a, b = torch.randn(m, 13), torch.randn(384, 13)
    (qa, sa), (qb, sb) = provider.operands(a, False, b, False, provider.recipe("rowwise"))
    args = (qa, sa, qb, sb, m, "0=emulated:rowwise", torch.float32)
    # FP8 arguments: opcheck multiplies tensors in its schema test, which FP8 has not.
    torch.library.opcheck(
        gemm_of_quantised_by_batch, args, test_utils=("test_faketensor", "test_autograd_registration")
    )
    error = (gemm_of_quantised_by_batch(*args).double() - a.double() @ b.double().t()).abs().max()
    assert float(error) < 0.1 * float((a.double() @ b.double().t()).abs().max())
    empty = gemm_of_quantised_by_batch(qa[:0], sa[:0], qb, sb, 0, args[5], torch.bfloat16)
    assert (empty.shape, empty.dtype) == ((0, 384), torch.bfloat16)


def test_plan_written_for_the_primary_kernel_alone_is_unchanged(no_codegen):
    """Without ranges a dynamic batch gets plain operators, which Inductor fuses."""
    run = torch.compile(
        Plain((48, 64)), backend="loka", options={"plan": plan_for({"layers.0#0 forward": "emulated:rowwise"})},
        dynamic=True,
    )  # fmt: skip
    with torch.no_grad():
        run(torch.randn(20, 48))
    assert no_codegen.targets()["loka.gemm_by_batch.default"] == 0
    assert no_codegen.targets()["aten.amax.default"] == 2
