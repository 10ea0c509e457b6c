"""apply_mods: the eager twin of the backend's rewriting."""

from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parent / "passes"))

import loka_compile
from loka_compile import BlockNorm, HardSwish, apply_mods
from loka_compile.errors import ApplyModsError, ConfigError


class Model(nn.Module):
    """Embedding, residual block, SwishNorm, dropout as a function, a buffer, a layer that forward does not use."""

    def __init__(self, n=256):
        super().__init__()
        self.embed = nn.Embedding(10, 16)
        self.a, self.na = nn.Linear(16, n), nn.LayerNorm(n)
        self.b, self.nb = nn.Linear(n, n), nn.RMSNorm(n)
        self.head = nn.Sequential(nn.Linear(n, 64), nn.LayerNorm(64), nn.SiLU(), nn.Dropout(0.5), nn.Linear(64, 1))
        self.spare = nn.Linear(3, 3)
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.register_buffer("halved", torch.tensor(0.5), persistent=False)

    def forward(self, ids):
        x = self.embed(ids).mean(1)
        x = F.silu(self.na(self.a(x)))
        h = self.b(x)
        x = h * torch.sigmoid(self.nb(h)) * self.scale * self.halved
        return self.head(F.dropout(x, 0.25, self.training))


@pytest.fixture
def model():
    torch.manual_seed(0)
    torch._dynamo.reset()
    return Model()


IDS = torch.arange(30).reshape(6, 5) % 10


def test_it_is_an_eager_module_with_the_mods_as_modules(model):
    eager = apply_mods(model)
    kinds = [type(m) for m in eager.modules()]
    assert kinds.count(BlockNorm) == 3
    assert kinds.count(HardSwish) == 2
    assert eager.loka_report.chains == {
        "a#0": "linear-norm-swish",
        "b#0": "linear-swishnorm",
        "head.0#0": "linear-norm-swish",
    }


def test_state_dict_round_trip_is_strict_both_ways(model):
    eager = apply_mods(model)
    assert list(sorted(eager.state_dict())) == list(sorted(model.state_dict()))
    assert {n for n, _ in eager.named_parameters()} == {n for n, _ in model.named_parameters()}
    other = Model()
    other.load_state_dict(eager.state_dict(), strict=True)
    eager.load_state_dict(Model().state_dict(), strict=True)


def test_parameters_are_shared_and_the_model_is_left_alone(model):
    before = repr(model)
    model.eval()
    want = model(IDS)
    eager = apply_mods(model)
    assert dict(eager.named_parameters())["a.weight"] is model.a.weight
    assert repr(model) == before
    assert torch.equal(model(IDS), want)
    assert not torch.equal(eager(IDS), want)


def test_same_function_as_the_backend(model):
    model.eval()
    eager = apply_mods(model)
    compiled = torch.compile(model, backend="loka", options={"table": "off"})
    want, got = eager(IDS), compiled(IDS)
    assert ((got - want).norm() / want.norm()).item() < 1e-5
    want.sum().backward()
    wanted = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    got.sum().backward()
    for name, grad in wanted.items():
        assert model.get_parameter(name).grad is not None, name
        torch.testing.assert_close(model.get_parameter(name).grad, grad, rtol=1e-4, atol=1e-5)


def test_compiled_without_mods_it_gives_the_same_graph(model):
    model.eval()
    graphs = []
    for module, mods in ((model, "all"), (apply_mods(model), "none")):
        torch._dynamo.reset()
        compiled = torch.compile(module, backend="loka", options={"mods": mods, "table": "off", "inspect": True})
        compiled(IDS).sum().backward()
        report = loka_compile.reports()[-1]
        lines = [line for line in report.graph("joint").splitlines() if not line.strip().startswith("#")]
        calls = [line.split(" = ")[1].split("(")[0] for line in lines if " = torch.ops" in line]
        graphs.append(sorted(calls))
    assert graphs[0] == graphs[1]
    assert sum("aten.rsqrt" in call for call in graphs[0]) == 3  # the decomposed BlockNorms


def test_unused_parameters_get_zero_gradients_or_are_removed(model):
    eager = apply_mods(model)
    eager(IDS).sum().backward()
    for name in ("a.bias", "na.weight", "na.bias", "nb.weight", "head.0.bias", "head.1.weight"):
        assert not eager.get_parameter(name).grad.any()
    assert eager.get_parameter("head.4.bias").grad.any()
    lean = apply_mods(copy.deepcopy(model), remove_unused=True)
    names = {n for n, _ in lean.named_parameters()}
    assert names == {"embed.weight", "a.weight", "b.weight", "head.0.weight", "head.4.weight", "head.4.bias"}
    lean.eval(), eager.eval()
    torch.testing.assert_close(lean(IDS), eager(IDS))


def test_dropout_follows_train_and_eval(model):
    eager = apply_mods(model.train())
    assert not torch.equal(eager(IDS), eager(IDS))
    eager.eval()
    assert torch.equal(eager(IDS), eager(IDS))
    assert not apply_mods(model.eval()).training


def test_copies_and_pickles(model):
    eager = apply_mods(model).eval()
    want = eager(IDS)
    clone = copy.deepcopy(eager)
    assert torch.equal(clone(IDS), want)
    assert clone.get_parameter("a.weight") is not model.a.weight
    assert torch.equal(pickle.loads(pickle.dumps(clone))(IDS), want)


def test_options_and_errors(model):
    assert apply_mods(model, mods=("hard_swish",)).loka_report.count("block_norm") == 0
    assert apply_mods(model, block_size=128).get_submodule("block_norm_0").block_size == 128
    with pytest.raises(ConfigError, match="unknown option 'blok_size'"):
        apply_mods(model, blok_size=128)

    class Branches(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    with pytest.raises(ApplyModsError, match=r"cannot trace Branches\.forward"):
        apply_mods(Branches())


def test_exports(model):
    eager = apply_mods(model).eval()
    program = torch.export.export(eager, (IDS,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    assert "loka" not in program.graph_module.code
    torch.testing.assert_close(program.module()(IDS[:3]), eager(IDS[:3]))
