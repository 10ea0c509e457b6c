"""The arms of the quality protocol: what is done to a model, and what it is compared with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.fp8_linear import emulate_fp8, is_large
from examples.training.config import TrainConfig

Transform = Callable[[nn.Module], nn.Module]


@dataclass(frozen=True)
class Arm:
    """One way to train the same model on the same stream."""

    name: str
    text: str
    #: "none", "torchao", "emulated" (plain FP8 on the original), "loka" (Mods and plan, as options say).
    kind: str = "none"
    precision: str = "bf16"
    tf32: bool = False
    #: Recipe of plain FP8, or options of the loka backend.
    recipe: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    #: The arm of the same model in bf16, that tells precision from architecture.
    twin: str = ""
    #: Added to the seed of the initial weights.
    other_seed: int = 0
    #: Must show a loss, or the stream is too easy to say anything.
    control: bool = False
    #: For figure 3 (plain FP8) or 9 (Mods and loka).
    figure: int = 0


def _mods(name: str, text: str, mods: Any) -> Arm:
    return Arm(name, text, "loka", options={"mods": mods, "table": "off"}, twin="bf16", figure=9)


ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm("fp32", "original in fp32", precision="fp32"),
        Arm("fp32_other_seed", "original in fp32, other initial weights", precision="fp32", other_seed=1000),
        Arm("tf32", "original in TF32", precision="fp32", tf32=True),
        Arm("bf16", "original in bf16", figure=3),
        Arm("torchao_tensorwise", "torchao float8 tensorwise on the original", "torchao", recipe="tensorwise",
            twin="bf16", control=True, figure=3),
        Arm("torchao_rowwise", "torchao float8 rowwise on the original", "torchao", recipe="rowwise", twin="bf16",
            figure=3),
        Arm("emulated_tensorwise", "emulated FP8 tensorwise on the original", "emulated", recipe="tensorwise",
            twin="bf16", control=True, figure=3),
        Arm("emulated_rowwise", "emulated FP8 rowwise on the original", "emulated", recipe="rowwise", twin="bf16",
            figure=3),
        _mods("no_bias", "bias removal alone, bf16", ("bias_removal",)),
        _mods("block_norm", "BlockNorm alone, bf16", ("block_norm",)),
        _mods("hard_swish", "HardSwish alone, bf16", ("hard_swish",)),
        _mods("mods", "all Mods, bf16", "all"),
        _mods("mods_silu", "Mods but HardSwish, bf16", ("bias_removal", "block_norm")),
        Arm("loka", "all Mods, FP8 by the default plan", "loka", options={"mods": "all", "table": "auto"},
            twin="mods", figure=9),
        Arm("loka_silu", "Mods but HardSwish, FP8 by the default plan", "loka",
            options={"mods": ("bias_removal", "block_norm"), "table": "auto"}, twin="mods_silu", figure=9),
        Arm("loka_unfused", "as loka, without fused kernels", "loka",
            options={"mods": "all", "table": "auto", "fuse": False}, twin="mods", figure=9),
        Arm("mods16", "all Mods, bf16, residual stream in bf16", "loka",
            options={"mods": "all", "table": "off", "residual_dtype": "autocast"}, twin="mods", figure=9),
        Arm("loka16", "as loka, residual stream in bf16", "loka",
            options={"mods": "all", "table": "auto", "residual_dtype": "autocast"}, twin="mods", figure=9),
    )
}  # fmt: skip


def planned_arm(name: str, plan: Path) -> Arm:
    """All Mods, and FP8 as a plan file says; an arm of ours that plans by itself keeps its other options."""
    planned = {"plan": str(plan)}
    known = ARMS.get(name)
    if known is not None and known.options.get("table") == "auto":
        return dataclasses.replace(known, options={k: v for k, v in known.options.items() if k != "table"} | planned)
    return Arm(name, f"all Mods, FP8 by {plan.name}", "loka", options={"mods": "all"} | planned, twin="mods", figure=9)


def everywhere_arm(name: str, dense: nn.Module, provider: str, recipe: str, *, keep: tuple[str, ...] = ()) -> Arm:
    """All Mods, and one FP8 recipe for every GEMM of every linear, but for those whose site or role is in ``keep``.

    For ablations: "all but the first layer", "all but grad_weight". No error gate is asked.
    """
    from loka_compile.gemm import Role
    from loka_compile.plan import Decision, Plan

    decisions = []
    for fqn, module in dense.named_modules():
        if not isinstance(module, nn.Linear) or module.out_features == 1:
            continue
        for role in Role:
            if fqn not in keep and str(role) not in keep:
                decisions.append(Decision(f"{fqn}#0", role, provider, recipe, reason="everywhere"))
    options = {"mods": "all", "plan": Plan(decisions)}
    return Arm(
        name, f"all Mods, {provider}:{recipe} everywhere but {keep}", "loka", options=options, twin="mods", figure=9
    )


def why_not(arm: Arm) -> str:
    """Why an arm cannot run here; "" where it can."""
    if arm.kind == "torchao":
        try:
            import torchao.float8  # noqa: F401
        except ImportError as error:
            return f"torchao is not importable ({error})"
    return ""


def prepare(arm: Arm, base: TrainConfig, *, min_features: int, device: str) -> tuple[TrainConfig, Transform | None]:
    """The training configuration of an arm, and what is done to the dense part before it is compiled.

    ``base.backend`` is what the arms without loka are compiled with. "eager" keeps everything uncompiled: the Mods
    then come from `apply_mods`, and arms with a plan cannot run.
    """
    config = dataclasses.replace(base, precision=arm.precision, tf32=arm.tf32)
    if arm.kind == "emulated":
        return config, lambda dense: emulate_fp8(dense, rowwise=arm.recipe == "rowwise", min_features=min_features)
    if arm.kind == "torchao":
        return config, lambda dense: _torchao(dense, arm.recipe, min_features, emulate=device == "cpu")
    if arm.kind == "loka":
        if base.backend != "eager":
            return dataclasses.replace(config, backend="loka", options=arm.options, mode=None), None
        if arm.options.get("table") != "off":
            raise ValueError(f"arm {arm.name} needs a compiler: its plan is carried out by backend='loka'")
        if "residual_dtype" in arm.options:
            raise ValueError(f"arm {arm.name} needs a compiler: backend='loka' rounds its residual stream")
        return config, lambda dense: _apply_mods(dense, arm.options["mods"])
    return config, None


def _apply_mods(dense: nn.Module, mods: Any) -> nn.Module:
    from loka_compile import apply_mods

    return apply_mods(dense, mods=mods)


def _torchao(dense: nn.Module, recipe: str, min_features: int, *, emulate: bool) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    return convert_to_float8_training(dense, config=config, module_filter_fn=is_large(min_features))


def fp8_summary(report: Any) -> dict[str, Any]:
    """What a compile by loka did: kernels, which GEMMs stayed in high precision and why, and what was fused."""
    # Of a compile out of the cache the report knows the plan alone.
    known = report if report.gemms or report.plan is None else report.plan
    return {
        "kernels": known.counts(),
        "chains": report.chains,
        "high_precision": {f"{d.site} {d.role}": d.reason for d in known.decisions if d.is_high_precision},
        "fusions": report.fusions,
    }


def device_text(device: str) -> str:
    """The device's own name."""
    return torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"
