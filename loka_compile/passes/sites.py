"""Names every linear layer: ``"<FQN>#<call index>"``, the key of statistics, tables, plans and reports.

The name comes from the weight (``over.mlp.2.weight`` -> ``over.mlp.2``), so that it is the same in every graph that
holds the layer: training and inference, checkpointed or not. The index counts the calls of a shared layer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from loka_compile.passes.base import Changes, Match, PassContext, source_line
from loka_compile.passes.nodes import MATRIX_TRANSPOSE, TRANSPOSE, argument, kind, subgraphs

#: Where the name is kept: AOTAutograd copies ``meta["custom"]`` to every node that a node becomes, backward included.
KEY = "loka.site"

_TRANSPOSES = (torch.t, torch.transpose, torch.permute, MATRIX_TRANSPOSE, TRANSPOSE)
_TRANSPARENT = frozenset(
    {"t", "transpose", "permute", "T", "mT", "contiguous",
     "float", "double", "bfloat16", "half", "to", "type", "type_as"}
)  # fmt: skip


def sites(gm: fx.GraphModule, ctx: PassContext) -> Changes:
    """Stamp each linear layer's site into ``node.meta["custom"]``. The graph's code does not change."""
    changes = Changes()
    for node, site in name_sites(gm).items():
        custom = node.meta.get("custom") or {}
        if custom.get(KEY) != site:
            node.meta["custom"] = {**custom, KEY: site}
            changes.matched.append(Match(site, kind(node), source=source_line(node)))
    return changes


def name_sites(gm: fx.GraphModule) -> dict[fx.Node, str]:
    """Every linear layer of the graph and of its sub-graphs, with its site."""
    outer = outer_arguments(gm)
    calls: Counter[str] = Counter()
    names: dict[fx.Node, str] = {}
    for sub in subgraphs(gm):
        for node in sub.graph.nodes:
            weight = learnt_weight(node, outer)
            if weight is None:
                continue
            name = _fqn(weight) or module_path(node) or f"<root>:{node.name}"
            names[node] = f"{name}#{calls[name]}"
            calls[name] += 1
    return names


def learnt_weight(node: fx.Node, outer: dict[fx.Node, fx.Node] | None = None) -> fx.Node | None:
    """The placeholder or attribute that holds the weight of a linear layer or of a matmul with a parameter."""
    what = kind(node)
    if what == "linear":
        candidates = [argument(node, 1, "weight")]
    elif what == "matmul":
        candidates = [argument(node, 1, "other"), argument(node, 0, "input")]
    else:
        return None
    for candidate in candidates:
        found = _origin(candidate, outer or {})
        if found is not None:
            return found
    return None


def _origin(node: Any, outer: dict[fx.Node, fx.Node]) -> fx.Node | None:
    """Walk back from an operand over transposes and casts to a parameter or buffer."""
    while isinstance(node, fx.Node):
        if node.op == "get_attr":
            return node
        if node.op == "placeholder":
            if node in outer:
                node = outer[node]
                continue
            return node if _is_state(node) else None
        name = node.args[1] if node.target is getattr else str(node.target)
        method = (node.op == "call_method" or node.target is getattr) and name in _TRANSPARENT
        if not method and node.target not in _TRANSPOSES:
            return None
        node = node.args[0]
    return None


def _is_state(placeholder: fx.Node) -> bool:
    """Whether Dynamo made this input from a parameter or buffer of a module."""
    if isinstance(placeholder.meta.get("example_value"), torch.nn.Parameter):
        return True
    return "_buffers[" in _source_name(placeholder)


def _source_name(placeholder: fx.Node) -> str:
    source = getattr(placeholder, "_dynamo_source", None)
    return "" if source is None else str(source.name)


def _fqn(weight: fx.Node) -> str:
    """``b.0.lin`` for the parameter ``b.0.lin.weight``; other parameters keep their own name."""
    if weight.op == "get_attr":
        name = str(weight.target)
        owner = weight.graph.owning_module
        if owner is not None:  # Dynamo flattens names when it makes attributes of parameters (freezing)
            name = original_name(name, owner.meta.get("dynamo_flat_name_to_original_fqn", {}))
    else:
        name = clean_source(_source_name(weight))
    return name.removesuffix(".weight")


def original_name(flat: str, known: Mapping[str, str]) -> str:
    """The FQN of a parameter that Dynamo made an attribute of the graph of.

    Dynamo's own table has other keys than the graph has attributes where a module is reached through two containers
    (``getattr_L__self___layers_0_mlp___0___weight`` for ``L__self___layers_0_mlp_0_weight``; torch 2.11 to 2.13). So
    the FQNs that it knows are flattened as it flattens; a name that two of them have in common is nobody's.
    """
    if flat in known:
        return known[flat]
    found = {fqn for fqn in known.values() if flat == "L__self___" + fqn.replace(".", "_")}
    return found.pop() if len(found) == 1 else flat


def clean_source(name: str) -> str:
    """Dynamo's source expression as a dotted path: ``L['m']._modules['b']._parameters['w']`` -> ``b.w``.

    The root variable is dropped: it is whatever the user called the model.
    """
    name = re.sub(r"\._(?:modules|parameters|buffers)\['([^']*)'\]", r".\1", name)
    name = re.sub(r"\['([^']*)'\]", r".\1", name)
    name = re.sub(r"\[(\d+)\]", r".\1", name)
    root, _, path = name.partition(".")
    if root in ("L", "G"):  # the root was a local or global variable: drop its name as well
        _, _, path = path.partition(".")
    return path.removeprefix("_orig_mod.").removeprefix("module.")


def module_path(node: fx.Node) -> str:
    """FQN of the module that made this node, or "" if none did."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    return clean_source(str(next(reversed(stack.values()))[0]))


def outer_arguments(gm: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """Placeholder of a sub-graph -> the node that the surrounding graph passes in for it."""
    outer: dict[fx.Node, fx.Node] = {}
    for sub in subgraphs(gm):
        for node in sub.graph.nodes:
            for position, arg in enumerate(node.args):
                if not (isinstance(arg, fx.Node) and arg.op == "get_attr"):
                    continue
                body = getattr(sub, str(arg.target), None)
                if not isinstance(body, fx.GraphModule):
                    continue
                given = [a for a in node.args[position + 1 :] if isinstance(a, fx.Node)]
                inner = [n for n in body.graph.nodes if n.op == "placeholder"]
                outer.update(zip(inner, given, strict=False))
    return outer
