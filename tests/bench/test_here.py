"""Speeds measured on the spot: what is asked for, what is kept, and where a table says that its times come from."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from loka_compile.bench import here as module
from loka_compile.bench.here import measured_costs
from loka_compile.costs import CostTable
from loka_compile.errors import ConfigError
from loka_compile.gemm import Gemm, Role
from loka_compile.lowering.providers import get_provider
from loka_compile.probe.quantify import quantify
from loka_compile.probe.samples import SiteSamples
from tests.bench.test_runner import FakeTimer

GEMMS = [Gemm("a#0", Role.FORWARD, 64, 128, 256), Gemm("b#0", Role.FORWARD, 48, 32, 13)]
TORCH = [get_provider("torch")]


@pytest.fixture(autouse=True)
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling quantisers is not the subject here."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def test_measures_the_sizes_that_run_and_keeps_them(tmp_path: Path) -> None:
    path, timer = tmp_path / "deep" / "bench.csv", FakeTimer()
    costs = measured_costs(GEMMS, TORCH, seconds=1e9, path=path, timer=timer)
    assert costs.target == "here"
    plain, padded = GEMMS[0], TORCH[0].padded(GEMMS[1], TORCH[0].recipe("tensorwise_fast"))
    assert padded.k == 16
    for gemm in (plain, padded):
        latency = costs.latency(gemm, "torch", "tensorwise_fast")
        assert latency is not None
        # The timer's answer is 1 us and a nanosecond per byte of bf16 result.
        assert latency.gemm_us == pytest.approx(1 + 2e-3 * gemm.m * gemm.n, rel=1e-3)
        assert costs.source(gemm, "torch", "tensorwise_fast") == "measured"
        assert not math.isnan(costs.baseline(gemm))
    elsewhere = Gemm("c#0", Role.FORWARD, 4096, 4096, 4096)
    assert costs.source(elsewhere, "torch", "tensorwise_fast") == "cost table here"
    again = FakeTimer()
    assert measured_costs(GEMMS, TORCH, seconds=1e9, path=path, timer=again).source(plain, "torch", "tensorwise") == (
        "measured"
    )
    assert again.groups == []


def test_what_is_measured_stands_in_the_place_of_the_shipped_lines(tmp_path: Path) -> None:
    shipped = CostTable.load("h200")
    shape = next(iter(shipped.gemms["torch", "tensorwise_fast", "", "bfloat16", False].points))
    gemm, other = Gemm("", Role.FORWARD, *shape), Gemm("", Role.FORWARD, 512, 768, 1280)
    here = measured_costs([gemm], TORCH, seconds=1e9, path=tmp_path / "b.csv", timer=FakeTimer())
    both = shipped.with_measured(here)
    mine, old = (t.latency(gemm, "torch", "tensorwise_fast") for t in (both, shipped))
    assert mine is not None
    assert old is not None
    assert mine.gemm_us == pytest.approx(1 + 2e-3 * gemm.m * gemm.n, rel=1e-3) != old.gemm_us
    assert both.has_fused_kernels
    assert both.source(gemm, "torch", "tensorwise_fast") == "measured"
    assert both.source(gemm, "fbgemm", "rowwise_fast") == "cost table h200"
    assert both.source(other, "torch", "tensorwise_fast") == "cost table h200"
    assert shipped.source(gemm, "torch", "tensorwise_fast") == "cost table h200", "the shipped table must not change"
    assert shipped.latency(gemm, "torch", "tensorwise_fast") == old


def samples() -> dict[str, SiteSamples]:
    torch.manual_seed(0)
    x, dy = torch.randn(64, 256).bfloat16(), torch.randn(64, 128).bfloat16()
    return {"a#0": SiteSamples(weight=torch.randn(128, 256).bfloat16(), inputs=[x], grad_outputs=[dy], batch=64)}


def test_a_tables_rows_say_where_their_times_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Gemm] = []

    def fake(gemms: list[Gemm], providers: object, *, seconds: float) -> CostTable:
        asked.extend(gemms)
        assert seconds == 7
        return measured_costs(GEMMS[:1], TORCH, seconds=1e9, path=tmp_path / "b.csv", timer=FakeTimer())

    monkeypatch.setattr(module, "measured_costs", fake)
    table = quantify(samples(), target="here", providers=["torch"], bench_seconds=7)
    assert {(g.m, g.n, g.k, g.role) for g in asked} == {
        (64, 128, 256, Role.FORWARD), (64, 256, 128, Role.GRAD_INPUT), (128, 256, 64, Role.GRAD_WEIGHT)
    }  # fmt: skip
    rows = {(r.role, r.candidate): r for r in table.rows}
    assert rows["forward", "torch:tensorwise_fast"].speed_source == "measured"
    unknown = rows["grad_input", "torch:tensorwise_fast"]  # quantisers of its transposed operands were not measured
    assert "no cost known" in unknown.refused
    assert table.header.target == "here"


def test_without_a_gpu_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"(?s)torch sees none.*h200"):
        quantify(samples(), target="here", providers=["torch"])


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOKA_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    x, dy = torch.randn(4096, 2048).bfloat16().cuda(), torch.randn(4096, 2048).bfloat16().cuda()
    seen = SiteSamples(weight=torch.randn(2048, 2048).bfloat16().cuda(), inputs=[x], grad_outputs=[dy], batch=4096)
    # It ends when all is measured; the self-tests start processes, which takes long beside other tests.
    table = quantify({"a#0": seen}, target="here", providers=["torch"], bench_seconds=120)
    rows = {(r.role, r.candidate): r for r in table.rows}
    fast, base = rows["forward", "torch:tensorwise_fast"], rows["forward", "high_precision:native"]
    assert fast.speed_source == base.speed_source == "measured"
    assert 10 < fast.gemm_us < base.baseline_us < 200
    assert list(tmp_path.glob("bench-*.csv"))
