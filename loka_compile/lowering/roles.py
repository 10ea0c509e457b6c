"""Finds the (site, role) of every GEMM in a joint forward and backward graph.

The passes stamped each linear layer's site into ``node.meta["custom"]``, and AOTAutograd copied it to the matrix
products that the layer became. The role follows from the data: a backward product that shares the forward's
activation makes grad_weight, one that shares its weight makes grad_input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from loka_compile.gemm import Role
from loka_compile.passes.sites import KEY

aten = torch.ops.aten

#: Positions of the two matrices, and of an added bias.
_MATRICES: dict[Any, tuple[int, int]] = {aten.mm.default: (0, 1), aten.addmm.default: (1, 2)}

_VIEWS = frozenset(
    {
        aten.permute.default,
        aten.t.default,
        aten.transpose.int,
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.expand.default,
        aten.clone.default,
        aten.squeeze.dim,
        aten.squeeze.default,
        aten.unsqueeze.default,
        aten.alias.default,
        aten.detach.default,
        torch.ops.prims.convert_element_type.default,
        aten._to_copy.default,
    }
)


@dataclass(frozen=True)
class Operand:
    """One side of a GEMM as the graph stores it. ``transposed``: the GEMM wants ``base.T`` ("NT" form)."""

    base: fx.Node
    transposed: bool


@dataclass(frozen=True)
class MatMul:
    """A matrix product of the joint graph with everything the lowering needs to know of it."""

    node: fx.Node
    site: str
    role: Role
    a: Operand
    b: Operand
    bias: fx.Node | None = None
    #: Backward only: whether the first matrix is the output gradient (else the second is).
    grad_first: bool = True

    @property
    def positions(self) -> tuple[int, int]:
        """Where the two matrices stand among the node's arguments."""
        return _MATRICES[self.node.target]


def find_matmuls(graph: fx.Graph) -> tuple[list[MatMul], list[str]]:
    """All GEMMs of the graph with a site and a role, in graph order, and the names of those without,
    with the reason."""
    forwards: dict[str, list[tuple[fx.Node, fx.Node]]] = {}
    nodes = [n for n in graph.nodes if n.op == "call_function" and n.target in _MATRICES]
    for node in nodes:
        if not _in_backward(node) and site_of(node):
            first, second = _operands(node)
            forwards.setdefault(site_of(node), []).append((_root(first), _root(second)))
    found: list[MatMul] = []
    unmapped: list[str] = []
    for node in nodes:
        site = site_of(node)
        if not site:
            unmapped.append(f"{node.name}: not made by a linear layer with a learnt weight")
            continue
        role, grad_first = _role(node, forwards.get(site, []))
        if role is None:
            unmapped.append(f"{node.name}: of {site}, but it shares neither activation nor weight with a forward")
            continue
        if node.kwargs or (node.target is aten.addmm.default and len(node.args) > 3):
            unmapped.append(f"{node.name}: of {site}, a scaled addmm")
            continue
        found.append(as_it_stands(node, site, role, grad_first))
    for node in graph.nodes:
        if node.target is aten.bmm.default and site_of(node):
            unmapped.append(f"{node.name}: of {site_of(node)}, a batched product")
    return found, unmapped


def as_it_stands(node: fx.Node, site: str, role: Role, grad_first: bool) -> MatMul:
    """The product with the operands that its node has now: lowering the product in front of it has changed them."""
    first, second = _operands(node)
    bias = node.args[0] if node.target is aten.addmm.default else None
    return MatMul(node, site, role, _first(first), _second(second), bias, grad_first)  # type: ignore[arg-type]


def site_of(node: fx.Node) -> str:
    """The site stamped on a node, or ""."""
    custom = node.meta.get("custom")
    return str(custom.get(KEY, "")) if isinstance(custom, dict) else ""


def _in_backward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward"


def _operands(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    first, second = _MATRICES[node.target]
    return node.args[first], node.args[second]  # type: ignore[return-value]


def _root(node: Any) -> Any:
    """The tensor whose data this is, behind views and casts."""
    while isinstance(node, fx.Node) and node.target in _VIEWS:
        node = node.args[0]
    return node


def _role(node: fx.Node, forwards: list[tuple[fx.Node, fx.Node]]) -> tuple[Role | None, bool]:
    """The role, and whether the first matrix is the output gradient."""
    if not _in_backward(node):
        return Role.FORWARD, True
    roots = [_root(operand) for operand in _operands(node)]
    for x, w in forwards:
        # The weight is asked first: with x and w the same tensor both would fit, and either is right.
        if w in roots:
            return Role.GRAD_INPUT, roots[1] is w
        if x in roots:
            return Role.GRAD_WEIGHT, roots[1] is x
    return None, True


def _untranspose(node: fx.Node) -> tuple[fx.Node, bool]:
    """Strip 2-D transposes; returns the base and whether an odd number of them was stripped."""
    flipped = False
    while True:
        if node.target in (aten.permute.default, aten.t.default, aten.transpose.int):
            rest = list(node.args[1:])
            if node.target is aten.permute.default and [d % 2 for d in rest[0]] != [1, 0]:  # type: ignore[union-attr,operator]
                break
            if node.target is aten.transpose.int and {d % 2 for d in rest} != {0, 1}:  # type: ignore[operator]
                break
            flipped = not flipped
            node = node.args[0]  # type: ignore[assignment]
        else:
            break
    return node, flipped


def _first(node: fx.Node) -> Operand:
    """mm's first matrix is A [m, k] itself."""
    base, flipped = _untranspose(node)
    return Operand(base, flipped)


def _second(node: fx.Node) -> Operand:
    """mm's second matrix is B.T [k, n]: B is its transpose."""
    base, flipped = _untranspose(node)
    return Operand(base, not flipped)
