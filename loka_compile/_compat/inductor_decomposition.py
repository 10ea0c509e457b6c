"""Lets plain Inductor see through our operators (``torch._inductor.decomposition``, torch 2.11 to 2.14).

``apply_mods`` and ``loka_compile.nn.BlockNorm`` put ``loka::block_norm`` into a model; under ``backend="inductor"`` it
has to be taken apart, or it would be an opaque call between two kernels.
"""

from __future__ import annotations


def register() -> None:
    """Add our decompositions to Inductor's table; calling it again changes nothing."""
    from torch._inductor.decomposition import decompositions, register_decomposition

    from loka_compile.ops import DECOMPOSITIONS

    for op, fn in DECOMPOSITIONS.items():
        if op not in decompositions:
            register_decomposition([op])(fn)  # type: ignore[arg-type]
