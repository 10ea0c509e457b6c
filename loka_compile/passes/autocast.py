"""Which dtype autocast casts to at each node: around the graph when it is compiled, or entered inside it.

Dynamo writes ``with torch.autocast(...)`` into the graph as a pair of calls, ``_enter_autocast(device_type, dtype,
enabled, cache)`` and ``_exit_autocast(that node)``, in the order in which they run.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from loka_compile._compat.autocast import enter_autocast, exit_autocast, has_autocast_rule
from loka_compile.passes.nodes import argument, callers, kind, subgraphs

#: Device type -> dtype, or None where it is off; what a graph has not set is as it is around the graph.
State = Mapping[str, torch.dtype | None]

_OPERATORS = {"layer_norm": "aten::layer_norm", "rms_norm": "aten::rms_norm", "block_norm": "loka::block_norm"}


def states(gm: fx.GraphModule) -> dict[fx.Node, State]:
    """What autocast does at every node of the graph and of its sub-graphs, which run under their caller's state."""
    called_from = callers(gm)
    found: dict[fx.Node, State] = {}
    for sub in subgraphs(gm):
        state: State = found.get(called_from[sub.graph], {}) if sub.graph in called_from else {}
        outside: dict[fx.Node, State] = {}
        for node in sub.graph.nodes:
            if node.target is enter_autocast:
                outside[node] = state
                device_type = argument(node, 0, "device_type")
                dtype = argument(node, 1, "dtype") or at(state, device_type) or torch.get_autocast_dtype(device_type)
                state = {**state, device_type: dtype if argument(node, 2, "enabled", True) else None}
            elif node.target is exit_autocast:
                state = outside.get(node.args[0], state)
            found[node] = state
    return found


def at(state: State, device_type: str) -> torch.dtype | None:
    """The dtype that autocast casts to on such a device, or None where it is off."""
    if device_type in state:
        return state[device_type]
    on = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if on else None


def widens(norm: fx.Node, device_type: str) -> bool:
    """Whether autocast runs this norm in fp32 on such a device, whatever it is given: on CUDA, not on the CPU."""
    return has_autocast_rule(_OPERATORS[kind(norm)], device_type)
