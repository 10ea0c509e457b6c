"""Concatenations that are quantised are written to memory first.

The rows of a cat come from several places, often through gathers and products, and Inductor puts all of that into every
kernel that reads the cat. A GEMM in bf16 makes it write the cat once; an FP8 one is read twice, for the maximum and for
the cast, and the reduction then walks over masked pieces: DHEN's 8192 rows of 12256 features on an H200 took 405 us for
their maxima and 159 for the cast, where writing them takes 186.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from loka_compile.lowering.fused import lowerings
from loka_compile.lowering.fused.match import ALIAS, CONVERT, FP8, VIEWS, arg, dtype_of, emit, is_call
from loka_compile.lowering.fused.product import on_this_device
from loka_compile.report import Report

aten = torch.ops.aten
_CLAMPS = (aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default)


def write_joined(graph: fx.Graph, report: Report) -> int:
    """Emit ``loka::materialise`` behind every cat that is quantised; returns for how many. In place, on one half."""
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if is_call(node, *CONVERT) and dtype_of(node) in FP8 and not on_this_device(node.meta["val"]):
            source = _behind(arg(node, 0), *_CLAMPS)
            source = arg(source, 0) if is_call(source, aten.mul.Tensor) else source  # by the scale
            source = _behind(source, *CONVERT, *ALIAS, *VIEWS)
            if is_call(source, aten.cat.default):
                found[source] = None
    if found:
        lowerings.register()
    for cat in found:
        with graph.inserting_after(cat):
            (written,) = emit(graph, cat, torch.ops.loka.materialise.default, (cat,))
        for user in [u for u in cat.users if u is not written]:
            user.replace_input_with(cat, written)
        report.fusions.append(f"{cat.name}: written to memory before it is quantised")
    return len(found)


def _behind(node: Any, *targets: Any) -> Any:
    while is_call(node, *targets):
        node = arg(node, 0)
    return node
