"""``explain`` and the report: what is said, that it is true, and that looking changes nothing."""

import json

import pytest
import torch
import torch.nn.functional as F
from helpers_backend import Watch, plan_for
from models_backend import Plain, Tower
from torch import nn

import loka_compile
from loka_compile.errors import ConfigError, LokaError, UnknownNameError, UnknownOptionError

OFF = {"table": "off"}


class Mixed(nn.Module):
    """A chain, a refused norm, a batch norm with state, dropout, a prediction layer."""

    def __init__(self):
        super().__init__()
        self.a, self.na = nn.Linear(16, 256), nn.LayerNorm(256)
        self.b, self.nb = nn.Linear(256, 300), nn.LayerNorm(300)  # a last block of 44 is too narrow
        self.c, self.nc = nn.Linear(300, 64), nn.BatchNorm1d(64)
        self.drop = nn.Dropout(0.5)
        self.out = nn.Linear(64, 1)

    def forward(self, x, *, shift=None):
        x = F.silu(self.na(self.a(x)))
        x = F.relu(self.nb(self.b(x)))
        x = self.drop(F.relu(self.nc(self.c(x))))
        return self.out(x if shift is None else x + shift)


def test_the_model_is_left_as_it_was(no_codegen):
    """Parameters, gradients (the objects), buffers, mode, random state, the input: all untouched."""
    model = Mixed()
    model(torch.randn(8, 16)).sum().backward()
    grads = {n: (p.grad, p.grad.clone()) for n, p in model.named_parameters()}
    state = {n: v.clone() for n, v in model.state_dict().items()}
    x = torch.randn(8, 16, requires_grad=True)
    random = torch.get_rng_state()
    loka_compile.explain(model, x, options=OFF, show=False)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(v, state[n]) for n, v in model.state_dict().items())
    for name, p in model.named_parameters():
        assert p.grad is grads[name][0]
        assert torch.equal(p.grad, grads[name][1])
    assert x.grad is None
    assert model.training
    # What is called later is the plain model, and compiling it is not hindered.
    model.eval()
    torch.testing.assert_close(model(x), model(x))


def test_what_is_said(no_codegen, capsys):
    report = loka_compile.explain(Mixed(), torch.randn(8, 16), options=OFF)
    text = capsys.readouterr().out
    assert report.chains == {"a#0": "linear-norm-swish"}
    assert [(m.site, m.kind) for m in report.matches] == [
        ("a#0", "bias"), ("b#0", "bias"), ("c#0", "bias"), ("a#0", "linear-norm-swish"), ("a#0", "linear-norm-swish")
    ]  # fmt: skip
    reasons = " ".join(r.reason for r in report.refusals)
    assert "300 features leave a last block of 44" in reasons
    assert "BatchNorm normalises over the batch" in reasons
    assert "final prediction layer" in reasons
    for part in ("training graph", "a#0", "linear-norm-swish", "last block of 44", "8 x 256 x 16", "grad_weight",
                 "high_precision:native x", "no plan: option table is 'off'"):  # fmt: skip
        assert part in text, part
    assert report.counts() == {"high_precision:native": 4 * 3 - 1}
    # The reason has the line of the model that it is about.
    (block,) = [r for r in report.refusals if "last block" in r.reason]
    assert "test_explain.py:" in block.source
    assert block.source in text or block.source.rsplit("/", 1)[-1].split(":")[0] in text


def test_graphs_and_diffs(no_codegen):
    """Every stage's graph is kept; the diff of a pass is what that pass changed and nothing else."""
    report = loka_compile.explain(Tower((13, 256)), torch.randn(4, 13), options=OFF, show=False)
    names = report.stage_names()
    assert names[:6] == ["before", "bias_removal", "block_norm", "hard_swish", "token_mixing", "sites"]
    assert {"joint", "forward", "backward"} <= set(names)
    before, after = report.graph("before"), report.graph("after")
    assert "functional.layer_norm(" in before
    assert "functional.silu(" in before
    assert "functional.layer_norm(" not in after
    assert "functional.silu(" not in after
    assert "loka.block_norm.default(" in after
    assert "functional.hardswish(" in after
    assert report.graph("hard_swish") != report.graph("block_norm")
    diff = report.diff("block_norm")
    assert "torch.ops.loka.block_norm.default +1" in diff.splitlines()[0]
    assert "layer_norm -1" in diff.splitlines()[0]
    assert "silu" not in diff.splitlines()[0]
    assert any(line.startswith("-") and "layer_norm" in line for line in diff.splitlines())
    assert any(line.startswith("+") and "block_norm" in line for line in diff.splitlines())
    assert report.diff("sites").splitlines()[0] == "# sites: no operator changed"
    with pytest.raises(UnknownNameError, match=r"'no_stage'.*before"):
        report.graph("no_stage")


