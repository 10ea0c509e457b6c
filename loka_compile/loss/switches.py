"""A model whose every linear layer can be switched to FP8 and back between two calls, without compiling anything.

Dynamo captures the graph and the Mods rewrite it as for ``backend="loka"``, so that sites have the same names and
layers compute the same function; then it runs eagerly, and each layer asks the switchboard which of its GEMMs are in
FP8 now.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from loka_compile.config import LokaConfig
from loka_compile.gemm import Gemm, Recipe, Role
from loka_compile.lowering.joint import executor
from loka_compile.lowering.providers import COMPILE_AT_FIRST_CALL, get_provider
from loka_compile.lowering.providers.base import Provider
from loka_compile.passes.manager import run_passes
from loka_compile.passes.nodes import argument, kind, subgraphs
from loka_compile.passes.registry import snapshot
from loka_compile.passes.sites import learnt_weight, name_sites
from loka_compile.report import Report

#: Site and role.
Key = tuple[str, str]
#: What a switch is set to: provider and recipe by name.
Kernel = tuple[str, str]


class Switchboard:
    """Which GEMMs run in FP8 now. ``compile(model)`` gives the model whose layers look here at every call.

    Args:
        config: the options of ours that the rewriting depends on (Mods, block size, ...).
    """

    def __init__(self, config: LokaConfig | None = None) -> None:
        self.config = config or LokaConfig()
        #: Sites that the captured graphs hold.
        self.sites: set[str] = set()
        #: The layers with switches in them, of all captured graphs.
        self.layers: list[nn.Module] = []
        #: GEMM -> why it stayed in high precision although it was switched.
        self.refused: dict[Key, str] = {}
        self._on: dict[str, dict[str, Kernel]] = {}

    def compile(self, model: nn.Module) -> Callable[..., Any]:
        """The model with switches in it. It is captured at its first call; gradients flow as usual."""
        torch.compiler.reset()
        switched: Callable[..., Any] = torch.compile(model, backend=self._backend)
        return switched

    @contextlib.contextmanager
    def on(self, kernels: Mapping[Key, Kernel]) -> Iterator[None]:
        """Run these GEMMs, and no others, in these kernels.

        Raises:
            UnknownNameError: a provider or recipe does not exist. Now, and not in the middle of a graph, where an error
                would leave what the graph has entered (autocast) entered.
        """
        for provider, recipe in set(kernels.values()):
            get_provider(provider).recipe(recipe)
        before, self._on = self._on, {}
        for (site, role), kernel in kernels.items():
            self._on.setdefault(site, {})[role] = kernel
        try:
            yield
        finally:
            self._on = before

    def of(self, site: str) -> dict[str, Kernel]:
        """Role -> kernel for one site; empty in high precision."""
        return self._on.get(site, {})

    def _backend(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        run_passes(gm, snapshot(self.config), self.config, Report())
        names = name_sites(gm)
        for sub in subgraphs(gm):
            for node in list(sub.graph.nodes):
                if node in names:
                    self._switch(sub, node, names[node])
            sub.recompile()
        return gm.forward

    def _switch(self, gm: fx.GraphModule, node: fx.Node, site: str) -> None:
        if kind(node) == "linear":
            x, weight, bias = argument(node, 0, "input"), argument(node, 1, "weight"), argument(node, 2, "bias")
            turned = False
        else:
            x, weight, bias, turned = argument(node, 0, "input"), argument(node, 1, "other"), None, True
            if learnt_weight(node) is None or not _is_weight(weight):
                return  # the parameter is the left operand: not a layer of ours
        name = f"loka_switch_{len([m for m in gm.children() if isinstance(m, _Layer)])}"
        layer = _Layer(self, site, turned)
        self.layers.append(layer)
        gm.add_submodule(name, layer)
        with gm.graph.inserting_before(node):
            new = gm.graph.call_module(name, (x, weight, bias))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
        self.sites.add(site)


def _is_weight(node: Any) -> bool:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return isinstance(value, Tensor) and value.dim() == 2


class _Layer(nn.Module):
    """``x @ weight.T + bias`` in high precision, or with the switched GEMMs in FP8."""

    def __init__(self, board: Switchboard, site: str, turned: bool) -> None:
        super().__init__()
        self.board, self.site, self.turned = board, site, turned

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        kernels = self.board.of(self.site)
        weight = weight.t() if self.turned else weight
        if not kernels:
            return F.linear(x, weight, bias)
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        with torch.autocast(x.device.type, enabled=False):
            y: Tensor = _Product.apply(x.reshape(-1, x.shape[-1]), weight, self.board, self.site, kernels)  # type: ignore[no-untyped-call]
            y = y.reshape(*x.shape[:-1], weight.shape[0])
            return y if bias is None else y + bias


class _Product(torch.autograd.Function):
    """``x [M, K] @ weight [N, K].T`` whose three GEMMs are each in their own kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, board: Switchboard, site: str, kernels: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rest = board, site, kernels
        return gemm(Role.FORWARD, x, weight, *ctx.rest)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_x = gemm(Role.GRAD_INPUT, grad, weight, *ctx.rest) if ctx.needs_input_grad[0] else None
        grad_w = gemm(Role.GRAD_WEIGHT, grad, x, *ctx.rest) if ctx.needs_input_grad[1] else None
        return grad_x, grad_w, None, None, None


def gemm(
    role: Role, a: Tensor, b: Tensor, board: Switchboard, site: str, kernels: Mapping[str, Kernel]
) -> Tensor:  # fmt: skip
    """One of a layer's GEMMs from its tensors as they are stored: (x, W), (dy, W) or (dy, x)."""
    a_turned, b_turned = role is Role.GRAD_WEIGHT, role is not Role.FORWARD
    chosen = kernels.get(str(role))
    if chosen is not None and a.numel() and b.numel():
        m, k = reversed(a.shape) if a_turned else a.shape
        n = b.shape[1] if b_turned else b.shape[0]
        shape = Gemm(site, role, m=m, n=n, k=k, dtype=str(a.dtype).removeprefix("torch."))
        provider, recipe = _runs(*chosen, a.device.type)
        reason = provider.refuses(provider.padded(shape, recipe), recipe, a.device.type)
        if reason is None:
            return provider.gemm(a, a_turned, b, b_turned, recipe, a.dtype)
        board.refused[site, str(role)] = reason
    return (a.t() if a_turned else a) @ (b if b_turned else b.t())


def _runs(provider: str, recipe: str, device: str) -> tuple[Provider, Recipe]:
    """The kernel itself where it runs here, else its emulation; that too where each shape would be compiled first."""
    real, found = executor(provider, recipe, emulate=False)
    if found is None:
        real.recipe(recipe)  # raises, and names what there is
    assert found is not None
    if provider not in COMPILE_AT_FIRST_CALL and real.supported(found, device) is None:
        return real, found
    emulated, same = executor(provider, recipe, emulate=True)
    if same is None:
        emulated.recipe(recipe)
    assert same is not None
    return emulated, same
