"""After fusion: everything of ours that no fused kernel swallowed becomes plain aten for Inductor to fuse."""

from __future__ import annotations

import torch
from torch import fx

from loka_compile.errors import LoweringError
from loka_compile.lowering.decomposition_table import KEPT_WHOLE
from loka_compile.lowering.inline import replace_with
from loka_compile.ops import DECOMPOSITIONS


def decompose(graph: fx.Graph) -> None:
    """Inline the reference of each remaining BlockNorm and the decomposition of each remaining HardSwish."""
    from torch._inductor.decomposition import select_decomp_table

    table = select_decomp_table()
    rules = {**{op: table[op] for op in KEPT_WHOLE if op in table}, **DECOMPOSITIONS}
    for node in list(graph.nodes):
        rule = rules.get(node.target) if node.op == "call_function" else None
        if rule is not None:
            replace_with(node, rule)


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
