"""The gradient's way through HardSwish or SiLU and BlockNorm, with the FP8 operands of both GEMMs that read it (on the
joint graph).

Small tensors take one kernel, whose programs meet to find the scale; large ones two, since what the second one reads is
no longer in the cache anyway. ``data/fused_h200.json`` says where the border is.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from loka_compile._compat.shapes import size_hint
from loka_compile.lowering.fused import configs, ops, ops_meeting  # noqa: F401
from loka_compile.lowering.fused.match import (
    ACTIVATION_GRADIENTS,
    ACTIVATION_NAMES,
    BOUNDED_ACTIVATIONS,
    CONVERT,
    Quantise,
    arg,
    dtype_of,
    emit,
    flat_shape,
    is_call,
    result,
    rows,
    shape_to_view,
    strip,
)
from loka_compile.lowering.fused.product import block_refusal, on_this_device
from loka_compile.lowering.roles import site_of
from loka_compile.report import Report

aten = torch.ops.aten


def gradients(
    graph: fx.Graph, found: list[Quantise], report: Report, states: dict[torch.device, fx.Node], save_fp8: bool = False
) -> int:
    """Fuse what stands around every ``loka::block_norm_backward``; returns how many operators were emitted.

    With ``save_fp8`` the forward keeps the normalised values for them in FP8.
    """
    return sum(
        _gradient(graph, node, found, report, states, save_fp8)
        for node in list(graph.nodes)
        if is_call(node, torch.ops.loka.block_norm_backward.default)
    )


def _gradient(
    graph: fx.Graph, norm: fx.Node, found: list[Quantise], report: Report, states: dict[torch.device, fx.Node],
    save_fp8: bool,
) -> int:  # fmt: skip
    name = site_of(norm) or norm.name
    grad, y, rstd, block = norm.args
    assert isinstance(grad, fx.Node)
    assert isinstance(y, fx.Node)
    assert isinstance(block, int)
    value = norm.meta["val"]
    consumers = [q for q in found if rows(q.source) is norm and q.factor is None]
    activation = _activation_backward(grad, y)
    act = ACTIVATION_GRADIENTS[activation.target] if activation is not None else ""
    inputs = [q for q in found if act and _is_activation_of(q, y, act)]
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
    narrow = _narrow(source, norm, consumers)
    if narrow:
        source = strip(source)
    meets = _meets(source.meta["val"], consumers)
    with graph.inserting_before(norm):
        kept = _kept(graph, strip(y), save_fp8)
        operands = [_flat(graph, n) for n in (source, kept, rstd)]
        if meets:
            args = [*operands, state_of(graph, norm, operands[2], states), block, act]
            dx, xt = _in_one(graph, norm, args, consumers, bool(copies))
        else:
            dx, amax, xt = emit(
                graph, norm, torch.ops.loka.block_norm_backward_amax.default,
                (*operands, block, act, bool(copies)),
            )  # fmt: skip
            for dtype in dict.fromkeys(q.dtype for q in consumers):
                _cast(graph, norm, dx, amax, dtype, [q for q in consumers if q.dtype == dtype])
        shaped = _viewed(graph, dx, shape_to_view(value.shape)) if value.dim() != 2 else dx
    if narrow:
        for user in list(norm.users):
            if dtype_of(user) == dtype_of(source):
                user.replace_all_uses_with(shaped)
    else:
        norm.replace_all_uses_with(shaped)
    for copy in copies:
        copy.replace_all_uses_with(xt)
    if save_fp8:
        less = strip(y).meta["val"].dtype.itemsize - 1
        elements = size_hint(value.numel())
        amount = "" if elements is None else f", {elements * less / 2**20:.1f} MiB less"
        report.fusions.append(f"{name}: BlockNorm's output is kept for the backward in FP8{amount}")
    words = f"{ACTIVATION_NAMES[act]}' + BlockNorm'" if act else "BlockNorm'"
    extra = " + FP8 transpose of the layer's output" if copies else ""
    if meets:
        report.fusions.append(f"{name}: {words} + FP8 gradient in both layouts{extra} in one kernel")
    else:
        second = ", FP8 gradient in both layouts in a second" if consumers else ""
        report.fusions.append(f"{name}: {words} + amax{extra} in one kernel{second}")
    return 1


def state_of(graph: fx.Graph, like: fx.Node, value: fx.Node, states: dict[torch.device, fx.Node]) -> fx.Node:
    """What the kernels on the device of ``value`` meet with, made at the insertion point if there is none yet."""
    device = value.meta["val"].device
    if device not in states:
        (states[device],) = emit(graph, like, torch.ops.loka.meeting_state.default, (value,))
    return states[device]


def _narrow(source: fx.Node, norm: fx.Node, consumers: list[Quantise]) -> bool:
    """Whether the gradient comes from 16 bits and goes to 16 bits or FP8, and is wide only on its way.

    So it is under autocast, where a norm computes in fp32 between GEMMs in bf16. The kernels compute in fp32 anyway;
    with narrow operands they move half the bytes, and the cast in front of them is gone.
    """
    dtype = dtype_of(strip(source))
    if dtype_of(norm) == dtype or dtype not in (torch.bfloat16, torch.float16):
        return False
    return all(dtype_of(user) == dtype and is_call(user, *CONVERT) for user in norm.users) and all(
        _passes_through(q, norm, dtype) for q in consumers
    )


def _passes_through(q: Quantise, norm: fx.Node, dtype: torch.dtype) -> bool:
    """Whether what ``q`` quantises has been rounded to ``dtype`` on its way from ``norm``."""
    node: Any = q.node
    while node is not norm:
        node = arg(node, 0)
        if dtype_of(node) == dtype:
            return True
    return False


def _kept(graph: fx.Graph, y: fx.Node, save_fp8: bool) -> fx.Node:
    """What the forward keeps of its normalised values: in FP8 if asked to, else no wider than the GEMM's own result."""
    if save_fp8:
        return _in_fp8(graph, y)
    made = arg(y, 0) if y.target is operator.getitem else y
    of = dtype_of(strip(arg(made, 0))) if is_call(made, torch.ops.loka.block_norm.default) else dtype_of(y)
    if of == dtype_of(y) or of not in (torch.bfloat16, torch.float16):
        return y
    with graph.inserting_before(y.next):
        (kept,) = emit(graph, y, torch.ops.prims.convert_element_type.default, (y, of))
    return kept


