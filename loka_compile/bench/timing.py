"""Times calls as they run in production: as CUDA graphs, arms interleaved, on inputs that are not in the L2 cache."""

from __future__ import annotations

import gc
import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from loka_compile.bench.records import Timing

Call = Callable[[], object]
logger = logging.getLogger(__name__)

#: Microseconds that all rounds of one group of arms may take, within the limits of rounds below.
GROUP_US = 150_000.0
LEAST_ROUNDS, MOST_ROUNDS = 5, 20
#: A call that takes longer than this (us) is not repeated within a graph: its own operands evict each other.
LONG_US = 2_000.0


class DeviceLostError(RuntimeError):
    """An arm broke the CUDA context: nothing more can be measured in this process."""


class Timer(Protocol):
    """What the runner needs; tests have one without a GPU."""

    def measure(
        self, arms: Mapping[str, Callable[[], Sequence[Call]]], on_try: Callable[[str], None]
    ) -> dict[str, Timing | str]:
        """Time all arms together; for each its timing, or why there is none.

        Args:
            arms: name -> a function that makes the arm's calls, each on operands of its own.
            on_try: called with the name before anything of the arm runs.

        Raises:
            DeviceLostError: an arm broke the device.
        """
        ...


class GraphTimer:
    """On a CUDA device. All graphs share one memory pool, so that thousands of them do not allocate."""

    def __init__(self, device: str = "cuda") -> None:
        self._device = device
        self._renew()

    def _renew(self) -> None:
        """A capture that fails leaves its pool and stream in a state that no other capture gets along with."""
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        torch.zeros(1, device=self._device)
        # A pool dies with its last graph; this one keeps it.
        self._anchor = self._capture([lambda: torch.zeros(1, device=self._device)])

    def _capture(self, calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
        """``torch.cuda.graph`` would give all cached memory back to the driver every time."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            self._stream.synchronize()
            gc.disable()  # what a collection frees might be nothing that a capture allows
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    # Results stay until the end: each call writes to memory of its own, as it would in a model.
                    results = [call() for call in calls]
                finally:
                    graph.capture_end()
            finally:
                gc.enable()
        del results
        return graph

    def _prepare(self, make: Callable[[], Sequence[Call]]) -> tuple[torch.cuda.CUDAGraph, int]:
        """The arm's graph and the number of calls in it."""
        with torch.cuda.stream(self._stream):
            calls = make()
            calls[0]()  # compiles what compiles at first use
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            calls[0]()
            stop.record()
            stop.synchronize()
        if start.elapsed_time(stop) * 1e3 > LONG_US:
            calls = calls[:1]
        return self._capture(calls), len(calls)

    def measure(
        self, arms: Mapping[str, Callable[[], Sequence[Call]]], on_try: Callable[[str], None]
    ) -> dict[str, Timing | str]:
        """See :class:`Timer`."""
        found: dict[str, Timing | str] = {}
        graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]] = {}
        for name, make in arms.items():
            on_try(name)
            try:
                graphs[name] = self._prepare(make)
                with torch.cuda.stream(self._stream):
                    graphs[name][0].replay()
                torch.cuda.synchronize()
            except Exception as error:
                # Whatever a library raises: the other arms are worth measuring.
                logger.debug("arm %s broke", name, exc_info=True)
                graphs.pop(name, None)
                found[name] = reason = f"{type(error).__name__}: {str(error).strip() or 'no text'}"
                check_device(reason)
                self._renew()
        once = self._rounds(graphs, 1)
        total = sum(once[name][0] * graphs[name][1] for name in graphs)
        rounds = max(LEAST_ROUNDS, min(MOST_ROUNDS, int(GROUP_US / max(total, 1.0))))
        for name, times in self._rounds(graphs, rounds).items():
            found[name] = summarise(times)
        return found

    def _rounds(self, graphs: Mapping[str, tuple[torch.cuda.CUDAGraph, int]], rounds: int) -> dict[str, list[float]]:
        """Microseconds of one call by arm and round. Every round replays each arm once: drift hits all alike."""
        events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in graphs}
        with torch.cuda.stream(self._stream):
            for _ in range(rounds):
                for name, (graph, _) in graphs.items():
                    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    start.record()
                    graph.replay()
                    stop.record()
                    events[name].append((start, stop))
        # Only now: the GPU always has the next replay waiting, so that no time of the CPU is between the events.
        torch.cuda.synchronize()
        return {
            name: [start.elapsed_time(stop) * 1e3 / graphs[name][1] for start, stop in pairs]
            for name, pairs in events.items()
        }


def summarise(times: Sequence[float]) -> Timing:
    """Median and relative interquartile range."""
    median = statistics.median(times)
    if len(times) < 2:
        return Timing(median, 0.0)
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return Timing(median, (high - low) / median)


def check_device(what: str) -> None:
    """Raise if the CUDA context is gone.

    Raises:
        DeviceLostError: it is; the text names ``what`` happened before.
    """
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise DeviceLostError(f"{what} (and then the device: {error})") from error
