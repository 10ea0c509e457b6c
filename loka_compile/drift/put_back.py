"""Puts layers back to high precision while a model trains.

A layer's class is exchanged for a subclass of itself, marked and otherwise equal. Dynamo guards on the classes of a
model's modules, so what holds the layer is captured and compiled once more at its next call; the backend finds the mark
in the captured graph (``nn_module_stack``) and leaves the layer's GEMMs out of the plan. A graph that was compiled
before does not run again while the mark is there.
"""

from __future__ import annotations

import copyreg
import functools
from typing import Any

from torch import fx, nn

from loka_compile.passes.sites import name_sites

_MARK = "_loka_high_precision"


def put_back(module: nn.Module) -> None:
    """Mark a layer; it is compiled in high precision from its next call on. To be called between two steps."""
    if not is_put_back(type(module)):
        base: Any = type(module)
        object.__setattr__(module, "__class__", _marked_class(base))  # nn.Module's own is slow


def restore(module: nn.Module) -> None:
    """Take the mark away."""
    base = type(module).__dict__.get("_loka_unmarked")
    if base is not None:
        object.__setattr__(module, "__class__", base)


def is_put_back(cls: Any) -> bool:
    """Whether this is the class of a layer that was put back (with the probe's taps on it or without)."""
    return bool(getattr(cls, _MARK, False))


def sites_put_back(gm: fx.GraphModule) -> frozenset[str]:
    """The sites of a captured graph that lie in marked layers."""
    found = set()
    for node, site in name_sites(gm).items():
        stack = node.meta.get("nn_module_stack") or {}
        if any(is_put_back(entry[1]) for entry in stack.values()):
            found.add(site)
    return frozenset(found)


@functools.cache
def _marked_class(base: type[nn.Module]) -> type[nn.Module]:
    def reduce_ex(self: Any, protocol: Any) -> Any:
        # Copies and pickles are of the layer's own class: they belong to a model that nothing was put back in.
        reduced: tuple[Any, ...] = base.__reduce_ex__(self, protocol)  # type: ignore[assignment]
        made, args, *rest = reduced
        made = _bare if made is copyreg.__newobj__ else made  # type: ignore[attr-defined]
        return (made, tuple(base if arg is type(self) else arg for arg in args), *rest)

    members = {
        "__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__,
        "__reduce_ex__": reduce_ex, "_loka_unmarked": base, _MARK: True,
    }  # fmt: skip
    return type(base.__name__, (base,), members)


def _bare(cls: type[nn.Module], *args: Any) -> nn.Module:
    """``copyreg.__newobj__`` by another name: pickle insists that its class is that of the object."""
    return cls.__new__(cls, *args)
