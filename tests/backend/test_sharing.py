"""What a plan's costs say is shared is what runs: one quantisation per (tensor, form), however many GEMMs read it."""

import pytest
import torch
from helpers_backend import Watch, plan_for
from models_backend import Plain, Tower
from torch import nn

from loka_compile.gemm import Gemm, Role
from loka_compile.lowering.providers import get_provider
from loka_compile.probe.site_errors import forms
from loka_compile.selection.operands import OPERANDS, TRANSPOSED, form, tensor
from loka_compile.table import BASELINE, Header, Measurement, Table

RECIPES = get_provider("emulated").recipes


def items(choices, same=None):
    """(tensor, form) of every operand of a plan, as the planner counts them."""
    found = set()
    for gemm, recipe_name in choices.items():
        site, role = gemm.split(" ")
        recipe = RECIPES[recipe_name]
        formats = ((recipe.a, recipe.a_dtype), (recipe.b, recipe.b_dtype))
        for operand, transposed, (scaling, dtype) in zip(OPERANDS[role], TRANSPOSED[role], formats, strict=True):
            name = tensor(site, operand)
            found.add(((same or {}).get(name, name), form(scaling, dtype, transposed)))
    return found


def quantisations(no_codegen):
    """Quantisations in forward and backward: each has one amax."""
    return sum(count for name, count in no_codegen.targets().items() if name == "aten.amax.default")


def run(model, choices, x, no_codegen):
    plan = plan_for({gemm: f"emulated:{recipe}" for gemm, recipe in choices.items()})
    watch = Watch()
    torch.compile(model, backend="loka", options={"plan": plan, "mods": "none"})(x).sum().backward()
    assert sum(g.decision.provider == "emulated" for g in watch.last.gemms) == len(choices)
    return watch.last


SITE = "layers.1#0"
FWD, GRAD_X, GRAD_W = (f"{SITE} {role}" for role in Role)


@pytest.mark.parametrize(
    ("choices", "count"),
    [
        ({FWD: "tensorwise", GRAD_X: "tensorwise", GRAD_W: "tensorwise"}, 3),
        ({FWD: "rowwise", GRAD_X: "rowwise", GRAD_W: "rowwise"}, 6),
        ({FWD: "rowwise", GRAD_X: "tensorwise", GRAD_W: "tensorwise"}, 5),
        ({FWD: "tensorwise", GRAD_X: "rowwise", GRAD_W: "tensorwise"}, 5),
        ({FWD: "tensorwise", GRAD_W: "tensorwise"}, 3),
        ({FWD: "blockwise", GRAD_X: "blockwise"}, 3),  # the weight in 128x128 blocks serves both
        ({FWD: "blockwise", GRAD_X: "blockwise", GRAD_W: "blockwise_1x128"}, 5),
        ({GRAD_X: "tensorwise", GRAD_W: "tensorwise"}, 3),
    ],
)
def test_one_quantisation_per_tensor_and_form(choices, count, no_codegen):
    assert len(items(choices)) == count
    run(Plain((48, 256, 128)), choices, torch.randn(128, 48), no_codegen)
    assert quantisations(no_codegen) == count


