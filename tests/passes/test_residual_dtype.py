"""residual_dtype="autocast": where a norm's fp32 result is rounded, where it is left alone, and what it costs.

A CPU's autocast leaves norms in the dtype of their input; the fixture ``norms_in_fp32`` gives it CUDA's rule.
"""

from __future__ import annotations

import copy
import operator

import pytest
import torch
import torch.nn.functional as F
from helpers_passes import capture, ops
from helpers_residual import BF16, D, Function, PostNorm, autocast, dtypes, rounded, rows
from torch import nn
from torch.utils.checkpoint import checkpoint

from loka_compile import apply_mods
from loka_compile.config import LokaConfig
from loka_compile.passes.base import PassContext
from loka_compile.passes.residual_dtype import residual_dtype

pytestmark = pytest.mark.usefixtures("norms_in_fp32")


# ---------------------------------------------------------------------------------------------- where it acts
@pytest.mark.parametrize("mods", ["none", "all"])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_the_stream_of_a_post_norm_model_is_16_bit(mods, norm):
    gm, report = rounded(PostNorm(3, norm), rows(), mods=mods)
    # Three activations go into a cat; of three outer norms the last one feeds a GEMM alone.
    assert report.count("residual_dtype") == 5
    assert set(dtypes(gm)["cat"]) == set(dtypes(gm)["add"]) == set(dtypes(gm)["getitem"]) - {torch.float32} == {BF16}
    assert all(n.args[0].meta["example_value"].dtype == BF16 for n in gm.graph.nodes if n.target == "chunk")
    assert dtypes(gm)["bfloat16"] == [BF16] * 5
    assert "float" not in dtypes(gm)
    kinds = {m.kind for stage in report.stages if stage.name == "residual_dtype" for m in stage.matched}
    assert kinds == {"norm result in bfloat16"}
    names = {m.site for stage in report.stages if stage.name == "residual_dtype" for m in stage.matched}
    assert names == {"inner.0", "inner.1", "inner.2", "outer.0", "outer.1"}


def test_without_the_option_everything_stays_fp32():
    gm, report = rounded(PostNorm(), rows(), residual_dtype="model")
    assert "bfloat16" not in ops(gm)
    assert torch.float32 in dtypes(gm)["add"]
    assert report.count("residual_dtype") == 0


def test_disable_passes_leaves_it_out():
    gm, _ = rounded(PostNorm(), rows(), disable_passes=("residual_dtype",))
    assert "bfloat16" not in ops(gm)


def test_running_twice_changes_nothing():
    gm, _ = rounded(PostNorm(), rows(), mods="all")
    before = ops(gm)
    with autocast():
        assert residual_dtype(gm, PassContext(LokaConfig(residual_dtype="autocast"))).matched == []
    assert ops(gm) == before


def test_autocast_within_the_graph_and_its_islands():
    """Only the norm inside of the enabled region is rounded; an enabled=False region keeps the user's fp32."""

    def fn(m, x):
        with autocast():
            y = m.norm(m.linear(x))
            inside = y + m.linear(y)
            with autocast(enabled=False):
                z = m.other(inside.float())
                island = z + z
        outside = m.norm(x) + x
        return inside, island, outside

    gm, report = rounded(fn, rows(), ambient=None)
    assert report.count("residual_dtype") == 1
    assert dtypes(gm)["add"] == [BF16, torch.float32, torch.float32]
    cast = gm.graph.find_nodes(op="call_method", target="bfloat16")[0]
    assert "nn_module_stack" in cast.meta, "it says where it comes from"


def test_autocast_off_around_and_nested_dtype():
    def fn(m, x):
        with autocast(torch.float16):
            y = m.norm(m.linear(x))
            return y + m.linear(y)

    gm, report = rounded(fn, rows())
    assert [m.kind for m in report.matches] == ["norm result in float16"]
    assert ops(gm).count("half") == 1
    gm, report = rounded(lambda m, x: m.norm(m.linear(x)) + x, rows(), ambient=None)
    assert report.count("residual_dtype") == 0
    assert ops(gm) == ops(capture(Function(lambda m, x: m.norm(m.linear(x)) + x), rows()))


def test_a_device_whose_autocast_has_no_rule_is_left_alone(norms_in_fp32, monkeypatch):
    """The CPU as it is: a norm's result there has its input's dtype, and could change downstream."""
    monkeypatch.setattr("loka_compile.passes.autocast.has_autocast_rule", lambda *_: False)
    _, report = rounded(PostNorm(), rows())
    assert report.count("residual_dtype") == 0


