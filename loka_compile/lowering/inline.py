"""Puts the operators that a Python function consists of into a graph, in place of one node."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch.fx.experimental.proxy_tensor import make_fx

from loka_compile.lowering.decomposition_table import decompositions

#: Kept on every node that replaces another: site, position in autograd, checkpointing.
_META = ("custom", "partitioner_tag", "autograd_backward", "nn_module_stack", "fwd_nn_module_stack", "source_fn_stack",
         "fwd_source_fn_stack", "seq_nr", "stack_trace", "ac_graph_id", "original_aten", "from_node")  # fmt: skip

_INLINED = "loka_inlined"


def is_inlined(node: fx.Node) -> bool:
    """Whether :func:`inline` put the node into its graph."""
    return bool(node.meta.get(_INLINED))


def inline(
    before: fx.Node, fn: Callable[..., Any], inputs: Sequence[fx.Node], meta_of: fx.Node | None = None
) -> list[fx.Node]:
    """Trace ``fn`` over the inputs' fake values and insert its operators before ``before``.

    Returns the nodes of fn's outputs. New nodes take over what the compiler knows of ``meta_of`` (``before`` by
    default); under selective checkpointing only the outputs inherit "must be saved".
    """
    meta_of = meta_of or before
    values = [n.meta["val"] for n in inputs]
    fake_mode = detect_fake_mode(values)
    assert fake_mode is not None, "the graph's values must be fake tensors"
    # Autocast and grad mode of the surrounding compile must not leak into what fn means.
    with fake_mode, torch.no_grad(), torch._C._DisableAutocast():
        traced = make_fx(fn, decomposition_table=decompositions())(*values)
    traced.graph.eliminate_dead_code()
    env: dict[fx.Node, fx.Node] = {}
    given = iter(inputs)
    outputs: list[fx.Node] = []
    with before.graph.inserting_before(before):
        for node in traced.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(given)
            elif node.op == "output":
                result = node.args[0]
                outputs = [env[n] for n in (result if isinstance(result, (tuple, list)) else (result,))]
            elif node.op == "get_attr":
                env[node] = _constant(before, getattr(traced, str(node.target)))
            else:
                new = before.graph.node_copy(node, env.__getitem__)
                new.meta.update({k: meta_of.meta[k] for k in _META if k in meta_of.meta})
                new.meta[_INLINED] = True
                if "recompute" in meta_of.meta:
                    new.meta["recompute"] = torch.utils.checkpoint.CheckpointPolicy.PREFER_RECOMPUTE
                env[node] = new
    for output in outputs:
        if "recompute" in meta_of.meta and output not in inputs:
            output.meta["recompute"] = meta_of.meta["recompute"]
    return outputs


def replace_with(node: fx.Node, fn: Callable[..., Any], inputs: Sequence[fx.Node] | None = None) -> None:
    """Replace ``node`` by fn's operators; a node with several results is replaced through its getitems."""
    if inputs is None:
        inputs, fn = _bind(node, fn)
    outputs = inline(node, fn, inputs)
    if isinstance(node.meta.get("val"), (tuple, list)):
        for user in list(node.users):
            assert user.target is operator.getitem
            user.replace_all_uses_with(outputs[user.args[1]])  # type: ignore[index]
            node.graph.erase_node(user)
    else:
        node.replace_all_uses_with(outputs[0])
    node.graph.erase_node(node)


def _bind(node: fx.Node, fn: Callable[..., Any]) -> tuple[list[fx.Node], Callable[..., Any]]:
    """Split a node's arguments into the nodes among them and a function of just these."""
    flat, spec = torch.utils._pytree.tree_flatten((node.args, node.kwargs))
    positions = [i for i, value in enumerate(flat) if isinstance(value, fx.Node)]

    def bound(*values: Any) -> Any:
        filled = list(flat)
        for position, value in zip(positions, values, strict=True):
            filled[position] = value
        args, kwargs = torch.utils._pytree.tree_unflatten(filled, spec)
        return fn(*args, **kwargs)

    return [flat[i] for i in positions], bound


def _constant(before: fx.Node, value: Any) -> fx.Node:
    """A tensor that fn closes over becomes an attribute of the surrounding module."""
    owner = before.graph.owning_module
    assert owner is not None
    name = "_loka_constant"
    index = 0
    while hasattr(owner, f"{name}{index}"):
        index += 1
    setattr(owner, f"{name}{index}", value)
    node = before.graph.get_attr(f"{name}{index}")
    node.meta["val"] = value
    return node
