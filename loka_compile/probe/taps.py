"""The taps: custom ops in the training graph through which the probe sees a linear layer's operands.

During a sampling window every tapped layer runs as a subclass of itself:

    y = <the layer's own forward>(x)
    loka_probe::input(x, weight, bias, token, shown, call, dtype)  # shows the operands, returns nothing
    y = loka_probe::output(y, token, call)                         # the identity; its backward calls
        loka_probe::grad_output(dy, token, call)                   # shows dy, returns nothing

Swapping ``module.__class__`` is what Dynamo reliably guards on. (A forward hook added to a compiled module is not seen:
``skip_nnmodule_hook_guards`` is on by default.) So a compiled model has two graphs, with and without taps; changing
between them picks a cached one, and a step that does not sample runs exactly the code that it ran before the probe.

``token`` is a small CPU tensor that names session and layer. Being a tensor, it is an input of the graph, not a
constant: equal layers still share one compiled graph. Its reading needs no device synchronisation.

An op without a result has to be kept from being removed as dead. ``input`` declares that it mutates ``shown`` (which it
leaves alone). That will not do in a backward graph, whose inputs must not have been mutated since the forward pass;
``grad_output`` is registered as having an effect instead. That in turn will not do in the forward graph: Dynamo's
splitting of graphs for DDP mixes up their outputs (seen with torch 2.11 and 2.13).

An op that runs Python cannot be replayed from a CUDA graph. So Inductor is told to let it stand between the graphs
that it captures (``between_cuda_graphs``), and an op does nothing while a stream is being captured by hand.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import itertools
import types
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from loka_compile._compat.tracing import in_backward, keep_for_its_effect, outside_cuda_graphs, trace_attempt

TOKEN = "_loka_probe_token"
SHOWN = "_loka_probe_shown"
TRAINING_ONLY = "_loka_probe_training_only"
_ATTRIBUTES = (TOKEN, SHOWN, TRAINING_ONLY)


class CallCounter:
    """Numbers the calls of each layer within one forward pass of the model: the index in a site's name.

    Under torch.compile the numbers are taken while Dynamo traces, and are constants of the graph.
    """

    def __init__(self) -> None:
        """Start with no calls."""
        self._calls: Counter[tuple[int, bool]] = Counter()
        self._before: Counter[tuple[int, bool]] = Counter()
        self._trace: tuple[object, int] | None = None
        self._gone_back = False

    def begin(self) -> None:
        """A forward pass of the model begins."""
        self._calls.clear()
        self._gone_back = False

    def went_back(self) -> None:
        """A backward pass runs: the next call begins a forward pass, even where the model's own forward is not used."""
        self._gone_back = True

    def next(self, layer: int) -> int:
        """How often the layer was called before in this forward pass."""
        if self._gone_back and not in_backward():
            self.begin()
        trace = trace_attempt()
        if trace is not None and trace != self._trace:
            if self._trace is not None and trace[0] == self._trace[0]:
                self._calls = self._before.copy()  # Dynamo traces a frame again, from its beginning
            else:
                self._before = self._calls.copy()
            self._trace = trace
        # What a checkpoint runs again in the backward pass has had its number before; it must not get a new one.
        key = (layer, in_backward())
        self._calls[key] += 1
        return self._calls[key] - 1


