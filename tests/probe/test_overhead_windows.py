"""What a probe costs by its windows: the arithmetic, on rows made by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import loka_compile.probe
from benchmarks.probe_windows import BUDGET, cost_per_worker_second, estimate, estimates, hook_us, line
from loka_compile.probe.errors import confidence_interval


def row(arm: str, **other: Any) -> dict[str, Any]:
    """A row of the benchmark: blocks of 1 s without the probe, steps of 10 ms."""
    made = {"case": "c", "mode": "eager", "arm": arm, "rounds": 4, "windows": 0, "worker_share": 0.0,
            "hook_us": 2.0, "step_ms_without": 10.0, "window_extra_ms": [], "block_s_without": [1.0] * 4,
            "block_s_with": [1.0] * 4}  # fmt: skip
    return made | other


#: The worker spends 0.5 s in each block of 1.25 s on average; training loses 0.2, 0.3, 0.2 and 0.3 s.
ALL = row("all", windows=4, worker_share=0.4, block_s_with=[1.2, 1.3, 1.2, 1.3], window_extra_ms=[0.0] * 4,
          calls_taken=20, weights_taken=12)  # fmt: skip


def test_what_training_loses_per_second_of_the_worker() -> None:
    cost = cost_per_worker_second(ALL)
    assert cost is not None
    assert cost.mean == pytest.approx(0.25 / 0.5)
    # t(0.975, 3) = 3.18245; the standard deviation of the four is 0.1 / sqrt(3)
    half = 3.18245 * 0.1 / math.sqrt(3) / 2 / 0.5
    assert (cost.low, cost.high) == pytest.approx((0.5 - half, 0.5 + half), rel=1e-4)


def test_the_workers_share_and_the_hook() -> None:
    found = estimate(row("probe", worker_share=0.01), ALL, budget=0.005)
    assert found is not None
    assert (found["case"], found["mode"], found["hook_us"]) == ("c", "eager", 2.0)
    assert found["cost_per_worker_second"] == pytest.approx(0.5)
    half = confidence_interval([0.2, 0.3, 0.2, 0.3]).high / 0.5 - 0.5
    for name, share in (("by_windows", 0.01), ("by_windows_budget", 0.005)):
        assert found[name] == pytest.approx(share * 0.5 + 2e-6 / 10e-3)
        assert found[f"{name}_low"] == pytest.approx(found[name] - share * half)
        assert found[f"{name}_high"] == pytest.approx(found[name] + share * half)


@pytest.mark.parametrize(
    ("own", "everything", "extra"),
    [([1.0, 3.0], [4.0] * 4, 2.0), ([], [4.0, 9.0, 4.0, 3.0], 4.0), ([30.0], [4.0] * 4, 4.0), ([-1.0], [4.0] * 4, 0.0)],
    ids=["its own windows", "no window", "a step that hung", "a step that took less"],
)
def test_every_window_is_charged_its_extra_time(own: list[float], everything: list[float], extra: float) -> None:
    probe = row("probe", worker_share=0.01, windows=len(own), window_extra_ms=own, hook_us=0.0)
    found = estimate(probe, ALL | {"window_extra_ms": everything}, budget=0.005)
    assert found is not None
    assert found["window_extra_ms"] == pytest.approx(extra)
    assert found["by_windows"] == pytest.approx(0.01 * 0.5 + len(own) / 4 * extra / 1e3)
    # In the long run half of the windows of this one, which spent twice the budget; else one for each of eight jobs a
    # block, of which the budget pays for an eightieth.
    windows = len(own) / 4 * 0.005 / 0.01 if own else 8 * 0.005 / 0.4
    assert found["by_windows_budget"] == pytest.approx(0.005 * 0.5 + windows * extra / 1e3)


def test_there_is_one_window_in_a_block_at_most() -> None:
    probe = row("probe", worker_share=0.001, windows=4, window_extra_ms=[2.0] * 4, hook_us=0.0)
    found = estimate(probe, ALL | {"window_extra_ms": [2.0]}, budget=0.005)
    assert found is not None
    assert found["by_windows_budget"] == pytest.approx(0.005 * 0.5 + 2e-3)


def test_arms_of_one_case_and_mode_belong_together() -> None:
    other = {"mode": "graphs"}
    rows = [row("probe"), row("probe") | other, ALL, ALL | other | {"worker_share": 0.8}, row("probe", case="alone")]
    found = estimates(rows)
    assert [f["mode"] for f in found] == ["eager", "graphs"]
    assert [f["cost_per_worker_second"] for f in found] == pytest.approx([0.5, 0.25])
    assert found[0]["by_windows_budget"] == pytest.approx(BUDGET * 0.5 + 2e-4)
    assert "eager" in line(found[0])


def test_without_what_it_needs_there_is_no_estimate() -> None:
    assert estimates([]) == []
    assert estimates([row("probe", worker_share=0.01)]) == []
    assert estimates([ALL]) == []
    idle = row("all")
    assert cost_per_worker_second(idle) is None
    assert estimates([row("probe", worker_share=0.01), idle]) == []


def test_the_hook_is_timed_in_steps_without_a_window() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())

    def step() -> None:
        model(torch.ones(2)).sum().backward()
        optimizer.step()

    with loka_compile.probe(model, every=3) as probe:
        step()
        before = probe.windows
        assert 0 < hook_us(step, probe, 10) < 10_000
        assert (probe.steps, probe.windows, probe.every) == (11, before, 3)
        step()
        step()
        assert probe.windows == before + 1, "the probe goes on as it was"
