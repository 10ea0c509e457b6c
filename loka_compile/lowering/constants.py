"""Fixed scales are constants of the compiled graph, and no kernel's output.

A GEMM reads its scales from memory. Behind a BlockNorm they are numbers that are known when compiling, and Inductor
launches a kernel in each call to write one: 1.5 us on an H200, 6 % of four layers of 512 at a batch of 4096
(docs/fused_speed.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from loka_compile.lowering.fused import lowerings
from loka_compile.lowering.fused.match import copy_meta, is_call
from loka_compile.lowering.fused.product import on_this_device

aten = torch.ops.aten


def hold_constants(graph: fx.Graph) -> int:
    """Replace each number on a GPU that a GEMM reads as a tensor by ``loka::constant``; returns how many.

    On the forward or the backward graph, in place, behind the fusion. Elementwise readers keep the number itself, which
    Inductor writes into their kernels.
    """
    held = 0
    for node in list(graph.nodes):
        if not _is_number_on_gpu(node):
            continue
        readers = [user for user in node.users if _reads_memory(user)]
        if readers:
            value = node.meta["val"]
            with graph.inserting_before(node):
                constant = graph.call_function(torch.ops.loka.constant.default, (float(node.args[1]), value.device))
            copy_meta(constant, node, value)
            for reader in readers:
                reader.replace_input_with(node, constant)
            held += 1
    if held:
        lowerings.register()
        graph.eliminate_dead_code()
    return held


def _is_number_on_gpu(node: Any) -> bool:
    if not is_call(node, aten.full.default) or not isinstance(node.args[1], (int, float)):
        return False
    value = node.meta["val"]
    return value.dim() == 0 and value.dtype == torch.float32 and not on_this_device(value)


def _reads_memory(node: fx.Node) -> bool:
    """GEMMs, fused or not; what the graph returns must stay fresh in each call."""
    target = node.target
    return target is aten._scaled_mm.default or (
        isinstance(target, torch._ops.OpOverload) and target.namespace == "loka"
    )


__all__ = ["hold_constants"]
