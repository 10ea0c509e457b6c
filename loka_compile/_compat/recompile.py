"""Compiling a captured graph a second time, after Dynamo has finished with it.

Private: ``TracingContext`` and ``tracing`` (torch 2.11 to 2.14). Dynamo 2.11 clears ``tensor_to_context`` when a
compile ends (``torch/_dynamo/convert_frame.py``); without it every size of every input would become symbolic the second time.
Copying a GraphModule drops the ``_dynamo_source`` of its inputs, by which AOTAutograd knows parameters from data.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import fx
from torch._guards import TracingContext, tracing

T = TypeVar("T")


class SavedCapture:
    """A captured graph with everything that is needed to compile it again later. Made inside the backend call."""

    def __init__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        self.gm = copy.deepcopy(gm)
        for old, new in zip(gm.graph.nodes, self.gm.graph.nodes, strict=True):
            if hasattr(old, "_dynamo_source"):
                new._dynamo_source = old._dynamo_source
        self.inputs = list(example_inputs)
        self._context = TracingContext.try_get()
        self._tensor_contexts: list[tuple[torch.Tensor, Any]] = []
        if self._context is not None:
            known = self._context.tensor_to_context
            self._tensor_contexts = [(t, known[t]) for t in self.inputs if isinstance(t, torch.Tensor) and t in known]

    def compile(self, compiler: Callable[[fx.GraphModule, Sequence[Any]], T]) -> T:
        """``compiler(gm, example_inputs)`` as Dynamo would have called it. Only once: it takes the graph over."""
        if self._context is None:
            return compiler(self.gm, self.inputs)
        for tensor, context in self._tensor_contexts:
            self._context.tensor_to_context[tensor] = context
        with tracing(self._context):
            return compiler(self.gm, self.inputs)
