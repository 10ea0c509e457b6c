"""Forward fusion, on a graph as Inductor is about to lower it: GEMM -> (cast, residual) -> BlockNorm becomes one
operator.

The operator's template takes Inductor's pointwise epilogue (HardSwish, gate, residual, cast, FP8 quantisation), so that
linear, norm, activation and the next layer's quantisation are one kernel. Anything that cannot be fused is left alone
with the reason in the report; nothing is fused on a CPU.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from loka_compile._compat.shapes import size_hint
from loka_compile.lowering.fused import configs, lowerings
from loka_compile.lowering.fused.match import ALIAS, CONVERT, FP8, VIEWS, arg, copy_meta, dtype_of, emit, is_call, result, shape_to_view
from loka_compile.lowering.roles import site_of
from loka_compile.report import Report

logger = logging.getLogger(__name__)
aten = torch.ops.aten

#: Widest block that fits a tile of the kernels.
MAX_BLOCK = 256
#: Narrowest last block (issue 5): below it the mean of squares is taken over too few values.
MIN_LAST_BLOCK = 128


@dataclass(frozen=True)
class Product:
    """The GEMM in front of a BlockNorm."""

    node: fx.Node
    #: Nodes between the GEMM and the norm, GEMM included.
    path: tuple[fx.Node, ...]
    a: fx.Node
    b: fx.Node
    scale_a: fx.Node | None
    scale_b: fx.Node | None
    fast: bool
    #: What is added to the product in front of the norm, in the shape of the norm's input or [M, N].
    residual: fx.Node | None = None
    #: The product as it is added: the GEMM's result behind its casts and views, without the residual.
    summand: fx.Node | None = None


def fuse(graph: fx.Graph, report: Report) -> int:
    """Fuse every GEMM with the BlockNorm behind it, and a residual between them; returns how many were fused. ``graph`` is changed in place.

    To run in ``post_grad_custom_pre_pass``, on forward and backward graphs (under activation checkpointing the backward
    recomputes the forward with the same kernels), before what is left of BlockNorm is decomposed.
    """
    fused = 0
    for node in list(graph.nodes):
        if not is_call(node, torch.ops.loka.block_norm.default):
            continue
        product = _product_of(node)
        reason = "its input is not a GEMM's result" if product is None else _refusal(node, product)
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
    product = _product_of(norm)
    return product is not None and not _refusal(norm, product)


def on_this_device(value: torch.Tensor) -> str:
    """Why the kernels cannot run on the device of ``value``, or ""."""
    if value.device.type != "cuda":
        return f"the fused kernels are for CUDA, not {value.device.type}"
    if torch.cuda.is_available() and torch.cuda.get_device_capability(value.device) < (8, 9):
        return "FP8 needs a GPU of compute capability 8.9"
    return ""


def block_refusal(n: Any, block: int) -> str:
    """Why rows of n features in blocks of ``block`` do not fit the kernels, or ""."""
    if not isinstance(n, int):
        return "the number of features is not known when compiling"
    if block > MAX_BLOCK or block & (block - 1):
        return f"a block of {block} does not fit a tile of {MAX_BLOCK} columns"
    if n > MAX_BLOCK and 0 < n % block < min(MIN_LAST_BLOCK, block):
        return f"{n} features leave a last block of {n % block}"
    return ""


def _product_of(norm: fx.Node) -> Product | None:
    """Walk from the norm's input over casts, aliases, views of the rows and one sum with a residual to the GEMM."""
    path: list[fx.Node] = []
    node = arg(norm, 0)
    while _keeps_rows(node):
        path.append(node)
        node = arg(node, 0)
    if not is_sum(node):
        return _gemm(node, path)
    left, right = node.args
    products = [
        replace(found, residual=residual, summand=summand)
        for summand, residual in ((left, right), (right, left))
        if (found := _gemm(summand, [*path, node])) is not None
    ]
    # Where both are products, the one that nothing else reads.
    return next((p for p in products if _alone(p)), products[0] if products else None)


def _alone(product: Product) -> bool:
    return all(len(node.users) == 1 for node in product.path)


