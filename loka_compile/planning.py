"""From options to a plan: a given plan, a given table, a cached table, or the wish to sample first."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from loka_compile._compat.shapes import size_hint
from loka_compile.config import LokaConfig
from loka_compile.costs import CostTable, target_of_device_name
from loka_compile.drift.put_back import sites_put_back
from loka_compile.errors import UnknownNameError
from loka_compile.gemm import NATIVE, Role
from loka_compile.header import Header
from loka_compile.lowering.hooks import source_digest
from loka_compile.passes.nodes import argument, kind, subgraphs
from loka_compile.passes.sites import learnt_weight, name_sites
from loka_compile.plan import Plan, make_plan
from loka_compile.selection.thresholds import Limits, overrides
from loka_compile.store import load_cached
from loka_compile.table import Measurement, Table


@dataclass
class Planning:
    """How the GEMMs of one graph get their plan."""

    config: LokaConfig
    #: Weight shapes [N, K] by site.
    fingerprint: dict[str, tuple[int, int]]
    #: Device whose costs count; None where there are none (a CPU without ``target=``).
    target: str | None
    #: True where kernels of the target are emulated, because this is another device.
    emulate: bool = False
    plan: Plan | None = None
    table: Table | None = None
    #: True when the plan has to wait for samples.
    sample: bool = False
    note: str = ""
    #: The GEMMs that the graph has; a plan must not count on sharing with others.
    roles: frozenset[Role] = frozenset(Role)
    #: Sites whose weight gets no gradient.
    frozen: frozenset[str] = frozenset()
    #: Sites that the drift guard has put back to high precision.
    put_back: frozenset[str] = frozenset()
    #: What decides the GEMMs' dtype: that of the weights, and autocast around the graph.
    dtypes: tuple[str, ...] = ()

    @property
    def cache_key(self) -> str:
        """Names the cached table of this model on this device."""
        return self._key(self.config.least_speedup)

    def cached(self) -> Table | None:
        """The cached table, or the one in which more was measured, if there is any."""
        for least in dict.fromkeys((self.config.least_speedup, 0.0)):
            table = load_cached(self._key(least))
            if table is not None:
                return table
        return None

    def _key(self, least_speedup: float) -> str:
        parts = {
            "fingerprint": sorted((site, *shape) for site, shape in self.fingerprint.items()),
            "target": self.target,
            "mods": self.config.active_mods,
            "block_size": self.config.block_size,
            "dtypes": self.dtypes,
            "fuse": self.config.fuse,  # the costs in a table count on fused kernels
            "least_speedup": least_speedup,  # what is slower was not measured
            "torch": torch.__version__,
            "package": source_digest(),  # costs and error measures are ours, and change
        }
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]

    def accept(self, table: Table) -> Plan:
        """Make the plan from a table that fits."""
        self.table = table
        plan = make_plan(
            Table(table.header, filter(self._happens, table.rows)),
            max_mere=self.config.max_mere,
            min_speedup=self.config.min_speedup,
            providers=self.config.providers,
            per_site=self.config.per_site,
        )
        self.sample = False
        self.plan = self.take(plan)
        unmatched = Limits(overrides=self.plan.per_site).unmatched(self.fingerprint)
        if unmatched and not self.note:
            self.note = f"option 'per_site': no site of this graph matches {', '.join(map(repr, unmatched))}"
        return self.plan

    def _happens(self, row: Measurement) -> bool:
        role = Role(row.role)
        return role in self.roles and not (role is Role.GRAD_WEIGHT and row.site in self.frozen)

    def take(self, plan: Plan) -> Plan:
        """The plan less what the drift guard has put back."""
        known = sorted({d.site for d in plan.decisions if not d.is_high_precision} & self.put_back)
        if not known:
            return plan
        self.note = f"put back to high precision by the drift guard: {', '.join(known)}"
        return plan.without(known, "put back by the drift guard")


def resolve(gm: fx.GraphModule, config: LokaConfig, device: torch.device, roles: frozenset[Role]) -> Planning:
    """Find the plan for a rewritten graph.

    Args:
        gm: torch-level graph, after the passes.
        config: the options.
        device: where the graph runs.
        roles: GEMMs that the graph will have: all three in training, forward alone in inference.

    Raises:
        UnknownNameError: the target or a provider does not exist.
        StaleTableError, CorruptFileError: a given table or plan is not for this model or device, or is damaged.
    """
    target = config.target or _target_of(device)
    if config.target is not None and config.target not in CostTable.targets():
        raise UnknownNameError("target in option 'target'", config.target, CostTable.targets())
    _check_providers(config)
    planning = Planning(config, fingerprint(gm), target, emulate=target is not None and target != _target_of(device))
    planning.put_back, planning.roles, planning.frozen = sites_put_back(gm), roles, _frozen(gm)
    if config.plan is not None:
        plan = config.plan if isinstance(config.plan, Plan) else Plan.load(config.plan)
        _check_plan(plan, planning, device)
        planning.plan = planning.take(plan)
    elif config.table == "off":
        planning.note = "no plan: option table is 'off'"
    elif not isinstance(config.table, str) or config.table != "auto":
        table = Table.load(config.table) if isinstance(config.table, (str, os.PathLike)) else config.table
        table.check(**_expected(planning, device, table.header))
        planning.accept(table)
    elif target is None:
        planning.note = (
            f"no plan: there is no cost table for this {device.type} device; "
            'options={"target": "h200"} plans for another device and emulates its FP8 here'
        )
    elif planning.fingerprint:
        planning.dtypes = _dtypes(gm, device)
        cached = planning.cached()
        if cached is not None:
            cached = near(cached, *batches(gm))
        if cached is not None and covers(cached, planning.fingerprint, roles):
            planning.accept(cached)
        else:
            planning.sample = True
    return planning


def covers(table: Table, fingerprint: dict[str, tuple[int, int]], roles: frozenset[Role]) -> bool:
    """Whether the table knows every GEMM of the graph. The first layer may lack grad_input: its input needs none."""
    if table.header.differences(fingerprint=fingerprint):
        return False
    known = {(row.site, row.role) for row in table.rows}
    needed = roles - {Role.GRAD_INPUT}
    return all((site, role.value) in known for site in fingerprint for role in needed)


def near(table: Table, batches: Mapping[str, int], dynamic: Collection[str] = ()) -> Table:
    """The rows for about these batch sizes, within a factor of two: what pays for 4096 rows may not for 64.

    Of a site whose batch size varies (``dynamic``) all rows are kept if one of them is near: the others are the ends of
    what was seen, and the plan has a kernel for each part of it.
    """

    def is_near(row: Measurement) -> bool:
        m = batches.get(row.site)
        return m is None or (row.m_min <= 2 * m and m <= 2 * row.m_max)

    close = [row for row in table.rows if is_near(row)]
    whole = {row.site for row in close} & set(dynamic)
    return Table(table.header, (row for row in table.rows if is_near(row) or row.site in whole))


def batches(gm: fx.GraphModule) -> tuple[dict[str, int], set[str]]:
    """Number of rows that each site's layer is applied to, as far as it is known; and the sites where it is dynamic.

    A dynamic one counts as its hint.
    """
    found: dict[str, int] = {}
    dynamic: set[str] = set()
    for node, site in name_sites(gm).items():
        operand = argument(node, 0, "input")
        value = operand.meta.get("example_value") if isinstance(operand, fx.Node) else None
        if isinstance(value, torch.Tensor):
            sizes = [size_hint(size) for size in value.shape[:-1]]
            if None not in sizes:
                found[site] = math.prod(int(size or 0) for size in sizes)
            if not all(isinstance(size, int) for size in value.shape[:-1]):
                dynamic.add(site)
    return found, dynamic


def _frozen(gm: fx.GraphModule) -> frozenset[str]:
    """Sites whose weight is known to get no gradient."""
    found = set()
    for node, site in name_sites(gm).items():
        weight = learnt_weight(node)
        value = None if weight is None else weight.meta.get("example_value")
        if isinstance(value, torch.Tensor) and not value.requires_grad:
            found.add(site)
    return frozenset(found)


def _dtypes(gm: fx.GraphModule, device: torch.device) -> tuple[str, ...]:
    weights = (learnt_weight(node) for node in name_sites(gm))
    values = (w.meta.get("example_value") for w in weights if w is not None)
    found = {str(v.dtype) for v in values if isinstance(v, torch.Tensor)}
    if torch.is_autocast_enabled(device.type):
        found.add(f"autocast {torch.get_autocast_dtype(device.type)}")
    return tuple(sorted(found))


def fingerprint(gm: fx.GraphModule) -> dict[str, tuple[int, int]]:
    """Weight shape [N, K] of every site whose shape the capture recorded."""
    shapes: dict[str, tuple[int, int]] = {}
    for node, site in name_sites(gm).items():
        is_linear = kind(node) == "linear"
        operand = argument(node, 1, "weight" if is_linear else "other")
        value = operand.meta.get("example_value") if isinstance(operand, fx.Node) else None
        if isinstance(value, torch.Tensor) and value.dim() == 2 and all(isinstance(s, int) for s in value.shape):
            n, k = value.shape if is_linear else reversed(value.shape)
            shapes[site] = (n, k)
    return shapes


def has_loka_ops(gm: fx.GraphModule) -> bool:
    """Whether the graph holds operators of ours that need our lowering."""
    return any(
        (isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "loka")
        or (isinstance(node.target, torch._ops.OpOverloadPacket) and node.target.__name__ in ("block_norm", "anchor"))
        for sub in subgraphs(gm)
        for node in sub.graph.nodes
    )  # fmt: skip


def _target_of(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    return target_of_device_name(torch.cuda.get_device_name(device))


def _check_providers(config: LokaConfig) -> None:
    from loka_compile.lowering.providers import PROVIDERS

    known = [name for name, _, _ in PROVIDERS]
    for name in config.providers or ():
        if name not in known:
            raise UnknownNameError("provider in option 'providers'", name, known)
    for override in overrides(config.per_site):
        for name in override.providers or ():
            if name not in known:
                raise UnknownNameError(f"provider in option per_site[{override.pattern!r}]", name, known)


def _expected(planning: Planning, device: torch.device, header: Header) -> dict[str, Any]:
    """What the header of a given table or plan must say. A plan for another device may come from any machine."""
    from loka_compile.lowering.providers import get_provider

    expected: dict[str, Any] = {"fingerprint": planning.fingerprint, "target": planning.target or ""}
    if not planning.emulate:
        expected["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        expected["torch"] = str(torch.__version__)
        expected["libraries"] = {name: get_provider(name).version() for name in header.libraries}
    return expected


def _check_plan(plan: Plan, planning: Planning, device: torch.device) -> None:
    from loka_compile.lowering.providers import get_provider

    if plan.header is not None:
        plan.check(**_expected(planning, device, plan.header))
    for decision in plan.decisions:
        provider = get_provider(decision.provider)
        if decision.recipe not in provider.recipes and decision.recipe != NATIVE.name:
            raise UnknownNameError(
                f"recipe of provider {decision.provider!r} in the plan, {decision.site} {decision.role}:",
                decision.recipe,
                provider.recipes,
            )
