"""Fusion on the joint graph, before it is cut into forward and backward: the gradient's way through HardSwish and
BlockNorm with the FP8 operands of both GEMMs that read it, and the quantisation of all weights together.

On the joint graph because what is saved for the backward is decided after it: with these operators in place the
forward saves y and rstd, and no transposed activation. Measured on an H200 (docs/fused_kernels.md), HardSwish' and
BlockNorm' are faster behind a bare GEMM, in one pass that also writes every operand the next GEMMs want, than in the
GEMM's epilogue.
"""

from __future__ import annotations

import logging
import operator
from typing import Any

import torch
from torch import fx

from loka_compile.gemm import Role
from loka_compile.lowering.fused import ops
from loka_compile.lowering.fused.forward import block_refusal, on_this_device
from loka_compile.lowering.fused.match import (
    ALIAS,
    CONVERT,
    VIEWS,
    Quantise,
    arg,
    emit,
    flat_shape,
    is_call,
    quantisations,
    result,
    rows,
    shape_to_view,
    sort_topologically,
    strip,
)
from loka_compile.lowering.roles import MatMul, site_of
from loka_compile.report import Report

logger = logging.getLogger(__name__)
aten = torch.ops.aten


def fuse_joint(graph: fx.Graph, report: Report) -> int:
    """Fuse backward epilogues and weight quantisation; returns how many operators were emitted. In place.

    To run on the joint graph after its GEMMs are lowered.
    """
    found = list(quantisations(graph))
    emitted = _weights(graph, found, report)
    for node in list(graph.nodes):
        if is_call(node, torch.ops.loka.block_norm_backward.default):
            emitted += _gradient(graph, node, found, report)
    if emitted:
        sort_topologically(graph)
        graph.eliminate_dead_code()
        graph.lint()
    logger.info("fused %d places of the joint graph", emitted)
    return emitted


# ---------------------------------------------------------------------------------------------- gradients
def _gradient(graph: fx.Graph, norm: fx.Node, found: list[Quantise], report: Report) -> int:
    name = site_of(norm) or norm.name
    grad, y, rstd, block = norm.args
    assert isinstance(grad, fx.Node)
    assert isinstance(y, fx.Node)
    assert isinstance(block, int)
    value = norm.meta["val"]
    consumers = [q for q in found if rows(q.source) is norm and q.factor is None]
    activation = _hardswish_backward(grad, y)
    inputs = [q for q in found if _is_activation_of(q, y)] if activation is not None else []
    copies = [copy for q in inputs for copy in q.transposes() if copy.meta.get("partitioner_tag") == "is_backward"]
    reason = on_this_device(value) or block_refusal(value.shape[-1], block)
    if not reason and shape_to_view(value.shape) is None:
        reason = f"more than one size of its gradient {list(value.shape)} changes"
    if not reason and not consumers and not copies:
        reason = "no FP8 GEMM reads its gradient or its activation"
    if reason:
        report.fusions.append(f"{name}: backward of BlockNorm not fused: {reason}")
        return 0
    source = arg(activation, 0) if activation is not None else grad
    with graph.inserting_before(norm):
        dx, amax, xt = emit(
            graph, norm, torch.ops.loka.block_norm_backward_amax.default,
            (*(_flat(graph, n) for n in (source, strip(y), rstd)), block, activation is not None, bool(copies)),
        )  # fmt: skip
        for dtype in dict.fromkeys(q.dtype for q in consumers):
            _cast(graph, norm, dx, amax, dtype, [q for q in consumers if q.dtype == dtype])
        shaped = _viewed(graph, dx, shape_to_view(value.shape)) if value.dim() != 2 else dx
    norm.replace_all_uses_with(shaped)
    for copy in copies:
        copy.replace_all_uses_with(xt)
    words = "HardSwish' + BlockNorm'" if activation is not None else "BlockNorm'"
    extra = " + FP8 transpose of the layer's output" if copies else ""
    second = ", FP8 gradient in both layouts in a second" if consumers else ""
    report.fusions.append(f"{name}: {words} + amax{extra} in one kernel{second}")
    return 1


