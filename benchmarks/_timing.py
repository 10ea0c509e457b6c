"""Times GPU work the way it runs in production: as CUDA graphs, arms interleaved, inputs larger than the L2 cache."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

import torch

Call = Callable[[], object]


def capture(calls: Sequence[Call], warmup: int = 3) -> torch.cuda.CUDAGraph:
    """One CUDA graph that runs all calls once, in order. What they return is dropped."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmup):
            for call in calls:
                call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def measure(arms: Mapping[str, Sequence[Call]], rounds: int = 25) -> dict[str, float]:
    """As :func:`measure_graphs`, from calls."""
    return measure_graphs({name: (capture(calls), len(calls)) for name, calls in arms.items()}, rounds)


def measure_graphs(graphs: Mapping[str, tuple[torch.cuda.CUDAGraph, int]], rounds: int = 25) -> dict[str, float]:
    """Median microseconds of one call, for every arm: a graph and the number of calls in it.

    The calls of an arm do the same on different inputs, so that the cache holds none of them. Every round replays
    each arm once, so that clock and temperature drift hits all arms alike.
    """
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for graph, _ in graphs.values():
        for _ in range(3):
            graph.replay()
    torch.cuda.synchronize()
    for _ in range(rounds):
        for name, (graph, count) in graphs.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop) * 1000 / count)
    return {name: statistics.median(t) for name, t in times.items()}


def copies_past_l2(bytes_per_input: int, l2: int = 60 << 20, least: int = 3, most: int = 64) -> int:
    """How many input sets are needed so that a round trip through all of them evicts the first."""
    return max(least, min(most, -(-2 * l2 // max(bytes_per_input, 1))))
