"""After fusion: everything of ours that no fused kernel swallowed becomes plain aten for Inductor to fuse."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from loka_compile.errors import LoweringError
from loka_compile.lowering.decomposition_table import KEPT_WHOLE
from loka_compile.lowering.fused.forward import will_fuse
from loka_compile.lowering.fused.match import BOUNDED_ACTIVATIONS
from loka_compile.lowering.inline import replace_with
from loka_compile.ops import DECOMPOSITIONS


def decompose_unfusable(graph: fx.Graph) -> None:
    """On the joint graph: take apart what no fused kernel will swallow.

    Here, and not later, so that the partitioner sees plain arithmetic and is free to recompute it in the backward
    instead of saving it.
    """
    kept = {n for n in graph.nodes if n.target is torch.ops.loka.block_norm.default and will_fuse(n)}
    kept |= {n for n in graph.nodes if n.target in BOUNDED_ACTIVATIONS and _source(n) in kept}
    decompose(graph, kept)


def decompose(graph: fx.Graph, kept: Collection[fx.Node] = ()) -> None:
    """Inline the reference of each BlockNorm and the decomposition of each activation that is not in ``kept``."""
    from torch._inductor.decomposition import select_decomp_table

    table = select_decomp_table()
    rules = {**{op: table[op] for op in KEPT_WHOLE if op in table}, **DECOMPOSITIONS}
    for node in list(graph.nodes):
        rule = rules.get(node.target) if node.op == "call_function" else None
        if rule is not None and node not in kept:
            replace_with(node, rule)  # type: ignore[arg-type]


def _source(node: fx.Node) -> object:
    """The BlockNorm behind an activation, past casts and the choice of its first result."""
    while isinstance(node, fx.Node) and node.target is not torch.ops.loka.block_norm.default:
        node = node.args[0] if node.args else None  # type: ignore[assignment]
    return node


def check_lowered(graph: fx.Graph) -> None:
    """Assert that no operator of ours is left without a kernel.

    Raises:
        LoweringError: names the operator and the node.
    """
    from torch._inductor.lowering import lowerings

    for node in graph.nodes:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or target.namespace != "loka":
            continue
        has_kernel = target in lowerings or torch._C._dispatch_has_computed_kernel_for_dispatch_key(
            target.name(), _backend_key(node)
        )
        if target in DECOMPOSITIONS or not has_kernel:
            raise LoweringError(
                f"{target} (node {node.name}) is left in the graph without a kernel: a pass inserted an operator that "
                "nothing lowers"
            )


def _backend_key(node: fx.Node) -> str:
    value = node.meta.get("val")
    value = value[0] if isinstance(value, (tuple, list)) else value
    device = value.device.type if isinstance(value, torch.Tensor) else "cpu"
    return {"cuda": "CUDA", "cpu": "CPU"}.get(device, "CompositeExplicitAutograd")
