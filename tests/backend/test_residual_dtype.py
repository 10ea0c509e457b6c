"""residual_dtype="autocast" through the whole backend, on a CPU whose autocast treats norms as CUDA's does."""

from __future__ import annotations

import pytest
import torch
from helpers_backend import Watch
from torch import nn

from examples.models.wukong import Wukong, WukongConfig

pytestmark = pytest.mark.usefixtures("norms_in_fp32")

CONFIG = WukongConfig.named("tiny", table_sizes=(9,) * 5, numerics=3, layers=2)
TOKENS = CONFIG.fmb_tokens + CONFIG.lcb_tokens


def batch(size):
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, 3, generator=generator), torch.randint(9, (size, 5), generator=generator)


def compiled(model, choice, dynamic=False, **options):
    torch._dynamo.reset()
    options = {"table": "off", "residual_dtype": choice, **options}
    return torch.compile(model, backend="loka", options=options, fullgraph=True, dynamic=dynamic)


def step(run, model, *inputs):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = run(*inputs)
    if torch.is_grad_enabled():
        y.double().sum().backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return y.detach(), grads


def tokens(nodes):
    """Dtypes of the values that are a whole set of tokens, [B, 8, 8]."""
    values = [node.meta.get("val") for node in nodes if isinstance(node, torch.fx.Node)]
    return [v.dtype for v in values if isinstance(v, torch.Tensor) and v.shape[1:] == (TOKENS, CONFIG.dim)]


def sums(gm):
    return tokens(n for n in gm.graph.nodes if n.target is torch.ops.aten.add.Tensor)


def test_wukongs_stream_and_its_gradient_move_16_bits(no_codegen):
    """The residual sum, the sums of gradients, and what is kept for the backward."""
    model, inputs, results = Wukong(CONFIG), batch(33), {}
    forward, kept, backward = {}, {}, {}
    for choice in ("model", "autocast"):
        no_codegen.graphs.clear()
        watch = Watch()
        results[choice] = step(compiled(model, choice), model, *inputs)
        assert watch.last.count("residual_dtype") == (choice == "autocast"), (
            "the last layer's norm feeds the head alone"
        )
        first, second = no_codegen.graphs
        forward[choice], backward[choice] = sums(first), sums(second)
        kept[choice] = tokens(first.graph.output_node().args[0])
    fp32, bf16 = torch.float32, torch.bfloat16
    # The two LayerNorms add their bias in fp32.
    assert [forward[c].count(fp32) for c in ("model", "autocast")] == [3, 2]
    assert (set(backward["model"]), set(backward["autocast"])) == ({fp32}, {bf16})
    assert fp32 in kept["model"]
    assert set(kept["autocast"]) == {bf16}

    (y, grads), (want, want_grads) = results["autocast"], results["model"]
    assert y.dtype == want.dtype == bf16
    torch.testing.assert_close(y, want, rtol=2**-4, atol=2**-5)
    for name, grad in grads.items():
        assert grad.dtype == fp32
        assert (grad - want_grads[name]).norm() <= 0.05 * want_grads[name].norm() + 1e-6, name


def test_a_dynamic_batch_is_compiled_once_and_serves_inference(no_codegen):
    model, watch = Wukong(CONFIG), Watch()
    with torch.no_grad():
        run, eager = (compiled(model, choice, dynamic=True, mods="none") for choice in ("autocast", "model"))
        for size in (33, 199, 7):
            got, want = step(run, model, *batch(size))[0], step(eager, model, *batch(size))[0]
            torch.testing.assert_close(got, want, rtol=2**-4, atol=2**-5)
    assert [r.count("residual_dtype") for r in watch.reports] == [1, 0]


def test_a_norm_that_is_also_the_output_stays_fp32(no_codegen):
    """The norm is the output as well: it keeps its dtype and, not being rounded, its bits."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

        def forward(self, x):
            y = self.norm(self.linear(x))
            return y, y + self.linear(y)

    model, x = Model(), torch.randn(5, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = {c: compiled(model, c, mods="none")(x) for c in ("model", "autocast")}
    assert [y.dtype for y in found["autocast"]] == [torch.float32] * 2
    assert torch.equal(found["autocast"][0], found["model"][0])
    assert not torch.equal(found["autocast"][1], found["model"][1])
