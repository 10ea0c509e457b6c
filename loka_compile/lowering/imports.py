"""Has imported ahead what this process would import at its first launch.

Where all caches hit, much of a compile is imports. They are done in a thread while this process waits for a worker of
Inductor's, which loads the kernels that begin early. (To have the workers themselves import ahead was measured too, and
took as long as it gained.) What fails is left to the launch, which says so.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Sequence
from typing import Any

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
    "loka_compile.kernels.block_norm_backward_fp8",
)
#: Seconds that a fork waits for the imports.
PATIENCE = 1.0

#: Begun at the next wait, once a process.
_thread: threading.Thread | None = None


def import_launched(inputs: Sequence[Any]) -> None:
    """Import what the launches of a graph on CUDA import in a thread, once this process waits for a worker.

    Not before: Python runs one thread at a time, and the compile would stand still for what another one gets done.
    """
    global _thread
    if _thread is None and any(isinstance(x, torch.Tensor) and x.device.type == "cuda" for x in inputs):
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
    """In a forked process, which has none of this one's threads."""
    global _thread
    _thread = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_forget)
