"""Which operators AOTAutograd takes apart: as Inductor wants it, except for what our fusion has to see whole."""

from __future__ import annotations

from typing import Any

import torch

from loka_compile.ops import DECOMPOSITIONS

aten = torch.ops.aten

#: The fusion recognises these; Inductor's own decomposition of what it leaves comes after it.
KEPT_WHOLE = (
    aten.hardswish.default, aten.hardswish_backward.default, aten.silu.default, aten.silu_backward.default,
    aten.hardsigmoid.default, aten.hardsigmoid_backward.default,
)  # fmt: skip


def decompositions() -> dict[Any, Any]:
    """Inductor's decomposition table less the operators kept whole."""
    from torch._inductor.decomposition import select_decomp_table

    kept = {*DECOMPOSITIONS, *KEPT_WHOLE}
    return {op: fn for op, fn in select_decomp_table().items() if op not in kept}