def test_a_checkpointed_layer_runs_under_its_callers_autocast():
    def fn(m, x):
        def block(x):
            y = m.norm(m.linear(x))
            return m.linear(y) + y

        with autocast():
            return checkpoint(block, x, use_reentrant=False)

    gm, report = rounded(fn, rows(), ambient=None)
    assert report.count("residual_dtype") == 1
    assert ops(gm).count("bfloat16") == 1
    assert ops(gm).count("float") == 1, "the body's output keeps its dtype"


# ---------------------------------------------------------------------------------- where nothing is to be gained
@pytest.mark.parametrize(
    "fn",
    [
        lambda m, x: m.linear(m.norm(m.linear(x))),
        lambda m, x: m.linear(F.silu(m.norm(m.linear(x))).flatten(0, 1)),
        lambda m, x: torch.bmm(m.norm(x), m.norm(x).transpose(1, 2)),
        lambda m, x: m.norm(m.linear(x)),
        lambda m, x: m.norm(m.linear(x)).flatten(1),
        lambda m, x: m.norm(m.linear(x)).sum(-1),
        lambda m, x: m.norm(m.linear(x)).float() + x,
        lambda m, x: m.norm(m.linear(x)).to(torch.float64) + 1,
        lambda m, x: m.norm(m.linear(x)) > 0,
        lambda m, x: torch.softmax(m.norm(m.linear(x)), -1),
        lambda m, x: m.norm(m.linear(x)).view(torch.int32) + 1,
        lambda m, x: m.norm(m.linear(x)).view(dtype=torch.int32) + 1,
    ],
)
def test_untouched(fn):
    gm, report = rounded(fn, rows())
    assert report.count("residual_dtype") == 0
    assert "bfloat16" not in ops(gm)


def test_only_safe_consumers_read_the_rounded_value():
    def fn(m, x):
        y = m.norm(m.linear(x))
        return y + m.linear(y), y, y.mean(), y.float() * 2, y.flatten(1)

    x = rows()
    torch.manual_seed(0)
    model = Function(fn)
    with autocast():
        want = model(x)
    gm, report = rounded(model, x)
    assert report.count("residual_dtype") == 1
    with autocast():
        got = gm(*gm.meta["inputs"])
    assert [g.dtype for g in got] == [w.dtype for w in want] == [torch.float32] * 5
    assert not torch.equal(got[0], want[0])
    for g, w in zip(got[1:], want[1:], strict=True):
        assert torch.equal(g, w), "what is not rounded keeps every bit"


def test_one_cast_and_views_of_it():
    def fn(m, x):
        y = F.silu(m.norm(m.linear(x)))
        z = torch.stack([y.transpose(1, 2).reshape(3, -1), y.flatten(1)])
        return ((m.linear(y) - y * 2)[:, 1:] - 1).sum(), F.dropout(z, 0.5).sum()

    gm, _ = rounded(fn, rows())
    assert ops(gm).count("bfloat16") == 1
    cast = gm.graph.find_nodes(op="call_method", target="bfloat16")[0]
    assert cast.args[0].target is F.silu, "rounded once, behind the activation"
    found = dtypes(gm)
    for name in ("transpose", "reshape", "flatten", "stack", "mul", "sub", "dropout", "getitem"):
        assert set(found[name]) == {BF16}, name
    assert ops(gm).count("float") == 2


@pytest.mark.parametrize(
    "activation",
    [
        lambda y, x: F.silu(y),
        lambda y, x: y * torch.sigmoid(y),
        lambda y, x: torch.sigmoid(y) * y,
        lambda y, x: x * torch.sigmoid(y),
    ],
)
@pytest.mark.parametrize("mods", ["none", "all"])
def test_behind_each_spelling_of_an_activation(activation, mods):
    def fn(m, x):
        h = m.linear(x)
        y = activation(m.norm(h), h)
        return y + m.linear(y)

    gm, report = rounded(fn, rows(), mods=mods)
    assert report.count("residual_dtype") == 1
    cast = gm.graph.find_nodes(op="call_method", target="bfloat16")[0]
    assert cast.args[0].target in (F.silu, F.hardswish, operator.mul), cast.args[0]


def test_a_gate_on_something_else_is_rounded_before_it():
    """sigmoid(norm(x)) * table: the table's fp32 is the user's own choice."""
    gm, _ = rounded(lambda m, x: torch.sigmoid(m.norm(m.linear(x))) * x, rows())
    assert dtypes(gm)["mul"] == [torch.float32]
    assert dtypes(gm)["sigmoid"] == [torch.float32]


def test_an_fp32_operand_promotes_again_and_a_scalar_does_not():
    def fn(m, x):
        y = m.norm(m.linear(x))
        return y + x, y * 0.5, y * m.norm.weight.sum()

    gm, _ = rounded(fn, rows())
    assert dtypes(gm)["add"] == [torch.float32]
    assert dtypes(gm)["mul"] == [BF16, BF16]
    assert ops(gm).count("float") == 2


