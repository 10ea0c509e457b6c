"""What is compiled of a layer's GEMMs: for each tensor, everything that kernels need of it, once.

A step (gemm_steps.py) is traced from the providers: quantisers, relayouts of scales, kernels. Without a producer in the
graph, no fusion goes across tensors: what comes before the kernels falls apart into one graph for each of the input,
the weight and the output's gradient. Each is a *piece*: equal ones, of other layers, of other arms, are compiled once,
by Inductor as in a model. Kernels, and what comes behind them (a cast, a cut), run as operators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from loka_compile.bench.prepare import compile_only

_aten = torch.ops.aten
#: Operators of torch that are kernels: they read several tensors, or what others have quantised.
_PRODUCTS = ("mm", "_scaled_mm", "_scaled_mm_v2")
#: Operators that cost nothing; they stay with the kernel, so that a piece returns no tensor twice.
_VIEWS = frozenset({
    _aten.t.default, _aten.view.default, _aten.unsqueeze.default, _aten.permute.default, _aten.transpose.int,
    _aten.slice.Tensor, _aten.detach.default, _aten.expand.default, _aten.squeeze.dim,
})  # fmt: skip
Compiled = Callable[..., tuple[Tensor, ...]]


class Traceable(Protocol):
    """A step, for what is needed of it here."""

    def graph(self) -> fx.GraphModule:
        """Its operators on input, weight and gradient."""
        ...

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Of these three."""
        ...

    @property
    def dtype(self) -> str:
        """Of these three."""
        ...


@dataclass(frozen=True)
class Piece:
    """A job of Preparation: compile what a step needs of one tensor. Equal keys are the same code."""

    key: str
    step: Traceable = field(compare=False)
    index: int = field(compare=False)

    def compiled(self) -> Compiled:
        """By Inductor, for the tensor's shape, at the first call; from its caches where it was compiled before."""
        return torch.compile(split(self.step).pieces[self.index], dynamic=False, fullgraph=True)  # type: ignore[return-value]

    def run(self) -> str | None:
        """Compile into the caches, without a launch."""
        x = torch.empty(*self.step.shapes[self.index], dtype=getattr(torch, self.step.dtype), device=device())
        compile_only(split(self.step).pieces[self.index], x)
        return None


@dataclass(frozen=True)
class Split:
    """A step taken apart."""

    #: By the tensor's place: a graph that takes the tensor and returns all that kernels need of it.
    pieces: Mapping[int, fx.GraphModule]
    #: Takes the tensors, and then what the pieces return, in order.
    rest: fx.GraphModule


def device() -> str:
    """Where pieces run."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def pieces_of(step: Traceable) -> list[Piece]:
    """The jobs of a step."""
    return [
        Piece(f"{step.shapes[index]} {step.dtype}\n{gm.code}", step, index) for index, gm in split(step).pieces.items()
    ]


def runner(step: Traceable, compiled: dict[str, Compiled]) -> Compiled:
    """The step as a function of its tensors; compiled pieces are taken from ``compiled``, and put there."""
    parts = split(step)
    own = []
    for piece in pieces_of(step):
        if piece.key not in compiled:
            compiled[piece.key] = piece.compiled()
        own.append((piece.index, compiled[piece.key]))

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        made = [out for index, call in own for out in call(tensors[index])]
        results: tuple[Tensor, ...] = parts.rest(*tensors, *made)
        return results

    return run


@functools.cache
def split(step: Traceable) -> Split:
    """Take a step apart."""
    graph = step.graph().graph
    _merge_equal(graph)
    graph.eliminate_dead_code()
    reads = _reads(graph)
    places = {node: place for place, node in enumerate(graph.find_nodes(op="placeholder"))}
    # What the rest takes over from each piece.
    handed: dict[int, list[fx.Node]] = {}
    stays: set[fx.Node] = set()

    def hand_over(node: fx.Node) -> None:
        if node in stays or node.op == "placeholder":
            return
        found = reads[node]
        if found is None or not found or node.target in _VIEWS:
            stays.add(node)
            for source in node.all_input_nodes:
                hand_over(source)
        else:
            (place,) = found
            known = handed.setdefault(place, [])
            if node not in known:
                known.append(node)

    for node in graph.nodes:
        if node.op == "output" or (node.op == "call_function" and reads[node] is None):
            stays.add(node)
            for source in node.all_input_nodes:
                hand_over(source)
    order = {node: number for number, node in enumerate(graph.nodes)}
    handed = {place: sorted(nodes, key=order.__getitem__) for place, nodes in sorted(handed.items())}
    placeholders = list(places)
    pieces = {place: _subgraph(graph, [placeholders[place]], nodes) for place, nodes in handed.items()}
    inputs = [*placeholders, *(node for nodes in handed.values() for node in nodes)]
    (output,) = graph.find_nodes(op="output")
    return Split(pieces, _subgraph(graph, inputs, list(output.args[0])))


def _reads(graph: fx.Graph) -> dict[fx.Node, frozenset[int] | None]:
    """The one tensor that a node is made from (or none: a constant); None: a kernel, or made from its result."""
    found: dict[fx.Node, frozenset[int] | None] = {}
    for place, node in enumerate(graph.find_nodes(op="placeholder")):
        found[node] = frozenset({place})
    for node in graph.nodes:
        if node in found or node.op == "output":
            continue
        sources = [found[source] for source in node.all_input_nodes]
        places = frozenset[int]().union(*(s for s in sources if s is not None))
        kernel = node.target.namespace not in ("aten", "prims") or node.target.overloadpacket.__name__ in _PRODUCTS
        found[node] = None if kernel or None in sources or len(places) > 1 else places
    return found


def _subgraph(graph: fx.Graph, inputs: list[fx.Node], outputs: list[fx.Node]) -> fx.GraphModule:
    """From the inputs to the outputs; what is needed and no input is computed."""
    made = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {node: made.placeholder(f"in_{place}") for place, node in enumerate(inputs)}
    needed: set[fx.Node] = set()
    stack = list(outputs)
    while stack:
        node = stack.pop()
        if node not in copies and node not in needed:
            needed.add(node)
            stack += node.all_input_nodes
    for node in graph.nodes:
        if node in needed:
            # Named anew: equal pieces of different steps are to be equal as text.
            args, kwargs = (fx.map_arg(given, copies.__getitem__) for given in (node.args, node.kwargs))
            copies[node] = made.call_function(node.target, args, kwargs)
    made.output(tuple(copies[node] for node in outputs))
    made.lint()
    return fx.GraphModule(torch.nn.Module(), made)


def _merge_equal(graph: fx.Graph) -> None:
    """Two products that quantise the same tensor alike share the result, as in a joint graph."""
    seen: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op == "call_function":
            key = (node.target, repr(node.args), repr(sorted(node.kwargs.items())))
            if key in seen:
                node.replace_all_uses_with(seen[key])
                graph.erase_node(node)
            else:
                seen[key] = node
