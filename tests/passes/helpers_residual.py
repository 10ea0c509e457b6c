"""A post-norm model and graphs under autocast, for the tests of ``residual_dtype``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from helpers_passes import capture, rewrite
from torch import nn

from loka_compile.passes.manager import check_outputs, output_values

BF16, D = torch.bfloat16, 16


class PostNorm(nn.Module):
    """x' = LN(cat(silu(LN(a(x))), b(x)) + x): Wukong's shape, [B, 4, 16]."""

    def __init__(self, layers=2, norm=nn.LayerNorm):
        super().__init__()
        self.first = nn.Linear(D, D)
        self.a = nn.ModuleList(nn.Linear(D, D) for _ in range(layers))
        self.inner = nn.ModuleList(norm(D) for _ in range(layers))
        self.b = nn.ModuleList(nn.Linear(D, D) for _ in range(layers))
        self.outer = nn.ModuleList(norm(D) for _ in range(layers))
        self.head = nn.Linear(4 * D, 1)

    def forward(self, x):
        x = self.first(x)
        for a, inner, b, outer in zip(self.a, self.inner, self.b, self.outer, strict=True):
            left, right = x.chunk(2, 1)
            new = torch.cat([F.silu(inner(a(left))), b(right)], 1)
            x = outer(new + x)
        return self.head(x.flatten(1))


def autocast(dtype=BF16, enabled=True):
    return torch.autocast("cpu", dtype=dtype, enabled=enabled)


def dtypes(gm, kinds=("call_function", "call_method")):
    """Recorded dtypes of the calls, by short name."""
    found = {}
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        if node.op in kinds and isinstance(value, torch.Tensor):
            name = node.target if isinstance(node.target, str) else node.target.__name__
            found.setdefault(name, []).append(value.dtype)
    return found


def rounded(fn, *inputs, ambient=BF16, **options):
    """Capture under autocast and run the passes; the graph's outputs must keep their dtypes."""
    model = fn if isinstance(fn, nn.Module) else Function(fn)
    with autocast(ambient or BF16, enabled=ambient is not None):
        gm = capture(model, *inputs)
        expected = output_values(gm)
        report = rewrite(gm, **{"residual_dtype": "autocast", "mods": "none", **options})
        check_outputs(gm, expected, ())
        _recorded_dtypes_are_true(gm)
    return gm, report


class Function(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.fn = fn
        self.linear, self.norm, self.other = nn.Linear(D, D), nn.LayerNorm(D), nn.LayerNorm(D)

    def forward(self, *inputs):
        return self.fn(self, *inputs)


def _recorded_dtypes_are_true(gm):
    """Runs the graph and compares each node's dtype with what the pass says it is now."""

    class Check(torch.fx.Interpreter):
        def run_node(self, n):
            got = super().run_node(n)
            said = n.meta.get("example_value")
            if isinstance(got, torch.Tensor) and isinstance(said, torch.Tensor):
                assert got.dtype == said.dtype, f"{n.name}: {got.dtype}, recorded {said.dtype}"
            return got

    Check(gm).run(*gm.meta["inputs"])


def rows(*shape):
    return torch.randn(*(shape or (3, 4, D)))
