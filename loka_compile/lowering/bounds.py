"""Proves upper bounds of absolute values in an aten graph.

BlockNorm over blocks of 256 bounds its output by sqrt(256) = 16, and HardSwish does not exceed its input. An operand
with a proven bound is quantised with a fixed scale: no amax, no extra pass over memory.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

import loka_compile.ops  # noqa: F401  (defines the operators named here)

aten = torch.ops.aten

#: The value moves or is rounded, its magnitude stays.
_SAME = frozenset(
    {
        aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.permute.default, aten.t.default,
        aten.transpose.int, aten.expand.default, aten.clone.default, aten.slice.Tensor, aten.select.int,
        aten.squeeze.dim, aten.squeeze.default, aten.unsqueeze.default, aten.alias.default, aten.detach.default,
        aten._to_copy.default, torch.ops.prims.convert_element_type.default, aten.neg.default, aten.abs.default,
        aten.relu.default, aten.hardswish.default, aten.silu.default, torch.ops.loka.anchor.default,
    }
)  # fmt: skip
_ONE = frozenset({aten.sigmoid.default, aten.hardsigmoid.default, aten.tanh.default})


def bound(node: Any, depth: int = 32) -> float | None:
    """A proven upper bound of ``abs(node)``, or None. Rounding to bf16 is covered: bounds are powers of two or reached
    with a margin by the quantiser's fixed scale (16 * 16 = 256 of e4m3's 448)."""
    if not isinstance(node, fx.Node):
        return abs(float(node)) if isinstance(node, (int, float)) else None
    if depth == 0 or node.op != "call_function":
        return None
    target = node.target
    if target is operator.getitem:
        parent, index = node.args
        if isinstance(parent, fx.Node) and parent.target is torch.ops.loka.block_norm.default and index == 0:
            return _block_norm_bound(parent)
        return None
    if target in _SAME:
        return bound(node.args[0], depth - 1)
    if target in _ONE:
        return 1.0
    if target is aten.mul.Tensor:
        return _combine(node, operator.mul, depth)
    if target in (aten.add.Tensor, aten.sub.Tensor) and not node.kwargs:
        return _combine(node, operator.add, depth)
    if target is aten.cat.default:
        parts = [bound(part, depth - 1) for part in node.args[0]]  # type: ignore[union-attr]
        return None if any(p is None for p in parts) else max(parts)  # type: ignore[type-var]
    return None


def _combine(node: fx.Node, combine: Any, depth: int) -> float | None:
    left, right = (bound(arg, depth - 1) for arg in node.args[:2])
    return None if left is None or right is None else combine(left, right)


def _block_norm_bound(node: fx.Node) -> float | None:
    """Of b values with root mean square <= 1 none exceeds sqrt(b)."""
    block = node.args[1]
    width = node.args[0].meta["val"].shape[-1]  # type: ignore[union-attr]
    if isinstance(width, int):
        block = min(block, width)  # type: ignore[type-var]
    return math.sqrt(block)  # type: ignore[arg-type]
