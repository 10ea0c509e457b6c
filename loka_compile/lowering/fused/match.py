"""Recognises what the lowering left in the graph: FP8 quantisation of whole tensors and of rows, and values behind
casts and views."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from torch import fx

from loka_compile.lowering.quantize import AMAX_FLOOR

aten = torch.ops.aten
CONVERT = (torch.ops.prims.convert_element_type.default, aten._to_copy.default)
ALIAS = (aten.alias.default, aten.detach.default)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


#: What may stand behind a BlockNorm and stays within its bound, as the kernels call it (kernels.reference.ACTIVATIONS).
BOUNDED_ACTIVATIONS: dict[Any, str] = {aten.hardswish.default: "hardswish", aten.silu.default: "silu"}
#: The gradient through it: (gradient, input).
ACTIVATION_GRADIENTS: dict[Any, str] = {
    aten.hardswish_backward.default: "hardswish",
    aten.silu_backward.default: "silu",
}
#: As reports write them.
ACTIVATION_NAMES = {"hardswish": "HardSwish", "silu": "SiLU"}


def dtype_of(node: fx.Node) -> torch.dtype:
    """Dtype of the tensor that a node makes."""
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def arg(node: Any, index: int) -> Any:
    """A positional argument of a node, untyped: what a node is called with can be almost anything."""
    return node.args[index]


def is_call(node: Any, *targets: Any) -> bool:
    """Whether ``node`` calls one of ``targets``."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def strip(node: Any, *targets: Any) -> fx.Node:
    """The value behind casts between wide dtypes and aliases (and ``targets``); FP8 casts are not looked through."""
    while is_call(node, *CONVERT, *ALIAS, *targets) and dtype_of(node) not in FP8:
        node = node.args[0]
    return cast(fx.Node, node)


def rows(node: Any) -> fx.Node:
    """The value behind casts, aliases and views that only group the rows of [..., N] differently."""
    node = strip(node)
    while is_call(node, *VIEWS) and node.meta["val"].shape[-1:] == arg(node, 0).meta["val"].shape[-1:]:
        node = strip(arg(node, 0))
    return cast(fx.Node, node)


def flat_shape(shape: Sequence[Any]) -> list[Any]:
    """Sizes to view a tensor [..., N] as [M, N] with."""
    return [-1, shape[-1]]


def shape_to_view(shape: Sequence[Any]) -> list[Any] | None:
    """Sizes to view a tensor with that has as many elements as ``shape``: -1 stands for a moving one;
    None if two move."""
    moving = [size for size in shape if not isinstance(size, int)]
    return None if len(moving) > 1 else [size if isinstance(size, int) else -1 for size in shape]


def result(node: fx.Node, index: int) -> fx.Node | None:
    """The ``getitem(node, index)`` that is used, or None."""
    for user in node.users:
        if user.target is operator.getitem and user.args[1] == index and user.users:
            return user
    return None


def is_rounded_later(node: fx.Node) -> bool:
    """Whether all that elementwise operators make of a value is rounded to 16 bits or fewer before anything else reads
    it."""
    waiting, seen = [node], {node}
    while waiting:
        for user in waiting.pop().users:
            if user in seen or (is_call(user, *CONVERT) and dtype_of(user).itemsize <= 2):
                continue
            elementwise = isinstance(user.target, torch._ops.OpOverload) and torch.Tag.pointwise in user.target.tags
            # torch 2.11 to 2.13 do not tag hardswish.
            if not (elementwise or is_call(user, *BOUNDED_ACTIVATIONS, *CONVERT, *VIEWS, *ALIAS)):
                return False
            seen.add(user)
            waiting.append(user)
    return True


@dataclass(frozen=True)
class Quantise:
    """One quantisation: ``node`` is ``source`` in FP8, by a constant ``factor``, by its own amax, or by those of its
    rows."""

    node: fx.Node
    source: fx.Node
    #: The constant that multiplies source, or None where the scale comes from the amax.
    factor: float | None
    #: The dequantisation scale's node (only with an amax): shape [], or [rows].
    scale: fx.Node | None
    #: Whether a cast between source and the quantisation rounds.
    rounded: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """FP8 format."""
        return dtype_of(self.node)

    def transposes(self) -> list[fx.Node]:
        """Contiguous copies of the transpose of ``node``."""
        return [
            copy
            for permuted in self.node.users
            if _is_transpose(permuted)
            for copy in permuted.users
            if is_call(copy, aten.clone.default, aten.contiguous.default)
        ]

    def direct_users(self) -> list[fx.Node]:
        """Readers of ``node`` as it is stored, views of it included."""
        copies = self.transposes()
        return [u for u in self.node.users if not (_is_transpose(u) and all(c in copies for c in u.users))]


