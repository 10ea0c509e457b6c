"""Drops the bias of every linear layer but the final prediction layers (paper section III-B.1).

    linear(x, w, b)   ->   anchor(linear(x, w), [b])

The anchor gives ``b`` a zero gradient, so that DDP, optimizers and checkpoints keep working; it costs nothing.
A layer is final if its output reaches the graph's output without another GEMM, norm of ours or activation of ours.
"""

from __future__ import annotations

import torch
from torch import fx

from loka_compile.passes.base import Changes, Match, PassContext, Refusal, source_line
from loka_compile.passes.chains import Chain, find_chains
from loka_compile.passes.nodes import GEMMS, argument, callers, kind
from loka_compile.passes.rewrite import anchor
from loka_compile.passes.sites import name_sites


def bias_removal(gm: fx.GraphModule, ctx: PassContext) -> Changes:
    """See the module's docstring."""
    changes = Changes()
    names = name_sites(gm)
    findings = find_chains(gm, ctx.config.block_size)
    ends = _chain_nodes(findings.chains)
    called_from = callers(gm)
    for linear, site in names.items():
        bias = argument(linear, 2, "bias")
        if kind(linear) != "linear" or not isinstance(bias, fx.Node):
            continue
        if not ctx.config.remove_final_bias and _is_final(linear, ends, called_from):
            changes.refused.append(
                Refusal(
                    linear.name,
                    f"the bias of {site} is kept: a final prediction layer (remove_final_bias=True drops it)",
                    source_line(linear),
                )
            )
            continue
        weight = argument(linear, 1, "weight")
        linear.args = (argument(linear, 0, "input"), weight, None)
        linear.kwargs = {}
        anchor(linear, [bias])
        changes.matched.append(Match(site, "bias", ("bias",), source_line(linear)))
    return changes


def _chain_nodes(chains: list[Chain]) -> set[fx.Node]:
    """The norms and activations of ours, behind which a bias has lost its meaning for the prediction."""
    return {node for chain in chains for node in (chain.norm, chain.activation) if node is not None}


def _is_final(linear: fx.Node, ends: set[fx.Node], called_from: dict[fx.Graph, fx.Node]) -> bool:
    """Whether a path leads from the layer to the output of the whole graph past no GEMM, norm or activation of ours."""
    seen: set[fx.Node] = set()
    stack = list(linear.users)
    while stack:
        node = stack.pop()
        if node in seen or node in ends or kind(node) in GEMMS or kind(node) == "shape":
            continue
        seen.add(node)
        if node.op == "output":
            caller = called_from.get(node.graph)
            if caller is None:
                return True
            stack.extend(caller.users)
        elif node.target is torch.ops.higher_order.tag_activation_checkpoint:
            stack.extend(_inside(node))
        else:
            stack.extend(node.users)
    return False


def _inside(call: fx.Node) -> list[fx.Node]:
    """The users, within a checkpointed body, of everything passed into it."""
    owner = call.graph.owning_module
    body = getattr(owner, str(call.args[0].target))  # type: ignore[union-attr]
    return [user for n in body.graph.nodes if n.op == "placeholder" for user in n.users]
