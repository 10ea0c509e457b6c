"""Inductor's C++ backend does not decline an optimisation where it should.

``CppScheduling.try_loop_split`` (``torch/_inductor/codegen/cpp.py``, torch 2.11 to 2.14) wants to split a loop over
``x // 256`` in all nodes that were fused into one kernel. When these iterate in different shapes of equal size, as
BlockNorm of [4096, 2048] and a transposed FP8 copy of it do, it fails an assertion instead of leaving the loops alone.
Came in with pytorch pull request 132389; its check compares the number of dimensions, not their sizes. No issue is
known. And where 256 does not divide the size of x (rows of 384), it loops over 384 // 256 blocks: what lies behind them
is never written (torch 2.13; BlockNorm of one row of 384 came out wrong).
"""

from __future__ import annotations

import functools
from typing import Any


def install() -> None:
    """Make a failed split mean "do not split"; calling it again changes nothing."""
    from torch._inductor.codegen.cpp import CppScheduling

    original = CppScheduling.try_loop_split
    if getattr(original, "_loka", False):
        return

    @functools.wraps(original)
    def try_loop_split(self: Any, nodes: Any) -> Any:
        if not all(_in_whole_blocks(node) for node in nodes):
            return nodes
        try:
            return original(self, nodes)
        except AssertionError:
            return nodes

    try_loop_split._loka = True  # type: ignore[attr-defined]
    CppScheduling.try_loop_split = try_loop_split  # type: ignore[method-assign]


def _in_whole_blocks(node: Any) -> bool:
    """Whether each loop variable of a node that an index divides runs over a multiple of the divisor."""
    from torch._inductor.virtualized import V
    from torch.utils._sympy.functions import FloorDiv

    _, body, _ = node.node.get_default_sizes_body()
    divisions = {d for expr in body.indexing_exprs.values() if hasattr(expr, "find") for d in expr.find(FloorDiv)}
    return all(
        V.graph.sizevars.statically_known_multiple_of(body.var_ranges[over], by)
        for over, by in (d.args for d in divisions)
        if over in body.var_ranges
    )