def quantisations(graph: fx.Graph, rowwise: bool = False) -> Iterator[Quantise]:
    """Every tensorwise quantisation of a 2-D tensor, or every rowwise one, in graph order."""
    for node in graph.nodes:
        if is_call(node, *CONVERT) and dtype_of(node) in FP8 and node.meta["val"].dim() == 2:
            found = _parse(node, rowwise)
            if found is not None:
                yield found


def _parse(node: fx.Node, rowwise: bool) -> Quantise | None:
    inner: Any = node.args[0]
    limit = torch.finfo(dtype_of(node)).max
    bounds = []
    while is_call(inner, aten.clamp_min.default, aten.clamp_max.default, aten.clamp.default):
        bounds += [abs(v) for v in inner.args[1:] if v is not None]
        inner = inner.args[0]
    if len(bounds) != 2 or any(b != limit for b in bounds) or not is_call(inner, aten.mul.Tensor):
        return None
    wide, factor = cast("tuple[Any, Any]", inner.args)
    if not isinstance(wide, fx.Node) or dtype_of(wide) != torch.float32:
        return None
    source = strip(wide)
    rounded = _rounds(wide, source)
    if isinstance(factor, (int, float)):
        return None if rowwise else Quantise(node, source, float(factor), None, rounded)
    if rowwise:
        if not (is_call(factor, aten.unsqueeze.default) and factor.args[1] in (1, -1)):
            return None
        factor = factor.args[0]
    if not is_call(factor, aten.reciprocal.default):
        return None
    scale: Any = factor.args[0]
    if not (is_call(scale, aten.div.Tensor) and scale.args[1] == limit):
        return None
    floor: Any = scale.args[0]
    if not (is_call(floor, aten.clamp_min.default, aten.clamp.default) and floor.args[1:] == (AMAX_FLOOR,)):
        return None
    largest: Any = floor.args[0]
    if not (is_call(largest, aten.amax.default) and is_call(largest.args[0], aten.abs.default)):
        return None
    dims: Any = largest.args[1] if len(largest.args) > 1 else []
    # All of the tensor: a rowwise scale is no scalar.
    whole = (scale.meta["val"].dim() == 1 and [d % 2 for d in dims] == [1]) if rowwise else scale.meta["val"].dim() == 0
    if largest.args[0].args[0] is not wide or not whole:
        return None
    return Quantise(node, source, None, scale, rounded)


def _rounds(wide: fx.Node, source: fx.Node) -> bool:
    """Whether a cast from source to wide loses anything."""
    node: Any = wide
    while node is not source:
        before = node.args[0]
        if dtype_of(before) != dtype_of(node) and dtype_of(before).itemsize >= dtype_of(node).itemsize:
            return True
        node = before
    return False


def _is_transpose(node: fx.Node) -> bool:
    if is_call(node, aten.permute.default):
        dims: Any = node.args[1]
        return [d % 2 for d in dims] == [1, 0]
    return is_call(node, aten.t.default)


def sort_topologically(graph: fx.Graph) -> None:
    """Move each node behind its inputs, keeping the order otherwise."""
    done: set[fx.Node] = set()
    waiting: dict[fx.Node, list[fx.Node]] = {}
    order: list[fx.Node] = []
    for node in graph.nodes:
        stack = [node]
        while stack:
            current = stack.pop()
            missing = next((i for i in current.all_input_nodes if i not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(current)
                continue
            done.add(current)
            order.append(current)
            stack.extend(reversed(waiting.pop(current, [])))
    assert not waiting, "the graph has a cycle"
    for before, node in pairwise(order):
        before.append(node)


def copy_meta(new: fx.Node, like: fx.Node, value: Any) -> fx.Node:
    """Give a new node its value, and what the compiler knows of the node it stands for."""
    keep = ("custom", "partitioner_tag", "autograd_backward", "nn_module_stack", "fwd_nn_module_stack", "seq_nr",
            "source_fn_stack", "fwd_source_fn_stack", "stack_trace", "ac_graph_id", "recompute")  # fmt: skip
    new.meta.update({k: like.meta[k] for k in keep if k in like.meta})
    new.meta["val"] = value
    return new


def emit(graph: fx.Graph, like: fx.Node, target: Any, args: tuple[Any, ...]) -> list[fx.Node]:
    """Call an operator of ours before the insertion point; returns its result nodes (one for a single tensor)."""
    from torch._guards import detect_fake_mode

    values = torch.utils._pytree.tree_map(lambda a: a.meta["val"] if isinstance(a, fx.Node) else a, args)
    mode = detect_fake_mode([v for v in torch.utils._pytree.tree_leaves(values) if isinstance(v, torch.Tensor)])
    assert mode is not None, "the graph's values must be fake tensors"
    with mode, torch.no_grad():
        value = target(*values)
    node = copy_meta(graph.call_function(target, args), like, value)
    if isinstance(value, torch.Tensor):
        return [node]
    return [copy_meta(graph.call_function(operator.getitem, (node, i)), like, part) for i, part in enumerate(value)]