class Heads(nn.Module):
    """Two layers on one input, whose outputs are added: they share x, and the gradient of their outputs."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(48, 64, bias=False)
        self.b = nn.Linear(48, 64, bias=False)

    def forward(self, x):
        x = torch.relu(x) * 2
        return torch.relu(self.a(x) + self.b(x))


def test_sites_that_read_one_tensor_share_it(no_codegen):
    choices = {f"{site} {role}": "tensorwise" for site in ("a#0", "b#0") for role in Role}
    same = {"b#0 input": "a#0 input", "b#0 grad_output": "a#0 grad_output"}
    assert len(items(choices, same)) == 4
    run(Heads(), choices, torch.randn(32, 48, requires_grad=True), no_codegen)
    assert quantisations(no_codegen) == 4


def test_auto_finds_out_which_tensors_are_shared(no_codegen):
    """The table knows it, so the plan may count on it."""
    options = {"target": "h200", "max_mere": 1e3, "min_speedup": 1e-3, "auto_calls": 1, "mods": "none"}
    watch = Watch()
    compiled = torch.compile(Heads(), backend="loka", options=options)
    for _ in range(2):
        compiled(torch.randn(32, 48, requires_grad=True)).sum().backward()
    table = watch.last.table
    assert table.header.same == {"b#0 input": "a#0 input", "b#0 grad_output": "a#0 grad_output"}
    known = [row for row in table.rows if row.provider == "torch" and not row.refused]
    assert known
    for row in known:
        assert row.a_form
        parts = (row.a_once_us, row.a_layout_us, row.b_once_us, row.b_layout_us)
        assert sum(parts) == pytest.approx(row.quantize_us)
        assert min(parts) >= 0


def test_frozen_weights_cause_no_grad_weight_work(no_codegen):
    """The plan holds grad_weight for both layers; of the frozen one nothing runs: no GEMM, no operand for it."""
    model = Plain((48, 256, 128))
    model.layers[1].weight.requires_grad_(False)
    choices = {f"layers.{i}#0 {role}": "tensorwise" for i in range(2) for role in Role}
    plan = plan_for({gemm: f"emulated:{recipe}" for gemm, recipe in choices.items()})
    watch = Watch()
    torch.compile(model, backend="loka", options={"plan": plan, "mods": "none"})(torch.randn(128, 48)).sum().backward()
    ran = {(g.gemm.site, g.gemm.role.value) for g in watch.last.gemms}
    assert ran == {("layers.0#0", "forward"), ("layers.0#0", "grad_weight"), (SITE, "forward"), (SITE, "grad_input")}
    # x0, w0 forward; dy0 (with x0) for its grad_weight; x1, w1 forward; dy1 (with w1) for grad_input.
    assert quantisations(no_codegen) == 6
    # Transposed copies: x0 and dy0 for grad_weight, w1 for grad_input; none of x1 or dy1.
    fp8 = [
        tuple(n.meta["val"].shape)
        for gm in no_codegen.graphs for n in gm.graph.nodes
        if n.op == "call_function" and "clone" in str(n.target) and n.meta["val"].dtype == torch.float8_e4m3fn
    ]  # fmt: skip
    assert sorted(fp8) == sorted([(48, 128), (256, 128), (256, 128)])


def test_a_plan_counts_on_no_gemm_that_the_graph_lacks(no_codegen):
    """One table, in which a site pays only as a whole: in training it does, in inference and frozen it does not."""
    rows = []
    for role, (a, b) in {"forward": "xw", "grad_input": "dw", "grad_weight": "dx"}.items():
        shape = ("layers.1#0", role, 128, 128, 128, 256, "float32")
        rows.append(Measurement(*shape, *BASELINE, quantize_us=0.0, gemm_us=17.0, baseline_us=17.0, mere=0.0))
        rows.append(Measurement(*shape, "emulated", "tensorwise", quantize_us=8.0, gemm_us=10.0, baseline_us=17.0,
                                mere=0.1, a_form=a, a_once_us=4.0, b_form=b, b_once_us=4.0))  # fmt: skip
    fingerprint = {"layers.0#0": (256, 48), "layers.1#0": (128, 256)}
    table = Table(Header(target="h200", fingerprint=fingerprint), rows)

    # All three: 51 against 42. Forward and grad_input: 34 against 32.
    options = {"table": table, "target": "h200", "mods": "none", "min_speedup": 1.1}

    def plan_of(model, training=True):
        torch._dynamo.reset()
        watch = Watch()
        run_it = torch.compile(model, backend="loka", options=options)
        if training:
            run_it(torch.randn(128, 48)).sum().backward()
        else:
            with torch.no_grad():
                run_it(torch.randn(128, 48))
        return watch.last.plan.counts()

    model = Plain((48, 256, 128))
    assert plan_of(model) == {"emulated:tensorwise": 3}
    assert plan_of(model, training=False) == {"high_precision:native": 1}
    model.layers[1].weight.requires_grad_(False)
    assert plan_of(model) == {"high_precision:native": 2}


def test_a_padded_operand_is_another_form():
    """K = 13 is padded to 16 wherever it is; M = 199 in grad_weight alone, whose contraction it is."""
    provider = get_provider("torch")
    recipe = provider.recipe("tensorwise")
    found = {}
    for role, shape in {"forward": (199, 384, 13), "grad_input": (199, 13, 384), "grad_weight": (384, 13, 199)}.items():
        a, b = forms(Gemm("a#0", Role(role), *shape), provider, recipe)
        found.update({(role, what): name for what, name in zip(OPERANDS[Role(role)], (a, b), strict=True)})
    # As stored: x [M, K], dy [M, N], W [N, K].
    fp8 = "tensorwise float8_e4m3fn"
    assert found == {
        ("forward", "input"): f"{fp8} padded 1x16", ("forward", "weight"): f"{fp8} padded 1x16",
        ("grad_input", "grad_output"): fp8, ("grad_input", "weight"): f"{fp8} padded 1x16",
        ("grad_weight", "grad_output"): f"{fp8} padded 16x1", ("grad_weight", "input"): f"{fp8} padded 16x16",
    }  # fmt: skip


def test_auto_finds_out_what_a_producer_may_write_in_fp8_alone(no_codegen):
    """Behind BlockNorm and HardSwish, where none but GEMMs read it; not where a gate reads it as well."""

    class Gated(Tower):
        def forward(self, x):
            h = self.block(0, x)
            g = self.block(1, h)
            return self.head(g) * g.sum(dim=-1, keepdim=True)

    options = {"target": "h200", "max_mere": 1e3, "min_speedup": 1e-3, "auto_calls": 1}
    watch = Watch()
    compiled = torch.compile(Gated((16, 256, 256)), backend="loka", options=options)
    for _ in range(2):
        compiled(torch.randn(32, 16)).sum().backward()
    stored = {
        (row.site, row.role, row.recipe): (row.a_stored_us, row.b_stored_us)
        for row in watch.last.table.rows
        if row.provider in ("high_precision", "emulated", "torch")
    }
    assert {site for (site, _, _), us in stored.items() if any(us)} == {"linears.1#0"}
    forward, grad_weight = (stored["linears.1#0", role, "native"] for role in ("forward", "grad_weight"))
    assert forward[0] > 0
    assert forward[1] == 0  # the weight
    assert grad_weight == (0, forward[0])
    assert stored["linears.1#0", "grad_input", "native"] == (0, 0)
    assert stored["linears.1#0", "forward", "tensorwise"] == (0, 0)
    assert stored["linears.1#0", "forward", "rowwise"] == forward
