"""Inference without work on weights (``freeze_weights=True``): they are quantised when compiling, and watched.

The parameters become constants of the graph, and Inductor's freezing evaluates everything that depends on them alone:
casts, transposes, the FP8 quantisation. At every call each parameter is compared with what it was then: the same
tensor, the same memory, the same version. If one differs, the graph is compiled again.

What is seen: an optimizer step, ``load_state_dict`` (``assign=True`` too), ``copy_`` and other in-place operations with
or without ``no_grad``, ``parameter.data = other``, a new Parameter in the module. What is not: writing *through*
``parameter.data`` (``parameter.data.mul_(2)``), through NumPy or through a kernel that is given the address: torch
keeps no version of memory, only of tensors, and ``.data`` is a tensor of its own. :func:`thaw` says that it happened.
"""

from __future__ import annotations

import logging
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from loka_compile._compat.recompile import SavedCapture, copy_graph

logger = logging.getLogger(__name__)

Compiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
#: After so many compiles of one graph a warning says that freezing does not fit.
_PATIENCE = 8

_all: weakref.WeakSet[FrozenWeights] = weakref.WeakSet()


def thaw() -> None:
    """Forget every frozen weight: the next call of each compiled model reads its weights anew.

    For changes that torch does not see: writes through ``parameter.data``, NumPy or a kernel of one's own.
    """
    for frozen in list(_all):
        frozen.forget()


class FrozenWeights:
    """A compiled inference graph with its parameters built in, compiled again when one of them changes.

    Args:
        gm: torch-level graph whose inputs include the parameters; it is copied.
        example_inputs: the graph's inputs.
        compiler: compiles a graph without these inputs. It is called under ``freezing=True``.
    """

    # Dynamo wraps what a backend returns and copies its ``__dict__``: with one, the first graph and its constants would
    # outlive it (auto.py).
    __slots__ = ("__weakref__", "_at", "_capture", "_compiler", "_compiles", "_lock", "_now", "_rest")

    def __init__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], compiler: Compiler) -> None:
        self._capture = SavedCapture(gm, example_inputs)
        self._compiler = compiler
        self._at = tuple(i for i, value in enumerate(example_inputs) if is_weight(value))
        self._rest = tuple(i for i in range(len(example_inputs)) if i not in set(self._at))
        self._lock = threading.Lock()
        self._compiles = 0
        weights = [example_inputs[i] for i in self._at]
        # What the lock guards and what a call reads is one tuple: the state of the weights and their graph.
        self._now: tuple[list[State], Callable[..., Any]] = ([State(w) for w in weights], self._compile(weights))
        # A model that gets new Parameters must not keep the old ones.
        self._capture.forget(self._at)
        _all.add(self)

    def __call__(self, *args: Any) -> Any:
        """Run the graph, after another compile if a weight is not what it was."""
        weights = [args[i] for i in self._at]
        states, run = self._now
        if not _same(states, weights) and not any(isinstance(arg, FakeTensor) for arg in args):
            with self._lock:
                states, run = self._now
                if not _same(states, weights):
                    logger.info("a frozen weight has changed: compiling the graph again")
                    states = [State(w) for w in weights]
                    run = self._capture.compile(lambda gm, inputs: self._compile(weights))
                    self._now = states, run
        return run(*(args[i] for i in self._rest))

    def forget(self) -> None:
        """Compile again at the next call."""
        with self._lock:
            self._now = [], self._now[1]

    def _compile(self, weights: Sequence[Tensor]) -> Callable[..., Any]:
        self._compiles += 1
        if self._compiles == _PATIENCE:
            warnings.warn(
                f"loka: a graph with frozen weights was compiled {_PATIENCE} times, because they keep changing; "
                'options={"freeze_weights": False} quantises them at every call instead',
                RuntimeWarning,
                stacklevel=4,
            )
        gm, inputs = with_constants(self._capture.gm, self._capture.inputs, self._at, weights)
        return self._compiler(gm, inputs)


class State:
    """Which tensor a weight was, where its memory lay, and its version."""

    def __init__(self, weight: Tensor) -> None:
        self._tensor = weakref.ref(weight)
        self._seen = _look(weight)

    def holds(self, weight: Tensor) -> bool:
        """Whether it is still the same."""
        return self._tensor() is weight and self._seen == _look(weight)


def _look(weight: Tensor) -> tuple[int, int]:
    # Tensors made in inference mode have no version, and can only be written to in inference mode.
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


def _same(states: Sequence[State], weights: Sequence[Tensor]) -> bool:
    return len(states) == len(weights) and all(s.holds(w) for s, w in zip(states, weights, strict=True))


def is_weight(value: object) -> bool:
    """A parameter of the model, and not something that changes from call to call."""
    return isinstance(value, torch.nn.Parameter) and not isinstance(value, FakeTensor)


def with_constants(
    gm: fx.GraphModule, inputs: Sequence[Any], at: Sequence[int], weights: Sequence[Tensor]
) -> tuple[fx.GraphModule, list[Any]]:
    """A copy of the graph in which the inputs at these positions are attributes, and the inputs that are left."""
    result = copy_graph(gm)
    placeholders = [node for node in result.graph.nodes if node.op == "placeholder"]
    for number, (position, weight) in enumerate(zip(at, weights, strict=True)):
        node, name = placeholders[position], f"_loka_frozen{number}"
        result.register_parameter(name, torch.nn.Parameter(weight.detach(), requires_grad=weight.requires_grad))
        with result.graph.inserting_before(node):
            constant = result.graph.get_attr(name)
        constant.meta = dict(node.meta)
        node.replace_all_uses_with(constant)
        result.graph.erase_node(node)
    result.recompile()
    return result, [value for i, value in enumerate(inputs) if i not in set(at)]
