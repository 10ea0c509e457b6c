"""What is a chain, in every spelling, and what is not, with its reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers_passes import ops, run
from torch import nn

MODS = ("block_norm", "hard_swish")


class Block(nn.Module):
    """linear, norm, then whatever ``then(self, linear output, norm output)`` makes of it."""

    def __init__(self, then, norm=None, n=256):
        super().__init__()
        self.lin, self.norm, self.then = nn.Linear(16, n), norm if norm is not None else nn.LayerNorm(n), then

    def forward(self, x):
        h = self.lin(x)
        return self.then(h, self.norm(h))


SILU, SIGMOID = nn.SiLU(), nn.Sigmoid()
SWISH = {
    "F.silu": lambda h, y: F.silu(y),
    "F.silu inplace": lambda h, y: F.silu(y, inplace=True),
    "nn.SiLU": lambda h, y, act=SILU: act(y),
    "x * torch.sigmoid(x)": lambda h, y: y * torch.sigmoid(y),
    "torch.sigmoid(x) * x": lambda h, y: torch.sigmoid(y) * y,
    "x * x.sigmoid()": lambda h, y: y * y.sigmoid(),
    "x.sigmoid() * x": lambda h, y: y.sigmoid() * y,
    "x.mul(F.sigmoid(x))": lambda h, y: y.mul(F.sigmoid(y)),
    "torch.mul": lambda h, y: torch.mul(torch.sigmoid(y), y),
    "nn.Sigmoid": lambda h, y, act=SIGMOID: y * act(y),
}


@pytest.mark.parametrize("spelling", SWISH)
def test_every_spelling_of_swish_becomes_hardswish(spelling):
    gm, report = run(Block(SWISH[spelling]), torch.randn(3, 16))
    assert ops(gm) == ["linear", "block_norm", "hardswish"]
    assert report.chains == {"lin#0": "linear-norm-swish"}
    assert not [r for r in report.refusals if "bias" not in r.reason]


@pytest.mark.parametrize(
    "spelling",
    {
        "h * sigmoid(y)": lambda h, y: h * torch.sigmoid(y),
        "sigmoid(y) * h": lambda h, y: torch.sigmoid(y) * h,
        "h * y.sigmoid()": lambda h, y: h * y.sigmoid(),
        "y.sigmoid().mul(h)": lambda h, y: y.sigmoid().mul(h),
    }.items(),
    ids=lambda item: item[0],
)
def test_swish_norm_becomes_a_hard_gate(spelling):
    gm, report = run(Block(spelling[1]), torch.randn(3, 16))
    assert sorted(ops(gm)) == sorted(["linear", "block_norm", "hardsigmoid", "mul"])
    assert report.chains == {"lin#0": "linear-swishnorm"}


def test_hardswish_of_the_model_stays_and_counts_as_the_activation():
    gm, report = run(Block(lambda h, y: F.hardswish(y)), torch.randn(3, 16))
    assert ops(gm) == ["linear", "block_norm", "hardswish"]
    assert report.count("hard_swish") == 0


def test_linear_then_activation_without_a_norm():
    gm, report = run(nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 1)), torch.randn(3, 16))
    assert ops(gm) == ["linear", "hardswish", "linear"]
    assert report.chains == {"0#0": "linear-swish"}


@pytest.mark.parametrize(
    ("norm", "n", "name"),
    [
        (nn.LayerNorm(256, eps=0.3), 256, 0.3),
        (nn.LayerNorm(256, elementwise_affine=False), 256, 1e-5),
        (nn.LayerNorm(256, bias=False), 256, 1e-5),
        (nn.RMSNorm(256), 256, None),
        (nn.RMSNorm(256, eps=0.1), 256, 0.1),
        (nn.LayerNorm(384), 384, 1e-5),
        (nn.LayerNorm(100), 100, 1e-5),
    ],
    ids=["eps", "no affine", "no bias", "rms", "rms eps", "tail of 128", "narrow"],
)
def test_each_norm_keeps_its_own_eps(norm, n, name):
    gm, report = run(Block(lambda h, y: y, norm, n), torch.randn(3, 16))
    (node,) = [x for x in gm.graph.nodes if x.target is torch.ops.loka.block_norm.default]
    assert node.args[1:] == (256, name)
    assert report.chains == {"lin#0": "linear-norm"}
    assert report.unused("norm") == sum(1 for _ in norm.parameters())


def test_functional_norms_match_like_modules():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 256), nn.Linear(256, 256)

        def forward(self, x):
            x = F.silu(F.layer_norm(self.a(x), (256,)))
            return F.rms_norm(self.b(x), [256], eps=0.25)

    gm, _ = run(M(), torch.randn(3, 16), mods=MODS)
    assert ops(gm) == ["linear", "block_norm", "hardswish", "linear", "block_norm"]
    assert [x.args[2] for x in gm.graph.nodes if x.target is torch.ops.loka.block_norm.default] == [1e-5, 0.25]


def test_norm_after_the_residual_add():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.norm = nn.Linear(256, 256), nn.LayerNorm(256)

        def forward(self, x):
            return F.silu(self.norm(x + self.lin(x)))

    gm, report = run(M(), torch.randn(3, 256))
    assert ops(gm) == ["linear", "add", "block_norm", "hardswish"]
    assert report.chains == {"lin#0": "linear-residual-norm-swish"}


class LinearThen(nn.Module):
    def __init__(self, then, n=256, **modules):
        super().__init__()
        self.lin, self.then = nn.Linear(16, n), then
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x):
        return self.then(self, self.lin(x), x)


REFUSED = {
    "BatchNorm": (LinearThen(lambda m, h, x: F.silu(m.norm(h)), norm=nn.BatchNorm1d(256)), "BatchNorm"),
    "GroupNorm": (LinearThen(lambda m, h, x: F.silu(m.norm(h)), norm=nn.GroupNorm(4, 256)), "GroupNorm"),
    "norm over two dimensions": (
        LinearThen(lambda m, h, x: m.norm(h), norm=nn.LayerNorm((3, 256))),
        "last 2 dimensions",
    ),
    "norm before the linear": (
        LinearThen(lambda m, h, x: m.lin(m.norm(x)), norm=nn.LayerNorm(16)),
        "does not follow a linear layer",
    ),
    "reshaped in between": (
        LinearThen(lambda m, h, x: m.norm(h.view(-1, 2, 128)), norm=nn.LayerNorm(128)),
        "reshaped before the norm",
    ),
    "dropout in between": (
        LinearThen(lambda m, h, x: m.norm(F.dropout(h, 0.5, True)), norm=nn.LayerNorm(256)),
        "dropout stands between",
    ),
    "dropout module in between, eval": (
        LinearThen(lambda m, h, x: m.norm(m.drop(h)), norm=nn.LayerNorm(256), drop=nn.Dropout(0.1)).eval(),
        "dropout stands between",
    ),
    "gate": (LinearThen(lambda m, h, x: torch.sigmoid(m.g(x)) * x, g=nn.Linear(16, 16)),
             "gate sigmoid(linear(x)) * y"),
    "used elsewhere": (LinearThen(lambda m, h, x: m.norm(h) + h, norm=nn.LayerNorm(256)), "also used by"),
    "last block too narrow": (
        LinearThen(lambda m, h, x: m.norm(h), n=300, norm=nn.LayerNorm(300)),
        "last block of 44",
    ),
    "silu behind BatchNorm": (
        LinearThen(lambda m, h, x: F.silu(m.norm(h)), norm=nn.BatchNorm1d(256)), "is not part of a chain"
    ),
    "silu of a product of activations": (
        LinearThen(lambda m, h, x: F.silu(h @ h.t())), "does not follow a linear layer"
    ),
    "silu of something else": (LinearThen(lambda m, h, x: F.silu(h.exp())), "does not follow a linear layer"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_chain_is_left_alone_and_says_why(case):
    model, reason = REFUSED[case]
    before, _ = run(model, torch.randn(3, 16), mods="none")
    gm, report = run(model, torch.randn(3, 16), mods=MODS)
    assert ops(gm) == ops(before)
    assert reason in " | ".join(r.reason for r in report.refusals)
    assert all(r.source for r in report.refusals)


def test_refusal_names_the_source_line():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.lin = nn.LayerNorm(16), nn.Linear(16, 8)

        def forward(self, x):
            return self.lin(self.norm(x))  # the line

    _, report = run(M(), torch.randn(3, 16), mods=MODS)
    lines = Path(__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if "# the line" in text and "in text" not in text)
    assert report.refusals[0].source == f"{__file__}:{line}"


def test_dropout_of_zero_and_casts_do_not_break_a_chain():
    model = LinearThen(
        lambda m, h, x: F.silu(m.norm(F.dropout(h.float(), 0.0, True)).contiguous()), norm=nn.LayerNorm(256)
    )
    gm, _ = run(model, torch.randn(3, 16))
    assert "layer_norm" not in ops(gm)
    assert "silu" not in ops(gm)


def test_a_chain_inside_activation_checkpointing():
    from torch.utils.checkpoint import checkpoint

    block = nn.Sequential(nn.Linear(16, 256), nn.LayerNorm(256), nn.SiLU())
    model = LinearThen(lambda m, h, x: checkpoint(m.block, x, use_reentrant=False), block=block)
    gm, report = run(model, torch.randn(3, 16))
    assert report.chains == {"block.0#0": "linear-norm-swish"}
    assert "block_norm" in ops(gm)


def test_the_probes_taps_do_not_break_a_chain():
    import loka_compile.probe.taps  # noqa: F401  (defines the operators)

    class Tapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.norm = nn.Linear(16, 256), nn.LayerNorm(256)
            self.token = torch.zeros(2, dtype=torch.int64)

        def forward(self, x):
            h = torch.ops.loka_probe.output.default(self.lin(x), self.token, 0)
            return F.silu(self.norm(h))

    gm, report = run(Tapped(), torch.randn(3, 16))
    assert ops(gm) == ["linear", "output", "block_norm", "hardswish"]
    assert report.chains == {"lin#0": "linear-norm-swish"}


@pytest.mark.parametrize(
    "transposed",
    [
        lambda w: w.t(), lambda w: w.T, lambda w: w.mT, lambda w: w.transpose(0, 1),
        lambda w: torch.transpose(w, -1, -2), lambda w: w.permute(1, 0), lambda w: torch.t(w).contiguous(),
    ],
)  # fmt: skip
def test_a_product_with_a_learnt_weight_has_a_site_however_it_is_transposed(transposed):
    """torch 2.14 writes ``.T`` and ``.mT`` as operators where 2.13 reads an attribute."""

    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(16, 32)

        def forward(self, x):
            return F.silu(F.layer_norm(x @ transposed(self.inner.weight), (32,)))

    _, report = run(Product(), torch.randn(3, 16))
    assert report.chains == {"inner#0": "linear-norm-swish"}
