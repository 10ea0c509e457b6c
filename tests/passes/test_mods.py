"""Each Mod alone and all together: golden graphs, numbers, idempotence, final layers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers_passes import capture, golden, ops, rewrite, run
from torch import nn


class Tower(nn.Module):
    """Two chains (a plain one, SwishNorm), an inner linear with ReLU, and a prediction layer."""

    def __init__(self, n=512):
        super().__init__()
        self.a, self.na = nn.Linear(16, n), nn.LayerNorm(n)
        self.b, self.nb = nn.Linear(n, 256), nn.LayerNorm(256)
        self.c, self.out = nn.Linear(256, 32), nn.Linear(32, 1)

    def forward(self, x):
        x = F.silu(self.na(self.a(x)))
        h = self.b(x)
        x = h * torch.sigmoid(self.nb(h))
        return self.out(F.relu(self.c(x)))


class TowerMods(Tower):
    """The same tower with the Mods written out, in fp64 if asked."""

    def forward(self, x):
        def block_norm(h):
            blocks = [h[:, i : i + 256] for i in range(0, h.shape[1], 256)]
            return torch.cat([b / (b.square().mean(1, keepdim=True) + 1e-5).sqrt() for b in blocks], 1)

        def relu6(t):
            return t.clamp(0, 6)

        y = block_norm(x @ self.a.weight.t())
        x = y * relu6(y + 3) / 6
        h = x @ self.b.weight.t()
        x = h * relu6(block_norm(h) + 3) / 6
        return self.out(F.relu(x @ self.c.weight.t()))


GOLDEN = {
    "bias_removal": """\
v0 = linear(x, aweight, None)
v1 = anchor.default(v0, [abias])
v2 = layer_norm(v1, (512,), naweight, nabias, 1e-05)
v3 = silu(v2)
v4 = linear(v3, bweight, None)
v5 = anchor.default(v4, [bbias])
v6 = layer_norm(v5, (256,), nbweight, nbbias, 1e-05)
v7 = sigmoid(v6)
v8 = mul(v5, v7)
v9 = linear(v8, cweight, None)
v10 = anchor.default(v9, [cbias])
v11 = relu(v10)
v12 = linear(v11, outweight, outbias)
return (v12,)""",
    "block_norm": """\
v0 = linear(x, aweight, abias)
v1 = block_norm.default(v0, 256, 1e-05)
v2 = getitem(v1, 0)
v3 = anchor.default(v2, [naweight, nabias])
v4 = silu(v3)
v5 = linear(v4, bweight, bbias)
v6 = block_norm.default(v5, 256, 1e-05)
v7 = getitem(v6, 0)
v8 = anchor.default(v7, [nbweight, nbbias])
v9 = sigmoid(v8)
v10 = mul(v5, v9)
v11 = linear(v10, cweight, cbias)
v12 = relu(v11)
v13 = linear(v12, outweight, outbias)
return (v13,)""",
    "hard_swish": """\
v0 = linear(x, aweight, abias)
v1 = layer_norm(v0, (512,), naweight, nabias, 1e-05)
v2 = hardswish(v1)
v3 = linear(v2, bweight, bbias)
v4 = layer_norm(v3, (256,), nbweight, nbbias, 1e-05)
v5 = hardsigmoid(v4)
v6 = mul(v3, v5)
v7 = linear(v6, cweight, cbias)
v8 = relu(v7)
v9 = linear(v8, outweight, outbias)
return (v9,)""",
    "all": """\
