"""The gate's metric: of which measure and operands it is, how long is drawn for it, and what is remarked."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

from loka_compile.errors import ProbeError
from loka_compile.gemm import ROWWISE, TENSORWISE, Gemm, Recipe, Role
from loka_compile.lowering.providers import get_provider
from loka_compile.lowering.providers.base import Provider, Quantized
from loka_compile.plan import make_plan
from loka_compile.probe.errors import Errors
from loka_compile.probe.gate import Effort, remarks, score, worse
from loka_compile.probe.quantify import quantify
from loka_compile.probe.samples import SiteSamples
from loka_compile.report import LoweredGemm, Report
from loka_compile.selection.decision import Decision, Verdict
from loka_compile.table import Measurement, Table


def errors(floored: float, by_row: float = 0.0) -> Errors:
    return Errors(floored, by_row, 1.0, 0.1, 20.0, 1.0, 0.99, 100, 0)


@pytest.mark.parametrize(("role", "gates"), [("forward", 3.0), ("grad_input", 3.0), ("grad_weight", 2.0)])
def test_rows_count_where_they_are_samples(role: str, gates: float) -> None:
    found = score([errors(1.0, 2.0), errors(3.0, 4.0)], Role(role))
    assert (found.gate.mean, found.pairs) == (gates, 2)
    half = scipy.stats.t.ppf(0.975, 1) * np.std([1.0, 3.0], ddof=1) / 2**0.5
    assert found.gate.high - found.gate.mean == pytest.approx(half, rel=1e-4)
    assert score([errors(1.0, 0.5)], Role(role)).gate.mean == 1.0
    assert score([errors(1.0, math.inf)], Role("forward")).gate.mean == math.inf


def test_the_worse_operands_gate_and_the_gaussians_optimism_is_remarked() -> None:
    effort = Effort(2, 4)
    low, high = (score([errors(m), errors(m)], Role.FORWARD) for m in (0.1, 0.13))
    assert worse(low, high) is worse(high, low) is high
    assert worse(None, low) is low
    nan = score([errors(math.nan)], Role.FORWARD)
    assert worse(low, nan) is nan
    with pytest.raises(ProbeError, match="nothing was measured"):
        worse(None, None)
    assert remarks(low, high, None, effort) == "a Gaussian underestimates it: 0.1 drawn, 0.13 on raw rows"
    assert not remarks(high, low, None, effort)
    close = score([errors(0.119), errors(0.119)], Role.FORWARD)
    assert not remarks(low, close, None, effort)
    assert remarks(high, None, low, effort) == "1.3 times the error of exact arithmetic: a faulty kernel?"
    wide = score([errors(0.1), errors(0.2)], Role.FORWARD)
    assert remarks(wide, None, None, effort) == "interval wider than 2 % after 2 pairs"


def test_settled() -> None:
    effort = Effort(pairs=3, cap=9, width=0.02)
    assert not score([errors(0.1)] * 2, Role.FORWARD).is_settled(effort)
    assert score([errors(0.1)] * 3, Role.FORWARD).is_settled(effort)
    assert not score([errors(0.1), errors(0.1), errors(0.13)], Role.FORWARD).is_settled(effort)
    assert score([errors(math.inf)] * 3, Role.FORWARD).is_settled(effort)
    assert score([errors(math.nan)] * 3, Role.FORWARD).is_settled(effort)
    for wrong in ({"pairs": 0}, {"pairs": 5, "cap": 4}, {"width": 0.0}, {"rows": 0}):
        with pytest.raises(ProbeError):
            Effort(**wrong)  # type: ignore[arg-type]


def seen(spread: float, raw: Tensor, k: int = 32, n: int = 16, dtype: str = "float32") -> tuple[SiteSamples, list[int]]:
    """A site whose draws differ from pair to pair by ``spread``, and the numbers of draws that were asked for."""
    drawn: list[int] = []
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(1))

    def draws(rows: int) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        random = torch.Generator().manual_seed(0)
        for number in itertools.count():
            drawn.append(number)
            x = torch.randn(rows, k, generator=random)
            x[:, 0] *= 1 + spread * torch.rand((), generator=random) ** 4
            yield x, weight, torch.randn(rows, n, generator=random)

    samples = SiteSamples(inputs=[raw], weight=weight, grad_outputs=[torch.randn(len(raw), n)], dtype=dtype,
                          batch=64, draws=draws)  # fmt: skip
    return samples, drawn


def rows_of(table: Table, recipe: str) -> dict[str, Measurement]:
    return {row.role: row for row in table.rows if row.recipe == recipe}


def test_drawing_goes_on_until_the_interval_is_narrow() -> None:
    samples, drawn = seen(0.0, torch.randn(64, 32))
    table = quantify({"a#0": samples}, target=None, providers=["emulated"], effort=Effort(10, 100, 0.1, 32))
    assert 10 <= len(drawn) < 100
    for row in rows_of(table, "rowwise").values():
        assert row.mere == max(row.mere_drawn, row.mere_raw)
        if row.mere == row.mere_drawn:
            assert (row.mere_high - row.mere_low) <= 0.1 * row.mere
            assert row.samples >= 10
    enough, few = seen(0.0, torch.randn(64, 32)), Effort(2, 3, 1e-4, 32)
    table = quantify({"a#0": enough[0]}, target=None, providers=["emulated"], effort=few)
    assert len(enough[1]) == 3
    assert all("interval wider than 0.01 % after" in row.remark for row in rows_of(table, "rowwise").values())


def test_what_is_narrow_enough_is_not_measured_again() -> None:
    """Each GEMM and candidate stops by itself: the inputs vary from pair to pair, weights and gradients do not."""
    samples, drawn = seen(200.0, torch.zeros(0, 32))
    table = quantify({"a#0": samples}, target=None, providers=["emulated"], effort=Effort(10, 60, 0.08, 32))
    assert len(drawn) == 60
    rows = rows_of(table, "rowwise")
    assert (rows["forward"].samples, rows["grad_weight"].samples) == (60, 60)
    assert "interval wider than 8 % after 60 pairs" in rows["forward"].remark
    assert 10 < rows["grad_input"].samples < 60
    assert not rows["grad_input"].remark
    assert rows["grad_input"].mere_high - rows["grad_input"].mere_low <= 0.08 * rows["grad_input"].mere


def test_outliers_that_a_gaussian_forgets_gate_and_are_remarked() -> None:
    raw = torch.randn(256, 32)
    raw[::3] *= 3e4  # heavy tails: rows of very different size
    samples, _ = seen(0.0, raw)
    table = quantify({"a#0": samples}, target=None, providers=["emulated"], effort=Effort(5, 5, rows=64))
    row = rows_of(table, "tensorwise")["forward"]
    assert row.mere == row.mere_raw > 0.2 > row.mere_drawn
    assert "a Gaussian underestimates it" in row.remark
    assert not rows_of(table, "rowwise")["forward"].remark.startswith("a Gaussian")


def test_draws_alone_are_enough_and_what_does_not_fit_is_refused() -> None:
    samples, _ = seen(0.0, torch.zeros(0, 32))
    table = quantify({"a#0": samples}, target=None, providers=["emulated"], effort=Effort(3, 3, rows=16))
    for row in rows_of(table, "rowwise").values():
        assert row.mere == row.mere_drawn > 0
        assert math.isnan(row.mere_raw)
    samples, _ = seen(1e9, torch.zeros(0, 32), dtype="float16")
    table = quantify({"a#0": samples}, target=None, providers=["emulated"], effort=Effort(3, 3, rows=16))
    assert "does not fit into float16" in rows_of(table, "rowwise")["forward"].refused


class HalfScale(Provider):
    """A kernel that runs anywhere, with a mistake in one recipe."""

    name: ClassVar[str] = "half"
    recipes: ClassVar[dict[str, Recipe]] = {r.name: r for r in (ROWWISE, TENSORWISE)}
    distributions: ClassVar[tuple[str, ...]] = ("numpy",)

    def compute(self, a: Quantized, b: Quantized, recipe: Recipe, out_dtype: torch.dtype) -> Tensor:
        wrong = a.scale.roll(1, 0) if recipe == ROWWISE else a.scale
        return get_provider("emulated").compute(Quantized(a.data, wrong), b, recipe, out_dtype)


def test_a_kernel_with_more_error_than_its_recipe_is_remarked_up_to_the_plan() -> None:
    samples, _ = seen(0.0, torch.randn(64, 32))
    table = quantify({"a#0": samples}, target=None, providers=[HalfScale()], effort=Effort(5, 5, rows=32))
    faulty, sound = (rows_of(table, recipe)["forward"] for recipe in ("rowwise", "tensorwise"))
    assert faulty.error_source == "real kernel"
    assert "times the error of exact arithmetic: a faulty kernel?" in faulty.remark
    assert "faulty" not in sound.remark
    decision = make_plan(table).lookup("a#0", "forward")
    assert decision is not None
    assert [v.remark for v in decision.verdicts if v.recipe == "rowwise"] == [faulty.remark]


def test_the_report_of_explain_shows_the_remark_of_the_kernel_that_runs() -> None:
    verdicts = tuple(
        Verdict("torch", recipe, 0.1, 1.5, remark=remark)
        for recipe, remark in (("rowwise", "wide"), ("tensorwise", ""))
    )
    gemm = Gemm("a#0", Role.FORWARD, 64, 16, 32)
    decided = {
        recipe: Decision("a#0", "forward", "torch", recipe, "fastest", 1.5, 0.1, verdicts)
        for recipe in ("rowwise", "tensorwise")
    }
    assert "fastest; wide" in str(Report(gemms=[LoweredGemm(gemm, decided["rowwise"])]))
    assert "wide" not in str(Report(gemms=[LoweredGemm(gemm, decided["tensorwise"])]))
