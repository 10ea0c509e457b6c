"""A graph's inputs that are quantised by their own amax, each in one launch instead of Inductor's two or three.

On a graph as Inductor is about to lower it: weights that became constants are quantised already, and those that did not
were quantised together on the joint graph (:mod:`loka_compile.lowering.fused.joint`). What is left are activations that
come from outside, which no kernel of ours could write in FP8.
"""

from __future__ import annotations

import torch
from torch import fx

from loka_compile._compat.shapes import size_hint
from loka_compile.lowering.fused import configs
from loka_compile.lowering.fused.forward import on_this_device
from loka_compile.lowering.fused.gradients import state_of
from loka_compile.lowering.fused.match import Quantise, emit, quantisations
from loka_compile.report import Report


def quantise_inputs(graph: fx.Graph, report: Report) -> int:
    """Emit ``loka::quantize_weights_meeting`` for them; returns for how many. In place."""
    chosen = [q for q in quantisations(graph) if _pays(q)]
    states: dict[torch.device, fx.Node] = {}
    start = next(node for node in graph.nodes if node.op != "placeholder")
    for source, dtype in dict.fromkeys((q.source, q.dtype) for q in chosen):
        same = [q for q in chosen if q.source is source and q.dtype == dtype]
        turned = any(q.transposes() for q in same)
        with graph.inserting_before(start):
            state = state_of(graph, same[0].node, source, states)
            args = ([source], state, dtype, [turned])
            q, qt, scale = emit(graph, same[0].node, torch.ops.loka.quantize_weights_meeting.default, args)
        for old in same:
            for copy in old.transposes():
                copy.replace_all_uses_with(qt)
            old.node.replace_all_uses_with(q)
            if old.scale is not None:
                old.scale.replace_all_uses_with(scale)
        report.fusions.append(f"{source.name}: amax and FP8 of an input in one kernel")
    return len(chosen)


def _pays(q: Quantise) -> bool:
    value = q.source.meta["val"]
    if q.factor is not None or q.source.op != "placeholder" or value.dim() != 2 or on_this_device(value):
        return False
    m, n = (size_hint(size) for size in value.shape)
    return m is not None and n is not None and configs.find("quantize_input", m, n, 1, value.itemsize) is not None
