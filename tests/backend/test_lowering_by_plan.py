"""Each GEMM in the kernel that the plan names, and in no other: outputs and gradients against the documented rule."""

import pytest
import torch
from fp8_reference import RECIPES, Layer, product
from helpers_backend import Watch, assert_same_step, close, plan_for, train_step
from models_backend import Plain, Tower, exact, hard_swish, mods_of

from loka_compile.errors import UnknownNameError

SITE = "layers.1#0"
ROLES = ("forward", "grad_input", "grad_weight")


def plain_reference(model, recipes):
    """The forward of ``Plain`` with GEMMs of its second layer in FP8, in fp64."""

    def forward(x):
        h = torch.relu(x.double() @ model.layers[0].weight.t())
        return Layer.apply(h, model.layers[1].weight, recipes, None)

    return forward


def compile_with(model, choices, **options):
    watch = Watch()
    return torch.compile(model, backend="loka", options={"plan": plan_for(choices), "mods": "none", **options}), watch


def difference(a, b):
    """Largest relative difference over output and gradients."""
    pairs = [(a[0], b[0])] + [(a[1][name], b[1][name]) for name in b[1]]
    return max(float((x.double() - y.double()).abs().max() / y.abs().max()) for x, y in pairs)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_products_that_feed_each_other(recipe, fuse, no_codegen):
    """No operator between two layers: the second product's operand is the first, which is replaced before it."""
    model = torch.nn.Sequential(*(torch.nn.Linear(k, n, bias=False) for k, n in ((48, 80), (80, 64), (64, 96))))
    reference = exact(model)
    x = torch.randn(96, 48, requires_grad=True)
    choices = {f"{index}#0 {role}": f"emulated:{recipe}" for index in range(3) for role in ROLES}
    run, watch = compile_with(model, choices, fuse=fuse)
    got = train_step(run, model, x)

    def rounded(x):
        for layer in reference:
            x = Layer.apply(x, layer.weight, dict.fromkeys(ROLES, recipe), None)
        return x

    want = train_step(rounded, reference, x.double())
    without = train_step(reference, reference, x.double())
    assert difference(got, want) < 0.3 * difference(without, want)
    assert watch.last.counts() == {f"emulated:{recipe}": 9}


CASES = [(r, role) for r in RECIPES for role in ROLES if (r, role) != ("blockwise", "grad_weight")]


@pytest.mark.parametrize(("recipe", "role"), CASES, ids=["-".join(c) for c in CASES])
def test_one_gemm_emulated(recipe, role, no_codegen):
    """Ragged blocks in every dimension: M = 150, K = 200, N = 72. One GEMM is FP8, all the others are exact."""
    model = Plain((48, 200, 72))
    reference = exact(model)
    x = torch.randn(150, 48, requires_grad=True)
    # Rows and columns of very different sizes, so that scales along the wrong dimension give other numbers.
    with torch.no_grad():
        model.layers[1].weight.mul_(torch.exp2(torch.randint(-6, 6, (72, 1)).float()))
        reference.load_state_dict(model.state_dict())
    run, watch = compile_with(model, {f"{SITE} {role}": f"emulated:{recipe}"})
    got = train_step(run, model, x)
    want = train_step(plain_reference(reference, {role: recipe}), reference, x.double())
    without = train_step(plain_reference(reference, {}), reference, x.double())
    # The division by the scale may round the other way here and there: far less than FP8 itself changes.
    assert difference(got, want) < 0.15 * difference(without, want)
    ran = {(g.gemm.site, g.gemm.role.value): f"{g.decision.provider}:{g.decision.recipe}" for g in watch.last.gemms}
    assert ran.pop((SITE, role)) == f"emulated:{recipe}"
    assert set(ran.values()) == {"high_precision:native"}
    assert len(ran) == 5
    assert watch.last.counts() == {f"emulated:{recipe}": 1, "high_precision:native": 5}


class Stored(torch.nn.Module):
    """``x @ v`` with a weight that is stored as [K, N]."""

    def __init__(self, k, n):
        super().__init__()
        self.v = torch.nn.Parameter(torch.randn(k, n) * torch.exp2(torch.randint(-6, 6, (1, n)).float()))

    def forward(self, x):
        return x @ self.v