def test_graphs_need_inspect(no_codegen):
    watch = Watch()
    torch.compile(Tower((13, 256)), backend="loka", options=OFF)(torch.randn(4, 13))
    with pytest.raises(UnknownNameError, match="inspect"):
        watch.last.graph("before")


def test_a_plan_and_its_fallbacks_are_shown(no_codegen, capsys):
    choices = {"layers.0#0 forward": "emulated:rowwise", "layers.1#0 forward": "torch:blockwise"}
    report = loka_compile.explain(Plain((48, 96, 13)), torch.randn(8, 48), options={"plan": plan_for(choices)})
    text = capsys.readouterr().out
    assert report.counts() == {"emulated:rowwise": 1, "high_precision:native": 4}
    assert "needs an NVIDIA GPU" in text
    assert "emulated:rowwise x 1" in text


def test_preview_of_a_plan_from_the_given_inputs(no_codegen, capsys, tmp_path):
    """table="auto": the inputs are the sample; candidates with error and speed-up are shown, and nothing is cached."""
    report = loka_compile.explain(Plain((48, 160, 80)), torch.randn(64, 48), options={"target": "h200"})
    text = capsys.readouterr().out
    assert report.plan is not None
    assert report.table is not None
    decision = next(g.decision for g in report.gemms if g.gemm.role.value == "forward")
    assert len(decision.verdicts) >= 3
    assert all(v.reason for v in decision.verdicts), "a GEMM this small is not worth FP8"
    assert any(v.mere == v.mere and v.speedup == v.speedup for v in decision.verdicts)
    assert "speed-up" in text
    assert decision.reason.split()[0] in text
    assert len(report.gemms) == 5, "the sampled version of the graph is not counted"
    assert not list((tmp_path / "loka_cache").glob("*.json"))


def test_graph_breaks_give_one_report(no_codegen):
    class Broken(Tower):
        def forward(self, x):
            x = self.block(0, x)
            torch._dynamo.graph_break()
            return self.head(self.block(1, x))

    report = loka_compile.explain(Broken(), torch.randn(4, 13), options=OFF, show=False)
    assert set(report.chains) == {"linears.0#0", "linears.1#0"}
    assert len(report.gemms) == 3 * 3 - 1
    assert "graph 1" in report.graph("before")


def test_again_and_again(no_codegen):
    """The same question has the same answer, also more often than Dynamo recompiles one function."""
    tower, x = Tower((13, 256)), torch.randn(4, 13)
    first = loka_compile.explain(tower, x, options=OFF, show=False)
    for index in range(10):
        options = OFF if index % 2 else {"block_size": 128, **OFF}
        again = loka_compile.explain(tower, x, options=options, show=False)
        assert len(again.gemms) == len(first.gemms) == 5
        assert again.chains == first.chains
    # A model that has been compiled with the backend can be explained too.
    compiled = torch.compile(tower, backend="loka", options=OFF)
    compiled(x)
    assert loka_compile.explain(tower, x, options=OFF, show=False).chains == first.chains
    assert loka_compile.explain(compiled, x, options=OFF, show=False).chains == first.chains


def test_inference_keywords_and_no_grad(no_codegen):
    model = Mixed().eval()
    with torch.no_grad():
        report = loka_compile.explain(model, torch.randn(8, 16), shift=torch.ones(64), options=OFF, show=False)
    assert report.is_training is False
    assert {g.gemm.role.value for g in report.gemms} == {"forward"}
    assert "inference graph" in str(report)


def test_nothing_to_compile_is_said():
    class Nothing(nn.Module):
        def forward(self, x):
            return x

    with pytest.raises(ValueError, match="nothing was compiled"):
        loka_compile.explain(Nothing(), torch.ones(2), options=OFF, show=False)


@pytest.mark.parametrize(
    ("options", "error"), [({"block_size": 100}, ConfigError), ({"no_such": 1}, UnknownOptionError)]
)
def test_errors_come_as_they_are(options, error):
    """The LokaError itself, not wrapped in Dynamo's."""
    with pytest.raises(LokaError) as caught:
        loka_compile.explain(Tower((13, 256)), torch.randn(4, 13), options=options, show=False)
    assert type(caught.value) is error


def test_report_as_plain_data(no_codegen):
    """JSON without special cases, with the same counts."""
    report = loka_compile.explain(Tower((13, 256)), torch.randn(4, 13), options=OFF, show=False)
    data = json.loads(json.dumps(report.to_dict()))
    assert [s["name"] for s in data["stages"]] == ["bias_removal", "block_norm", "hard_swish", "token_mixing", "sites"]
    assert all(s["seconds"] >= 0 for s in data["stages"])
    assert data["counts"] == report.counts()
    assert {(g["site"], g["role"]) for g in data["gemms"]} == {(g.gemm.site, g.gemm.role.value) for g in report.gemms}
