"""Which kernel stands for a candidate while effects on the loss are measured."""

from __future__ import annotations

import pytest

from loka_compile.loss.switches import _runs
from loka_compile.lowering.providers import get_provider


@pytest.mark.parametrize(("provider", "runs"), [("torch", "torch"), ("triton", "emulated"), ("deepgemm", "emulated")])
def test_kernels_that_compile_for_each_shape_are_emulated(
    monkeypatch: pytest.MonkeyPatch, provider: str, runs: str
) -> None:
    """Thousands of products, one shape after another: a kernel that is compiled for each would take minutes."""
    real = get_provider(provider)
    monkeypatch.setattr(type(real), "supported", lambda self, *args, **more: None)
    recipe = next(iter(real.recipes.values()))
    found, same = _runs(provider, recipe.name, "cuda")
    assert found.name == runs
    assert (same.a, same.b) == (recipe.a, recipe.b)