class Listener(Protocol):
    """What the ops talk to. The methods run in the thread that runs forward or backward: they must be quick."""

    def on_input(
        self, layer: int, call: int, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        """A layer was called with ``x`` [..., in_features], and computes in ``dtype``."""

    def on_grad_output(self, layer: int, call: int, grad: Tensor) -> None:
        """The gradient [..., out_features] of a layer's output is known."""

    calls: CallCounter


_listeners: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_ids = itertools.count(1)


def register(listener: Listener) -> int:
    """Give a listener the number under which tokens name it. It is held weakly."""
    number = next(_ids)
    _listeners[number] = listener
    return number


def _listener(token: Tensor) -> tuple[Any, int]:
    session, layer = token.tolist()
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return None, layer
    return _listeners.get(session), layer


_TAGS = (torch.Tag.cudagraph_unsafe, torch.Tag.flexible_layout)


_lib: Any = torch.library.Library("loka_probe", "FRAGMENT")
_lib.define(
    "input(Tensor x, Tensor weight, Tensor? bias, Tensor token, Tensor(a!) shown, int call, ScalarType dtype) -> ()",
    tags=_TAGS,
)


def _probe_input(
    x: Tensor, weight: Tensor, bias: Tensor | None, token: Tensor, shown: Tensor, call: int, dtype: torch.dtype
) -> None:
    listener, layer = _listener(token)
    if listener is not None and not in_backward():  # otherwise a checkpoint runs it again: these rows have been seen
        listener.on_input(layer, call, x, weight, bias, dtype)


_lib.impl("input", _probe_input, "CompositeExplicitAutograd")


@torch.library.custom_op("loka_probe::grad_output", mutates_args=(), tags=_TAGS)
def _probe_grad_output(grad: Tensor, token: Tensor, call: int) -> None:
    listener, layer = _listener(token)
    if listener is not None:
        listener.calls.went_back()
        listener.on_grad_output(layer, call, grad)


@torch.library.register_fake("loka_probe::input", lib=_lib)
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, token: Tensor, shown: Tensor, call: int, dtype: torch.dtype
) -> None:
    return None


@_probe_grad_output.register_fake
def _(grad: Tensor, token: Tensor, call: int) -> None:
    return None


keep_for_its_effect(_probe_grad_output)


def between_cuda_graphs() -> AbstractContextManager[None]:
    """While this lasts, taps are compiled to stand outside of CUDA graphs."""
    return outside_cuda_graphs("loka_probe::input", "loka_probe::grad_output")


class _Output(torch.autograd.Function):
    """The identity; only its backward does something."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, token: Tensor, call: int) -> Tensor:
        ctx.token, ctx.call = token, call
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        torch.ops.loka_probe.grad_output.default(grads[0], ctx.token, ctx.call)
        return grads[0], None, None


def _probe_output(y: Tensor, token: Tensor, call: int) -> Tensor:
    return _Output.apply(y, token, call)  # type: ignore[no-untyped-call]


_lib.define("output(Tensor y, Tensor token, int call) -> Tensor")
# Decomposed by autograd itself, so AOTAutograd sees a view in the forward graph and grad_output in the backward.
_lib.impl("output", _probe_output, "CompositeImplicitAutograd")


def _shown(args: tuple[Any, ...], kwargs: dict[str, Any], weight: Tensor) -> Tensor | None:
    """The input of a linear layer's call if it is a plain tensor; subclasses (DTensor and such) are left alone."""
    x: Any = args[0] if args else kwargs.get("input")
    if type(x) not in (Tensor, nn.Parameter) or type(weight) not in (Tensor, nn.Parameter):
        return None
    return x if x.is_floating_point() and x.dim() and x.shape[-1] == weight.shape[1] else None


