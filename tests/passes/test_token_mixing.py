"""Linear layers over the token axis become batched products: where, where not, and with which numbers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers_passes import ops, run
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from loka_compile.plan import Decision, Plan
from loka_compile.report import reports

B, N, D, M = 6, 10, 32, 4


class Mixing(nn.Module):
    """[B, n, d] -> whatever ``how`` makes of a linear layer [m, n] over the tokens."""

    def __init__(self, how, tokens=N, out=M, bias=False):
        super().__init__()
        self.how = how
        self.linear = nn.Linear(tokens, out, bias=bias)

    def forward(self, x):
        return self.how(x, self.linear)


SPELLINGS = {
    "transpose": lambda x, f: f(x.transpose(1, 2)).transpose(1, 2),
    "negative": lambda x, f: f(x.transpose(-1, -2)).transpose(-2, -1),
    "function": lambda x, f: torch.transpose(f(torch.transpose(x, 2, 1)), 2, 1),
    "mT": lambda x, f: f(x.mT).mT,
    "permute": lambda x, f: f(x.permute(0, 2, 1)).permute((0, 2, 1)),
    "torch.permute": lambda x, f: torch.permute(f(torch.permute(x, (0, 2, 1))), (0, 2, -2)),
    "swapaxes": lambda x, f: f(x.swapaxes(1, 2)).swapaxes(1, 2),
    "contiguous": lambda x, f: f(x.transpose(1, 2).contiguous()).transpose(1, 2).contiguous(),
    "bmm": lambda x, f: torch.bmm(x, f(x.transpose(1, 2))),
    "both": lambda x, f: (f(x.mT).mT, torch.bmm(x, f(x.mT))),
}
KEPT = {
    "no transpose": (lambda x, f: f(x), {"tokens": D}),
    "tokens last in the output": (lambda x, f: f(x.transpose(1, 2)), {}),
    "norm over the tokens": (lambda x, f: F.layer_norm(f(x.transpose(1, 2)), (M,)).transpose(1, 2), {}),
    "transposed back and forth": (lambda x, f: f(x.mT).mT.mT.reshape(-1), {}),
    "another axis": (lambda x, f: f(x.transpose(0, 2)).transpose(0, 2), {"tokens": B}),
    "more tokens than features": (lambda x, f: f(x.transpose(1, 2)).transpose(1, 2), {"out": D + 1}),
    "many tokens": (lambda x, f: f(x.transpose(1, 2)).transpose(1, 2), {"out": 300}),
}


def matched(report):
    (stage,) = [s for s in report.stages if s.name == "token_mixing"]
    return stage


@pytest.mark.parametrize("how", SPELLINGS)
def test_every_spelling_becomes_batched(how):
    gm, report = run(Mixing(SPELLINGS[how]), torch.randn(B, N, D))
    names = ops(gm)
    assert "linear" not in names
    count = 2 if how == "both" else 1
    assert [m.site for m in matched(report).matched] == ["linear"] * count
    assert report.count("sites") == 0
    assert names.count("bmm") == {"bmm": 2, "both": 3}.get(how, 1)
    if how not in ("bmm", "both"):  # the transposes undid each other
        out = next(n for n in gm.graph.nodes if n.op == "output").args[0][0]
        assert (out.args[0] if out.target == "contiguous" else out).target == "bmm"


@pytest.mark.parametrize("how", KEPT)
def test_others_stay_linear_layers(how):
    fn, sizes = KEPT[how]
    gm, report = run(Mixing(fn, **sizes), torch.randn(B, N, D))
    assert ops(gm).count("linear") == 1
    assert matched(report).matched == ()
    reasons = {"tokens last in the output": "with the tokens last", "norm over the tokens": "with the tokens last",
               "transposed back and forth": "transposed once more", "many tokens": "300 tokens are more",
               "more tokens than features": "33 tokens come out of rows of 32"}  # fmt: skip
    assert [r.reason for r in matched(report).refused if reasons.get(how, "-") in r.reason] == [
        r.reason for r in matched(report).refused
    ]
    assert len(matched(report).refused) == (how in reasons)


def test_layers_behind_each_other():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Mixing(SPELLINGS["transpose"]), Mixing(SPELLINGS["mT"], tokens=M, out=3)

        def forward(self, x):
            x = self.first(x)
            return self.second(x) + x[:, :3]

    gm, report = run(Two(), torch.randn(B, N, D))
    assert [m.site for m in matched(report).matched] == ["first.linear", "second.linear"]
    assert "linear" not in ops(gm)


def test_rows_that_no_load_fits_stay():
    gm, report = run(Mixing(SPELLINGS["transpose"]), torch.randn(B, N, 13))
    assert ops(gm).count("linear") == 1
    assert "rows of 13 torch.float32 are not whole 16 bytes" in matched(report).refused[0].reason


def test_rows_of_a_moving_width_stay():
    gm, report = run(Mixing(SPELLINGS["transpose"]), torch.randn(B, N, D), dynamic=True)
    assert ops(gm).count("linear") == 1
    assert "the width of its rows is not known" in matched(report).refused[0].reason


@pytest.mark.filterwarnings("ignore::loka_compile.ModsWarning")
@pytest.mark.parametrize("write", [lambda x: x.add_(1), lambda x: x.__setitem__(0, 2.0), lambda x: x[:, 1:].mul_(2)])
@pytest.mark.parametrize("copied", [True, False])
def test_what_is_written_to_in_place_stays(write, copied):
    """The layer reads a copy of x as it was, or a view of x as it is now."""

    def mix(x, f):
        x = x * 1
        turned = x.mT.contiguous() if copied else x.mT
        write(x)
        return f(turned).mT + x[:, :M]

    model, x = Mixing(mix), torch.randn(B, N, D)
    out = torch.compile(model, backend="loka", options={"table": "off"})(x)
    torch.testing.assert_close(out, model(x))
    assert "written to in place" in matched(reports()[-1]).refused[0].reason


def test_weights_that_are_not_learnt_stay():
    """A product of two activations is no layer; it is the user's own choice how to write it."""

    class Two(nn.Module):
        def forward(self, x, w):
            return F.linear(x.mT, w).mT

    gm, report = run(Two(), torch.randn(B, N, D), torch.randn(M, N))
    assert ops(gm).count("linear") == 1
    assert matched(report).matched == matched(report).refused == ()


