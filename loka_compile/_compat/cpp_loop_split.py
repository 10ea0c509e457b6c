"""Inductor's C++ backend asserts where it should decline an optimisation.

``CppScheduling.try_loop_split`` (``torch/_inductor/codegen/cpp.py``, torch 2.11 to 2.14) wants to split a loop over
``x // 256`` in all nodes that were fused into one kernel. When these iterate in different shapes of equal size, as
BlockNorm of [4096, 2048] and a transposed FP8 copy of it do, it fails an assertion instead of leaving the loops alone.
Came in with pytorch pull request 132389; its check compares the number of dimensions, not their sizes. No issue is
known.
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
        try:
            return original(self, nodes)
        except AssertionError:
            return nodes

    try_loop_split._loka = True  # type: ignore[attr-defined]
    CppScheduling.try_loop_split = try_loop_split  # type: ignore[method-assign]