def _keeps_rows(node: Any) -> bool:
    """Whether a node only casts its input, or groups the rows of [..., N] differently."""
    same_width = is_call(node, *VIEWS) and arg(node, 0).meta["val"].shape[-1] == node.meta["val"].shape[-1]
    return is_call(node, *CONVERT, *ALIAS) or same_width


def is_sum(node: Any) -> bool:
    """Whether a node adds two tensors of its own shape."""
    if not is_call(node, aten.add.Tensor) or node.kwargs:
        return False
    shape = node.meta["val"].shape
    return all(isinstance(n, fx.Node) and n.meta["val"].shape == shape for n in node.args)


def _gemm(node: Any, path: list[fx.Node]) -> Product | None:
    """The GEMM behind casts, aliases and views of the rows; path is what lies between the norm and ``node``."""
    path = list(path)
    while isinstance(node, fx.Node):
        path.append(node)
        if is_call(node, aten.mm.default):
            return Product(node, tuple(path), arg(node, 0), arg(node, 1), None, None, True)
        if is_call(node, aten._scaled_mm.default):
            operands: list[Any] = [*node.args, *[None] * (8 - len(node.args))]
            a, b, scale_a, scale_b, bias, scale_result, _, fast = operands
            if bias is not None or scale_result is not None or node.kwargs:
                return None
            return Product(node, tuple(path), a, b, scale_a, scale_b, bool(fast))
        if not _keeps_rows(node):
            return None
        node = arg(node, 0)
    return None


def _refusal(norm: fx.Node, product: Product) -> str:
    value = product.node.meta["val"]
    reason = on_this_device(value) or block_refusal(value.shape[1], int(arg(norm, 1)))
    if reason:
        return reason
    if not _alone(product):
        return "the GEMM's result is read by others as well"
    if shape_to_view(norm.meta["val"][0].shape) is None:
        return "more than one of its sizes changes from call to call"
    operand = dtype_of(product.a)
    if operand not in (*FP8, torch.bfloat16, torch.float16):
        return f"{operand} operands have no fused kernel"
    if operand not in FP8 and dtype_of(product.b) != operand:
        return "the operands' dtypes differ"
    if operand in FP8:
        scales = [s.meta["val"].numel() for s in (product.scale_a, product.scale_b) if s is not None]
        m, n = value.shape
        if scales != [1, 1] and [s == size for s, size in zip(scales, (m, n), strict=True)] != [True, True]:
            return "its scales are in blocks"
    if any(dtype_of(node) == torch.float64 for node in product.path):
        return "float64 has no fused kernel"
    m, n, k = _sizes(product)
    if m is None or n is None or k is None:
        return "its size is unknown when compiling"
    if configs.find("gemm_block_norm", m, n, k, operand.itemsize, product.fast) is None:
        return f"at {m}x{n}x{k} the fused kernel was not measured to be faster"
    return ""


def _sizes(product: Product) -> tuple[int | None, int | None, int | None]:
    (m, k), n = product.a.meta["val"].shape, product.b.meta["val"].shape[1]
    return size_hint(m), size_hint(n), size_hint(k)


