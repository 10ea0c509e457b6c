"""One computation for what several GEMMs quantise alike.

Each GEMM is lowered with the quantisation of its own operands: the forward and the grad_weight of a layer both quantise
its input. torch up to 2.13 merges equal operators of the forward and the backward before it cuts the graph; 2.14 no
longer does, and each operand would be read once more for its maximum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from loka_compile.lowering.inline import is_inlined


def merge_equal(graph: fx.Graph) -> int:
    """Let operators that lowering emitted with the same arguments be the first of them; returns how many went."""
    first: dict[Any, fx.Node] = {}
    merged = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or not is_inlined(node) or not _is_pure(node.target):
            continue
        same = first.setdefault(_key(node), node)
        if same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
            merged += 1
    return merged


def _is_pure(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags


def _key(node: fx.Node) -> tuple[Any, ...]:
    """Equal for equal calls; numbers by their text, so that 1 and 1.0, 0.0 and -0.0 are told apart."""
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    plain = tuple(leaf if isinstance(leaf, fx.Node) else (type(leaf), repr(leaf)) for leaf in leaves)
    return node.target, plain, str(spec)
