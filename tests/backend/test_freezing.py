"""Inference with ``torch._inductor.config.freezing``: weights are quantised when compiling, and never again."""

import copy
import warnings

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import nn

import loka_compile
from loka_compile.lowering.providers import get_provider
from loka_compile.passes.sites import original_name
from loka_compile.plan import Decision, Plan

pytestmark = pytest.mark.filterwarnings("ignore::loka_compile.ModsWarning")


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    parts = [m for _ in range(2) for m in (nn.Linear(256, 256), nn.LayerNorm(256), nn.SiLU())]
    return nn.Sequential(*parts).bfloat16().eval().requires_grad_(False)


def plan(recipe: str) -> Plan:
    return Plan([Decision(f"{3 * i}#0", "forward", "torch", recipe) for i in range(2)])


def run(model, x, recipe, freezing):
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="loka", options={"plan": plan(recipe), "inspect": True})
    with torch.no_grad(), inductor_config.patch(freezing=freezing):
        out = compiled(x)
    return compiled, out, loka_compile.reports()[-1]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_weights_are_constants_in_fp8(recipe):
    reason = get_provider("torch").supported(get_provider("torch").recipe(recipe), "cpu")
    if reason:
        pytest.skip(reason)
    model, x = chain(), torch.randn(48, 256).bfloat16()
    want_model = copy.deepcopy(model)
    _, want, plain = run(want_model, x, recipe, False)
    compiled, got, frozen = run(model, x, recipe, True)
    assert torch.equal(got, want)
    assert frozen.counts() == plain.counts() == {f"torch:{recipe}": 2}
    # One amax per operand; of the frozen graph's, those of the weights are gone.
    assert plain.graph("forward").count("aten.amax") - frozen.graph("forward").count("aten.amax") == 2
    assert "_frozen_param" in frozen.graph("forward")
    # Inductor's contract: what is frozen does not see the weights any more.
    model[0].weight.data.zero_()
    with torch.no_grad(), inductor_config.patch(freezing=True):
        assert torch.equal(compiled(x), want)


class Nested(nn.Module):
    """Layers in containers within containers, reached by iteration: Dynamo's table of flat names misses them."""

    def __init__(self):
        super().__init__()
        block = {"mlp": nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.SiLU(), nn.Linear(16, 16))}
        self.layers = nn.ModuleList(nn.ModuleDict(copy.deepcopy(block)) for _ in range(2))
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        for layer in self.layers:
            for part in layer["mlp"]:
                x = part(x)
        return self.head(x)


def test_sites_are_named_alike_with_and_without_freezing():
    sites = []
    for freezing in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(Nested().eval(), backend="loka", options={"table": "off"})
        with torch.no_grad(), inductor_config.patch(freezing=freezing):
            compiled(torch.randn(4, 16))
        sites.append([g.gemm.site for g in loka_compile.reports()[-1].gemms])
    assert sites[0] == sites[1] == [f"layers.{i}.mlp.{j}#0" for i in range(2) for j in (0, 3)] + ["head#0"]


def test_a_flat_name_of_two_parameters_is_nobodys():
    known = {"getattr_1": "a.b_c.weight", "getattr_2": "a_b.c.weight", "getattr_3": "d.e.weight", "L__self___f": "g.f"}
    assert original_name("L__self___a_b_c_weight", known) == "L__self___a_b_c_weight"
    assert original_name("L__self___d_e_weight", known) == "d.e.weight"
    assert original_name("L__self___f", known) == "g.f"


def test_freezing_as_an_option_says_that_it_does_nothing():
    model, x = chain(), torch.randn(48, 256).bfloat16()
    compiled = torch.compile(model, backend="loka", options={"plan": plan("tensorwise"), "freezing": True})
    with torch.no_grad(), warnings.catch_warnings():
        compiled(x)
    assert any("torch._inductor.config.freezing" in note for note in loka_compile.reports()[-1].notes)