def _rewrite(graph: fx.Graph, norm: fx.Node, product: Product) -> str:
    """Put the fused operator in the place of GEMM and norm; returns what it swallowed, in words."""
    block, eps = int(arg(norm, 1)), _eps(norm)
    y, rstd = result(norm, 0), result(norm, 1)
    m, n, k = _sizes(product)
    assert m is not None
    assert n is not None
    assert k is not None
    itemsize = dtype_of(product.a).itemsize
    parts = configs.config_for("gemm_block_norm", m, n, k, itemsize, product.fast).splits
    splits = configs.splits_for(m, n, k, itemsize) if parts == 1 else 1
    kind = "FP8" if dtype_of(product.a) in FP8 else str(dtype_of(product.a)).removeprefix("torch.")
    operands = (product.a, product.b, product.scale_a, product.scale_b)
    if splits > 1:
        _split(graph, product, operands, splits)
        return f"{kind} GEMM cut into {splits} along K ({m}x{n}x{k} has too few tiles), summed with BlockNorm"
    out_dtype = norm.meta["val"][0].dtype
    with graph.inserting_before(norm):
        residual = None if product.residual is None else _reshaped(graph, product.residual, product.node.meta["val"])
        new_y, new_rstd = emit(
            graph, product.node, torch.ops.loka.gemm_block_norm.default,
            (*operands, block, eps, out_dtype, product.fast, rstd is not None, residual),
        )  # fmt: skip
        new_y = _reshaped(graph, new_y, norm.meta["val"][0])
        if rstd is not None:
            new_rstd = _reshaped(graph, new_rstd, norm.meta["val"][1])
    if y is not None:
        y.replace_all_uses_with(new_y)
    if rstd is not None:
        rstd.replace_all_uses_with(new_rstd)
    followed = _cheapen_epilogue(graph, new_y, math.sqrt(block))
    saved = " (y and rstd kept for the backward)" if rstd is not None else ""
    added = " + residual" if residual is not None else ""
    cut = f", K in {parts} parts" if parts > 1 else ""
    return f"{kind} GEMM{added} + BlockNorm({block}){followed} in one kernel{cut}{saved}"


def _split(graph: fx.Graph, product: Product, operands: tuple[fx.Node | None, ...], splits: int) -> None:
    """GEMM in parts; the sum is pointwise to Inductor, which makes one kernel of it, the norm and what follows."""
    last = product.path[0] if product.summand is None else product.summand
    with graph.inserting_before(product.node):
        (parts,) = emit(
            graph, product.node, torch.ops.loka.gemm_split_k.default, (*operands, splits, product.fast)
        )  # fmt: skip
        (total,) = emit(graph, product.node, aten.sum.dim_IntList, (parts, [0]))
        total = _reshaped(graph, total, last.meta["val"])
        if dtype_of(total) != dtype_of(last):
            (total,) = emit(
                graph, product.node, torch.ops.prims.convert_element_type.default, (total, dtype_of(last))
            )  # fmt: skip
    last.replace_all_uses_with(total)


def _reshaped(graph: fx.Graph, node: fx.Node, like: torch.Tensor) -> fx.Node:
    if node.meta["val"].dim() == like.dim():
        return node
    # Not the shape itself: a symbolic size must not stand in a graph's arguments.
    new = graph.call_function(aten.reshape.default, (node, shape_to_view(like.shape)))
    return copy_meta(new, node, like)


def _eps(norm: fx.Node) -> float:
    eps = arg(norm, 2) if len(norm.args) > 2 else None
    return torch.finfo(torch.float32).eps if eps is None else float(eps)


def _cheapen_epilogue(graph: fx.Graph, y: fx.Node, bound: float) -> str:
    """Rewrite HardSwish on a fused result for fewer instructions, and drop clamps that cannot act.

    The tensor core waits while the epilogue runs. Inductor's NaN-safe minimum and maximum (three instructions each) and
    its division cost a tenth of the kernel's time. NaN goes through both forms.
    """
    found = ""
    for node in list(y.users):
        if not is_call(node, aten.hardswish.default):
            continue
        value = node.meta["val"]
        with graph.inserting_before(node):
            (wide,) = emit(graph, node, torch.ops.prims.convert_element_type.default, (y, torch.float32))
            (gate,) = emit(graph, node, aten.mul.Tensor, (wide, 1.0 / 6.0))
            (gate,) = emit(graph, node, aten.add.Tensor, (gate, 0.5))
            (middle,) = emit(graph, node, aten.mul.Tensor, (wide, gate))
            (below,) = emit(graph, node, aten.le.Scalar, (wide, -3.0))
            (above,) = emit(graph, node, aten.ge.Scalar, (wide, 3.0))
            (out,) = emit(graph, node, aten.where.self, (above, wide, middle))
            (out,) = emit(graph, node, aten.where.ScalarSelf, (below, 0.0, out))
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


__all__ = ["block_refusal", "fuse", "is_sum", "on_this_device", "will_fuse"]
