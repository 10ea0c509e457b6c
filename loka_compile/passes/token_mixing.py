"""Computes linear layers over the token axis where the tokens lie, without transposed copies.

    y = linear(x.transpose(1, 2), w).transpose(1, 2)    ->    y = bmm(w.expand(B, -1, -1), x)

for x [B, n, d] and w [m, n]: the linear compression of Wukong and DHEN, the projection in a factorisation machine, the
cross arch of InterFormer. As one GEMM of B * d rows they need x, and the gradient of y, as a transposed copy, and write
y so that the norm behind it reads and writes across rows. A batch of small products reads and writes everything as it
lies, with the same number of operations; the gradient of w is a sum of B products of 16 bits, added up in fp32.

Token counts are small, and FP8 does not pay for them: such a layer is no site any more, and no plan reaches it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from loka_compile.passes.base import Changes, Match, PassContext, Refusal, source_line
from loka_compile.passes.mutation import overwritten
from loka_compile.passes.nodes import GEMMS, MATRIX_TRANSPOSE, argument, kind, subgraphs
from loka_compile.passes.sites import learnt_weight, module_path, outer_arguments

#: Token counts up to which the products are small enough to be bound by reading x.
MAX_TOKENS = 256
#: Rows of x must be so many bytes or a multiple, or the batched product is not read in whole sectors.
_ALIGNMENT = 16


def token_mixing(gm: fx.GraphModule, ctx: PassContext) -> Changes:
    """See the module's docstring."""
    changes = Changes()
    outer = outer_arguments(gm)
    for sub in subgraphs(gm):
        fixed = overwritten(sub.graph)
        for node in list(sub.graph.nodes):
            if kind(node) != "linear":
                continue
            x = swapped(argument(node, 0, "input"))
            if x is None or learnt_weight(node, outer) is None:
                continue
            reason = "its input is written to in place" if x in fixed else _why_not(node, x)
            if reason:
                changes.refused.append(Refusal(node.name, reason, source_line(node)))
                continue
            _rewrite(node, x)
            changes.matched.append(Match(module_path(node) or node.name, "batched", source=source_line(node)))
    return changes


def swapped(node: Any) -> fx.Node | None:
    """The [B, n, d] whose last two dimensions this node swaps, as a view or a copy; None if it does anything else."""
    while isinstance(node, fx.Node) and node.op == "call_method" and node.target == "contiguous":
        node = node.args[0]
    if not isinstance(node, fx.Node) or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    value = node.args[0].meta.get("example_value")
    if not isinstance(value, torch.Tensor) or value.dim() != 3:
        return None
    if node.target is MATRIX_TRANSPOSE:
        swaps = True
    elif node.target is getattr:
        swaps = node.args[1] == "mT"
    elif node.target in ("transpose", "swapaxes", "swapdims", torch.transpose, torch.swapaxes, torch.swapdims):
        dims = node.args[1:] if len(node.args) == 3 else ()
        swaps = len(dims) == 2 and {d % 3 for d in dims if isinstance(d, int)} == {1, 2}
    elif node.target in ("permute", torch.permute):
        given: Any = node.args[1:] if len(node.args) == 4 else node.args[-1]
        swaps = isinstance(given, (tuple, list)) and [d % 3 for d in given if isinstance(d, int)] == [0, 2, 1]
    else:
        return None
    return node.args[0] if swaps else None


def _why_not(node: fx.Node, x: fx.Node) -> str:
    """Why a linear layer over tokens stays as it is, or ""."""
    value, weight = node.meta.get("example_value"), argument(node, 1, "weight").meta.get("example_value")
    if not isinstance(value, torch.Tensor) or not isinstance(weight, torch.Tensor):
        return "its shapes were not recorded"
    if weight.dim() != 2:
        return "its weight is no matrix"
    tokens, row = max(weight.shape), x.meta["example_value"].shape[-1]
    if tokens > MAX_TOKENS:
        return f"{tokens} tokens are more than {MAX_TOKENS}"
    if not isinstance(row, int):
        return "the width of its rows is not known when compiling"
    if row * value.dtype.itemsize % _ALIGNMENT:
        return f"its rows of {row} {value.dtype} are not whole {_ALIGNMENT} bytes"
    if weight.shape[0] > row:
        # The gradient of w is summed over [B, m, n], which must not be more to move than x [B, n, d].
        return f"{weight.shape[0]} tokens come out of rows of {row}"
    for user in node.users:
        if swapped(user) is node:
            again = [reader for reader in user.users if swapped(reader) is user]
            if any(kind(reader) not in GEMMS for back in again for reader in back.users):
                return f"{user.name} is transposed once more"  # and may be viewed in ways that need these strides
        elif kind(user) not in GEMMS - {"linear"}:
            return f"{user.name} reads it with the tokens last"
    return ""


def _rewrite(node: fx.Node, x: fx.Node) -> None:
    value = node.meta["example_value"]
    weight, bias = argument(node, 1, "weight"), argument(node, 2, "bias")
    graph = node.graph

    def add(like: torch.Tensor | int, method: str, *args: Any) -> fx.Node:
        new = graph.call_method(method, args)
        new.meta = {k: v for k, v in node.meta.items() if k != "custom"} | {"example_value": like}
        return new

    def cast(parameter: fx.Node) -> fx.Node:
        own = parameter.meta["example_value"]
        # Before it is expanded: autocast would cast the expanded one, element by element.
        return parameter if own.dtype == value.dtype else add(own.to(value.dtype), "to", parameter, value.dtype)

    with graph.inserting_before(node):
        batch = x.meta["example_value"].shape[0]
        weight = cast(weight)
        own = weight.meta["example_value"]
        if own.shape[1] * own.dtype.itemsize % _ALIGNMENT:
            # Rows of 34 tokens would be read two bytes at a time; outputs are a multiple of 8 more often.
            weight = add(own.t().contiguous(), "contiguous", add(own.t(), "t", weight))
            weight = add(own, "t", weight)
        wide = add(own.expand(batch, -1, -1), "expand", weight, add(batch, "size", x, 0), -1, -1)
        y = add(value.transpose(1, 2), "bmm", wide, x)
        if bias is not None:
            bias = cast(bias)
            y = add(y.meta["example_value"], "add", y, add(bias.meta["example_value"][:, None], "unsqueeze", bias, 1))
        back = add(value, "transpose", y, 1, 2)
    for user in list(node.users):
        if swapped(user) is node:
            user.replace_all_uses_with(y)
            graph.erase_node(user)
    node.replace_all_uses_with(back)
    graph.erase_node(node)
    if not back.users:
        graph.erase_node(back)