def test_it_can_be_left_out():
    gm, report = run(Mixing(SPELLINGS["mT"]), torch.randn(B, N, D), disable_passes=("token_mixing",))
    assert ops(gm).count("linear") == 1
    assert report.count("sites") == 1


def step(fn, model, x, grad, autocast=False):
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = fn(x)
    (out * grad).sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in model.parameters())]


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.filterwarnings("ignore::loka_compile.ModsWarning")
@pytest.mark.parametrize(
    ("batch", "tokens", "out", "dtype", "autocast", "bound"),
    [
        (1, 10, 4, torch.float32, False, 1e-6),
        (199, 34, 32, torch.float32, False, 1e-6),
        (7, 13, 5, torch.float64, False, 1e-14),
        (64, 34, 24, torch.bfloat16, False, 0.004),
        (65, 13, 1, torch.float32, True, 0.01),
        (64, 1, 3, torch.float32, True, 0.01),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_numbers_and_gradients_against_fp64(batch, tokens, out, dtype, autocast, bound, bias):
    torch.manual_seed(0)
    model = Mixing(SPELLINGS["transpose"], tokens, out, bias).to(dtype)
    x, grad = torch.randn(batch, tokens, D, dtype=dtype), torch.randn(batch, out, D, dtype=dtype)
    exact = copy.deepcopy(model).double()
    expected = step(exact, exact, x.double(), grad.double())
    compiled = torch.compile(model, backend="loka", options={"table": "off"}, fullgraph=True)
    found = step(compiled, model, x, grad, autocast)
    assert [m.kind for m in matched(reports()[-1]).matched] == ["batched"]
    assert found[0].dtype == (torch.bfloat16 if autocast else dtype)
    for a, b in zip(found, expected, strict=True):
        # Rounded operands, and a gradient that is a sum of 64 rounded products of both signs, 8 times as large as one:
        # at most 64 / 8 roundings of 2^-9 (bf16), if all had one sign.
        assert relative(a, b) < bound


@pytest.mark.filterwarnings("ignore::loka_compile.ModsWarning")
def test_one_graph_for_all_batches():
    model = Mixing(SPELLINGS["transpose"])
    compiled = torch.compile(model, backend="loka", options={"table": "off"}, fullgraph=True)
    made = set()
    for batch in (3, 8, 64, 2):
        x = torch.randn(batch, N, D)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(x), model(x))
        made.add(id(reports()[-1]))
    assert len(made) == 1
    assert matched(reports()[-1]).matched


@pytest.mark.filterwarnings("ignore::loka_compile.ModsWarning")
def test_in_a_checkpointed_body():
    class Checkpointed(Mixing):
        def forward(self, x):
            return checkpoint(lambda x: torch.sin(super(Checkpointed, self).forward(x)), x, use_reentrant=False)

    torch.manual_seed(0)
    model = Checkpointed(SPELLINGS["transpose"])
    exact = copy.deepcopy(model).double()
    x, grad = torch.randn(B, N, D), torch.randn(B, M, D)
    expected = step(exact, exact, x.double(), grad.double())
    found = step(torch.compile(model, backend="loka", options={"table": "off"}), model, x, grad)
    assert matched(reports()[-1]).matched
    for a, b in zip(found, expected, strict=True):
        assert relative(a, b) < 1e-6


@pytest.mark.filterwarnings("ignore::loka_compile.ModsWarning")
@pytest.mark.parametrize("left_out", [(), ("token_mixing",)])
def test_a_plan_that_is_passed_over_is_told_of(left_out):
    decision = Decision("linear#0", "forward", "emulated", "rowwise", "test", None, None, ())
    options = {"plan": Plan((decision,)), "disable_passes": left_out}
    torch.compile(Mixing(SPELLINGS["transpose"]), backend="loka", options=options)(torch.randn(B, N, D))
    report = reports()[-1]
    assert report.counts().get("emulated:rowwise", 0) == len(left_out)
    assert sum("the plan has FP8 for linear, which pass token_mixing" in note for note in report.notes) == 1 - len(
        left_out
    )


@pytest.mark.filterwarnings("ignore::loka_compile.ModsWarning")
def test_frozen_weights():
    model = Mixing(SPELLINGS["transpose"]).eval()
    x = torch.randn(B, N, D)
    with torch.no_grad():
        out = torch.compile(model, backend="loka", options={"table": "off", "freeze_weights": True})(x)
        torch.testing.assert_close(out, model(x))
        model.linear.weight.mul_(2)
        torch.testing.assert_close(torch.compile(model, backend="loka", options={"table": "off"})(x), model(x))


@pytest.mark.filterwarnings("ignore::loka_compile.ModsWarning")
def test_no_transposed_copy_is_left():
    """What the pass is for: apart from the two small sums that make the weight's gradient, nothing is copied."""
    model = Mixing(SPELLINGS["both"])
    compiled = torch.compile(model, backend="loka", options={"table": "off", "inspect": True})
    a, b = compiled(torch.randn(B, N, D, requires_grad=True))
    (a.sum() + b.sum()).backward()
    for half in ("forward", "backward"):
        text = reports()[-1].graph(half)
        assert f"[{B}, {D}, {N}]" not in "".join(line for line in text.splitlines() if "clone" in line)
        assert "aten.mm" not in text
