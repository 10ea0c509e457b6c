"""Zero gradients of parameters that the Mods no longer read: one buffer for all of them, so one kernel.

A parameter without a gradient would break DDP and the optimizer's weight decay, so each gets zeros. As separate tensors
Inductor launches a kernel for each, about a microsecond apiece: twelve of them were 5 % of a training step of width
1024 (docs/fused_speed.md).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from loka_compile.lowering.fused.match import emit, is_call

aten = torch.ops.aten

#: Every gradient begins on a cache line, for the vectorised loads of fused optimizers.
ALIGNMENT_BYTES = 128


def share_zero_gradients(graph: fx.Graph) -> int:
    """Make the zeros among the outputs of a backward graph parts of one buffer per dtype and device, in place.

    Returns how many outputs share one. Only zeros of fixed shape that nothing else reads.
    """
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    groups: dict[tuple[torch.dtype, torch.device], list[fx.Node]] = {}
    for node in output.all_input_nodes:
        if _is_zeros(node) and set(node.users) == {output}:
            value = node.meta["val"]
            groups.setdefault((value.dtype, value.device), []).append(node)
    shared = 0
    for (dtype, device), nodes in groups.items():
        if len(nodes) > 1:
            _share(graph, nodes, dtype, device)
            shared += len(nodes)
    return shared


def _share(graph: fx.Graph, nodes: list[fx.Node], dtype: torch.dtype, device: torch.device) -> None:
    unit = max(1, ALIGNMENT_BYTES // dtype.itemsize)
    starts, total = [], 0
    for node in nodes:
        starts.append(total)
        total += math.ceil(node.meta["val"].numel() / unit) * unit
    first = min(nodes, key=list(graph.nodes).index)
    with graph.inserting_before(first):
        buffer = graph.call_function(
            aten.full.default,
            ([total], 0),
            {"dtype": dtype, "device": device, "layout": torch.strided, "pin_memory": False},
        )
        buffer.meta["val"] = first.meta["val"].new_empty((total,))
    for node, start in zip(nodes, starts, strict=True):
        value = node.meta["val"]
        with graph.inserting_before(node):
            # A view of the buffer itself; a slice Inductor would compute anew for each output.
            (part,) = emit(
                graph, node, aten.as_strided.default, (buffer, list(value.shape), list(value.stride()), start)
            )
        node.replace_all_uses_with(part)
        graph.erase_node(node)


def _is_zeros(node: Any) -> bool:
    if not is_call(node, aten.full.default):
        return False
    value = node.meta["val"]
    # 1 would be True for a bool: its zeros are False, which equals 0 as well.
    return (
        node.args[1] == 0
        and all(isinstance(size, int) for size in value.shape)
        and value.numel() > 0
        and value.layout == torch.strided
        and value.is_contiguous()
    )


__all__ = ["share_zero_gradients"]
