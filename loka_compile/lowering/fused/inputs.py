"""A graph's inputs that are quantised by their own amax, or by those of their rows: by our kernels, in fewer passes.

On a graph as Inductor is about to lower it: weights that became constants are quantised already, and those that did not
were quantised together on the joint graph (:mod:`loka_compile.lowering.fused.joint`), if they have one scale. What is
left comes from outside, so that no kernel of ours could write it in FP8: activations, and what a plan quantises by
rows, weights and the gradients of a graph's results too. Rows are read once, where Inductor reads long ones twice, and
the kernels begin while the ones in front end (docs/fused_configurations.md has the times).
"""

from __future__ import annotations

import torch
from torch import fx

from loka_compile._compat.shapes import size_hint
from loka_compile.lowering import quantize_op  # noqa: F401  (registers the operator)
from loka_compile.lowering.fused.match import Quantise, aten, emit, quantisations
from loka_compile.lowering.fused.product import on_this_device
from loka_compile.report import Report

#: Most features of a row that was measured to be faster where a whole tensor shares a scale, which takes two passes.
WIDEST = 4096


def quantise_inputs(graph: fx.Graph, report: Report) -> int:
    """Emit ``loka::quantize_fp8`` for them; returns for how many. In place."""
    count = 0
    for rowwise in (False, True):
        chosen = [q for q in quantisations(graph, rowwise) if _is_input(q, rowwise)]
        for source, dtype in dict.fromkeys((q.source, q.dtype) for q in chosen):
            same = [q for q in chosen if q.source is source and q.dtype == dtype]
            _quantise(graph, source, same, rowwise)
            kind = "rowwise" if rowwise else "amax and"
            report.fusions.append(f"{source.name}: {kind} FP8 of an input by our kernels")
        count += len(chosen)
    return count


def _quantise(graph: fx.Graph, source: fx.Node, same: list[Quantise], rowwise: bool) -> None:
    """One call for all that are alike."""
    # A transpose of rows that have a scale each is no operand.
    turned = not rowwise and any(q.transposes() for q in same)
    # Constants of a frozen graph may stand before its inputs.
    behind = next((n.next for n in reversed(graph.nodes) if n.op == "placeholder"), None)
    with graph.inserting_before(behind):
        args = (source, "rowwise" if rowwise else "tensorwise", same[0].dtype, True, turned)
        q, scale, qt, _ = emit(graph, same[0].node, torch.ops.loka.quantize_fp8.default, args)
        if rowwise:
            (scale,) = emit(graph, same[0].node, aten.squeeze.dim, (scale, 1))
    for old in same:
        if turned:
            for copy in old.transposes():
                copy.replace_all_uses_with(qt)
        old.node.replace_all_uses_with(q)
        if old.scale is not None:
            old.scale.replace_all_uses_with(scale)


def _is_input(q: Quantise, rowwise: bool) -> bool:
    value = q.source.meta["val"]
    is_matrix = q.source.op == "placeholder" and value.dim() == 2 and size_hint(value.shape[1]) is not None
    narrow = rowwise or (is_matrix and size_hint(value.shape[1]) in range(WIDEST + 1))
    return q.factor is None and not q.rounded and is_matrix and narrow and not on_this_device(value)
