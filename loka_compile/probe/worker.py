"""Does the probe's arithmetic beside the training: one thread, on CUDA with its own stream, within a time budget."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable

import torch

logger = logging.getLogger(__name__)


class Budget:
    """Time that statistics may take: ``grace`` seconds at once, and ``fraction`` of the time that training takes.

    A job's cost is known only once it has run (the time of its kernels on CUDA, else wall time); an estimate from the
    last one of its kind stands in until then. With ``fraction`` None there is no limit.
    """

    def __init__(self, fraction: float | None, grace: float) -> None:
        """Start with the grace and nothing spent."""
        self.fraction = fraction
        self.allowance = grace
        self.spent = 0.0
        self._reserved = 0.0
        self._estimates: dict[Hashable, float] = {}
        self._served: dict[Hashable, int] = {}
        self._round = 0
        self._lock = threading.Lock()

    def earn(self, seconds: float) -> None:
        """Training has gone on for so long."""
        if self.fraction is not None:
            self.allowance += self.fraction * seconds

    @property
    def left(self) -> float:
        """Seconds that may still be spent; below zero if the last job took more than was left."""
        return self.allowance - self.spent - self._reserved

    def choose(self, kinds: Iterable[Hashable]) -> set[Hashable]:
        """The kinds of job that can be afforded now, those that waited longest first.

        As long as anything is left the first of them is taken whatever it costs, so that none waits for ever.
        """
        kinds = list(kinds)
        if self.fraction is None:
            return set(kinds)
        self._round += 1
        left = self.left
        chosen: set[Hashable] = set()
        for kind in sorted(kinds, key=lambda k: self._served.get(k, 0)):
            cost = self._estimates.get(kind, 0.0)
            if left <= 0 or (chosen and cost > left):
                break
            chosen.add(kind)
            self._served[kind] = self._round
            left -= cost
        return chosen

    def reserve(self, kind: Hashable) -> float:
        """A job of this kind waits to be run. Returns the estimate, to be given back to ``settle``."""
        estimate = self._estimates.get(kind, 0.0)
        with self._lock:
            self._reserved += estimate
        return estimate

    def settle(self, kind: Hashable, estimate: float, cost: float) -> None:
        """The job has run and took ``cost`` seconds."""
        with self._lock:
            self._reserved -= estimate
            self.spent += cost
            # Several calls of one layer in a window are of one kind; the latest cost stands for each.
            self._estimates[kind] = cost


class Worker:
    """Runs jobs in order, in one thread. Jobs wait until they are released, so that they spread over steps."""

    def __init__(self) -> None:
        """No thread runs before the first job."""
        self._jobs: deque[Callable[[], None]] = deque()
        self._released = 0
        self._running = False
        self._closing = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None

    @property
    def pending(self) -> int:
        """Jobs that wait."""
        return len(self._jobs)

    def submit(self, job: Callable[[], None]) -> None:
        """Add a job at the end."""
        with self._changed:
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="loka-probe", daemon=True)
                self._thread.start()

    def release(self, count: int) -> None:
        """Let ``count`` more of the waiting jobs run."""
        with self._changed:
            self._released = min(self._released + count, len(self._jobs))
            self._changed.notify_all()

    def drain(self) -> None:
        """Release everything and wait until it has run. Raises what a job raised."""
        with self._changed:
            self._released = len(self._jobs)
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._jobs and not self._running)
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Let the thread end once it has nothing more to do."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._running = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: (self._jobs and self._released) or self._closing)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                self._released = max(0, self._released - 1)
                self._running = True
            if self.error is not None:
                continue  # after a failure the statistics are not to be trusted: nothing more is added to them
            try:
                job()
            except Exception as error:
                logger.exception("the probe's statistics failed; training goes on without them")
                self.error = error


class Streams:
    """A stream of low priority beside the training's on every CUDA device; nothing on others."""

    def __init__(self) -> None:
        """Streams are made when first needed."""
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def mark(self, device: torch.device) -> torch.cuda.Event | None:
        """An event after which what the current stream has been given is there."""
        if device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return event

    def timed(
        self,
        device: torch.device,
        ready: torch.cuda.Event | None,
        tensors: Iterable[torch.Tensor],
        job: Callable[[], None],
    ) -> float:
        """Run ``job`` on the device's own stream once ``ready`` has passed; wait, and return its seconds.

        ``tensors`` were made on the training's stream: the allocator must not give their memory away before.
        """
        if device.type != "cuda":
            start = time.perf_counter()
            job()
            return time.perf_counter() - start
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device, priority=0)
        stream = self._streams[device]
        # Blocking: waiting for it must not keep a core busy.
        begin, end = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
        with torch.cuda.device(device), torch.cuda.stream(stream):
            if ready is not None:
                stream.wait_event(ready)
            for tensor in tensors:
                tensor.record_stream(stream)
            begin.record(stream)
            job()
            end.record(stream)
        end.synchronize()  # in this thread only; it lets other threads run
        return float(begin.elapsed_time(end)) / 1e3
