"""The grad_weight GEMMs of narrow layers in one launch (joint graph).

One of them fills an eighth of an H200, and nothing in the backward waits for it. So those of one shape wait for each
other and run together. What it costs is that their operands live until the last one is there.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from loka_compile._compat.inductor_templates import shared_memory
from loka_compile._compat.shapes import size_hint
from loka_compile.kernels import reference as ref
from loka_compile.lowering.ahead import on_cuda
from loka_compile.lowering.fused import configs
from loka_compile.lowering.fused.match import ALIAS, CONVERT, FP8, VIEWS, dtype_of, emit, is_call
from loka_compile.lowering.fused.ops import LIBRARY
from loka_compile.lowering.fused.product import on_this_device
from loka_compile.report import Report

aten = torch.ops.aten

LIBRARY.define(
    "grouped_scaled_mm(Tensor[] a, Tensor[] b, Tensor[] scale_a, Tensor[] scale_b, ScalarType out_dtype, bool fast) "
    "-> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def group_grad_weights(graph: fx.Graph, report: Report) -> int:
    """Put tensorwise FP8 GEMMs of one shape, whose results only leave the graph, into one launch; returns how many
    launches took the place of several. To run on the joint graph; it must be sorted afterwards."""
    groups: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        key = _key(node)
        if key is not None:
            groups.setdefault(key, []).append(node)
    emitted = 0
    for nodes in groups.values():
        m, n, k = _sizes(nodes[0])
        if len(nodes) < 2 or configs.find("grouped_gemm", m, n, k, 1, _fast(nodes[0])) is None:
            continue
        _rewrite(graph, nodes)
        report.fusions.append(f"{len(nodes)} grad_weight GEMMs of {m}x{n}x{k} in one launch")
        emitted += 1
    return emitted


def _key(node: fx.Node) -> Any:
    """What the GEMMs of a group have in common; None for a node that cannot be in one."""
    if not is_call(node, aten._scaled_mm.default) or node.meta.get("partitioner_tag") != "is_backward":
        return None
    operands: list[Any] = [*node.args, *[None] * (8 - len(node.args))]
    a, b, scale_a, scale_b, bias, scale_result, out_dtype, fast = operands
    value, a_value, b_value = node.meta["val"], a.meta["val"], b.meta["val"]
    plain = bias is None and scale_result is None and not node.kwargs and out_dtype is not None
    scalars = scale_a.meta["val"].numel() == 1 and scale_b.meta["val"].numel() == 1
    rows = a_value.stride(1) == 1 and b_value.stride(0) == 1
    static = all(isinstance(size, int) for size in value.shape)
    if not (plain and scalars and rows and static and dtype_of(a) in FP8 and dtype_of(b) in FP8):
        return None
    if on_this_device(value) or None in _sizes(node) or not _only_leaves(node):
        return None
    if not (_is_a_kernels(a) and _is_a_kernels(b)):
        return None
    # A moving size is the same only where it is the same expression.
    shapes = (str(a_value.shape), str(b_value.shape), str(a_value.stride()), str(b_value.stride()))
    return (*shapes, a_value.dtype, b_value.dtype, out_dtype, bool(fast), value.device)


def _is_a_kernels(operand: fx.Node) -> bool:
    """Whether one of our kernels writes the operand, or the graph is given it. What Inductor writes, such as a padded
    batch, has the layout that Inductor likes: it keeps no strides for operands in a list (torch 2.11,
    ``constrain_to_fx_strides``)."""
    while is_call(operand, *ALIAS, aten.permute.default, aten.t.default):
        operand = operand.args[0]  # type: ignore[assignment]
    source = operand.args[0] if is_call(operand, operator.getitem) else None
    return operand.op == "placeholder" or (isinstance(source, fx.Node) and str(source.target).startswith("loka."))


def _fast(node: fx.Node) -> bool:
    return len(node.args) > 7 and bool(node.args[7])


def _sizes(node: fx.Node) -> tuple[Any, Any, Any]:
    m, k = node.args[0].meta["val"].shape  # type: ignore[union-attr]
    return size_hint(m), size_hint(node.meta["val"].shape[1]), size_hint(k)


def _only_leaves(node: fx.Node) -> bool:
    """Whether a result is only viewed, cast and returned: then no member of a group can wait for another."""
    waiting = [node]
    while waiting:
        for user in waiting.pop().users:
            if user.op == "output":
                continue
            if not is_call(user, *CONVERT, *ALIAS, *VIEWS, aten.permute.default, aten.t.default):
                return False
            waiting.append(user)
    return True


def _rewrite(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    last = nodes[-1]
    a, b, scale_a, scale_b = ([node.args[i] for node in nodes] for i in range(4))
    with graph.inserting_before(last):
        turned = [emit(graph, last, aten.permute.default, (operand, [1, 0]))[0] for operand in b]
        results = emit(
            graph, last, torch.ops.loka.grouped_scaled_mm.default,
            (a, turned, scale_a, scale_b, last.args[6], _fast(last)),
        )  # fmt: skip
    for node, new in zip(nodes, results, strict=True):
        node.replace_all_uses_with(new)


# ---------------------------------------------------------------------------------------------- the operator
def _fake(
    a: list[Tensor], b: list[Tensor], scale_a: list[Tensor], scale_b: list[Tensor], out_dtype: torch.dtype, fast: bool
) -> list[Tensor]:
    """a_i [M, K], b_i [N, K] in FP8, scales of one element -> ``a_i @ b_i.T * scales`` [M, N]."""
    return [x.new_empty((x.shape[0], w.shape[0]), dtype=out_dtype) for x, w in zip(a, b, strict=True)]


def _any(
    a: list[Tensor], b: list[Tensor], scale_a: list[Tensor], scale_b: list[Tensor], out_dtype: torch.dtype, fast: bool
) -> list[Tensor]:
    return [ref.scaled_product(x, w.t(), s, t).to(out_dtype) for x, w, s, t in zip(a, b, scale_a, scale_b, strict=True)]


def _cuda(
    a: list[Tensor], b: list[Tensor], scale_a: list[Tensor], scale_b: list[Tensor], out_dtype: torch.dtype, fast: bool
) -> list[Tensor]:
    from loka_compile.kernels.grouped_gemm import grouped_gemm

    if not a or a[0].numel() == 0 or b[0].numel() == 0:
        return [x.zero_() for x in _fake(a, b, scale_a, scale_b, out_dtype, fast)]
    config = configs.config_for("grouped_gemm", a[0].shape[0], b[0].shape[0], a[0].shape[1], 1)
    config = config.fitting(1, out_dtype.itemsize, shared_memory(a[0].device))
    return grouped_gemm(a, b, scale_a, scale_b, out_dtype, fast=fast, config=config)


LIBRARY.impl("grouped_scaled_mm", _any, "CPU")
LIBRARY.impl("grouped_scaled_mm", _cuda, "CUDA")
on_cuda("loka::grouped_scaled_mm", _cuda)
torch.library.register_fake("loka::grouped_scaled_mm", _fake, lib=LIBRARY)
