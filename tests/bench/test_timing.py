"""The CUDA-graph timer's logic, on a stand-in for torch.cuda that keeps a clock of its own."""

import contextlib
import types

import pytest
import torch

from loka_compile.bench import timing
from loka_compile.bench.records import Timing
from loka_compile.bench.timing import DeviceLostError, GraphTimer


class FakeCuda:
    """Calls advance a clock (us); a graph replays what was called while it captured."""

    def __init__(self, monkeypatch):
        self.now, self.capturing, self.lost, self.pools, self.replays = 0.0, None, False, 0, []
        for name in ("graph_pool_handle", "Stream", "CUDAGraph", "Event", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())

    def spend(self, us, name=""):
        if self.capturing is not None:
            self.capturing.append((us, name))
        else:
            self.now += us

    def graph_pool_handle(self):
        self.pools += 1
        return self.pools

    def Stream(self):
        return types.SimpleNamespace(synchronize=lambda: None)

    def synchronize(self):
        if self.lost:
            raise RuntimeError("CUDA error: an illegal memory access")

    def CUDAGraph(self):
        outer, recorded = self, []

        class Graph:
            def capture_begin(self, pool, capture_error_mode):
                assert pool == outer.pools  # never one that a failed capture left behind
                outer.capturing = recorded

            def capture_end(self):
                outer.capturing = None

            def replay(self):
                outer.replays.append(recorded[0][1] if recorded else "")
                for us, name in recorded:
                    outer.spend(us() if callable(us) else us, name)

        return Graph()

    def Event(self, enable_timing):
        outer = self

        class Event:
            def record(self):
                self.at = outer.now

            def synchronize(self):
                pass

            def elapsed_time(self, other):
                return (other.at - self.at) / 1e3

        return Event()


@pytest.fixture
def cuda(monkeypatch):
    return FakeCuda(monkeypatch)


def calls(cuda, us, name, count=4):
    return lambda: [lambda: cuda.spend(us, name)] * count


def test_median_and_turns(cuda):
    timer = GraphTimer("cpu")
    tried = []
    found = timer.measure({"a": calls(cuda, 100.0, "a"), "b": calls(cuda, 3.0, "b", 64)}, tried.append)
    assert tried == ["a", "b"]
    assert found == {"a": Timing(pytest.approx(100.0), 0.0), "b": Timing(pytest.approx(3.0), 0.0)}
    # After one replay each to see that it works: the arms take turns.
    assert cuda.replays[2:6] == ["a", "b", "a", "b"]
    assert len(cuda.replays) == 2 * (1 + 1 + timing.MOST_ROUNDS)
    assert cuda.pools == 1


def test_long_calls_are_replayed_alone_and_less_often(cuda):
    found = GraphTimer("cpu").measure({"long": calls(cuda, 1e5, "long")}, lambda _: None)
    assert found["long"].us == pytest.approx(1e5)
    assert len(cuda.replays) == 1 + 1 + timing.LEAST_ROUNDS
    assert cuda.now == pytest.approx(1e5 * (2 + len(cuda.replays)))


def test_a_failing_arm_leaves_the_others_and_a_fresh_pool(cuda):
    def fail_in_capture():
        if cuda.capturing is not None:
            raise RuntimeError("operation not permitted when stream is capturing")

    makers = {"good": calls(cuda, 5.0, "good"), "bad": lambda: [fail_in_capture], "worse": lambda: 1 / 0,
              "last": calls(cuda, 7.0, "last")}  # fmt: skip
    found = GraphTimer("cpu").measure(makers, lambda _: None)
    assert found["bad"] == "RuntimeError: operation not permitted when stream is capturing"
    assert found["worse"] == "ZeroDivisionError: division by zero"
    assert (found["good"].us, found["last"].us) == pytest.approx((5.0, 7.0))
    assert cuda.pools == 3


def test_a_lost_device_is_told_apart(cuda):
    def kill():
        cuda.lost = True
        raise RuntimeError("CUDA error")

    with pytest.raises(DeviceLostError, match=r"RuntimeError: CUDA error .and then the device: CUDA error: an illegal"):
        GraphTimer("cpu").measure({"kills": lambda: [kill]}, lambda _: None)


def test_spread(cuda):
    """A replay to see that it works, one to estimate, and twenty that count: 10, 20, 30, 40 us in turn."""
    times = iter([1.0, 1.0, *([10.0, 20.0, 30.0, 40.0] * 5)])

    def call():
        if cuda.capturing is not None:
            cuda.spend(lambda: next(times))

    found = GraphTimer("cpu").measure({"x": lambda: [call]}, lambda _: None)
    # Quartiles 17.5 and 32.5.
    assert found["x"] == Timing(pytest.approx(25.0), pytest.approx(15 / 25))
