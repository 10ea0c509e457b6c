"""The map (site, role) of every GEMM, over the shapes and surroundings in which linear layers are used."""

import pytest
import torch
import torch.nn.functional as F
from helpers_backend import Watch, roles_of
from models_backend import Checkpointed, Plain, Tower
from torch import nn

PLAN_NOTHING = {"table": "off", "inspect": True}  # inspect installs the hooks also where nothing is rewritten


def role_map(model, x, *, autocast=False, inference=False, dynamic=None, **options):
    """{(site, role): count} of one training step, and the report."""
    watch = Watch()
    run = torch.compile(model, backend="loka", options={**PLAN_NOTHING, **options}, dynamic=dynamic)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast), torch.set_grad_enabled(not inference):
        y = run(x)
    if not inference:
        y.float().sum().backward()
    assert len(watch.reports) == 1
    return dict(roles_of(watch.last)), watch.last


def expected(sites, without_input_grad=()):
    """Every site three times, the named ones without grad_input."""
    found = {(site, role): 1 for site in sites for role in ("forward", "grad_input", "grad_weight")}
    for site in without_input_grad:
        del found[site, "grad_input"]
    return found


TOWER = ("linears.0#0", "linears.1#0", "head#0")


def tower_case(cls=Tower, shape=(19, 13), grad=False, dtype=torch.float32, **kwargs):
    x = torch.randn(shape, dtype=dtype, requires_grad=grad)
    # Three outputs: of one row and one column Inductor makes a sum, which is no GEMM any more.
    return cls(out=3).to(dtype), x, kwargs, expected(TOWER, () if grad else ("linears.0#0",))


CASES = {
    "plain": lambda: tower_case(),
    "input grad": lambda: tower_case(grad=True),
    "checkpointed": lambda: tower_case(cls=Checkpointed, grad=True),
    "autocast": lambda: tower_case(autocast=True),
    "bf16": lambda: tower_case(dtype=torch.bfloat16),
    "3-D dynamic": lambda: tower_case(shape=(3, 7, 13), dynamic=True),
    "autocast 3-D dynamic checkpointed": lambda: tower_case(
        cls=Checkpointed, shape=(3, 7, 13), grad=True, dynamic=True, autocast=True
    ),
    "no Mods": lambda: tower_case(mods="none"),
    "no Mods 4-D": lambda: tower_case(mods="none", shape=(2, 3, 4, 13), grad=True),
    "1-D input": lambda: tower_case(shape=(13,), grad=True),
    "one row": lambda: tower_case(shape=(1, 13), grad=True),
    "inference": lambda: (*tower_case()[:2], {"inference": True}, {(s, "forward"): 1 for s in TOWER}),
    "bias kept": lambda: tower_case(mods=("block_norm",), grad=True),
}


@pytest.mark.parametrize("name", CASES)
def test_role_map(name, no_codegen):
    model, x, kwargs, want = CASES[name]()
    found, report = role_map(model, x, **kwargs)
    assert found == want
    assert report.unmapped == []
    for lowered in report.gemms:  # m, n, k follow from the role and from the layer's own sizes
        layer = model.get_submodule(lowered.gemm.site.split("#")[0])
        n, k, m = layer.out_features, layer.in_features, x.numel() // x.shape[-1]
        sizes = {"forward": (m, n, k), "grad_input": (m, k, n), "grad_weight": (n, k, m)}
        gemm = lowered.gemm
        assert (gemm.m, gemm.n, gemm.k) == sizes[gemm.role.value], str(gemm)


def test_dynamic_letters(no_codegen):
    """The batch is m of forward and grad_input, k of grad_weight; in bf16 under autocast the GEMM says bfloat16."""
    tower = Tower()
    _, report = role_map(tower, torch.randn(3, 7, 13), dynamic=True, autocast=True)
    for lowered in report.gemms:
        assert lowered.gemm.dynamic == ("k" if lowered.gemm.role.value == "grad_weight" else "m")
        assert lowered.gemm.dtype == "bfloat16"


def test_bounds_behind_block_norm(no_codegen):
    """BlockNorm bounds what the next layer reads by sqrt(256); its output gradient and weights are not bounded."""
    _, report = role_map(Tower((13, 384, 128)), torch.randn(5, 13))
    bounds = {(g.gemm.site, g.gemm.role.value): (g.gemm.a_bound, g.gemm.b_bound) for g in report.gemms}
    assert bounds["linears.0#0", "forward"] == (None, None)
    assert bounds["linears.1#0", "forward"] == (16.0, None)
    assert bounds["linears.1#0", "grad_weight"] == (None, 16.0)
    assert bounds["linears.1#0", "grad_input"] == (None, None)
    assert bounds["head#0", "forward"] == (pytest.approx(128**0.5), None)  # one block of 128 features