def _flat(graph: fx.Graph, node: Any) -> fx.Node:
    """[..., N] as [M, N]."""
    return node if node.meta["val"].dim() == 2 else _viewed(graph, node, flat_shape(node.meta["val"].shape))


def _viewed(graph: fx.Graph, node: fx.Node, sizes: list[int] | None) -> fx.Node:
    (view,) = emit(graph, node, aten.reshape.default, (node, sizes))
    return view


def _cast(
    graph: fx.Graph, norm: fx.Node, dx: fx.Node, amax: fx.Node, dtype: torch.dtype, consumers: list[Quantise]
) -> None:
    """One cast serves all GEMMs that read the gradient in that format."""
    copies = [copy for q in consumers for copy in q.transposes()]
    direct = [q for q in consumers if q.direct_users()]
    q, qt, scale = emit(
        graph, norm, torch.ops.loka.cast_transpose.default, (dx, amax, dtype, bool(direct), bool(copies))
    )  # fmt: skip
    for consumer in consumers:
        for copy in consumer.transposes():
            copy.replace_all_uses_with(qt)
        consumer.node.replace_all_uses_with(q)
        if consumer.scale is not None:
            consumer.scale.replace_all_uses_with(scale)


def _hardswish_backward(grad: fx.Node, y: fx.Node) -> fx.Node | None:
    """The HardSwish' in front, if it is that of this very y and nothing else reads its result."""
    node = grad
    while node is strip(node) or len(node.users) == 1:
        if is_call(node, aten.hardswish_backward.default):
            same = rows(arg(node, 1)) is rows(y)
            return node if same and len(node.users) == 1 else None
        if node is strip(node):
            return None
        node = arg(node, 0)
    return None


def _is_activation_of(q: Quantise, y: fx.Node) -> bool:
    """Whether ``q`` is ``fp8(hardswish(y) * 16)``, which the backward kernel can write from the y that it reads."""
    return (
        q.factor == 16.0
        and q.dtype == ops.FP8
        and is_call(rows(q.source), aten.hardswish.default)
        and rows(arg(rows(q.source), 0)) is rows(y)
    )


# ---------------------------------------------------------------------------------------------- weights
def _weights(graph: fx.Graph, found: list[Quantise], report: Report) -> int:
    """One operator for all graph inputs that are quantised by their own amax: a model's weights, mostly."""
    import torch._inductor.config as inductor_config

    if inductor_config.freezing:
        return 0  # Constant folding quantises weights at compile time, once; it wants plain aten.
    emitted = 0
    inputs = [q for q in found if q.factor is None and q.source.op == "placeholder" and q.source.meta["val"].dim() == 2]
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
        with graph.inserting_before(first):
            outs = emit(
                graph, like, torch.ops.loka.quantize_weights.default,
                (sources, dtype, [bool(copies[s]) for s in sources]),
            )  # fmt: skip
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
    node = matmul.node
    while len(node.users) == 1 and not is_call(node, torch.ops.loka.block_norm.default):
        node = next(iter(node.users))
        if not is_call(node, torch.ops.loka.block_norm.default, *CONVERT, *ALIAS, *VIEWS):
            return ""
    if matmul.role is not Role.FORWARD or not is_call(node, torch.ops.loka.block_norm.default):
        return ""
    value = arg(node, 0).meta["val"]
    fits = not block_refusal(value.shape[-1], int(arg(node, 1))) and shape_to_view(value.shape) is not None
    return "epilogue" if fits else ""


def _bounded_activation(node: fx.Node) -> bool:
    if not is_call(node, aten.hardswish.default):
        return False
    norm = rows(arg(node, 0))
    return norm.target is operator.getitem and is_call(arg(norm, 0), torch.ops.loka.block_norm.default)


def _follows_block_norm_backward(node: fx.Node) -> bool:
    source = rows(node)
    if not is_call(source, torch.ops.loka.block_norm_backward.default):
        return False
    return not block_refusal(source.meta["val"].shape[-1], int(arg(source, 3)))
