"""Builds the kernels that a graph calls by themselves while Inductor still makes the others.

Inductor compiles what it generates side by side, in processes. Kernels behind an operator of ours would be compiled
when they are first launched, one after another, in the first training step. So threads launch them, on fake tensors of
the graph's shapes and without running them, as soon as the graph is fused.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from loka_compile._compat.shapes import size_hint
from loka_compile.lowering.fused.ops import ON_CUDA

logger = logging.getLogger(__name__)
_lock = threading.Lock()
_pending: list[Future[None]] = []


def build(graph: fx.Graph) -> int:
    """Begin to build the kernels of the graph's operators of ours on CUDA; returns for how many."""
    begun = 0
    for node in graph.nodes:
        run = ON_CUDA.get(node.target._schema.name) if isinstance(node.target, torch._ops.OpOverload) else None
        if run is None:
            continue
        args = pytree.tree_map(lambda a: _described(a.meta["val"]) if isinstance(a, fx.Node) else a, node.args)
        tensors = [a for a in pytree.tree_leaves(args) if isinstance(a, _Described)]
        if not tensors or any(t.shape is None or t.device.type != "cuda" for t in tensors):
            continue
        with _lock:
            _pending.append(_pool().submit(_build, run, args, tensors[0].device))
        begun += 1
    return begun


def wait() -> None:
    """Until everything that was begun is built. What could not be is built at its first launch, and raises there."""
    with _lock:
        waiting, _pending[:] = list(_pending), []
    for future in waiting:
        future.result()


class _Described:
    """What a tensor's kernel depends on."""

    def __init__(self, value: torch.Tensor) -> None:
        sizes = [size_hint(size) for size in value.shape]
        known = [size for size in sizes if size is not None]
        self.shape = known if len(known) == len(sizes) else None
        self.dtype, self.device = value.dtype, value.device


def _described(value: Any) -> Any:
    return pytree.tree_map(lambda v: _Described(v) if isinstance(v, torch.Tensor) else v, value)


def _build(run: Any, args: Any, device: torch.device) -> None:
    from loka_compile.kernels import device as dev  # there is no Triton without a CUDA device

    dev.thread.builds_ahead = True
    try:
        torch.cuda.set_device(device)
        with FakeTensorMode():
            run(*pytree.tree_map(_fake, args))
    except Exception:  # whatever it is, the launch itself will say so
        logger.debug("a kernel of %s was not built ahead", run, exc_info=True)
    finally:
        dev.thread.builds_ahead = False


def _fake(arg: Any) -> Any:
    if not isinstance(arg, _Described):
        return arg
    return torch.empty(arg.shape or (), dtype=arg.dtype, device=arg.device)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="loka-build")


def _forget() -> None:
    """In a forked process, which has none of this one's threads."""
    global _lock
    _lock = threading.Lock()
    _pending.clear()
    _pool.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
