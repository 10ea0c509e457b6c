"""Launches of our Triton kernels: performed, told to somebody instead, or held until a worker has built the kernel."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger(__name__)
#: A worker that takes longer than this many seconds is not waited for: the launch compiles by itself.
PATIENCE = 120.0
#: Kernels that a worker process builds at this moment, or has built.
_building: dict[Any, list[Future[None]]] = {}
_lock = threading.Lock()


class _Thread(threading.local):
    #: What launches of this thread are told to instead of being performed.
    told: Callable[[Any, tuple[Any, ...], dict[str, Any]], None] | None = None


_thread = _Thread()


def run_kernel(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """``kernel[grid](*args, **options)``, after what is being built of the kernel is there."""
    if _thread.told is not None:
        _thread.told(kernel, args, options)
        return
    if _building:
        _wait_for(kernel)
    kernel[grid](*args, **options)


@contextmanager
def telling(told: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]) -> Iterator[None]:
    """Launches of this thread are told as (kernel, arguments, options), and nothing runs."""
    before, _thread.told = _thread.told, told
    try:
        yield
    finally:
        _thread.told = before


def expect(kernel: Any, built: Future[None]) -> None:
    """Launches of ``kernel`` wait for this, rather than compile what a worker process is compiling."""
    with _lock:
        _building.setdefault(kernel, []).append(built)


def _wait_for(kernel: Any) -> None:
    with _lock:
        futures = _building.pop(kernel, [])
    for future in futures:
        try:
            future.result(PATIENCE)
        except Exception:  # whatever it is, the launch will say so if it stands in its way too
            logger.debug("%s was not built ahead", kernel, exc_info=True)


def forget() -> None:
    """Nothing is expected any more: in a forked process, which has none of this one's workers."""
    global _lock
    _lock = threading.Lock()
    _building.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget)
