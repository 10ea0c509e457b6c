"""A user's own pass: where it runs, what can go wrong, and that it is identified."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers_passes import capture, ops, rewrite, run
from torch import nn

from loka_compile import Changes, register_pass, unregister_pass
from loka_compile.config import LokaConfig
from loka_compile.errors import ConfigError, DuplicateNameError, PassError, UnknownNameError
from loka_compile.passes import DEFAULT_PASSES, Match
from loka_compile.passes.registry import snapshot, source_of


@pytest.fixture
def register():
    names = []

    def add(fn, name="mine", **where):
        register_pass(fn, name=name, **where)
        names.append(name)

    yield add
    for name in names:
        unregister_pass(name)


def relu_to_hardswish(gm, ctx):
    changes = Changes()
    for node in gm.graph.nodes:
        if node.target is F.relu:
            node.target, node.kwargs = F.hardswish, {}
            changes.matched.append(Match("here", "relu"))
    return changes


def names():
    return [p.name for p in snapshot(LokaConfig())]


def test_the_default_order_is_the_tuple_in_the_package():
    everything = [p.name for p in snapshot(LokaConfig(residual_dtype="autocast"))]
    assert everything == [p.name for p in DEFAULT_PASSES]
    assert everything == ["bias_removal", "block_norm", "hard_swish", "residual_dtype", "token_mixing", "sites"]
    assert names() == ["bias_removal", "block_norm", "hard_swish", "token_mixing", "sites"], (
        "residual_dtype runs when it is asked for"
    )


def test_place_before_after_and_by_default(register):
    register(relu_to_hardswish, "first", before="bias_removal")
    register(relu_to_hardswish, "middle", after="block_norm")
    register(relu_to_hardswish, "default")
    register(relu_to_hardswish, "next", after="hard_swish")
    assert names() == [
        "first",
        "bias_removal",
        "block_norm",
        "middle",
        "hard_swish",
        "default",
        "next",
        "token_mixing",
        "sites",
    ]


def test_it_rewrites_and_shows_in_the_report(register):
    register(relu_to_hardswish)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    gm, report = run(model, torch.randn(3, 16))
    assert ops(gm) == ["linear", "hardswish", "linear"]
    assert report.count("mine") == 1
    assert "hardswish" in report.diff("mine")
    assert "relu" in report.graph("before")


def test_disable_passes_leaves_it_out(register):
    register(relu_to_hardswish)
    gm, _ = run(
        nn.Sequential(nn.Linear(16, 32), nn.ReLU()), torch.randn(3, 16), disable_passes=("mine", "bias_removal")
    )
    assert ops(gm) == ["linear", "relu"]
    assert gm.graph.find_nodes(op="call_function", target=torch.ops.loka.anchor.default) == []


def test_duplicate_and_unknown_names(register):
    register(relu_to_hardswish)
    with pytest.raises(DuplicateNameError, match=r"'mine' exists already .*test_registry\.py"):
        register_pass(relu_to_hardswish, name="mine")
    with pytest.raises(DuplicateNameError, match="'block_norm' exists already"):
        register_pass(relu_to_hardswish, name="block_norm")
    with pytest.raises(UnknownNameError, match=r"unknown pass 'nowhere'; known are: .*block_norm"):
        register_pass(relu_to_hardswish, name="other", after="nowhere")
    with pytest.raises(UnknownNameError, match="unknown tier 'wild'"):
        register_pass(relu_to_hardswish, name="other", tier="wild")
    with pytest.raises(ConfigError, match="before= or after="):
        register_pass(relu_to_hardswish, name="other", after="sites", before="sites")
    with pytest.raises(UnknownNameError, match="registered pass 'block_norm'"):
        unregister_pass("block_norm")
    with pytest.raises(UnknownNameError, match="'disable_passes' 'nothing'"):
        snapshot(LokaConfig(disable_passes=("nothing",)))


def _raises(gm, ctx):
    raise KeyError("oops")


def _dangling(gm, ctx):
    other = torch.fx.Graph()
    alien = other.placeholder("alien")
    node = next(n for n in gm.graph.nodes if n.op == "call_function")
    node.args = (alien, *node.args[1:])
    return Changes()


def _drops_an_output(gm, ctx):
    output = next(n for n in gm.graph.nodes if n.op == "output")
    output.args = ((*output.args[0], output.args[0][0]),)
    return Changes()


def _returns_nothing(gm, ctx):
    return None


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (_raises, r"'mine' \(.*test_registry\.py:\d+\) raised KeyError: 'oops'"),
        (_dangling, r"'mine' .* left an invalid graph: .*alien"),
        (_drops_an_output, "changed the graph's inputs or its number of outputs"),
        (_returns_nothing, "must return Changes, not NoneType"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_a_pass_that_goes_wrong_is_named(register, fn, text):
    register(fn)
    gm = capture(nn.Sequential(nn.Linear(16, 32), nn.ReLU()), torch.randn(3, 16))
    with pytest.raises(PassError, match=text):
        rewrite(gm)


def test_a_pass_is_identified_by_its_source(tmp_path):
    path = tmp_path / "own.py"
    fns = []
    for body in ("1", "2"):
        path.write_text(f"def own(gm, ctx):\n    return {body}\n")
        scope = {}
        exec(compile(path.read_text(), str(path), "exec"), scope)
        fns.append(source_of(scope["own"]))
    assert fns[0] != fns[1]
    assert source_of(relu_to_hardswish) == source_of(relu_to_hardswish)
    assert source_of(lambda gm, ctx: 1) != source_of(relu_to_hardswish)
