"""Hands a rewritten graph to AOTAutograd and Inductor with our hooks in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from loka_compile._compat import cpp_loop_split, read_back
from loka_compile.frozen import FrozenWeights, is_weight
from loka_compile.lowering import imports
from loka_compile.lowering.decomposition_table import decompositions
from loka_compile.lowering.hooks import Lowering, config_patches
from loka_compile.report import new_report
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

    if lowering is not None and _freezes(lowering, patches) and any(map(is_weight, example_inputs)):
        return _freeze(gm, example_inputs, lowering, patches)
    if lowering is None:
        plain: Callable[..., Any] = compile_fx(gm, example_inputs, config_patches=dict(patches) or None)  # type: ignore[assignment]
        return plain
    imports.import_launched(example_inputs)
    cpp_loop_split.install()
    read_back.install()
    merged = {**patches, **config_patches(lowering, patches)}
    compiled: Callable[..., Any] = compile_fx(  # type: ignore[assignment]
        gm, example_inputs, config_patches=merged, decompositions=_Decompositions(decompositions())
    )
    lowering.report.from_cache = "joint" not in lowering.ran
    emit(lowering.report)
    return compiled


def _freezes(lowering: Lowering, patches: Mapping[str, Any]) -> bool:
    """Whether weights become constants: in inference, and not while the model is sampled."""
    wanted = lowering.config.freeze_weights and lowering.tap is None
    return wanted and not patches.get("freezing") and not torch.is_grad_enabled()


def _freeze(
    gm: fx.GraphModule, example_inputs: Sequence[Any], lowering: Lowering, patches: Mapping[str, Any]
) -> FrozenWeights:
    # Inductor's cache knows frozen tensors by their shapes; single numbers, such as scales, are in the cached code.
    frozen = {**patches, "freezing": True, "fx_graph_cache": False}

    def compiler(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        now = lowering
        if lowering.ran:  # a later compile has a report of its own
            report = new_report(keep_graphs=lowering.config.inspect)
            report.inherit(lowering.report)
            report.plan, report.table = lowering.report.plan, lowering.report.table
            now = dataclasses.replace(lowering, report=report, ran=[])
        return compile_rewritten(graph, inputs, now, frozen)

    return FrozenWeights(gm, example_inputs, compiler)


class _Decompositions(dict[Any, Any]):
    """The table of decompositions, which torch 2.13 makes part of the cache's key: some of its functions do not pickle,
    and then nothing would be cached. It is a function of our code and of torch's, both of which are in the key."""

    def __reduce__(self) -> tuple[Callable[[], dict[Any, Any]], tuple[()]]:
        return decompositions, ()