@pytest.mark.parametrize(
    ("role", "recipe"),
    [("forward", "rowwise"), ("forward", "blockwise"), ("grad_input", "blockwise"), ("grad_weight", "rowwise")],
)
def test_weight_stored_the_other_way_round(role, recipe, no_codegen):
    """Rows and contraction of each operand are those of the GEMM, not of how the weight lies in memory."""
    model = Stored(200, 72)
    x, grad = torch.randn(150, 200, requires_grad=True), torch.randn(150, 72, dtype=torch.float64)
    run, watch = compile_with(model, {f"v#0 {role}": f"emulated:{recipe}"})
    got = train_step(run, model, x, grad)
    assert watch.last.counts() == {f"emulated:{recipe}": 1, "high_precision:native": 2}
    v, x = model.v.detach().double(), x.detach().double()
    operands = {"forward": (x, v.t()), "grad_input": (grad, v), "grad_weight": (x.t(), grad.t())}
    results = {"forward": got[0], "grad_input": got[1]["x"], "grad_weight": got[1]["v"]}
    for name, (a, b) in operands.items():
        if name == role:
            want, without = product(a, b, recipe), a @ b.t()
            close(results[name], want, 0.15 * float((want - without).abs().max() / want.abs().max()), name)
        else:
            close(results[name], a @ b.t(), 1e-5, name)


def test_two_sites_of_one_layer_are_decided_apart(no_codegen):
    """The same layer called twice on the same input: one call in FP8, the other exact, though both are one product."""

    class Twice(Plain):
        def forward(self, x):
            return torch.stack([self.layers[0](x), self.layers[0](x)])

    model = Twice((48, 64))
    run, _ = compile_with(model, {"layers.0#1 forward": "emulated:rowwise"})
    x = torch.randn(40, 48)
    with torch.no_grad():
        first, second = run(x)
        close(first, exact(model).layers[0](x.double()), 1e-5)
        want = product(x, model.layers[0].weight, "rowwise")
        close(second, want, 1e-3)
        assert float((first - second).abs().max()) > 1e-3 * float(first.abs().max())


