"""Reading a torch-level FX graph: what does this node compute, whichever way the user spelled it?

Dynamo gives functions and methods, ``torch.fx`` (used by ``apply_mods``) gives modules as well; both end up as the
few kinds below.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

import loka_compile.ops  # noqa: F401  (defines torch.ops.loka)

_FUNCTIONS: dict[Any, str] = {
    F.linear: "linear",
    torch._C._nn.linear: "linear",
    torch.matmul: "matmul",
    torch.mm: "matmul",
    operator.matmul: "matmul",
    F.layer_norm: "layer_norm",
    torch.layer_norm: "layer_norm",
    F.rms_norm: "rms_norm",
    torch.rms_norm: "rms_norm",
    torch.ops.loka.block_norm.default: "block_norm",
    torch.ops.loka.anchor.default: "anchor",
    F.batch_norm: "batch_norm",
    torch.batch_norm: "batch_norm",
    F.group_norm: "group_norm",
    torch.group_norm: "group_norm",
    F.instance_norm: "instance_norm",
    F.silu: "silu",
    F.hardswish: "hardswish",
    torch.sigmoid: "sigmoid",
    F.sigmoid: "sigmoid",
    torch.special.expit: "sigmoid",
    F.hardsigmoid: "hardsigmoid",
    operator.mul: "mul",
    torch.mul: "mul",
    torch.multiply: "mul",
    operator.add: "add",
    operator.iadd: "add",
    torch.add: "add",
    F.dropout: "dropout",
    torch.dropout: "dropout",
    F.alpha_dropout: "dropout",
    F.feature_alpha_dropout: "dropout",
    operator.getitem: "getitem",
    torch.bmm: "bmm",
    torch.baddbmm: "bmm",
    torch.addmm: "addmm",
    torch.einsum: "einsum",
}
_METHODS = {
    "matmul": "matmul",
    "mm": "matmul",
    "sigmoid": "sigmoid",
    "mul": "mul",
    "multiply": "mul",
    "add": "add",
    "add_": "add",
    "bmm": "bmm",
    "contiguous": "identity",
    "float": "identity",
    "double": "identity",
    "half": "identity",
    "bfloat16": "identity",
    "size": "shape",
    "dim": "shape",
    "numel": "shape",
}
_MODULES: tuple[tuple[type[nn.Module], str], ...] = (
    (nn.modules.batchnorm._BatchNorm, "batch_norm"),
    (nn.GroupNorm, "group_norm"),
    (nn.modules.instancenorm._InstanceNorm, "instance_norm"),
    (nn.modules.dropout._DropoutNd, "dropout"),
    (nn.Identity, "identity"),
)

#: What Dynamo makes of ``x.mT`` and ``x.T`` from torch 2.14 on; up to 2.13 it is ``getattr``.
MATRIX_TRANSPOSE, TRANSPOSE = torch.ops.aten.mT, torch.ops.aten.numpy_T

#: A GEMM, of which the linear layers with a learnt weight get a site.
GEMMS = frozenset({"linear", "matmul", "bmm", "addmm", "einsum"})
NORMS = frozenset({"layer_norm", "rms_norm", "block_norm"})


def kind(node: Any) -> str:
    """The kind of a node ("linear", "layer_norm", "silu", ...), or "" for everything else."""
    if not isinstance(node, fx.Node):
        return ""
    if node.op == "call_function":
        if node.target is getattr:
            return "shape"
        if getattr(node.target, "namespace", "") == "loka_probe":
            return "identity"  # the probe's taps show a tensor to it and hand it on
        return _FUNCTIONS.get(node.target, "")
    if node.op == "call_method":
        return _METHODS.get(str(node.target), "")
    if node.op == "call_module":
        module = _submodule(node)
        for cls, name in _MODULES:
            if isinstance(module, cls):
                return name
    return ""


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """An argument that may have been given by position or by keyword."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def dropout_p(node: fx.Node) -> float:
    """The probability of a dropout node, as function or module. Its ``training`` flag does not matter to a rewrite."""
    if node.op == "call_module":
        return float(getattr(_submodule(node), "p", 0.5))
    return float(argument(node, 1, "p", 0.5))


def skip_identity(node: Any) -> Any:
    """Walk back over casts, ``contiguous``, anchors and dropout with p = 0: they do not change what a chain means."""
    while isinstance(node, fx.Node):
        what = kind(node)
        if what in ("identity", "anchor") or (what == "dropout" and dropout_p(node) == 0.0):
            node = node.args[0]
        elif what == "getitem" and kind(node.args[0]) == "block_norm" and node.args[1] == 0:
            node = node.args[0]  # block_norm returns (y, rstd)
        else:
            break
    return node


def users(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that really consume this one: looks through identities, leaves out queries of the shape."""
    for user in node.users:
        what = kind(user)
        if what == "shape":
            continue
        if skip_identity(user) is skip_identity(node) and user is not node:
            yield from users(user)
        else:
            yield user


def last_dim(node: fx.Node) -> int | None:
    """Size of the last dimension if the capture recorded it and it is static."""
    value = node.meta.get("example_value", node.meta.get("val"))
    if isinstance(value, torch.Tensor) and value.dim() > 0 and isinstance(value.shape[-1], int):
        return value.shape[-1]
    return None


def subgraphs(gm: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """The module itself and the bodies of higher-order operators in it (activation checkpointing)."""
    seen = set()
    for module in gm.modules():
        if isinstance(module, fx.GraphModule) and id(module) not in seen:
            seen.add(id(module))
            yield module


def callers(gm: fx.GraphModule) -> dict[fx.Graph, fx.Node]:
    """Sub-graph -> the node that calls it (activation checkpointing)."""
    found = {}
    for sub in subgraphs(gm):
        for node in sub.graph.nodes:
            for arg in node.args:
                if isinstance(arg, fx.Node) and arg.op == "get_attr":
                    body = getattr(sub, str(arg.target), None)
                    if isinstance(body, fx.GraphModule):
                        found[body.graph] = node
    return found


def _submodule(node: fx.Node) -> nn.Module | None:
    owner = node.graph.owning_module
    return None if owner is None else owner.get_submodule(str(node.target))