def _in_fp8(graph: fx.Graph, y: fx.Node) -> fx.Node:
    """y times 16 in e4m3, right behind y: a part of the forward, and of its kernel.
    BlockNorm's output is at most 16."""
    with graph.inserting_before(y.next):
        (wide,) = emit(graph, y, torch.ops.prims.convert_element_type.default, (y, torch.float32))
        (scaled,) = emit(graph, y, aten.mul.Tensor, (wide, 16.0))
        (kept,) = emit(graph, y, torch.ops.prims.convert_element_type.default, (scaled, ops.FP8))
    return kept


def _meets(value: torch.Tensor, consumers: list[Quantise]) -> bool:
    """Whether one kernel finds the scale and casts: one format is asked for, and the tensor is small enough."""
    m, n = size_hint(value.numel() // value.shape[-1]), value.shape[-1]
    one = len({q.dtype for q in consumers}) == 1
    return one and m is not None and configs.find("block_norm_backward_fp8", m, n, 1, value.itemsize) is not None


def _in_one(
    graph: fx.Graph, norm: fx.Node, args: list[Any], consumers: list[Quantise], with_xt: bool
) -> tuple[fx.Node, fx.Node]:
    """Emit the kernel whose programs meet; returns dx (written only if it will be read) and xt."""
    wanted = (bool([q for q in consumers if q.direct_users()]), bool([c for q in consumers for c in q.transposes()]))
    dx, q, qt, scale, xt = emit(
        graph, norm, torch.ops.loka.block_norm_backward_fp8.default,
        (*args, consumers[0].dtype, True, *wanted, with_xt),
    )  # fmt: skip
    _replace(consumers, q, qt, scale)
    return dx, xt


def drop_unread(graph: fx.Graph) -> None:
    """Do not write a gradient in its own dtype that no node reads: GEMMs read it in FP8. After dead code is gone."""
    for node in graph.nodes:
        if is_call(node, torch.ops.loka.block_norm_backward_fp8.default) and result(node, 0) is None:
            args = list(node.args)
            args[7] = False
            node.args = tuple(args)
            dx, *others = node.meta["val"]
            node.meta["val"] = (dx.new_empty((0,)), *others)


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
    _replace(consumers, q, qt, scale)


def _replace(consumers: list[Quantise], q: fx.Node, qt: fx.Node, scale: fx.Node) -> None:
    for consumer in consumers:
        for copy in consumer.transposes():
            copy.replace_all_uses_with(qt)
        consumer.node.replace_all_uses_with(q)
        if consumer.scale is not None:
            consumer.scale.replace_all_uses_with(scale)


def _activation_backward(grad: fx.Node, y: fx.Node) -> fx.Node | None:
    """The HardSwish' or SiLU' in front, if it is that of this very y and nothing else reads its result."""
    node = grad
    while node is strip(node) or len(node.users) == 1:
        if is_call(node, *ACTIVATION_GRADIENTS):
            same = rows(arg(node, 1)) is rows(y)
            return node if same and len(node.users) == 1 else None
        if node is strip(node):
            return None
        node = arg(node, 0)
    return None


def _is_activation_of(q: Quantise, y: fx.Node, act: str) -> bool:
    """Whether ``q`` is ``fp8(act(y) * 16)``, which the backward kernel can write from the y that it reads."""
    return (
        q.factor == 16.0
        and q.dtype == ops.FP8
        and BOUNDED_ACTIVATIONS.get(rows(q.source).target) == act
        and rows(arg(rows(q.source), 0)) is rows(y)
    )