def test_every_gemm_at_once_with_real_code():
    """All six GEMMs of two layers in FP8 through Inductor's own code generation."""
    model = Plain((48, 160, 72))
    reference = exact(model)
    recipes = {"forward": "rowwise", "grad_input": "tensorwise", "grad_weight": "rowwise"}
    choices = {f"layers.{i}#0 {role}": f"emulated:{r}" for i in range(2) for role, r in recipes.items()}
    run, watch = compile_with(model, choices)
    x = torch.randn(150, 48, requires_grad=True)
    weight = torch.randn(150, 72, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    got = train_step(run, model, x, weight)

    def forward(x):
        h = torch.relu(Layer.apply(x.double(), reference.layers[0].weight, recipes, None))
        return Layer.apply(h, reference.layers[1].weight, recipes, None)

    want = train_step(forward, reference, x.double(), weight)
    without = train_step(plain_reference(reference, {}), reference, x.double(), weight)
    assert difference(got, want) < 0.15 * difference(without, want)
    assert watch.last.counts() == {"emulated:rowwise": 4, "emulated:tensorwise": 2}


def test_fixed_scale_behind_block_norm(no_codegen):
    """After BlockNorm and HardSwish the bound is 16: the operand is multiplied by 16 and no amax is taken."""
    tower = Tower((16, 256), out=32)
    reference = exact(tower)
    recipes = {"forward": "tensorwise", "grad_weight": "tensorwise"}
    options = {"plan": plan_for({f"head#0 {role}": f"emulated:{r}" for role, r in recipes.items()})}
    watch = Watch()
    x = torch.randn(40, 16)
    got = train_step(torch.compile(tower, backend="loka", options=options), tower, x)

    def forward(fixed):
        def run(x):
            z = x.double() @ reference.linears[0].weight.t()
            h = hard_swish(z * torch.rsqrt(z.square().mean(-1, keepdim=True) + reference.norms[0].eps))
            return Layer.apply(h, reference.head.weight, recipes, fixed) + reference.head.bias

        return run

    want = train_step(forward(16.0), reference, x)
    other = train_step(forward(None), reference, x)
    used = ("head.weight", "head.bias")
    for name in used:
        close(got[1][name], want[1][name], 0.01, name)
    step = float((other[0] - want[0]).abs().max())
    assert float((got[0] - want[0]).abs().max()) < 0.2 * step, "the scale is that of the amax, not the fixed one"
    assert watch.last.counts()["emulated:tensorwise"] == 2
    # The activation has no amax of its own: two are left, of the weight and of the output's gradient.
    amaxes = sum(n for op, n in no_codegen.targets().items() if op in ("aten.amax.default", "aten.max.default"))
    assert amaxes == 2


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_torch_provider_on_the_cpu(recipe, request):
    """aten._scaled_mm in all roles, forward with a bias behind it; tensorwise through Inductor's code generation."""
    if recipe == "rowwise":
        request.getfixturevalue("no_codegen")
    if recipe == "rowwise" and tuple(int(v) for v in torch.__version__.split(".")[:2]) < (2, 13):
        pytest.skip("rowwise scaled_mm on a CPU needs torch 2.13")
    model = Plain((64, 96, 32), bias=True)
    reference = exact(model)
    x = torch.randn(48, 64, requires_grad=True)
    run, watch = compile_with(model, {f"{SITE} {role}": f"torch:{recipe}" for role in ROLES})
    got = train_step(run, model, x)
    assert watch.last.counts() == {f"torch:{recipe}": 3, "high_precision:native": 3}, str(watch.last)

    def forward(recipes):
        def run(x):
            h = torch.relu(reference.layers[0](x.double()))
            return Layer.apply(h, reference.layers[1].weight, recipes, None) + reference.layers[1].bias

        return run

    want = train_step(forward(dict.fromkeys(ROLES, recipe)), reference, x.double())
    without = train_step(forward({}), reference, x.double())
    assert difference(got, want) < 0.15 * difference(without, want)


def test_dynamic_batch_stays_dynamic(no_codegen):
    """Every size is right. Blocks along the batch tell one block from more (128 rows), and nothing else."""
    model = Plain((48, 200, 72))
    reference = exact(model)
    recipes = {"forward": "blockwise", "grad_input": "rowwise", "grad_weight": "blockwise_1x128"}
    run, watch = compile_with(model, {f"{SITE} {role}": f"emulated:{r}" for role, r in recipes.items()})
    torch._dynamo.utils.counters.clear()
    for rows in (130, 7, 300, 128, 129, 64):
        x = torch.randn(rows, 48, requires_grad=True)

        def marked(x):
            torch._dynamo.mark_dynamic(x, 0)
            return run(x)

        got = train_step(marked, model, x)
        want = train_step(plain_reference(reference, recipes), reference, x.double())
        without = train_step(plain_reference(reference, {}), reference, x.double())
        assert difference(got, want) < 0.2 * difference(without, want), rows
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == len(watch.reports) <= 2


@pytest.mark.parametrize("rows", [0, 1])
def test_empty_and_single_rows(rows, no_codegen):
    model = Plain((48, 200, 72))
    reference = exact(model)
    recipes = dict.fromkeys(ROLES, "rowwise")
    run, _ = compile_with(model, {f"{SITE} {role}": f"emulated:{r}" for role, r in recipes.items()})
    x = torch.randn(rows, 48, requires_grad=True)
    got = train_step(run, model, x)
    assert got[0].shape == (rows, 72)
    if rows:
        want = train_step(plain_reference(reference, recipes), reference, x.double())
        assert_same_step(got, want, 0.02)
    else:
        assert all(not g.any() for g in got[1].values())


def test_autocast_and_checkpointing_under_a_plan(no_codegen):
    """The planned GEMMs keep the dtype that autocast gives them, and recomputed ones are the planned ones as well."""
    from models_backend import Checkpointed

    model = Checkpointed((16, 256, 256))
    reference = exact(model)
    choices = {f"linears.{i}#0 {role}": "emulated:rowwise" for i in range(2) for role in ROLES}
    watch = Watch()
    run = torch.compile(model, backend="loka", options={"plan": plan_for(choices)})
    x = torch.randn(40, 16, requires_grad=True)

    def autocast(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return run(x)

    got = train_step(autocast, model, x)
    assert got[0].dtype == torch.bfloat16
    assert all(g.dtype == torch.float32 for g in got[1].values())
    assert {g.gemm.dtype for g in watch.last.gemms} == {"bfloat16"}
    assert watch.last.counts()["emulated:rowwise"] == 6
    want = train_step(mods_of(reference), reference, x)
    assert_same_step(got, want, 0.2, model.unused)


def test_shapes_that_the_kernel_does_not_take_are_padded(no_codegen):
    """K = 13 in the forward, N = 13 in grad_input, and a contraction of 30 rows: all three run in FP8."""
    model = Plain((48, 13, 64))
    reference = exact(model)
    choices = {role: "tensorwise" for role in ROLES}
    run, watch = compile_with(model, {f"{SITE} {role}": "torch:tensorwise" for role in ROLES})
    x = torch.randn(30, 48, requires_grad=True)
    got = train_step(run, model, x)
    want = train_step(plain_reference(reference, choices), reference, x.double())
    without = train_step(plain_reference(reference, {}), reference, x.double())
    assert difference(got, want) < 0.15 * difference(without, want)
    assert watch.last.counts() == {"torch:tensorwise": 3, "high_precision:native": 3}


def test_planned_kernel_that_refuses_stays_in_high_precision(no_codegen):
    """Exact results, and the report says who refused and why."""
    model = Plain((48, 13, 64))
    reference = exact(model)
    run, watch = compile_with(model, {f"{SITE} {role}": "torch:blockwise" for role in ROLES})
    x = torch.randn(32, 48, requires_grad=True)
    assert_same_step(train_step(run, model, x), train_step(reference, reference, x.double()), 1e-5)
    fallbacks = {g.gemm.role.value: g.fallback for g in watch.last.gemms if g.gemm.site == SITE}
    assert set(fallbacks) == set(ROLES)
    for role, reason in fallbacks.items():
        assert "torch:blockwise was planned" in reason
        assert ("grad_weight has none" if role == "grad_weight" else "needs an NVIDIA GPU") in reason
    assert watch.last.counts() == {"high_precision:native": 6}
    assert "needs an NVIDIA GPU" in str(watch.last)


def test_plan_for_another_device_is_emulated(no_codegen):
    """target="h200" on a CPU: the kernel that the plan names, in emulated numerics."""
    model = Plain((48, 208, 80))
    reference = exact(model)
    run, watch = compile_with(model, {f"{SITE} forward": "torch:rowwise_fast"}, target="h200")
    x = torch.randn(150, 48)
    got = train_step(run, model, x)
    want = train_step(plain_reference(reference, {"forward": "rowwise"}), reference, x.double())
    without = train_step(plain_reference(reference, {}), reference, x.double())
    assert difference(got, want) < 0.15 * difference(without, want)
    assert watch.last.counts() == {"torch:rowwise_fast": 1, "high_precision:native": 4}
    assert not any("_scaled_mm" in op for op in no_codegen.targets())
    assert any("1 GEMMs run here as an emulation" in note for note in watch.last.notes)


def test_fp64_is_not_for_fp8(no_codegen):
    """A model in fp64 keeps fp64 products, and the report says why."""
    model = Plain().double()
    run, watch = compile_with(model, {f"{SITE} forward": "emulated:rowwise"})
    x = torch.randn(8, 48, dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(run(x), model(x))
    assert any("not float64" in g.fallback for g in watch.last.gemms)


def test_gemms_the_plan_does_not_name(no_codegen):
    model = Plain()
    run, watch = compile_with(model, {"nowhere#0 forward": "emulated:rowwise"})
    x = torch.randn(4, 48)
    reference = exact(model)
    close(run(x), reference(x.double()), 1e-5)
    assert {d.reason for d in watch.last.decisions} == {"the plan does not name this GEMM"}


@pytest.mark.parametrize(
    ("candidate", "parts"),
    [("cutlass:rowwise", ["'cutlass'", "torch"]), ("torch:rowwice", ["'rowwice'", "rowwise", "torch", SITE])],
)
def test_plan_with_an_unknown_kernel(candidate, parts):
    run, _ = compile_with(Plain(), {f"{SITE} forward": candidate})
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        run(torch.randn(4, 48))
    error = caught.value.inner_exception
    assert isinstance(error, UnknownNameError)
    assert all(part in str(error) for part in parts), str(error)


def test_a_plan_file_is_read(tmp_path, no_codegen):
    """Saved, edited by hand as the docs say, and used."""
    path = tmp_path / "plan.json"
    plan_for({f"{SITE} forward": "emulated:rowwise"}).save(path)
    path.write_text(path.read_text().replace('"recipe": "rowwise"', '"recipe": "tensorwise"'))
    watch = Watch()
    with torch.no_grad():
        torch.compile(Plain(), backend="loka", options={"plan": str(path), "mods": "none"})(torch.randn(4, 48))
    assert watch.last.counts() == {"emulated:tensorwise": 1, "high_precision:native": 1}
