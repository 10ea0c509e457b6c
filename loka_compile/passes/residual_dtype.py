"""Rounds a norm's fp32 result to autocast's dtype where a residual connection would carry it on in fp32.

    y = layer_norm(x)         y = layer_norm(x); y16 = y.bfloat16()
    z = y + linear(y)    ->   z = y16 + linear(y16)
    return z                  return z.float()

CUDA autocast runs norms in fp32 and returns fp32, so in a post-norm model the whole stream between the GEMMs, and its
gradient, is twice as wide as they are. The norm computes in fp32 as before; its result, or that of the activation right
behind it, is rounded once. Every operator downstream that gives what it is given then gives 16 bits; one that is not
known to take them reads fp32, and so does the graph's output: no dtype changes that anybody outside can see.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.utils import _pytree as pytree

from loka_compile.passes import autocast
from loka_compile.passes.base import Changes, Match, PassContext, Refusal, source_line
from loka_compile.passes.mutation import overwritten
from loka_compile.passes.nodes import GEMMS, NORMS, kind, skip_identity, subgraphs
from loka_compile.passes.sites import module_path

#: Methods by which a result becomes 16 bits: casts that `nodes.kind` calls identities, so that chains stay chains.
_CASTS = {torch.bfloat16: "bfloat16", torch.float16: "half"}
_GATES = ("sigmoid", "hardsigmoid")
_ACTIVATIONS = ("silu", "hardswish", *_GATES)
#: Elementwise, in the dtype that their operands promote to (or joined in it: cat and stack).
_PROMOTING = frozenset({
    operator.add, operator.sub, operator.mul, torch.add, torch.sub, torch.subtract, torch.mul, torch.multiply,
    torch.cat, torch.concat, torch.concatenate, torch.stack, F.relu, torch.relu, F.gelu, "add", "sub", "subtract",
    "mul", "multiply", "relu",
})  # fmt: skip
_PROMOTING_KINDS = frozenset({*_ACTIVATIONS, "dropout"})
_VIEWS = frozenset({
    operator.getitem, torch.reshape, torch.flatten, torch.transpose, torch.permute, torch.squeeze, torch.unsqueeze,
    torch.t, torch.chunk, torch.split, torch.unbind, "view", "reshape", "flatten", "unflatten", "transpose", "permute",
    "squeeze", "unsqueeze", "t", "contiguous", "chunk", "split", "unbind",
})  # fmt: skip


def residual_dtype(gm: fx.GraphModule, ctx: PassContext) -> Changes:
    """See the module's docstring."""
    changes = Changes()
    states = autocast.states(gm)
    for sub in subgraphs(gm):
        _Rounding(sub.graph, states, changes).run()
    return changes


