"""Samples of a site, and the rows of a table made from them, for the tests of ``quantify``."""

from typing import ClassVar

import torch

from loka_compile.gemm import ROWWISE, TENSORWISE, Gemm, Recipe, Role
from loka_compile.lowering.providers import get_provider
from loka_compile.lowering.providers.base import Provider
from loka_compile.probe.quantify import SiteSamples, quantify

torch.set_num_threads(1)


def samples(n=48, k=64, *, calls=4, rows=32, dtype="bfloat16", seed=0, batch=4096, **more):
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=rng)

    values = dict(inputs=[normal(rows, k) for _ in range(calls)], weight=normal(n, k) / k**0.5,
                  grad_outputs=[normal(rows, n) * 1e-3 for _ in range(calls)], dtype=dtype, batch=batch)  # fmt: skip
    return SiteSamples(**{**values, **more})


def run(target="h200", providers=("torch", "emulated"), **sites):
    sites = sites or {"a#0": samples()}
    return quantify({name.replace("__", "#"): s for name, s in sites.items()}, target=target, providers=providers)


def rows_of(table, **wanted):
    return [r for r in table.rows if all(getattr(r, name) == value for name, value in wanted.items())]


def one(table, **wanted):
    (row,) = rows_of(table, **wanted)
    return row


class Fake(Provider):
    """A library that works anywhere; ``spoil`` is applied to its result."""

    name: ClassVar[str] = "fake"
    recipes: ClassVar[dict[str, Recipe]] = {r.name: r for r in (ROWWISE, TENSORWISE)}
    distributions: ClassVar[tuple[str, ...]] = ("numpy",)

    def __init__(self, spoil=lambda out: out, only=Role, missing=None):
        self.spoil, self.missing, self.calls = spoil, missing, 0
        self.only = only

    def supported(self, recipe=None, device=None):
        return self.missing

    def _refuses_shape(self, gemm: Gemm, recipe: Recipe):
        return None if gemm.role in self.only else f"no {gemm.role} in this library"

    def compute(self, a, b, recipe, out_dtype):
        self.calls += 1
        return self.spoil(get_provider("emulated").compute(a, b, recipe, out_dtype))
