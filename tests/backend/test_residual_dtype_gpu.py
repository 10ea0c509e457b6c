"""residual_dtype="autocast" on a GPU: error against fp64, dtypes, and how many fp32 values the backward keeps."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers_backend import Watch
from torch import nn

from examples.models.wukong import Wukong, WukongConfig
from loka_compile import apply_mods

pytestmark = pytest.mark.gpu

#: Rounding the stream adds independent errors of the size that each 16-bit GEMM has already: two for every GEMM's
#: three (operands and result), so a factor of sqrt(5 / 3) = 1.3; 1.15 was found on a CPU. The rest is for small models,
#: where errors scatter.
FACTOR = 2.0


class PostNorm(nn.Module):
    """x' = LN(cat(silu(LN(a(x))), b(x)) + x) on tokens [B, 16, N]: Wukong's layer, reduced to its dtypes."""

    def __init__(self, n=256, layers=3):
        super().__init__()
        self.first = nn.Linear(n, n)
        self.a = nn.ModuleList(nn.Linear(n, n) for _ in range(layers))
        self.inner = nn.ModuleList(nn.LayerNorm(n) for _ in range(layers))
        self.b = nn.ModuleList(nn.Linear(n, n) for _ in range(layers))
        self.outer = nn.ModuleList(nn.LayerNorm(n) for _ in range(layers))
        self.head = nn.Linear(n, 1)

    def forward(self, x):
        x = self.first(x)
        for a, inner, b, outer in zip(self.a, self.inner, self.b, self.outer, strict=True):
            left, right = x.chunk(2, 1)
            x = outer(torch.cat([F.silu(inner(a(left))), b(right)], 1) + x)
        return x, self.head(x.mean(1))


def post_norm(batch):
    generator = torch.Generator().manual_seed(batch)
    return (torch.randn(batch, 16, 256, generator=generator).cuda(),)


def wukong():
    return Wukong(WukongConfig.named("demo", table_sizes=(9,) * 11, numerics=3, layers=3, dim=128))


def wukong_batch(batch):
    generator = torch.Generator().manual_seed(batch)
    numerics = torch.randn(batch, 3, generator=generator)
    return numerics.cuda(), torch.randint(9, (batch, 11), generator=generator).cuda()


MODELS = {"post_norm": (PostNorm, post_norm, 5), "wukong": (wukong, wukong_batch, 2)}


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def compiled(model, choice, **options):
    torch._dynamo.reset()
    options = {"table": "off", "residual_dtype": choice, **options}
    return torch.compile(model, backend="loka", options=options, fullgraph=True)


def step(run, model, inputs, enabled=True):
    """Outputs, gradients of a loss linear in the outputs, and the tensors kept for the backward."""
    kept = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
        torch.autocast("cuda", torch.bfloat16, enabled=enabled),
    ):
        outputs = run(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(y.shape, generator=generator, dtype=torch.float64).cuda() for y in outputs]
    model.zero_grad(set_to_none=True)
    sum((y.double() * w).sum() for y, w in zip(outputs, weights, strict=True)).backward()
    return [y.detach() for y in outputs], {n: p.grad for n, p in model.named_parameters()}, kept


def errors(got, want):
    """Relative Frobenius error of each output and of each gradient that is not zero."""
    pairs = list(zip(got[0], want[0], strict=True))
    pairs += [(got[1][n], w) for n, w in want[1].items() if w is not None and w.any()]
    return [float((g.double() - w).norm() / w.norm()) for g, w in pairs]


@pytest.mark.parametrize("mods", ["none", "all"])
@pytest.mark.parametrize("batch", [2048, 199])
@pytest.mark.parametrize("name", MODELS)
def test_training(name, batch, mods):
    """No output changes its dtype, errors stay those of bf16, and fewer fp32 values are kept for the backward."""
    make, inputs, rounded = MODELS[name]
    model = make().cuda()
    exact = copy.deepcopy(apply_mods(model, mods=mods)).double()
    doubles = [x.double() if x.is_floating_point() else x for x in inputs(batch)]
    want = step(exact, exact, doubles, enabled=False)
    found, kept = {}, {}
    for choice in ("model", "autocast"):
        watch = Watch()
        found[choice] = step(compiled(model, choice, mods=mods), model, inputs(batch))
        assert watch.last.count("residual_dtype") == (rounded if choice == "autocast" else 0)
        fp32 = [t for t in found[choice][2] if t.dtype == torch.float32 and not isinstance(t, nn.Parameter)]
        kept[choice] = sum(t.numel() for t in fp32)
    dtypes = {choice: [y.dtype for y in found[choice][0]] for choice in found}
    assert dtypes["autocast"] == dtypes["model"]
    assert all(g.dtype == torch.float32 for g in found["autocast"][1].values())
    mean = {choice: sum(e) / len(e) for choice, e in ((c, errors(f, want)) for c, f in found.items())}
    assert 2**-10 < mean["model"] < 0.1
    assert mean["autocast"] < FACTOR * mean["model"], mean
    assert mean["autocast"] != mean["model"], "nothing was rounded"
    assert kept["autocast"] < kept["model"], kept


@pytest.mark.parametrize("mods", ["none", "all"])
def test_inference_with_a_dynamic_batch(mods):
    model = PostNorm().cuda().eval()
    exact = copy.deepcopy(apply_mods(model, mods=mods)).double()
    run = torch.compile(
        model, backend="loka", options={"table": "off", "residual_dtype": "autocast", "mods": mods}, dynamic=True,
        fullgraph=True,
    )  # fmt: skip
    watch = Watch()
    with torch.no_grad():
        for batch in (64, 199, 1024):
            (x,) = post_norm(batch)
            with torch.autocast("cuda", torch.bfloat16):
                stream, logits = run(x)
            assert (stream.dtype, logits.dtype) == (torch.float32, torch.bfloat16)
            want = exact(x.double())
            for got, right in zip((stream, logits), want, strict=True):
                assert float((got.double() - right).norm() / right.norm()) < 0.03
    assert [r.count("residual_dtype") for r in watch.reports] == [5], "compiled once"


def test_autocast_inside_the_model_and_in_fp16():
    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = PostNorm()

        def forward(self, x):
            with torch.autocast("cuda", torch.float16):
                return self.model(x)

    model = Inside().cuda()
    exact, (x,) = copy.deepcopy(model.model).double(), post_norm(199)
    watch = Watch()
    with torch.no_grad():
        stream, logits = compiled(model, "autocast", mods="none", inspect=True)(x)
        want = exact(x.double())
    kinds = {m.kind for m in watch.last.matches}
    assert kinds == {"norm result in float16"}
    assert watch.last.graph("residual_dtype").count(".half()") == 5
    assert (stream.dtype, logits.dtype) == (torch.float32, torch.float16)
    assert float((stream.double() - want[0]).norm() / want[0].norm()) < 0.005


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
@pytest.mark.parametrize("fuse", [True, False])
def test_under_an_fp8_plan(fuse, recipe):
    """Fused chains end in a cast that more than the quantisation reads. Every gradient is right, and the same again:
    one alone was wrong, where a kernel of Inductor's read what it wrote without waiting (_compat/read_back.py)."""
    from loka_compile.gemm import Role
    from loka_compile.plan import Decision, Plan

    model, inputs = PostNorm().cuda(), post_norm(512)
    sites = [f"{part}.{i}#0" for part in ("a", "b") for i in range(3)]
    recipes = {role: recipe if role == Role.GRAD_WEIGHT else f"{recipe}_fast" for role in Role}
    plan = Plan([Decision(s, r.value, "torch", recipe) for s in sites for r, recipe in recipes.items()])
    exact = copy.deepcopy(apply_mods(model)).double()
    want = step(exact, exact, [x.double() for x in inputs], enabled=False)
    mean = {}
    for choice in ("model", "autocast"):
        torch._dynamo.reset()
        options = {"plan": plan, "residual_dtype": choice, "fuse": fuse}
        watch = Watch()
        run = torch.compile(model, backend="loka", options=options, fullgraph=True)
        found = step(run, model, inputs)
        counts = watch.last.counts()
        assert (counts[f"torch:{recipe}_fast"], counts[f"torch:{recipe}"]) == (2 * len(sites), len(sites))
        found_errors = errors(found, want)
        assert max(found_errors) < 0.1, found_errors
        mean[choice] = sum(found_errors) / len(found_errors)
        again = step(run, model, inputs)
        assert all(torch.equal(a, b) for a, b in zip(again[0], found[0], strict=True))
        assert [n for n, g in found[1].items() if g is not None and not torch.equal(g, again[1][n])] == []
    assert mean["autocast"] < 1.2 * mean["model"], mean
