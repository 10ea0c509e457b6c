"""Puts a GEMM, its BlockNorm and an activation into one operator, where Inductor's epilogue cannot take the activation
(joint graph, before it is cut into forward and backward).

    h = a @ b (+ residual)
    y, rstd = block_norm(h)                       out, h, rstd, q, scale = gemm_norm_activation(a, b, ...)
    out = h * hardsigmoid(y)  (SwishNorm)   ->
    q, scale = out in FP8, 1x128 blocks

SwishNorm reads the GEMM's result twice. HardSwish comes here only where the next GEMM reads it in 1x128 blocks,
whose scales are reductions; else :mod:`.forward` leaves it to the epilogue.

On the joint graph because here it can be said what the backward keeps: h and rstd (HardSwish: y and rstd). All else
that the backward reads of them is pointwise and goes into the kernels that read it. The backward itself is plain aten.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from loka_compile.kernels.config import BLOCK
from loka_compile.lowering.fused import lowerings, ops_activation  # noqa: F401
from loka_compile.lowering.fused.match import ALIAS, CONVERT, FP8, VIEWS, arg, dtype_of, emit, is_call, result, rows
from loka_compile.lowering.fused.product import (
    Product,
    eps_of,
    handed_on,
    kind_of,
    operands_of,
    product_of,
    refusal,
    reshaped,
)
from loka_compile.lowering.inline import inline
from loka_compile.lowering.roles import site_of
from loka_compile.report import Report

aten = torch.ops.aten
_WORDS = {"swish_norm": "SwishNorm({})", "hardswish": "BlockNorm({}) + HardSwish"}


@dataclass(frozen=True)
class _InBlocks:
    """A quantisation in 1x128 blocks: FP8 [M, N/128, 128], its scales [M, N/128, 1], and the same as [N/128, M]."""

    node: fx.Node
    scale: fx.Node
    transposed: list[fx.Node]


def activations(graph: fx.Graph, report: Report) -> int:
    """Fuse every GEMM with the norm and activation behind it that need it; returns how many. In place."""
    fused = 0
    for norm in list(graph.nodes):
        product = product_of(norm) if is_call(norm, torch.ops.loka.block_norm.default) else None
        if product is None:
            continue
        activation, out = _activation(norm, product)
        if out is None:
            continue
        gated = activation == "swish_norm"
        quantised = _in_blocks(out)
        if quantised and refusal(norm, product, gated, quantised=True):
            quantised = []
        if not gated and not quantised:
            continue
        name = site_of(product.node) or norm.name
        reason = "" if quantised else refusal(norm, product, gated)
        if reason:
            report.fusions.append(f"{name}: SwishNorm not fused with the GEMM: {reason}")
            continue
        report.fusions.append(f"{name}: {_rewrite(graph, norm, product, activation, out, quantised)}")
        fused += 1
    if fused:
        lowerings.register()
    return fused


def drop_unread(graph: fx.Graph) -> None:
    """Write only what a node reads: inference keeps nothing, nor does the forward under checkpointing."""
    for node in graph.nodes:
        if is_call(node, torch.ops.loka.gemm_norm_activation.default):
            args = list(node.args)
            args[10] = result(node, 0) is not None or not args[12]
            args[11] = result(node, 1) is not None or result(node, 2) is not None
            node.args = tuple(args)
            wanted = (args[10], args[11], args[11], args[12], args[12])
            node.meta["val"] = tuple(
                v if want else v.new_empty((0,)) for v, want in zip(node.meta["val"], wanted, strict=True)
            )


def _activation(norm: fx.Node, product: Product) -> tuple[str, fx.Node | None]:
    """Which activation follows the norm, and the node of its result; ("", None) if there is none."""
    y = result(norm, 0)
    for gate in _readers(y) if y is not None else ():
        if is_call(gate, aten.hardswish.default):
            return "hardswish", gate
        if is_call(gate, aten.hardsigmoid.default):
            for node in _readers(gate):
                if is_call(node, aten.mul.Tensor) and any(rows(n) is product.value for n in node.all_input_nodes):
                    return "swish_norm", node
    return "", None


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """What reads a value, through casts, aliases and views."""
    for user in node.users:
        if is_call(user, *CONVERT, *ALIAS, *VIEWS) and dtype_of(user) not in FP8:
            yield from _readers(user)
        else:
            yield user


def _in_blocks(value: fx.Node) -> list[_InBlocks]:
    """The quantisations of ``value`` [..., N] in 1x128 blocks along N, as ``lowering/quantize.py`` traces them."""
    found = []
    for absolute in _readers(value):
        scale = absolute if _is(absolute, aten.abs) else None
        for packet in (aten.amax, (aten.clamp, aten.clamp_min), aten.div):
            scale = _reader(scale, packet)
        node = _reader(_reader(scale, aten.reciprocal), aten.mul)
        if scale is None or node is None or arg(node, 0) is not arg(absolute, 0):
            continue
        while node is not None and not (is_call(node, *CONVERT) and dtype_of(node) in FP8):
            node = next(iter(node.users)) if len(node.users) == 1 else None
        if node is None or dtype_of(node) != torch.float8_e4m3fn or node.meta["val"].dim() != 3:
            continue
        m, blocks, width = node.meta["val"].shape
        if width == BLOCK and tuple(scale.meta["val"].shape) == (m, blocks, 1):
            copies = [n for n in _views(scale) if _is(n, aten.clone) and tuple(n.meta["val"].shape) == (blocks, m)]
            found.append(_InBlocks(node, scale, copies))
    return found


def _is(node: fx.Node, packets: Any) -> bool:
    return getattr(node.target, "overloadpacket", None) in (packets if isinstance(packets, tuple) else (packets,))


def _reader(node: fx.Node | None, packets: Any) -> fx.Node | None:
    """The only reader of ``node`` that calls one of packets, or None."""
    readers = [user for user in node.users if _is(user, packets)] if node is not None else []
    return readers[0] if len(readers) == 1 else None


def _views(node: fx.Node) -> Iterator[fx.Node]:
    """Everything that only shows ``node`` in another shape, or copies it."""
    for user in node.users:
        if is_call(user, *VIEWS, *ALIAS, aten.squeeze.dims, aten.permute.default, aten.t.default, aten.clone.default):
            yield user
            yield from _views(user)


def _rewrite(
    graph: fx.Graph, norm: fx.Node, product: Product, activation: str, out: fx.Node, quantised: list[_InBlocks]
) -> str:
    """Put the operator in the place of GEMM, norm and activation; returns what it swallowed, in words."""
    block, value, gated = int(arg(norm, 1)), product.value, activation == "swish_norm"
    old_y, old_rstd = result(norm, 0), result(norm, 1)
    assert old_y is not None
    kept_dtype, out_dtype = dtype_of(value if gated else old_y), handed_on(product, out)
    with graph.inserting_before(value):
        residual = None if product.residual is None else reshaped(graph, product.residual, product.node.meta["val"])
        new_out, kept, rstd, q, scale = emit(
            graph, product.node, torch.ops.loka.gemm_norm_activation.default,
            (*operands_of(graph, product), activation, block, eps_of(norm), out_dtype, kept_dtype, product.fast, True,
             True, bool(quantised), residual),
        )  # fmt: skip
        y = kept
        if gated:
            (y,) = inline(value, lambda h, r: normalised(h, r, block, dtype_of(old_y)), [kept, rstd], meta_of=norm)
        pairs = [(old_y, y), (old_rstd, rstd), (value if gated else None, kept)]
        replaced = [(old, reshaped(graph, new, old.meta["val"])) for old, new in pairs if old is not None]
        new_out = reshaped(graph, new_out, out.meta["val"])
        if out_dtype != dtype_of(out):
            (new_out,) = emit(graph, out, torch.ops.prims.convert_element_type.default, (new_out, dtype_of(out)))
        for found in quantised:
            replaced += _blocks(graph, found, q, scale)
    # Before the others: what is left of out is made from what they are replaced by.
    out.replace_all_uses_with(new_out, delete_user_cb=lambda user: user.meta.get("partitioner_tag") != "is_backward")
    for old, new in replaced:
        old.replace_all_uses_with(new)
    fused = arg(kept, 0)
    graph.eliminate_dead_code()
    saved = " (kept for the backward: {} and rstd)".format("h" if gated else "y")
    saved = saved if result(fused, 1) or result(fused, 2) else ""
    added = " + residual" if residual is not None else ""
    fp8 = " + FP8 output in 1x128 blocks" if quantised else ""
    return f"{kind_of(product)} GEMM{added} + {_WORDS[activation].format(block)}{fp8} in one kernel{saved}"


def _blocks(graph: fx.Graph, found: _InBlocks, q: fx.Node, scale: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """What stands for a quantisation's nodes: FP8 in blocks, the scales, and the scales as the kernel writes them."""
    blocks = found.node.meta["val"].shape[1]
    (in_blocks,) = emit(graph, q, aten.reshape.default, (q, [-1, blocks, BLOCK]))
    (turned,) = emit(graph, scale, aten.permute.default, (scale, [1, 0]))
    (column,) = emit(graph, scale, aten.unsqueeze.default, (turned, -1))
    return [*((copy, scale) for copy in found.transposed), (found.node, in_blocks), (found.scale, column)]


def normalised(h: Tensor, rstd: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    """BlockNorm's output [..., N] again, from its input and rstd [..., ceil(N / block)], in dtype."""
    n = h.shape[-1]
    each = rstd.unsqueeze(-1).expand(*rstd.shape, block).flatten(-2) if n > block else rstd
    return (h.to(rstd.dtype) * each[..., :n]).to(dtype)


__all__ = ["activations", "drop_unread", "normalised"]
