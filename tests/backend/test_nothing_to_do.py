"""Without a linear layer loka is Inductor: the same call, the same cache entries, the same numbers, the same time."""

import time

import pytest
import torch
import torch.nn.functional as F
from helpers_backend import Watch
from torch import nn


class NoLinear(nn.Module):
    """Embeddings, norms, activations, a convolution: none of it is ours."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(100, 32)
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(4))
        self.conv = nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, index):
        x = self.table(index)
        for norm in self.norms:
            x = x + F.silu(norm(self.conv(x)))
        return torch.softmax(x.sum(1), -1)


@pytest.mark.parametrize("options", [None, {"target": "h200"}, {"table": "off"}, {"mods": "none"}])
def test_it_is_the_plain_call(options, monkeypatch):
    """compile_fx gets the captured graph and nothing else: no hooks, no table of decompositions, no sampling."""
    import torch._inductor.compile_fx as module

    calls = []

    def compile_fx(gm, inputs, **kwargs):
        calls.append((gm, kwargs))
        return gm.forward

    monkeypatch.setattr(module, "compile_fx", compile_fx)
    watch = Watch()
    torch.compile(NoLinear(), backend="loka", options=options)(torch.randint(0, 100, (3, 8)))
    ((gm, kwargs),) = calls
    assert kwargs == {"config_patches": None}
    assert not watch.last.matches
    assert not watch.last.gemms
    assert not any("loka" in str(n.target) for n in gm.graph.nodes)


def test_our_share_of_the_compile_time(monkeypatch):
    """Everything outside compile_fx is ours. Compared within one compile, so that a busy machine slows down both."""
    import torch._inductor.compile_fx as module

    import loka_compile.backend

    inner, original = [], module.compile_fx

    def compile_fx(*args, **kwargs):
        began = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            inner.append(time.perf_counter() - began)

    monkeypatch.setattr(module, "compile_fx", compile_fx)
    shares = []
    for width in (7, 8):  # the first one imports what is imported once
        torch._dynamo.reset()
        inner.clear()
        spent = []

        def backend(gm, inputs, spent=spent):
            began = time.perf_counter()
            compiled = loka_compile.backend.loka(gm, inputs)
            spent.append(time.perf_counter() - began)
            return compiled

        index = torch.randint(0, 100, (width, 8))
        torch.compile(NoLinear(), backend=backend)(index)
        shares.append(1 - max(inner) / spent[0])
    assert shares[1] < 0.05, shares
