"""Forward fusion, on a graph as Inductor is about to lower it: GEMM -> (cast, residual) -> BlockNorm becomes one
operator.

The operator's template takes Inductor's pointwise epilogue (HardSwish, gate, residual, cast, FP8 quantisation), so that
linear, norm, activation and the next layer's quantisation are one kernel. Anything that cannot be fused is left alone
with the reason in the report; nothing is fused on a CPU.
"""

from __future__ import annotations

import logging
import math

import torch
from torch import fx

from loka_compile.lowering.fused import configs, lowerings
from loka_compile.lowering.fused.activations import drop_unread
from loka_compile.lowering.fused.match import CONVERT, FP8, arg, dtype_of, emit, is_call, result
from loka_compile.lowering.fused.product import (
    Product,
    eps_of,
    handed_on,
    kind_of,
    operands_of,
    product_of,
    refusal,
    reshaped,
    sizes_of,
)
from loka_compile.lowering.roles import site_of
from loka_compile.report import Report

logger = logging.getLogger(__name__)
aten = torch.ops.aten


def fuse(graph: fx.Graph, report: Report) -> int:
    """Fuse every GEMM with the BlockNorm behind it, and a residual between them; returns how many were fused.
    ``graph`` is changed in place.

    To run in ``post_grad_custom_pre_pass``, on forward and backward graphs (under activation checkpointing the backward
    recomputes the forward with the same kernels), before what is left of BlockNorm is decomposed.
    """
    fused = 0
    drop_unread(graph)
    for node in list(graph.nodes):
        if not is_call(node, torch.ops.loka.block_norm.default):
            continue
        product = product_of(node)
        reason = "its input is not a GEMM's result" if product is None else refusal(node, product)
        name = site_of(product.node if product is not None else node) or node.name
        if reason or product is None:
            report.fusions.append(f"{name}: BlockNorm not fused with the GEMM: {reason}")
            continue
        report.fusions.append(f"{name}: {_rewrite(graph, node, product)}")
        fused += 1
    if fused:
        lowerings.register()
        graph.eliminate_dead_code()
    logger.info("fused %d GEMMs with their BlockNorm", fused)
    return fused


def will_fuse(norm: fx.Node) -> bool:
    """Whether :func:`fuse` would take this ``loka::block_norm``; asked on the joint graph, before partitioning."""
    product = product_of(norm)
    return product is not None and not refusal(norm, product)


def _rewrite(graph: fx.Graph, norm: fx.Node, product: Product) -> str:
    """Put the fused operator in the place of GEMM and norm; returns what it swallowed, in words."""
    block, eps = int(arg(norm, 1)), eps_of(norm)
    y, rstd = result(norm, 0), result(norm, 1)
    m, n, k = sizes_of(product)
    assert m is not None
    assert n is not None
    assert k is not None
    parts = 1
    if not product.in_blocks:
        itemsize = dtype_of(product.a).itemsize
        parts = configs.config_for("gemm_block_norm", m, n, k, itemsize, product.fast, product.rowwise).splits
    kind = kind_of(product)
    wide = norm.meta["val"][0].dtype
    out_dtype = wide if y is None else handed_on(product, y)
    with graph.inserting_before(norm):
        residual = None if product.residual is None else reshaped(graph, product.residual, product.node.meta["val"])
        new_y, new_rstd = emit(
            graph, product.node, torch.ops.loka.gemm_block_norm.default,
            (*operands_of(graph, product), block, eps, out_dtype, product.fast, rstd is not None, residual),
        )  # fmt: skip
        new_y = reshaped(graph, new_y, norm.meta["val"][0])
        if out_dtype != wide:
            (new_y,) = emit(graph, norm, torch.ops.prims.convert_element_type.default, (new_y, wide))
        if rstd is not None:
            new_rstd = reshaped(graph, new_rstd, norm.meta["val"][1])
    if y is not None:
        y.replace_all_uses_with(new_y)
    if rstd is not None:
        rstd.replace_all_uses_with(new_rstd)
    followed = _cheapen_epilogue(graph, new_y, math.sqrt(block))
    saved = " (y and rstd kept for the backward)" if rstd is not None else ""
    added = " + residual" if residual is not None else ""
    cut = f", K in {parts} parts" if parts > 1 else ""
    return f"{kind} GEMM{added} + BlockNorm({block}){followed} in one kernel{cut}{saved}"


def _cheapen_epilogue(graph: fx.Graph, y: fx.Node, bound: float) -> str:
    """Rewrite HardSwish on a fused result for fewer instructions, and drop clamps that cannot act.

    The tensor core waits while the epilogue runs: Inductor's NaN-safe minimum and maximum (three instructions each) and
    its division cost a tenth of the kernel's time, and two comparisons another tenth. NaN goes through all forms.
    """
    found = ""
    for node in list(y.users):
        if not is_call(node, aten.hardswish.default):
            continue
        value = node.meta["val"]
        with graph.inserting_before(node):
            (wide,) = emit(graph, node, torch.ops.prims.convert_element_type.default, (y, torch.float32))
            (gate,) = emit(graph, node, torch.ops.loka.gate.default, (wide,))
            (out,) = emit(graph, node, aten.mul.Tensor, (wide, gate))
            (out,) = emit(graph, node, torch.ops.prims.convert_element_type.default, (out, value.dtype))
        node.replace_all_uses_with(out)
        graph.erase_node(node)
        found = " + HardSwish" + _drop_dead_clamps(out, bound)
    return found


def _drop_dead_clamps(node: fx.Node, bound: float) -> str:
    """Below ``bound`` times a quantiser's factor nothing saturates. Returns " + FP8 output" if one follows."""
    found = ""
    for user in list(node.users):
        if is_call(user, *CONVERT) and dtype_of(user) not in FP8:
            found = _drop_dead_clamps(user, bound) or found
        elif is_call(user, aten.mul.Tensor) and isinstance(arg(user, 1), (int, float)):
            found = _drop_dead_clamps(user, bound * abs(arg(user, 1))) or found
        elif is_call(user, aten.clamp_min.default, aten.clamp_max.default):
            limit = abs(float(arg(user, 1)))
            found = _drop_dead_clamps(user, bound) or found
            if bound <= limit:
                user.replace_all_uses_with(node)
        elif is_call(user, *CONVERT):
            found = " + FP8 output"
    return found


__all__ = ["fuse", "will_fuse"]
