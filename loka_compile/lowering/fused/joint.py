"""Fusion on the joint graph, before it is cut into forward and backward: the gradient's way through an activation and
BlockNorm with the FP8 operands of both GEMMs that read it, and the quantisation of all weights together.

On the joint graph because what is saved for the backward is decided after it: with these operators in place the
forward saves y and rstd, and no transposed activation. Measured on an H200 (docs/fused_dropped.md), HardSwish' and
BlockNorm' are faster behind a bare GEMM, in one pass that also writes every operand the next GEMMs want, than in the
GEMM's epilogue.
"""

from __future__ import annotations

import logging
import operator

import torch
from torch import fx

from loka_compile.gemm import Role
from loka_compile.lowering.fused.activations import activations
from loka_compile.lowering.fused.grad_input import fold_grad_inputs
from loka_compile.lowering.fused.gradients import drop_unread, gradients
from loka_compile.lowering.fused.grouped import group_grad_weights
from loka_compile.lowering.fused.match import (
    ALIAS,
    BOUNDED_ACTIVATIONS,
    CONVERT,
    VIEWS,
    Quantise,
    arg,
    emit,
    is_call,
    quantisations,
    result,
    rows,
    shape_to_view,
    sort_topologically,
)
from loka_compile.lowering.fused.product import block_refusal, is_sum, on_this_device
from loka_compile.lowering.fused.turns import turn_activations
from loka_compile.lowering.roles import MatMul
from loka_compile.report import Report

logger = logging.getLogger(__name__)
aten = torch.ops.aten


def fuse_joint(graph: fx.Graph, report: Report, save_fp8: bool = False) -> int:
    """Fuse backward epilogues and weight quantisation; returns how many operators were emitted. In place.

    To run on the joint graph after its GEMMs are lowered. ``save_fp8``: normalised values are kept for the backward in
    FP8.
    """
    emitted = activations(graph, report)
    found = list(quantisations(graph))
    # What the kernels of this graph meet with, by device; those of the backward use that of the forward.
    states: dict[torch.device, fx.Node] = {}
    emitted += _weights(graph, found, report) + gradients(graph, found, report, states, save_fp8)
    emitted += turn_activations(graph, found, report) + group_grad_weights(graph, report)
    if emitted:
        sort_topologically(graph)
        graph.eliminate_dead_code()
        drop_unread(graph)
        if fold_grad_inputs(graph, report):
            graph.eliminate_dead_code()
        graph.lint()
    logger.info("fused %d places of the joint graph", emitted)
    return emitted


# ---------------------------------------------------------------------------------------------- weights
def _weights(graph: fx.Graph, found: list[Quantise], report: Report) -> int:
    """One operator for all graph inputs that are quantised by their own amax: a model's weights, mostly."""
    import torch._inductor.config as inductor_config

    if inductor_config.freezing:
        return 0  # Constant folding quantises weights at compile time, once; it wants plain aten.
    emitted = 0
    inputs = [q for q in found if q.factor is None and _is_input(q.source)]
    inputs = [q for q in inputs if not on_this_device(q.node.meta["val"]) and _static(q.source)]
    for dtype in dict.fromkeys(q.dtype for q in inputs):
        group = [q for q in inputs if q.dtype == dtype]
        sources = list(dict.fromkeys(q.source for q in group))
        if len(sources) < 2:
            continue
        copies = {s: [c for q in group if q.source is s for c in q.transposes()] for s in sources}
        first = next(n for n in graph.nodes if n.op != "placeholder")
        # The operator belongs to the forward even where only the backward reads a transpose.
        like = next((q.node for q in group if q.node.meta.get("partitioner_tag") != "is_backward"), group[0].node)
        wanted = [bool(copies[s]) for s in sources]
        with graph.inserting_before(first):
            outs = emit(graph, like, torch.ops.loka.quantize_weights.default, (sources, dtype, wanted))
        count = len(sources)
        for index, source in enumerate(sources):
            q, qt, scale = outs[index], outs[count + index], outs[2 * count + index]
            for old in [o for o in group if o.source is source]:
                for copy in old.transposes():
                    copy.replace_all_uses_with(qt)
                old.node.replace_all_uses_with(q)
                if old.scale is not None:
                    old.scale.replace_all_uses_with(scale)
        report.fusions.append(
            f"{count} weights and inputs quantised together, {sum(map(bool, copies.values()))} also transposed"
        )
        emitted += 1
    return emitted


def _is_input(node: fx.Node) -> bool:
    """Whether the forward is given this matrix; gradients of its outputs are inputs of the joint graph too."""
    is_given = node.op == "placeholder" and node.meta.get("partitioner_tag") != "is_backward"
    return is_given and node.meta["val"].dim() == 2


def _static(node: fx.Node) -> bool:
    return all(isinstance(size, int) for size in node.meta["val"].shape) and result(node, 0) is None


# ---------------------------------------------------------------------------------------------- for the plan
def quantised_by_fusion(matmul: MatMul) -> set[str]:
    """The operands of a product that this fusion would quantise, whatever the device: "weight", "grad_output", "input".

    For the cost of a candidate, before anything is lowered.
    """
    found = set()
    if matmul.role is not Role.GRAD_WEIGHT:
        if matmul.b.base.op == "placeholder":
            found.add("weight")
    elif _bounded_activation(rows(matmul.b.base)):
        found.add("input")
    if matmul.role is not Role.FORWARD and _follows_block_norm_backward(matmul.a.base):
        found.add("grad_output")
    return found


def norm_by_fusion(matmul: MatMul) -> str:
    """``Gemm.norm`` of a forward product: "epilogue" where a BlockNorm alone reads it, in a form that :func:`fuse`
    takes, whatever the device; "" where there is none. For the cost of a candidate, before anything is lowered."""
    node, sums = matmul.node, 0
    while len(node.users) == 1 and not is_call(node, torch.ops.loka.block_norm.default):
        node = next(iter(node.users))
        sums += is_sum(node)
        if sums > 1 or not (is_sum(node) or is_call(node, torch.ops.loka.block_norm.default, *CONVERT, *ALIAS, *VIEWS)):
            return ""
    if matmul.role is not Role.FORWARD or not is_call(node, torch.ops.loka.block_norm.default):
        return ""
    value = arg(node, 0).meta["val"]
    fits = not block_refusal(value.shape[-1], int(arg(node, 1))) and shape_to_view(value.shape) is not None
    return "epilogue" if fits else ""


def _bounded_activation(node: fx.Node) -> bool:
    if not is_call(node, *BOUNDED_ACTIVATIONS):
        return False
    norm = rows(arg(node, 0))
    return norm.target is operator.getitem and is_call(arg(norm, 0), torch.ops.loka.block_norm.default)


def _follows_block_norm_backward(node: fx.Node) -> bool:
    source = rows(node)
    if not is_call(source, torch.ops.loka.block_norm_backward.default):
        return False
    return not block_refusal(source.meta["val"].shape[-1], int(arg(source, 3)))
