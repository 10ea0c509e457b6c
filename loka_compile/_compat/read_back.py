"""Inductor's kernels wait before they read what they wrote.

A kernel with several loops over a long row may store a value in one of them and load it in a later one
(``CSE.invalidated_stores``). Triton can give that load another layout than the store had, such as that of the
transposed store behind it, so that a thread reads what another one wrote; without a barrier it may not be there yet.
On an H200 with torch 2.11 a rowwise grad_weight came out wrong by 20 to 40 %, another way in each run. pytorch issue
190517, mended by pull request 190519 in torch 2.14 (triton-lang/triton issue 10924); torch 2.11 to 2.13 are mended
here in the same way, for Triton on a CPU too.
"""

from __future__ import annotations

import functools
from typing import Any

#: The line; whether torch writes it itself is seen from the constants of its code, for which no source is needed.
_BARRIER = "tl.debug_barrier()"


def install() -> None:
    """Put a barrier in front of such loads; where torch does so itself, or when called again, nothing changes."""
    from torch._inductor.codegen.common import DeferredLine
    from torch._inductor.codegen.triton import TritonKernel

    load: Any = TritonKernel.load
    load_buffer: Any = TritonKernel.get_load_buffer
    if getattr(load, "_loka", False) or _BARRIER in load.__code__.co_consts:
        return

    @functools.wraps(load)
    def load_behind_barrier(self: Any, name: str, index: Any) -> Any:
        self._loka_reads_back = name if name in self.cse.invalidated_stores else None
        try:
            return load(self, name, index)
        finally:
            self._loka_reads_back = None

    @functools.wraps(load_buffer)
    def buffer_with_barrier(self: Any, indexing: Any) -> Any:
        buffer = load_buffer(self, indexing)
        name = getattr(self, "_loka_reads_back", None)
        if name is not None:
            buffer.writeline(DeferredLine(name, _BARRIER))
        return buffer

    load_behind_barrier._loka = True  # type: ignore[attr-defined]
    TritonKernel.load = load_behind_barrier  # type: ignore[method-assign]
    TritonKernel.get_load_buffer = buffer_with_barrier  # type: ignore[method-assign]
