"""The budget that decides what is sampled, and the thread that does the arithmetic."""

from __future__ import annotations

import threading

import pytest

from loka_compile.probe.worker import Budget, Worker


def spend(budget: Budget, kind: str, seconds: float) -> None:
    budget.settle(kind, budget.reserve(kind), seconds)


def test_without_a_fraction_everything_is_taken() -> None:
    budget = Budget(None, 0.0)
    spend(budget, "a", 100.0)
    assert budget.choose("abc") == {"a", "b", "c"}


def test_the_grace_is_free_and_then_the_fraction_counts() -> None:
    budget = Budget(0.01, 1.0)
    assert budget.choose("ab") == {"a", "b"}
    spend(budget, "a", 0.7)
    spend(budget, "b", 0.7)
    assert budget.left == pytest.approx(-0.4)
    assert budget.choose("ab") == set()
    budget.earn(39.0)
    assert budget.choose("ab") == set()
    budget.earn(2.0)
    assert len(budget.choose("ab")) == 1  # a bit is left: one job, whatever it costs


def test_costly_kinds_get_their_turn_and_the_sum_keeps_to_the_fraction() -> None:
    budget, costs = Budget(0.01, 0.0), {"cheap": 0.001, "dear": 0.3, "middling": 0.02}
    counts = dict.fromkeys(costs, 0)
    for _ in range(20_000):
        budget.earn(0.5)
        for kind in budget.choose(costs):
            counts[str(kind)] += 1
            spend(budget, str(kind), costs[str(kind)])
    assert 0.9 * 100 < budget.spent < 100 + 0.3
    assert min(counts.values()) > 100
    assert max(counts.values()) - min(counts.values()) <= max(counts.values()) / 2


def test_waiting_jobs_count_with_their_last_cost() -> None:
    budget = Budget(0.5, 1.0)
    spend(budget, "a", 0.4)
    assert budget.left == pytest.approx(0.6)
    first, second = budget.reserve("a"), budget.reserve("a")
    assert budget.left == pytest.approx(-0.2)
    budget.settle("a", first, 0.1)
    budget.settle("a", second, 0.1)
    assert budget.left == pytest.approx(0.4)


def test_jobs_run_in_order_and_only_when_released() -> None:
    worker, done, two = Worker(), [], threading.Event()

    def job(index: int) -> None:
        done.append(index)
        if index == 1:
            two.set()

    for index in range(6):
        worker.submit(lambda index=index: job(index))  # type: ignore[misc]
    assert worker.pending == 6
    worker.release(2)
    assert two.wait(10)
    assert done == [0, 1]
    worker.drain()
    assert done == list(range(6))
    worker.release(10)  # nothing waits: this is not saved up
    worker.submit(lambda: job(6))
    assert worker.pending == 1
    worker.drain()
    worker.close()
    assert done == list(range(7))


def test_a_failure_stops_the_statistics_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    worker, done = Worker(), []
    worker.submit(lambda: 1 / 0)  # type: ignore[arg-type,return-value]
    worker.submit(lambda: done.append(1))
    with pytest.raises(ZeroDivisionError):
        worker.drain()
    assert done == []
    assert "training goes on without them" in caplog.text
    worker.close()
