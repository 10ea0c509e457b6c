"""What a compiled model computes: forward and every gradient against fp64, in training and inference, by dtype."""

import copy

import pytest
import torch
from helpers_backend import Watch, assert_same_step, close, train_step
from models_backend import Tower, exact, mods_of

import loka_compile
from loka_compile.passes.sites import KEY

OFF = {"table": "off"}


def test_training_and_inference_with_real_code():
    """fp32, all Mods: both graphs compute the hand-written function; the unused parameters get zero gradients."""
    tower, watch = Tower(), Watch()
    reference = exact(tower)
    x = torch.randn(19, 13, requires_grad=True)
    want = train_step(mods_of(reference), reference, x)
    compiled = torch.compile(tower, backend="loka", options=OFF)
    assert_same_step(train_step(compiled, tower, x), want, 1e-5, tower.unused)
    assert watch.last.is_training is True
    tower.eval()
    with torch.no_grad():
        close(compiled(x.detach()), want[0], 1e-5)
    assert watch.last.is_training is False
    assert len(watch.reports) == 2
    training, inference = watch.reports
    assert [m.kind for m in training.matches] == [m.kind for m in inference.matches]
    assert training.chains == inference.chains == dict.fromkeys(("linears.0#0", "linears.1#0"), "linear-norm-swish")


def test_without_mods_it_is_the_models_own_function(no_codegen):
    tower = Tower()
    reference = exact(tower)
    x = torch.randn(7, 13, requires_grad=True)
    compiled = torch.compile(tower, backend="loka", options={"mods": "none", **OFF})
    assert_same_step(train_step(compiled, tower, x), train_step(reference, reference, x.double()), 1e-5)


@pytest.mark.parametrize("mods", [("bias_removal",), ("block_norm",), ("hard_swish",), ("block_norm", "hard_swish")])
def test_each_mod_alone(mods, no_codegen):
    """The same as the eager model in which only these pieces were exchanged."""
    tower = Tower()
    x = torch.randn(5, 13, requires_grad=True)
    eager = loka_compile.apply_mods(copy.deepcopy(tower).double(), mods=mods)
    got = train_step(torch.compile(tower, backend="loka", options={"mods": mods, **OFF}), tower, x)
    want = train_step(eager, eager, x.double())
    close(got[0], want[0], 1e-5)
    for name in ("linears.0.weight", "head.bias"):
        close(got[1][name], want[1][name], 1e-5, name)
    hand = exact(tower)

    def forward(x):
        x = x.double()
        for linear, norm in zip(hand.linears, hand.norms, strict=True):
            x = x @ linear.weight.t() + (0 if "bias_removal" in mods else linear.bias)
            if "block_norm" in mods:
                blocks = x.split(256, -1)
                x = torch.cat([b * torch.rsqrt(b.square().mean(-1, keepdim=True) + norm.eps) for b in blocks], -1)
            else:
                x = norm(x)
            x = x * torch.clamp(x + 3, 0, 6) / 6 if "hard_swish" in mods else x * torch.sigmoid(x)
        return hand.head(x)

    close(got[0], forward(x).detach(), 1e-5)


@pytest.mark.parametrize("block", [128, 256, 512])
def test_block_size(block, no_codegen):
    tower = Tower((13, 512, 384))
    reference = exact(tower)
    x = torch.randn(6, 13)
    got = train_step(torch.compile(tower, backend="loka", options={"block_size": block, **OFF}), tower, x)
    assert_same_step(got, train_step(mods_of(reference, block), reference, x), 1e-5, tower.unused)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_model(dtype, no_codegen):
    """A model in bf16 or fp16: dtypes stay, and the error is that of the same operations in eager."""
    tower = Tower().to(dtype)
    reference = exact(tower)
    x = torch.randn(33, 13, dtype=dtype)
    got = train_step(torch.compile(tower, backend="loka", options=OFF), tower, x)
    assert got[0].dtype == dtype
    assert all(g.dtype == dtype for g in got[1].values())
    want = train_step(mods_of(reference), reference, x.double())
    close(got[0], want[0], 0.04 if dtype is torch.bfloat16 else 0.006)
    # HardSwish's derivative jumps at 3: a value that is rounded across it changes its gradient by a third.
    assert_same_step(got, want, 0.05, tower.unused)


def test_train_and_eval_share_their_sites(no_codegen):
    """The graphs of train(), eval() and no_grad() name the same layers the same way."""
    tower, watch = Tower(), Watch()
    compiled = torch.compile(tower, backend="loka", options=OFF)
    x = torch.randn(4, 13)
    compiled(x)
    tower.eval()
    compiled(x)
    with torch.inference_mode():
        compiled(x)
    names = [{g.gemm.site for g in r.gemms if g.gemm.role == "forward"} for r in watch.reports]
    assert len(names) >= 2
    assert all(n == {"linears.0#0", "linears.1#0", "head#0"} for n in names)
    stamps = [n.meta.get("custom", {}) for gm in no_codegen.graphs for n in gm.graph.nodes]
    sites = {stamp[KEY] for stamp in stamps if KEY in stamp}
    assert sites == names[0]
