"""The GEMMs of a model's training step alone, each layer's compiled as our lowering compiles them.

A :class:`LayerStep` is the products of one linear layer with a kernel for each. The FP8 ones are traced from the
provider (quantisers and kernel, `Provider.gemm`) together, so that a quantisation that two of them need runs once, as
it does in a joint graph; gemm_pieces.py compiles what comes before the kernels, for all arms alike. A model's step is
its layers' steps in a row, timed as one CUDA graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.gemm_pieces import Compiled, device, runner
from examples.data.stream import Schema
from examples.models.registry import build
from loka_compile.bench.workload import Layer
from loka_compile.costs import CostTable
from loka_compile.costs.file import may_be_padded
from loka_compile.costs.padded import padded_latency
from loka_compile.gemm import Gemm, Role
from loka_compile.header import Header
from loka_compile.lowering.providers import get_provider
from loka_compile.plan import Plan, make_plan
from loka_compile.probe.site_errors import forms
from loka_compile.selection.operands import OPERANDS, TRANSPOSED
from loka_compile.table import BASELINE, Measurement, Table

#: Provider and recipe.
Candidate = tuple[str, str]
#: Criteo's widths, with tables of a few rows: only linear layers are looked at.
SCHEMA = Schema(13, (8,) * 26, 128)


@dataclass(frozen=True)
class LinearLayer:
    """A linear layer of a model, and the GEMMs that its training step has."""

    site: str
    batch: int
    inputs: int
    outputs: int
    roles: tuple[Role, ...]

    @property
    def layer(self) -> Layer:
        """As the workloads of the measurements have it."""
        return Layer("", self.site, self.batch, self.inputs, self.outputs)


def linear_layers(model: str, size: str, batch: int) -> list[LinearLayer]:
    """The linear layers of a model's dense part in the order of a forward. Nothing is computed.

    A layer whose input needs no gradient (the numerics') has no grad_input.
    """
    net = build(model, size, SCHEMA)
    names = {module: name for name, module in net.dense_arch.named_modules()}
    found: list[LinearLayer] = []

    def see(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(module, nn.Linear)
        (x,) = inputs
        roles = tuple(role for role in Role if role is not Role.GRAD_INPUT or x.requires_grad)
        # Not by the last dimension: a layer may turn its input around first (Wukong's TokenLinear).
        rows = x.numel() // module.in_features
        found.append(LinearLayer(names[module], rows, module.in_features, module.out_features, roles))

    meta = net.dense_arch.to("meta")
    for module in meta.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(see)
    categories = torch.zeros(2, len(SCHEMA.table_sizes), dtype=torch.int64)
    history = torch.zeros(2, SCHEMA.history_length, dtype=torch.int64)
    features = []
    for feature in net.embed(categories, history if net.reads_history else None):
        wide = torch.empty(batch, *feature.shape[1:], dtype=feature.dtype, device="meta")
        features.append(wide.requires_grad_() if feature.is_floating_point() else wide)
    meta(torch.empty(batch, SCHEMA.n_numerics, device="meta"), *features)
    return found


@dataclass(frozen=True)
class LayerStep:
    """Products of one layer ``y[M, N] = x[M, K] @ W[N, K].T``, each in a kernel."""

    batch: int
    inputs: int
    outputs: int
    choices: tuple[tuple[Role, Candidate], ...]
    dtype: str = "bfloat16"
    #: High precision by ``torch.mm`` on the operands as they are, whatever Inductor would make of it.
    plain: bool = False

    @property
    def is_native(self) -> bool:
        """Nothing of it runs in FP8."""
        return all(candidate == BASELINE for _, candidate in self.choices)

    @property
    def may_be_padded(self) -> bool:
        """Native alone, and Inductor would look whether padding pays."""
        layer = Layer("", "", self.batch, self.inputs, self.outputs)
        gemms = [layer.gemm(role, self.dtype) for role, _ in self.choices]
        odd = any(may_be_padded(g.role.value, g.m, g.n, g.k, g.dtype) for g in gemms)
        return self.is_native and odd and not self.plain

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Of the input, the weight and the output's gradient."""
        return (self.batch, self.inputs), (self.outputs, self.inputs), (self.batch, self.outputs)

    def __call__(self, x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        """The products, in the order of ``choices``."""
        tensors = {"input": x, "weight": weight, "grad_output": grad}
        results = []
        for role, (provider, recipe) in self.choices:
            a, b = (tensors[name] for name in OPERANDS[role])
            a_turned, b_turned = TRANSPOSED[role]
            if (provider, recipe) == BASELINE:
                results.append(torch.mm(a.t() if a_turned else a, b if b_turned else b.t()))
            else:
                kernel = get_provider(provider)
                results.append(kernel.gemm(a, a_turned, b, b_turned, kernel.recipe(recipe), x.dtype))
        return tuple(results)

    def graph(self) -> torch.fx.GraphModule:
        """The step as aten operators and kernels. Nothing is computed."""
        for _, (provider, _) in self.choices:
            get_provider(provider).supported()  # loads its library
        with FakeTensorMode():
            tensors = [torch.empty(*shape, dtype=getattr(torch, self.dtype), device=device()) for shape in self.shapes]
        return make_fx(lambda x, w, g: self(x, w, g), tracing_mode="fake")(*tensors)

    def compiled(self, pieces: dict[str, Compiled]) -> Callable[..., tuple[Tensor, ...]]:
        """As it is timed; ``pieces`` holds what is compiled so far.

        What is native alone needs no compiler, unless Inductor would pad it.
        """
        if not self.is_native:
            return runner(self, pieces)
        if not self.may_be_padded:
            return self
        if repr(self) not in pieces:
            pieces[repr(self)] = torch.compile(self.graph(), dynamic=False, fullgraph=True)  # type: ignore[assignment]
        return pieces[repr(self)]


def step_of(layer: LinearLayer, choose: Callable[[Role], Candidate], *, pad: bool = True) -> LayerStep:
    """All products of a layer, ``choose`` giving the kernel of each role.

    What a kernel refuses stays native; with ``pad``, it is padded to what the kernel takes, as our lowering does it.
    """
    choices = []
    for role in layer.roles:
        provider, recipe = choose(role)
        native = (provider, recipe) == BASELINE or _refused(
            layer.layer.gemm(role, "bfloat16"), provider, recipe, pad=pad
        )
        choices.append((role, BASELINE if native else (provider, recipe)))
    return LayerStep(layer.batch, layer.inputs, layer.outputs, tuple(choices))


def _refused(gemm: Gemm, provider: str, recipe: str, *, pad: bool) -> bool:
    kernel = get_provider(provider)
    chosen = kernel.recipe(recipe)
    return kernel.refuses_shape(kernel.padded(gemm, chosen) if pad else gemm, chosen) is not None


def plan_of(
    layers: Sequence[LinearLayer],
    costs: CostTable,
    min_speedup: float = 1.05,
    providers: Collection[str] | None = None,
) -> Plan:
    """The plan for these layers by cost alone: no error is known or gated on.

    ``providers``: whose kernels; None is the libraries that are here.
    """
    rows = []
    here = [
        (name, recipe)
        for name, recipe in costs.candidates()
        if (get_provider(name).supported() is None if providers is None else name in providers)
    ]
    for layer in layers:
        for role in layer.roles:
            for candidate in (BASELINE, *here):
                row = _row(layer, role, candidate, costs)
                if row is not None:
                    rows.append(row)
    return make_plan(Table(Header(target=costs.target), rows), max_mere=1.0, min_speedup=min_speedup)


def _row(layer: LinearLayer, role: Role, candidate: Candidate, costs: CostTable) -> Measurement | None:
    """A candidate's line of the table, of the GEMM as it is padded; as loka_compile/probe/site_errors.py makes it."""
    gemm = layer.layer.gemm(role, "bfloat16")
    row = Measurement(
        layer.site, role.value, layer.batch, layer.batch, layer.outputs, layer.inputs, "bfloat16", *candidate,
        baseline_us=costs.baseline(gemm), gemm_us=costs.baseline(gemm), quantize_us=0.0, mere=0.0,
    )  # fmt: skip
    if candidate == BASELINE:
        return row
    provider = get_provider(candidate[0])
    recipe = provider.recipe(candidate[1])
    latency = padded_latency(costs, gemm, provider, recipe)
    if latency is None or provider.refuses_shape(provider.padded(gemm, recipe), recipe):
        return None
    a_form, b_form = forms(gemm, provider, recipe)
    return dataclasses.replace(
        row, quantize_us=latency.quantize_us, gemm_us=latency.gemm_us,
        a_form=a_form, a_once_us=latency.quantize_a_us - latency.a_layout_us, a_layout_us=latency.a_layout_us,
        b_form=b_form, b_once_us=latency.quantize_b_us - latency.b_layout_us, b_layout_us=latency.b_layout_us,
    )  # fmt: skip


def predicted_us(layers: Sequence[LinearLayer], costs: CostTable, choose: Callable[[str, Role], Candidate]) -> float:
    """What the cost table says that all products take, a quantisation that two of a layer need counted once."""
    total = 0.0
    for layer in layers:
        once: dict[tuple[str, str], float] = {}
        layouts: dict[tuple[str, str, bool], float] = {}
        for role in layer.roles:
            row = _row(layer, role, choose(layer.site, role), costs)
            assert row is not None
            total += row.gemm_us
            for name, turned, key in zip(OPERANDS[role], TRANSPOSED[role], "ab", strict=True):
                kind = getattr(row, f"{key}_form")
                if kind:
                    once[(name, kind)] = max(once.get((name, kind), 0.0), getattr(row, f"{key}_once_us"))
                    layouts[(name, kind, turned)] = getattr(row, f"{key}_layout_us")
        total += sum(once.values()) + sum(layouts.values())
    return total
