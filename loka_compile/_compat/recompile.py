"""Compiling a captured graph a second time, after Dynamo has finished with it.

Private: ``TracingContext`` and ``tracing`` (torch 2.11 to 2.14). Dynamo 2.11 clears ``tensor_to_context`` when a
compile ends (``torch/_dynamo/convert_frame.py``); without it every size of every input would become symbolic the second
time.
Copying a GraphModule drops the ``_dynamo_source`` of its inputs, by which AOTAutograd knows parameters from data.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch.utils.weak import WeakTensorKeyDictionary

T = TypeVar("T")


def copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """A deep copy whose inputs are still known as what they are."""
    copied = copy.deepcopy(gm)
    for old, new in zip(gm.graph.nodes, copied.graph.nodes, strict=True):
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    return copied


class SavedCapture:
    """A captured graph with everything that is needed to compile it again later. Made inside the backend call."""

    def __init__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        self.gm = copy_graph(gm)
        self.inputs = list(example_inputs)
        self._context = TracingContext.try_get()
        self._tensor_contexts: list[tuple[torch.Tensor, Any]] = []
        if self._context is not None:
            known = self._context.tensor_to_context
            self._tensor_contexts = [(t, known[t]) for t in self.inputs if isinstance(t, torch.Tensor) and t in known]

    def forget(self, positions: Collection[int]) -> None:
        """Keep none of these inputs alive; who compiles has to bring them."""
        dropped = {id(self.inputs[i]) for i in positions}
        self._tensor_contexts = [(t, known) for t, known in self._tensor_contexts if id(t) not in dropped]
        for i in positions:
            self.inputs[i] = None

    def compile(self, compiler: Callable[[fx.GraphModule, Sequence[Any]], T]) -> T:
        """``compiler(gm, example_inputs)`` as Dynamo would have called it. Only once: it takes the graph over."""
        if self._context is None:
            return compiler(self.gm, self.inputs)
        # A context of its own: backwards of the first version, which may still be compiled, read theirs. And the
        # first one's count of DDP buckets is used up; a bucket's graph stands alone by now.
        context = copy.copy(self._context)
        context.fw_metadata = context.output_strides = None
        context.tensor_to_context = WeakTensorKeyDictionary()
        for tensor, symbolic in self._tensor_contexts:
            context.tensor_to_context[tensor] = symbolic
        context.ddp_optimizer_ctx = None
        with tracing(context):
            return compiler(self.gm, self.inputs)
