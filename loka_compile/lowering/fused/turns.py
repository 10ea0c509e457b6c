"""FP8 activations that a grad_weight reads transposed: turned by a kernel of ours from what the forward wrote.

What the fused kernels do not write in both layouts is left to Inductor: it puts the transposed store into whatever
computes the values again, and a kernel that walks along rows then writes single bytes, M of them apart. On an H200 the
backward of a LayerNorm over 8192 x 1536 took 234 us with such a store. So the forward's FP8 operand is turned in a pass
of its own, and that is what the backward is given: half of what the GEMM in bf16 would keep.
"""

from __future__ import annotations

import torch
from torch import fx

from loka_compile.lowering.fused import ops  # noqa: F401  (registers the operator)
from loka_compile.lowering.fused.match import Quantise, emit
from loka_compile.lowering.fused.product import on_this_device
from loka_compile.report import Report


def turn_activations(graph: fx.Graph, found: list[Quantise], report: Report) -> int:
    """Emit ``loka::turn_fp8`` for them; returns for how many. In place, on the joint graph.

    To run behind the fusions that write both layouts themselves.
    """
    kept: dict[fx.Node, fx.Node] = {}
    for q in found:
        if q.source.op == "placeholder" or on_this_device(q.node.meta["val"]):
            continue
        copies = [copy for copy in q.transposes() if copy.users and _tag(copy) == "is_backward"]
        # Lowering quantises once for each GEMM; a gradient, which no forward reads, is written in both layouts by what
        # makes it.
        operand = next((f.node for f in found if _tag(f.node) != "is_backward" and _same(f, q)), None)
        if not copies or operand is None:
            continue
        if operand not in kept:
            # Of the forward, where the partitioner leaves what it cannot make again; in a checkpointed region it is
            # made again with the operand.
            with graph.inserting_after(operand):
                (kept[operand],) = emit(graph, operand, torch.ops.loka.turn_fp8.default, (operand,))
        for copy in copies:
            copy.replace_all_uses_with(kept[operand])
    if kept:
        report.fusions.append(f"{len(kept)} FP8 activations turned for the backward by a kernel of ours")
    return len(kept)


def _same(a: Quantise, b: Quantise) -> bool:
    return a.source is b.source and a.dtype == b.dtype and a.factor == b.factor


def _tag(node: fx.Node) -> str:
    return str(node.meta.get("partitioner_tag", ""))
