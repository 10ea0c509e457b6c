"""Has the kernels behind our operators built while Inductor still makes the others.

Inductor compiles what it generates side by side, in worker processes. A kernel behind an operator would be compiled at
its first launch, one after another, in the first training step. So the operators of a graph are run on fake tensors as
soon as it is lowered, their launches are noted instead of performed, and the same workers build them. No threads:
Python 3.11's parser, which Triton reads a kernel's source with, fails in them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import fx
from torch.utils import _pytree as pytree

from loka_compile._compat.kernel_cache import Launch, describe, fake_mode, submit
from loka_compile._compat.shapes import size_hint

logger = logging.getLogger(__name__)
#: What a CUDA device runs for an operator, by the operator's name.
ON_CUDA: dict[str, Callable[..., Any]] = {}
#: What was submitted: (launch, device).
_begun: set[tuple[Launch, int]] = set()


def on_cuda(name: str, run: Callable[..., Any]) -> None:
    """Let launches of the operator ``name`` be built ahead: ``run`` is its implementation for CUDA."""
    ON_CUDA[name] = run


def build(graph: fx.Graph) -> int:
    """Begin to build the kernels of the graph's operators on CUDA; returns how many launches were submitted."""
    begun = 0
    for node in graph.nodes:
        run = ON_CUDA.get(node.target._schema.name) if isinstance(node.target, torch._ops.OpOverload) else None
        if run is None:
            continue
        args, kwargs = pytree.tree_map(_described, (node.args, node.kwargs))
        tensors = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, _Described)]
        if tensors and all(t.known and t.device.type == "cuda" for t in tensors):
            begun += _build(run, args, kwargs, tensors[0].device)
    return begun


class _Described:
    """What a tensor's kernel depends on: its shape and strides as numbers, dtype and device."""

    def __init__(self, value: torch.Tensor) -> None:
        self._shape, self._strides = ([size_hint(n) for n in ns] for ns in (value.shape, value.stride()))
        self.known = None not in self._shape + self._strides
        self.dtype, self.device = value.dtype, value.device

    def fake(self) -> torch.Tensor:
        """One without data, within a mode of fake tensors."""
        shape, strides = (cast(list[int], numbers) for numbers in (self._shape, self._strides))
        return torch.empty_strided(shape, strides, dtype=self.dtype, device=self.device)


def _described(arg: Any) -> Any:
    value = arg.meta.get("val") if isinstance(arg, fx.Node) else arg
    return _Described(value) if isinstance(value, torch.Tensor) else value


def _build(run: Callable[..., Any], args: Any, kwargs: Any, device: torch.device) -> int:
    from loka_compile.kernels.running import expect, telling

    index = device.index if device.index is not None else torch.cuda.current_device()
    launches: list[tuple[Any, Launch]] = []

    def note(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        found = describe(kernel, args, options)
        if found is not None:
            launches.append((kernel, found))

    begun = 0
    try:
        with torch.cuda.device(index), telling(note), fake_mode():
            args, kwargs = pytree.tree_map(lambda a: a.fake() if isinstance(a, _Described) else a, (args, kwargs))
            run(*args, **kwargs)
    except Exception:  # what a fake tensor cannot do, such as to give an address: the launch does it
        logger.debug("launches of %s could not be described", run, exc_info=True)
    for kernel, launch in launches:
        if (launch, index) in _begun:
            continue
        try:
            future = submit(launch, index)
        except Exception:
            logger.debug("no worker takes a kernel", exc_info=True)
            break
        if future is None:
            break
        _begun.add((launch, index))
        expect(kernel, future)
        begun += 1
    return begun