v0 = linear(x, aweight, None)
v1 = anchor.default(v0, [abias])
v2 = block_norm.default(v1, 256, 1e-05)
v3 = getitem(v2, 0)
v4 = anchor.default(v3, [naweight, nabias])
v5 = hardswish(v4)
v6 = linear(v5, bweight, None)
v7 = anchor.default(v6, [bbias])
v8 = block_norm.default(v7, 256, 1e-05)
v9 = getitem(v8, 0)
v10 = anchor.default(v9, [nbweight, nbbias])
v11 = hardsigmoid(v10)
v12 = mul(v7, v11)
v13 = linear(v12, cweight, None)
v14 = anchor.default(v13, [cbias])
v15 = relu(v14)
v16 = linear(v15, outweight, outbias)
return (v16,)""",
}


@pytest.mark.parametrize("mods", GOLDEN)
def test_golden_graph(mods):
    gm, _ = run(Tower(), torch.randn(3, 16), mods="all" if mods == "all" else (mods,))
    assert golden(gm) == GOLDEN[mods]


@pytest.mark.parametrize("mods", ["all", "none", ("bias_removal",), ("block_norm",), ("hard_swish", "block_norm")])
def test_running_twice_changes_nothing(mods):
    gm, first = run(Tower(), torch.randn(3, 16), mods=mods)
    before = golden(gm)
    second = rewrite(gm, mods=mods)
    assert golden(gm) == before
    assert second.matches == []
    assert bool(first.matches) == (mods != "none")


@pytest.mark.parametrize("n", [512, 384, 200])
def test_the_rewritten_graph_computes_the_mods(n):
    torch.manual_seed(n)
    model, x = Tower(n), torch.randn(7, 16)
    reference = TowerMods(n).double()
    reference.load_state_dict(model.state_dict())
    gm = capture(model, x)
    rewrite(gm)
    torch.testing.assert_close(gm(*gm.meta["inputs"])[0].double(), reference(x.double()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mods", [("bias_removal",), ("block_norm",), "all"])
def test_parameters_that_are_no_longer_read_get_a_zero_gradient(mods):
    model, x = Tower(), torch.randn(5, 16)
    gm, report = run(model, x, mods=mods)
    gm(*gm.meta["inputs"])[0].sum().backward()
    zero = {name for name, p in model.named_parameters() if not p.grad.any()}
    want = set()
    if mods in ("all", ("bias_removal",)):
        want |= {"a.bias", "b.bias", "c.bias"}
    if mods in ("all", ("block_norm",)):
        want |= {"na.weight", "na.bias", "nb.weight", "nb.bias"}
    assert zero == want
    assert report.unused("bias") + report.unused("norm") == len(want)


class Heads(nn.Module):
    """Which layers are final: those whose output reaches the graph's output past no GEMM and nothing of ours."""

    def __init__(self):
        super().__init__()
        self.trunk, self.click, self.like = nn.Linear(16, 32), nn.Linear(32, 1), nn.Linear(32, 1)
        self.last, self.norm = nn.Linear(32, 256), nn.LayerNorm(256)

    def forward(self, x):
        t = F.relu(self.trunk(x))
        return torch.sigmoid(self.click(t)), self.like(t).squeeze(-1) * 2 + 1, F.silu(self.norm(self.last(t)))


def test_only_final_prediction_layers_keep_their_bias():
    _, report = run(Heads(), torch.randn(3, 16))
    assert {m.site for m in report.matches if m.kind == "bias"} == {"trunk#0", "last#0"}
    assert [r.reason.split()[3] for r in report.refusals if "final" in r.reason] == ["click#0", "like#0"]
    _, report = run(Heads(), torch.randn(3, 16), remove_final_bias=True)
    assert {m.site for m in report.matches if m.kind == "bias"} == {"trunk#0", "last#0", "click#0", "like#0"}


def test_a_layer_inside_checkpointing_is_final_only_if_the_outer_graph_ends_there():
    from torch.utils.checkpoint import checkpoint

    class M(nn.Module):
        def __init__(self, more):
            super().__init__()
            self.a, self.b, self.more = nn.Linear(16, 16), nn.Linear(16, 16), more

        def forward(self, x):
            x = checkpoint(self.a, x, use_reentrant=False)
            return self.b(x) if self.more else x

    for more, removed in ((True, {"a#0"}), (False, set())):
        _, report = run(M(more), torch.randn(3, 16))
        assert {m.site for m in report.matches} == removed


@pytest.mark.parametrize(("block", "blocks"), [(128, 4), (256, 2), (1024, 1)])
def test_block_size_option(block, blocks):
    gm, _ = run(Tower(), torch.randn(3, 16), block_size=block)
    nodes = [x for x in gm.graph.nodes if x.target is torch.ops.loka.block_norm.default]
    assert [x.args[1] for x in nodes] == [block, block]
    _, rstd = torch.ops.loka.block_norm(torch.randn(3, 512), block, 1e-5)
    assert rstd.shape == (3, blocks)


def test_shared_layers_are_rewritten_at_each_call():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.norm = nn.Linear(256, 256), nn.LayerNorm(256)

        def forward(self, x):
            for _ in range(2):
                x = F.silu(self.norm(self.lin(x)))
            return x

    gm, report = run(M(), torch.randn(3, 256))
    assert ops(gm) == ["linear", "block_norm", "hardswish"] * 2
    assert set(report.chains) == {"lin#0", "lin#1"}