def test_a_gemm_or_norm_behind_the_end_of_autocast_reads_fp32():
    """Outside of autocast a linear layer refuses an operand in another dtype than its weight's."""

    def fn(m, x):
        with autocast():
            y = m.norm(m.linear(x))
            z = y + m.linear(y)
        return m.linear(z), m.other(z), z - y

    gm, report = rounded(fn, rows(), ambient=None)
    assert report.count("residual_dtype") == 1
    assert dtypes(gm)["linear"] == [BF16, BF16, torch.float32]
    assert dtypes(gm)["layer_norm"] == [torch.float32] * 2
    gm(*gm.meta["inputs"])


# ------------------------------------------------------------------------------------------------ written in place
def add_to_the_norm(m, x):
    y = m.norm(m.linear(x))
    z = y - x
    y += 1.0
    return y * y, z


def add_to_a_view(m, x):
    y = m.norm(m.linear(x))
    y.view(-1)[3:].add_(1.0)
    return y * 2


def write_an_item(m, x):
    y = m.norm(m.linear(x))
    y[0] = 0
    return y * 2


def write_downstream(m, x):
    y = m.norm(m.linear(x))
    z = y + m.linear(y)
    w = z
    w += 1.0
    return z * 2, F.relu(z - y, inplace=True)


@pytest.mark.parametrize("fn", [add_to_the_norm, add_to_a_view, write_an_item, write_downstream])
def test_what_is_written_in_place_is_not_a_copy(fn):
    x, model = rows(), Function(fn)
    with torch.no_grad():
        with autocast():
            want = model(x)
        gm, _ = rounded(model, x)
        with autocast():
            got = gm(*gm.meta["inputs"])
    for g, w in zip(got, want if isinstance(want, tuple) else (want,), strict=True):
        torch.testing.assert_close(g, w, rtol=2**-6, atol=2**-5)


def test_in_place_on_the_norm_is_refused_with_the_reason():
    with torch.no_grad():
        _, report = rounded(add_to_the_norm, rows())
    assert report.count("residual_dtype") == 0
    assert any("written to in place" in r.reason for r in report.refusals)


def test_adding_to_something_else_in_place_refuses_nothing():
    def fn(m, x):
        y = m.norm(m.linear(x))
        z = m.linear(x) * 2
        z += y
        return z, y - m.linear(y)

    _, report = rounded(fn, rows())
    assert report.count("residual_dtype") == 1


# ------------------------------------------------------------------------------------------------ numbers
def step(run, inputs, params, enabled=True):
    """Output and gradients by parameter of a loss that is linear in the output, with fixed random weights."""
    with autocast(enabled=enabled):
        y = run(*inputs)
    y = y[0] if isinstance(y, (tuple, list)) else y
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [y.detach(), *torch.autograd.grad((y.double() * weights).sum(), params)]


@pytest.mark.parametrize("mods", ["none", "all"])
@pytest.mark.parametrize("batch", [199, 7])
def test_error_against_fp64_is_that_of_bf16(mods, batch):
    """Rounding the stream adds to the error of the 16-bit GEMMs no more than that error itself."""
    torch.manual_seed(3)
    model, x = PostNorm(3), rows(batch, 4, D)
    exact = apply_mods(copy.deepcopy(model), mods=mods).double()
    want = step(exact, (x.double(),), list(exact.parameters()), enabled=False)
    errors = {}
    for choice in ("model", "autocast"):
        gm, _ = rounded(model, x, mods=mods, residual_dtype=choice)
        got = step(gm, gm.meta["inputs"], list(model.parameters()))
        assert [g.dtype for g in got] == [BF16] + [torch.float32] * (len(got) - 1)
        errors[choice] = [float((g.double() - w).norm() / w.norm()) for g, w in zip(got, want, strict=True) if w.any()]
    middle = {choice: sum(found) / len(found) for choice, found in errors.items()}
    assert 2**-9 < middle["model"] < 0.05
    assert middle["autocast"] < 1.5 * middle["model"]
    assert errors["autocast"] != errors["model"], "nothing was rounded"


def test_gradients_of_the_stream_are_16_bit():
    """What flows back into the rounded value is of its dtype; the cast's own gradient is fp32 for the norm."""
    gm, _ = rounded(PostNorm(3), rows())
    seen = []

    class Hooks(torch.fx.Interpreter):
        def run_node(self, n):
            value = super().run_node(n)
            if n.target == "bfloat16":
                value.register_hook(lambda g: seen.append(g.dtype))
            return value

    with autocast():
        y = Hooks(gm).run(*gm.meta["inputs"])[0]
    y.sum().backward()
    assert seen == [BF16] * 5
