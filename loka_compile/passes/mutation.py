"""Which values of a graph are written over later: a copy of such a value would go stale."""

from __future__ import annotations

import inspect
import operator

import torch
from torch import fx
from torch.utils import _pytree as pytree

from loka_compile.passes.nodes import GEMMS, NORMS, kind

_IN_PLACE = frozenset({
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.ipow, operator.imod,
    operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift, operator.imatmul, operator.setitem,
})  # fmt: skip
_NEW = frozenset({*GEMMS, *NORMS, "add", "mul"})


def overwritten(graph: fx.Graph) -> set[fx.Node]:
    """The in-place operators, what they write to, and what that may be a view of."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if not writes(node):
            continue
        found.add(node)
        # By torch's convention the first argument and out= are written to; an operator's schema may name others.
        targets = node.args if isinstance(node.target, torch._ops.OpOverload) else node.args[:1]
        stack = [a for a in pytree.tree_leaves((targets, node.kwargs)) if isinstance(a, fx.Node)]
        while stack:
            target = stack.pop()
            if target in found:
                continue
            found.add(target)
            if kind(target) not in _NEW or writes(target):  # a new tensor is a view of nothing
                stack.extend(target.all_input_nodes)
    return found


def writes(node: fx.Node) -> bool:
    """Whether an operator changes one of its arguments: by its name, its ``out=``, or its ``inplace=True``."""
    if node.op not in ("call_function", "call_method"):
        return False
    if "out" in node.kwargs or node.target in _IN_PLACE:
        return True
    if isinstance(node.target, torch._ops.OpOverload):
        return bool(node.target._schema.is_mutable)
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    if name.endswith("_") and not name.endswith("__"):
        return True
    if inspect.isfunction(node.target):
        try:
            given = inspect.signature(node.target).bind_partial(*node.args, **node.kwargs).arguments
        except TypeError:
            return False
        return given.get("inplace") is True
    return node.kwargs.get("inplace") is True
