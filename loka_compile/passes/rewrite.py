"""Small edits of a graph that keep its bookkeeping right."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

import loka_compile.ops  # noqa: F401  (defines torch.ops.loka)


def replace(node: fx.Node, target: Callable[..., Any], args: tuple[Any, ...], *, output: int | None = None) -> fx.Node:
    """Replace ``node`` by a call of ``target`` and return the node that now carries its value.

    Meta (stack trace, module stack, shape) moves over: a rewrite keeps shape, dtype and device.
    ``output`` picks one result of an operator that returns several.
    """
    with node.graph.inserting_before(node):
        new = node.graph.call_function(target, args)
        new.meta = dict(node.meta)
        if output is not None:
            new.meta.pop("example_value", None)
            new = node.graph.call_function(operator.getitem, (new, output))
            new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
    return new


def anchor(node: fx.Node, unused: Sequence[fx.Node]) -> fx.Node:
    """Give parameters that nothing reads any more a zero gradient by way of ``node``'s gradient."""
    if not unused:
        return node
    with node.graph.inserting_after(node):
        new = node.graph.call_function(torch.ops.loka.anchor.default, (node, list(unused)))
        new.meta = dict(node.meta)
        new.meta.pop("custom", None)  # the anchor is no GEMM
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    return new