class Calls(nn.Module):
    """Linear layers in other words than nn.Linear."""

    def __init__(self, forward):
        super().__init__()
        self.w = nn.Parameter(torch.randn(24, 16) / 4)  # [N, K]
        self.v = nn.Parameter(torch.randn(16, 24) / 4)  # [K, N]
        self.lin = nn.Linear(16, 16, bias=False)
        self.one = nn.Linear(16, 1, bias=False)
        self.run = forward

    def forward(self, x):
        return self.run(self, x)


OTHER_WORDS = {
    "x @ w.t()": (lambda m, x: x @ m.w.t(), {"w#0"}),
    "x @ w.T": (lambda m, x: x @ m.w.T, {"w#0"}),
    "x @ w.mT": (lambda m, x: x @ m.w.mT, {"w#0"}),
    "torch.mm, transpose": (lambda m, x: torch.mm(x, m.w.transpose(0, 1)), {"w#0"}),
    "x @ v": (lambda m, x: x @ m.v, {"v#0"}),
    "torch.matmul(x, v)": (lambda m, x: torch.matmul(x, m.v), {"v#0"}),
    "x.matmul(v)": (lambda m, x: x.matmul(m.v), {"v#0"}),
    "x.mm(v)": (lambda m, x: x.mm(m.v), {"v#0"}),
    "w @ x.t()": (lambda m, x: m.w @ x.t(), {"w#0"}),
    "F.linear": (lambda m, x: F.linear(x, m.w), {"w#0"}),
    "F.linear of a cast weight": (lambda m, x: F.linear(x.double(), m.w.double()), {"w#0"}),
    "out_features = 1": (lambda m, x: m.one(x), {"one#0"}),
    "twice the same x and w": (lambda m, x: m.lin(x) * m.lin(x).sigmoid(), {"lin#0", "lin#1"}),
    "twice in a row": (lambda m, x: m.lin(m.lin(x).relu()), {"lin#0", "lin#1"}),
    "x is also the weight's input of another": (lambda m, x: (m.lin(x) * 2) @ m.v + (x @ m.v), {"lin#0", "v#0", "v#1"}),
}


@pytest.mark.parametrize("name", OTHER_WORDS)
def test_role_map_in_other_words(name, no_codegen):
    forward, sites = OTHER_WORDS[name]
    found, report = role_map(Calls(forward), torch.randn(40, 16, requires_grad=True), mods="none")
    assert {site for site, _ in found} == sites
    assert found == expected(sites)
    assert report.unmapped == []


def test_products_that_are_no_layers_are_reported(no_codegen):
    """A product of activations, one with a computed weight, and a batched one: high precision, each with a reason."""

    def forward(m, x):
        scores = x @ x.t()
        mixed = x @ (m.w.t() * 2)
        heads = torch.bmm(x.view(1, 5, 16), m.v.unsqueeze(0))
        return m.lin(x).sum() + scores.sum() + mixed.sum() + heads.sum()

    found, report = role_map(Calls(forward), torch.randn(5, 16, requires_grad=True), mods="none")
    assert {site for site, _ in found} == {"lin#0"}
    # x @ x.t() is one forward and two backward products; the computed weight likewise.
    assert len(report.unmapped) >= 6
    assert all("not made by a linear layer" in line or "batched" in line for line in report.unmapped)
    assert "GEMMs without a site or role" in str(report)


class Transformed(nn.Module):
    """A layer fed by views of one activation, as multi-head code does it."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.out = nn.Linear(32, 8)

    def forward(self, x):
        q, k = self.q(x.transpose(0, 1)), self.k(x.flip(0)).transpose(0, 1)
        return self.out(torch.cat([q, k], -1))


def test_layers_behind_transposes_of_an_activation(no_codegen):
    found, report = role_map(Transformed(), torch.randn(3, 5, 16, requires_grad=True), mods="none")
    assert found == expected({"q#0", "k#0", "out#0"})
    assert report.unmapped == []


def test_frozen_weight_has_no_grad_weight(no_codegen):
    model = Plain()
    model.layers[1].weight.requires_grad_(False)
    found, _ = role_map(model, torch.randn(5, 48), mods="none")
    assert found == {
        ("layers.0#0", "forward"): 1, ("layers.0#0", "grad_weight"): 1,
        ("layers.1#0", "forward"): 1, ("layers.1#0", "grad_input"): 1,
    }  # fmt: skip


def test_graph_break_keeps_the_names(no_codegen):
    """Each part of a broken model names its layers by the same paths; a shared layer counts anew in each graph."""

    class Broken(Plain):
        def forward(self, x):
            x = torch.relu(self.layers[0](x))
            torch._dynamo.graph_break()
            return self.layers[1](x)

    watch = Watch()
    run = torch.compile(Broken(), backend="loka", options=PLAN_NOTHING)
    run(torch.randn(4, 48)).sum().backward()
    assert [{s for s, _ in roles_of(r)} for r in watch.reports] == [{"layers.0#0"}, {"layers.1#0"}]
