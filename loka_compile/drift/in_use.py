"""Which FP8 kernels a model runs in, for the guard: from the reports of its compiles, or a given plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from loka_compile.errors import ProbeError
from loka_compile.gemm import Gemm, Role
from loka_compile.plan import Decision, Plan
from loka_compile.probe import taps as tapping
from loka_compile.report import Report, reports
from loka_compile.table import BASELINE


@dataclass(frozen=True)
class Watched:
    """A GEMM that runs in FP8, at some batch size at least."""

    gemm: Gemm
    decision: Decision

    def kernel_at(self, m: int) -> tuple[str, str] | None:
        """Provider and recipe at batch size ``m``, or None where that is high precision."""
        kernel = self.decision.at(m)
        return None if kernel == BASELINE else kernel


def layers_of(root: nn.Module) -> tuple[list[str], list[tuple[nn.Linear, int]]]:
    """Names of the linear layers, and each layer with the number of its name.

    Layers that share a weight are calls of one site, as in the backend: it goes by the weight's first name.

    Raises:
        ProbeError: there are none, or they are being probed.
    """
    names: list[str] = []
    layers: list[tuple[nn.Linear, int]] = []
    numbers: dict[int, int] = {}
    for name, module in root.named_modules():
        if tapping.is_attached(module):
            raise ProbeError(f"module {name!r} is being probed or guarded already; leave that first")
        if not isinstance(module, nn.Linear) or "forward" in module.__dict__:
            continue
        number = numbers.setdefault(id(module._parameters.get("weight", module)), len(names))
        if number == len(names):
            names.append(name or "weight")
        layers.append((module, number))
    if not layers:
        raise ProbeError(f"{type(root).__name__} holds no nn.Linear that could be guarded")
    return names, layers


def watched_gemms(
    given: Plan | None, layers: Mapping[str, nn.Linear], has_run: bool = True
) -> tuple[Plan | None, dict[str, list[Watched]]]:
    """The plan in force and its FP8 GEMMs, by site, of these layers.

    Args:
        given: the plan, or None: that of the reports of this model's compiles, the newest last. A model with graph
            breaks has several.
        layers: the model's linear layers by name.
        has_run: whether the compiled model has been called.
    """
    decisions: dict[tuple[str, str], Decision] = {}
    gemms: dict[tuple[str, str], Gemm] = {}
    limits = given
    for report in _reports_of(layers, has_run):
        assert report.plan is not None
        limits = given or report.plan
        for decision in report.plan.decisions:
            decisions[decision.site, decision.role] = decision
        for lowered in report.gemms:
            key = (lowered.gemm.site, lowered.gemm.role.value)
            gemms[key] = lowered.gemm
            if lowered.fallback:
                decisions[key] = lowered.decision
    if given is not None:
        decisions.update({(d.site, d.role): d for d in given.decisions if (d.site, d.role) not in decisions})
    if limits is None:
        return None, {}
    plan = Plan(
        decisions.values(), max_mere=limits.max_mere, min_speedup=limits.min_speedup, per_site=limits.per_site,
        header=limits.header,
    )  # fmt: skip
    found: dict[str, list[Watched]] = {}
    for (site, role), decision in decisions.items():
        name = site.rpartition("#")[0]
        if name not in layers or decision.is_high_precision:
            continue
        # Code from a compile cache leaves no description: then no bound of an operand is known, and none is assumed.
        gemm = gemms.get((site, role)) or _described(site, Role(role), layers[name])
        found.setdefault(site, []).append(Watched(gemm, decision))
    return plan, found


def _described(site: str, role: Role, layer: nn.Linear) -> Gemm:
    n, k = layer.weight.shape
    shape = {Role.FORWARD: (1, n, k), Role.GRAD_INPUT: (1, k, n), Role.GRAD_WEIGHT: (n, k, 1)}[role]
    return Gemm(site, role, *shape, dtype=str(layer.weight.dtype).removeprefix("torch."))


def _reports_of(layers: Mapping[str, nn.Linear], has_run: bool) -> list[Report]:
    """The reports of this model's planned graphs: of those that read its weights.

    Where it has run and there is none, those whose layers have the same names and shapes: Dynamo lets a second model
    run in the code that was compiled for a first one like it, and buckets of DDP are compiled without real parameters.
    """
    found = reports()
    weights = {id(layer.weight) for layer in layers.values()}
    mine = [r for r in found if any(id(parameter()) in weights for parameter in r.parameters)]
    if not mine and has_run:
        mine = [r for r in found if _looks_like(r, layers)]
    return [r for r in mine if r.plan is not None]


def _looks_like(report: Report, layers: Mapping[str, nn.Linear]) -> bool:
    shapes = {g.gemm.site: (g.gemm.n, g.gemm.k) for g in report.gemms if g.gemm.role is Role.FORWARD}
    return bool(shapes) and all(
        name in layers and tuple(layers[name].weight.shape) == shape
        for name, shape in ((site.rpartition("#")[0], shape) for site, shape in shapes.items())
    )
