"""What torch has no public question or word for (2.11 to 2.14): whether a backward pass or Dynamo's tracing runs right
now, and that an operator has an effect that its schema does not show.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator

import torch
from torch._guards import CompileContext
from torch._library.custom_ops import CustomOpDef
from torch._library.effects import EffectType


def in_backward() -> bool:
    """Whether this thread runs a backward pass: also true for what a checkpoint recomputes in it."""
    return torch._C._current_graph_task_id() != -1


def trace_attempt() -> tuple[object, int] | None:
    """(frame being compiled, attempt) while Dynamo traces, else None. An attempt traces the frame from its start."""
    if CompileContext.try_get() is None:
        return None
    trace = CompileContext.current_trace_id()
    return None if trace is None else (trace.compile_id, trace.attempt)


def keep_for_its_effect(op: CustomOpDef) -> None:
    """Let no compiler remove calls of an operator without a result, nor change their order."""
    op.register_effect(EffectType.ORDERED)
    torch.fx.node.has_side_effect(op._opoverload)


@contextlib.contextmanager
def outside_cuda_graphs(*names: str) -> Iterator[None]:
    """While this lasts, Inductor compiles calls of these operators to stand between CUDA graphs, not in them.

    The tag ``cudagraph_unsafe`` would say so, but Inductor looks for it on the target of the graph's node, and that is
    a higher-order operator for one that mutates or has an effect. Several may last at a time and end in any order,
    which ``config.patch`` would not survive: it puts back what was there when it began.
    """
    import torch._inductor.config as config

    with _lock:
        new = [name for name in names if not _lasting[name]]
        _lasting.update(names)
        config.custom_should_partition_ops = [*config.custom_should_partition_ops, *new]
    try:
        yield
    finally:
        with _lock:
            _lasting.subtract(names)
            old = {name for name in names if not _lasting[name]}
            config.custom_should_partition_ops = [n for n in config.custom_should_partition_ops if n not in old]


#: How many ``outside_cuda_graphs`` last, by operator.
_lasting: Counter[str] = Counter()
_lock = threading.Lock()
