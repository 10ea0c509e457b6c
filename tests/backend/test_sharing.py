"""What a plan's costs say is shared is what runs: one quantisation per (tensor, form), however many GEMMs read it."""

import pytest
import torch
from helpers_backend import Watch, plan_for
from models_backend import Plain
from torch import nn

from loka_compile.gemm import Role
from loka_compile.lowering.providers import get_provider
from loka_compile.operands import OPERANDS, TRANSPOSED, form, tensor

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
