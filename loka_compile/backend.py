"""``torch.compile(model, backend="loka")``: strings the steps together. Each step lives in a module of its own."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from loka_compile._compat.dynamo_errors import RestartAnalysis
from loka_compile._compat.versions import check_torch
from loka_compile.config import LokaConfig
from loka_compile.errors import ConfigError
from loka_compile.gemm import Role
from loka_compile.lowering.hooks import Lowering
from loka_compile.mods_warning import warn_about_mods
from loka_compile.passes.manager import check_outputs, output_values, run_passes
from loka_compile.passes.registry import snapshot, source_of
from loka_compile.planning import has_loka_ops, resolve
from loka_compile.report import Report, discard_report, new_report

logger = logging.getLogger(__name__)

Compiled = Callable[..., Any]


def loka(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Compiled:
    """The backend; torch.compile calls it once per captured graph.

    Args:
        gm: torch-level graph from Dynamo.
        example_inputs: its inputs.
        mode: as for ``backend="inductor"``: "reduce-overhead", "max-autotune", ...
        options: options of ours (:class:`loka_compile.LokaConfig`) and of Inductor.

    Raises:
        ConfigError: an option is unknown or has an illegal value.
        StaleTableError, CorruptFileError: the given table or plan does not fit or is damaged.
        PassError: a pass failed.
        UnsupportedTorchError: torch is outside the supported range.
    """
    check_torch()
    config, patches = LokaConfig.from_options(options)
    return compile_graph(gm, example_inputs, config, {**_mode_patches(mode or config.mode), **patches})


def compile_graph(
    gm: fx.GraphModule, example_inputs: Sequence[Any], config: LokaConfig, patches: Mapping[str, Any]
) -> Compiled:
    """Rewrite, plan and compile one captured graph. ``patches`` are Inductor's options."""
    report = new_report(keep_graphs=config.inspect)
    try:
        return _compile_graph(gm, example_inputs, config, patches, report)
    except RestartAnalysis:
        discard_report(report)  # Dynamo captures the graph anew and calls again, e.g. after specialising a float
        raise


def _compile_graph(
    gm: fx.GraphModule, example_inputs: Sequence[Any], config: LokaConfig, patches: Mapping[str, Any], report: Report
) -> Compiled:
    device = device_of(example_inputs)
    from loka_compile.compile_fx import compile_rewritten

    report.parameters = [weakref.ref(value) for value in example_inputs if isinstance(value, torch.nn.Parameter)]
    passes = snapshot(config)
    expected = output_values(gm)
    if run_passes(gm, passes, config, report):
        check_outputs(gm, expected, passes)
    warn_about_mods(report)
    planning = resolve(gm, config, device, _roles(gm))
    report.plan, report.table = planning.plan, planning.table
    if planning.note:
        report.notes.append(planning.note)
    if passed_over := _passed_over(report):
        report.notes.append(
            f"the plan has FP8 for {', '.join(passed_over)}, which pass token_mixing computes as batched products; "
            'disable_passes=("token_mixing",) carries the plan out there'
        )
    if patches.get("freezing") and not _dynamo_freezes():
        report.notes.append(
            "option 'freezing' does nothing here: Dynamo, which would have to make constants of the weights, reads "
            "torch._inductor.config.freezing. Set that, in torch.no_grad(), and weights are quantised once"
        )
    lowering = Lowering(config, report, planning.plan, emulate=planning.emulate, salt=_salt(passes))
    if planning.sample:
        from loka_compile.auto import PlanAfterSampling  # not for every compile: it brings the whole probe

        return PlanAfterSampling(gm, example_inputs, planning, lowering, patches)
    if planning.plan is None and not has_loka_ops(gm) and not config.inspect:
        # Nothing of ours is in the graph: this is Inductor, with Inductor's own cache entries.
        return compile_rewritten(gm, example_inputs, None, patches)
    return compile_rewritten(gm, example_inputs, lowering, patches)


def _passed_over(report: Report) -> list[str]:
    """Layers over tokens that a plan would have in FP8, and that are no GEMMs of a site any more."""
    batched = {match.site for stage in report.stages if stage.name == "token_mixing" for match in stage.matched}
    planned = report.plan.decisions if report.plan is not None else ()
    names = {d.site.partition("#")[0] for d in planned if not d.is_high_precision}
    return sorted(names & batched)


def device_of(example_inputs: Sequence[Any]) -> torch.device:
    """The device that a graph runs on: that of its first CUDA tensor, else of its first tensor."""
    devices = [value.device for value in example_inputs if isinstance(value, torch.Tensor)]
    return next((d for d in devices if d.type == "cuda"), devices[0] if devices else torch.device("cpu"))


def _dynamo_freezes() -> bool:
    import torch._inductor.config as inductor_config

    return bool(inductor_config.freezing)


def _roles(gm: fx.GraphModule) -> frozenset[Role]:
    """The GEMMs that AOTAutograd will make of the graph."""
    if not torch.is_grad_enabled():
        return frozenset({Role.FORWARD})
    values = (node.meta.get("example_value") for node in gm.graph.nodes if node.op == "placeholder")
    training = any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)
    return frozenset(Role) if training else frozenset({Role.FORWARD})


def _mode_patches(mode: str | None) -> dict[str, Any]:
    if mode is None or mode == "default":
        return {}
    from torch._inductor import list_mode_options

    try:
        return dict(list_mode_options(mode))
    except RuntimeError as error:
        raise ConfigError(f"option 'mode' is {mode!r}; {error}") from error


def _salt(passes: Sequence[Any]) -> str:
    """A user's own passes are part of the cache key by their source code."""
    return "".join(
        f"{p.name}:{source_of(p.fn).decode(errors='replace')}" for p in passes if p.origin != "loka_compile.passes"
    )


__all__ = ["Report", "loka"]