class _Rounding:
    """One walk along a graph: ``narrow`` holds the nodes that were fp32 and are 16 bits now, with their dtype."""

    def __init__(self, graph: fx.Graph, states: dict[fx.Node, autocast.State], changes: Changes) -> None:
        self.graph, self.states, self.changes = graph, states, changes
        self.fixed = overwritten(graph)
        self.narrow: dict[fx.Node, torch.dtype] = {}

    def run(self) -> None:
        ends = {_end(node): node for node in self.graph.nodes if kind(node) in NORMS}
        for node in list(self.graph.nodes):
            self._propagate(node)
            if node in ends:
                self._round(node, ends[node])

    def _round(self, end: fx.Node, norm: fx.Node) -> None:
        """Put the cast behind the norm and its activation, if that makes anything but a GEMM's own cast narrower."""
        value = end.meta.get("example_value")
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float32 or end in self.narrow:
            return
        dtype = autocast.at(self.states[norm], value.device.type)
        if dtype not in _CASTS or not autocast.widens(norm, value.device.type):
            return
        if end in self.fixed:
            self._refuse(end, "the norm's result stays in fp32: it is written to in place")
            return
        if not any(kind(reader) not in GEMMS for reader in self._readers(end)):
            odd = next((u for u in end.users if kind(u) not in {*GEMMS, "shape"} and not self._takes(u)), None)
            if odd is not None:
                self._refuse(end, f"the norm's result stays in fp32: {odd.name} may need it so")
            return
        readers = [user for user in end.users if self._takes(user)]
        with self.graph.inserting_after(end):
            cast = _cast(end, _CASTS[dtype], dtype)
        for user in readers:
            user.replace_input_with(end, cast)
        self.narrow[cast] = dtype
        site = module_path(norm) or norm.name
        what = str(dtype).removeprefix("torch.")
        self.changes.matched.append(Match(site, f"norm result in {what}", source=source_line(norm)))

    def _refuse(self, node: fx.Node, reason: str) -> None:
        self.changes.refused.append(Refusal(node.name, reason, source_line(node)))

    def _propagate(self, node: fx.Node) -> None:
        """The dtype of a node that reads narrow values; in front of one that does not take them they are widened."""
        given = [n for n in node.all_input_nodes if n in self.narrow]
        if not given or (kind(node) == "shape" and node.target is not getattr):
            return
        if not self._takes(node):
            for source in given:
                with self.graph.inserting_before(node):
                    node.replace_input_with(source, _cast(source, "float", torch.float32))
        elif kind(node) not in GEMMS | NORMS:
            dtype = self._promoted(node)
            if dtype in _CASTS:
                self.narrow[node] = dtype
                _record(node, node, dtype)

    def _promoted(self, node: fx.Node) -> torch.dtype | None:
        """The floating-point dtype of a view or elementwise result; zero-dimensional operands do not widen others."""
        inputs = [node.args[0]] if _is_view(node) else node.all_input_nodes
        values = [v for v in map(_value, inputs) if v is not None and v.dtype.is_floating_point]
        rows = [v for v in values if v.dim()] or values
        return functools.reduce(torch.promote_types, [v.dtype for v in rows])

    def _readers(self, node: fx.Node) -> Iterator[fx.Node]:
        """The consumers that can take 16 bits, also through views."""
        for user in node.users:
            if not self._takes(user):
                continue
            if _is_view(user):
                yield from self._readers(user)
            else:
                yield user

    def _takes(self, node: fx.Node) -> bool:
        """Whether an operator that reads an fp32 value may be given it in 16 bits."""
        value = _value(node)
        what = kind(node)
        if what in NORMS:  # their results stay fp32 only where autocast makes them so
            first = _value(node.args[0]) if node.args else None
            if first is None:
                return False
            device_type = first.device.type
            return autocast.at(self.states[node], device_type) in _CASTS and autocast.widens(node, device_type)
        if value is None:
            return False
        if what in GEMMS:  # a 16-bit result of an fp32 operand: autocast casts it
            return value.dtype in _CASTS and autocast.at(self.states[node], value.device.type) == value.dtype
        if node in self.fixed:
            return False
        if _is_view(node):
            return any(True for _ in self._readers(node))
        promotes = node.op != "call_module" and (node.target in _PROMOTING or what in _PROMOTING_KINDS)
        return promotes and value.dtype in (torch.float32, *_CASTS) and all(
            "example_value" in n.meta for n in node.all_input_nodes
        )  # fmt: skip


def _end(norm: fx.Node) -> fx.Node:
    """The node with which a norm's value leaves it: its own, or that of the activation which alone reads it."""
    node = norm
    while True:
        users = [user for user in node.users if kind(user) != "shape"]
        muls = [user for user in users if kind(user) == "mul"]
        if len(users) == 1:
            user = users[0]
            result = kind(node) == "block_norm" and kind(user) == "getitem"
            if result or kind(user) == "anchor" or (kind(user) in _ACTIVATIONS and kind(node) not in _GATES):
                node = user
                continue
            if kind(node) in _GATES and muls and _gates_its_own(user, node, norm):
                node = user
                continue
        elif len(users) == 2 and len(muls) == 1 and kind(node) not in _GATES:
            gate = next(user for user in users if user is not muls[0])
            if kind(gate) in _GATES and list(gate.users) == muls and set(muls[0].args) == {gate, node}:
                return muls[0]
        return node


def _gates_its_own(mul: fx.Node, gate: fx.Node, norm: fx.Node) -> bool:
    """Whether this is ``x * sigmoid(norm(x))``, not a gate on something else."""
    x = skip_identity(norm.args[0] if norm.args else None)
    return any(skip_identity(arg) is x for arg in mul.args if arg is not gate)


def _is_view(node: fx.Node) -> bool:
    known = node.op in ("call_function", "call_method") and node.target in _VIEWS
    return known and not any(isinstance(arg, torch.dtype) for arg in (*node.args, *node.kwargs.values()))


def _value(node: Any) -> torch.Tensor | None:
    """The recorded value, or the first of the pieces that ``chunk`` and the like return."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    if isinstance(value, (tuple, list)) and value:
        value = value[0]
    return value if isinstance(value, torch.Tensor) else None


def _cast(node: fx.Node, method: str, dtype: torch.dtype) -> fx.Node:
    """A cast of a node, at the graph's insertion point, that says the same place in the user's code."""
    new = node.graph.call_method(method, (node,))
    new.meta = {k: v for k, v in node.meta.items() if k != "custom"}
    _record(new, node, dtype)
    return new


def _record(node: fx.Node, like: fx.Node, dtype: torch.dtype) -> None:
    """Let a node's recorded value be that of ``like`` in another dtype."""
    node.meta["example_value"] = pytree.tree_map(lambda v: v.detach().to(dtype), like.meta["example_value"])