def _tap(self: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``forward(self, *args, **kwargs)`` with taps around it."""
    if getattr(self, TRAINING_ONLY) and not self.training:
        return forward(self, *args, **kwargs)
    weight = self.weight
    x = _shown(args, kwargs, weight)
    if x is None:
        return forward(self, *args, **kwargs)
    call, token, shown = self._loka_probe_call(), getattr(self, TOKEN), getattr(self, SHOWN)
    y = forward(self, *args, **kwargs)
    bias = None if self.bias is None else self.bias.detach()
    torch.ops.loka_probe.input.default(x.detach(), weight.detach(), bias, token, shown, call, y.dtype)
    return torch.ops.loka_probe.output.default(y, token, call) if y.requires_grad else y


class _Product(nn.Linear):
    """Stands between ``nn.Linear`` and a subclass whose forward does more than the product, and calls ``super()``'s.

    What such a layer is called with need not be what its weight is multiplied with: it may transpose it first.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _tap(self, nn.Linear.forward, args, kwargs)


@functools.cache
def _tapped_class(base: type[nn.Module]) -> type[nn.Module]:
    """``base`` with taps around its product. It looks and pickles like ``base``."""
    code = getattr(inspect.unwrap(base.forward), "__code__", None)
    inside = code is not None and "super" in code.co_names

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return base.forward(self, *args, **kwargs) if inside else _tap(self, base.forward, args, kwargs)

    # Dynamo looks such a method up by the function's own name, and puts its result into the graph as a constant.
    @torch.compiler.assume_constant_result
    def _loka_probe_call(self: Any) -> int:
        session, layer = self.__dict__[TOKEN].tolist()
        listener = _listeners.get(session)
        return 0 if listener is None else int(listener.calls.next(layer))

    bases = (base, _Product) if inside else (base,)
    return _subclass(bases, {"forward": forward, "_loka_probe_call": _loka_probe_call})


@functools.cache
def _root_class(base: type[nn.Module]) -> type[nn.Module]:
    """``base`` with a note to the listener when a forward pass of the whole model begins."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._loka_probe_begin()
        return base.forward(self, *args, **kwargs)

    @torch.compiler.assume_constant_result
    def _loka_probe_begin(self: Any) -> bool:
        listener = _listeners.get(self.__dict__[TOKEN].tolist()[0])
        if listener is not None:
            listener.calls.begin()
        return True

    return _subclass((base,), {"forward": forward, "_loka_probe_begin": _loka_probe_begin})


def _bare(cls: type[nn.Module], *args: Any) -> nn.Module:
    """``copyreg.__newobj__`` by another name: pickle insists that its class is that of the object."""
    return cls.__new__(cls, *args)


def _subclass(bases: tuple[type[nn.Module], ...], members: dict[str, Any]) -> type[nn.Module]:
    base = bases[0]

    def reduce_ex(self: Any, protocol: Any) -> Any:
        made, args, state, *rest = (*base.__reduce_ex__(self, protocol), None)[:5]
        if isinstance(state, dict):
            state = {key: value for key, value in state.items() if key not in _ATTRIBUTES}
        made = _bare if made is copyreg.__newobj__ else made  # type: ignore[attr-defined]
        return (made, tuple(base if arg is type(self) else arg for arg in args), state, *rest)

    # A code object of its own: Dynamo counts recompilations by code object, and all roots would share this one's limit.
    forward = members["forward"]
    copied = types.FunctionType(
        forward.__code__.replace(), forward.__globals__, base.forward.__name__, None, forward.__closure__
    )
    members = {**members, "forward": copied}
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    cls: type[nn.Module] = type(base.__name__, bases, {**members, **names, "__reduce_ex__": reduce_ex})
    cls._loka_probe_base = base  # type: ignore[attr-defined]
    return cls


def attach(module: nn.Module, token: Tensor, *, training_only: bool, root: bool = False) -> None:
    """Let ``module`` run with taps (a linear layer), or announce forward passes (``root``).

    Args:
        module: what is tapped until ``detach``.
        token: [2] int64 on the CPU: the number of the listener, and that of the layer.
        training_only: do not show what the module sees in ``eval()`` mode.
        root: whether this is the model rather than a layer. A linear layer may be both.
    """
    module.__dict__.setdefault(TOKEN, token)
    module.__dict__.setdefault(SHOWN, torch.zeros(1, dtype=torch.int64))
    module.__dict__[TRAINING_ONLY] = training_only
    base: Any = type(module)
    object.__setattr__(module, "__class__", (_root_class if root else _tapped_class)(base))  # nn.Module's is slow


def detach(module: nn.Module) -> None:
    """Undo every ``attach`` of this module."""
    while (base := type(module).__dict__.get("_loka_probe_base")) is not None:
        object.__setattr__(module, "__class__", base)
    for name in _ATTRIBUTES:
        module.__dict__.pop(name, None)


def is_attached(module: nn.Module) -> bool:
    """Whether a probe's taps are on this module."""
    return TOKEN in module.__dict__


def is_probe_output(node: fx.Node) -> bool:
    """Whether this node of Dynamo's graph is the identity that a tapped layer's output goes through."""
    return node.op == "call_function" and node.target in (
        torch.ops.loka_probe.output.default,
        torch.ops.loka_probe.output,
    )


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module within torch.compile's and DistributedDataParallel's."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner
