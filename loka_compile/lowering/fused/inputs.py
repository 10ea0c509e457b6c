"""A graph's inputs that are quantised by their own amax: by our kernels, two launches, instead of Inductor's three.

On a graph as Inductor is about to lower it: weights that became constants are quantised already, and those that did not
were quantised together on the joint graph (:mod:`loka_compile.lowering.fused.joint`). What is left are activations that
come from outside, which no kernel of ours could write in FP8. On an H200, 4096 rows of 512, 1024, 2048 and 4096 bf16
values take 6.6, 10.9, 18.3 and 28.2 us instead of 8.6, 12.3, 19.5 and 30.8 (docs/fused_kernels.md). Wider rows are left
to Inductor: there ours was not faster.
"""

from __future__ import annotations

import torch
from torch import fx

from loka_compile._compat.shapes import size_hint
from loka_compile.lowering.fused import ops  # noqa: F401  (registers the operator)
from loka_compile.lowering.fused.match import Quantise, emit, quantisations
from loka_compile.lowering.fused.product import on_this_device
from loka_compile.report import Report

#: Most features of a row that was measured to be faster.
WIDEST = 4096


def quantise_inputs(graph: fx.Graph, report: Report) -> int:
    """Emit ``loka::quantize_weights`` for them; returns for how many. In place."""
    chosen = [q for q in quantisations(graph) if _is_input(q)]
    # Constants of a frozen graph may stand before its inputs.
    behind = next((n.next for n in reversed(graph.nodes) if n.op == "placeholder"), None)
    for source, dtype in dict.fromkeys((q.source, q.dtype) for q in chosen):
        same = [q for q in chosen if q.source is source and q.dtype == dtype]
        turned = any(q.transposes() for q in same)
        with graph.inserting_before(behind):
            args = ([source], dtype, [turned])
            q, qt, scale = emit(graph, same[0].node, torch.ops.loka.quantize_weights.default, args)
        for old in same:
            for copy in old.transposes():
                copy.replace_all_uses_with(qt)
            old.node.replace_all_uses_with(q)
            if old.scale is not None:
                old.scale.replace_all_uses_with(scale)
        report.fusions.append(f"{source.name}: amax and FP8 of an input in two kernels of ours")
    return len(chosen)


def _is_input(q: Quantise) -> bool:
    value = q.source.meta["val"]
    is_matrix = q.source.op == "placeholder" and value.dim() == 2 and size_hint(value.shape[1]) in range(WIDEST + 1)
    return q.factor is None and is_matrix and not on_this_device(value)
