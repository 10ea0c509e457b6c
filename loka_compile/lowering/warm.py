"""Has imported ahead what the end of a compile would wait for.

Where all caches hit, much of a compile is imports: a worker process of Inductor's is given its first kernel, and this
process launches its first. Both sets are begun here, once a process, for CUDA and where there are workers. What fails
is left to the place that needs it, which says so.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
from concurrent.futures import Future

import torch

from loka_compile._compat import kernel_cache

logger = logging.getLogger(__name__)
#: What the first launches of a chain in FP8 import: Triton's types of tensor descriptors, which it looks for among the
#: arguments of any launch, and the kernels that every chain has. No others, which some graph may do without: Python
#: runs one thread at a time, and the compile would stand still for them.
LAUNCHED = (
    "triton.tools.tensor_descriptor",
    "triton.experimental.gluon.nvidia.hopper",
    "loka_compile.kernels.cast",
    "loka_compile.kernels.block_norm_backward",
)
#: Seconds that a fork waits for the imports.
PATIENCE = 1.0

_workers: list[Future[None]] = []
#: Imports; begun at the next wait.
_thread: threading.Thread | None = None


def warm_workers(device: torch.device) -> None:
    """Let Inductor's workers, where they are ready, prepare for the kernels of a graph on ``device``."""
    if _workers or device.type != "cuda":
        return
    try:
        index = device.index if device.index is not None else torch.cuda.current_device()
        _workers.extend(kernel_cache.warm_workers(index))
    except Exception:
        logger.debug("no worker is warmed", exc_info=True)


def import_launched() -> None:
    """Import what a chain's launches import in a thread, once this one waits for the workers that are being warmed.

    Not before: Python runs one thread at a time, and the compile would stand still for what another one gets done.
    """
    global _thread
    if _thread is None and _workers:
        _thread = threading.Thread(target=_import, name="loka-imports", daemon=True)
        try:
            kernel_cache.at_next_wait(_begin)
        except Exception:
            logger.debug("nothing is imported ahead", exc_info=True)


def _begin() -> None:
    try:
        if _thread is not None:
            _thread.start()
    except RuntimeError:  # no thread can be had
        logger.debug("nothing is imported ahead", exc_info=True)


def _import() -> None:
    for name in LAUNCHED:
        try:
            importlib.import_module(name)
        except Exception:  # the launch says so if it needs it
            logger.debug("%s was not imported ahead", name, exc_info=True)


def _before_fork() -> None:
    """A module that is half imported stays locked in the new process, for ever."""
    if _thread is not None and _thread.is_alive() and _thread is not threading.current_thread():
        _thread.join(PATIENCE)


def _forget() -> None:
    """In a forked process, which has none of this one's workers and threads."""
    global _thread
    _thread = None
    _workers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_forget)
