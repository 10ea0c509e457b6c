"""What runs right now: a backward pass, or Dynamo's tracing. torch has no public question for either (2.11 to 2.14)."""

from __future__ import annotations

import torch
from torch._guards import CompileContext


def in_backward() -> bool:
    """Whether this thread runs a backward pass: also true for what a checkpoint recomputes in it."""
    return torch._C._current_graph_task_id() != -1


def trace_attempt() -> tuple[object, int] | None:
    """(frame being compiled, attempt) while Dynamo traces, else None. An attempt traces the frame from its start."""
    if CompileContext.try_get() is None:
        return None
    trace = CompileContext.current_trace_id()
    return None if trace is None else (trace.compile_id, trace.attempt)
