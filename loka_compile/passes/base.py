"""What a pass is: a function ``(gm, ctx) -> Changes`` with a name and a tier.

A pass rewrites the torch-level FX graph that Dynamo captured, in place. It never logs, times, dumps or recompiles
(the manager does), and never looks at the device or at a kernel library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from torch import fx

from loka_compile.config import LokaConfig

if TYPE_CHECKING:
    from loka_compile.passes.chains import Chain


class Tier(str, Enum):
    """What a pass may do to the numbers."""

    #: Same numbers, bit for bit.
    EXACT = "exact"
    #: Same function, other rounding.
    NUMERICS = "numerics"
    #: Another function: the model itself changes (the Mods).
    MODEL = "model"


@dataclass(frozen=True)
class Match:
    """One place that a pass rewrote."""

    site: str
    kind: str
    #: How many learnt parameters are no longer read because of it, by kind ("bias", "norm").
    unused: tuple[str, ...] = ()
    source: str = ""


@dataclass(frozen=True)
class Refusal:
    """One place that a pass left alone although it looks like its business, and why."""

    node: str
    reason: str
    source: str = ""


@dataclass
class Changes:
    """What a pass did."""

    matched: list[Match] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)


@dataclass(frozen=True)
class PassContext:
    """What a pass may know besides the graph."""

    config: LokaConfig


PassFn = Callable[[fx.GraphModule, PassContext], Changes]


@dataclass(frozen=True)
class Pass:
    """A named pass. ``origin`` is where it was defined, for messages about duplicates."""

    name: str
    tier: Tier
    fn: PassFn
    origin: str = ""


def source_line(node: fx.Node) -> str:
    """``file:line`` of the user's code that made this node; where that is all torch's own, the module's path."""
    for line in reversed((node.meta.get("stack_trace") or node.stack_trace or "").splitlines()):
        line = line.strip()
        if line.startswith("File "):
            path, number = line.split('"')[1], line.split("line ")[1].split(",")[0]
            if "/torch/nn/" not in path:  # torch.nn's own lines say nothing to the user
                return f"{path}:{number}"
    stack = node.meta.get("nn_module_stack")
    if stack:
        path, cls = next(reversed(stack.values()))
        return f"{path} ({getattr(cls, '__name__', cls)})"
    return ""


def chain_unused(chain: Chain) -> tuple[str, ...]:
    """Kinds of the parameters that a chain's norm reads."""
    return tuple("norm" for _ in chain.norm_params)
