"""Hands a rewritten graph to AOTAutograd and Inductor with our hooks in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from loka_compile._compat import cpp_loop_split
from loka_compile.lowering.decomposition_table import decompositions
from loka_compile.lowering.hooks import Lowering, config_patches
from loka_compile.trace_log import emit


def compile_rewritten(
    gm: fx.GraphModule, example_inputs: Sequence[Any], lowering: Lowering | None, patches: Mapping[str, Any]
) -> Callable[..., Any]:
    """Compile ``gm``; without ``lowering`` this is plain Inductor.

    Args:
        gm: torch-level graph; ownership passes to Inductor.
        example_inputs: the graph's inputs.
        lowering: what our hooks do, or None.
        patches: Inductor's options. They also hold for the backward, which is compiled later.
    """
    from torch._inductor.compile_fx import compile_fx

    if lowering is None:
        plain: Callable[..., Any] = compile_fx(gm, example_inputs, config_patches=dict(patches) or None)  # type: ignore[assignment]
        return plain
    cpp_loop_split.install()
    merged = {**patches, **config_patches(lowering, patches)}
    compiled: Callable[..., Any] = compile_fx(  # type: ignore[assignment]
        gm, example_inputs, config_patches=merged, decompositions=_Decompositions(decompositions())
    )
    lowering.report.from_cache = "joint" not in lowering.ran
    emit(lowering.report)
    return compiled


class _Decompositions(dict[Any, Any]):
    """The table of decompositions, which torch 2.13 makes part of the cache's key: some of its functions do not pickle,
    and then nothing would be cached. It is a function of our code and of torch's, both of which are in the key."""

    def __reduce__(self) -> tuple[Callable[[], dict[Any, Any]], tuple[()]]:
        return decompositions, ()
