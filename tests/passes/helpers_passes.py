"""Captures the torch-level graph that Dynamo would hand to the backend, and runs passes over it."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from loka_compile.config import LokaConfig
from loka_compile.passes.manager import run_passes
from loka_compile.passes.nodes import subgraphs
from loka_compile.passes.registry import snapshot
from loka_compile.report import Report


class Captured(Exception):
    """Carries the graph out of torch.compile."""


def capture(model: nn.Module, *inputs: Any, dynamic: bool | None = None) -> fx.GraphModule:
    """The torch-level graph of ``model`` on ``inputs``."""
    found: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, example_inputs: Any) -> Any:
        gm.meta["inputs"] = list(example_inputs)
        found.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)(*inputs)
    return found[0]


def rewrite(gm: fx.GraphModule, **options: Any) -> Report:
    """Run the passes in place."""
    config = LokaConfig(**options)
    report = Report(_keep_graphs=True)
    run_passes(gm, snapshot(config), config, report)
    return report


def run(model: nn.Module, *inputs: Any, dynamic: bool | None = None, **options: Any) -> tuple[fx.GraphModule, Report]:
    """Capture, then rewrite."""
    gm = capture(model, *inputs, dynamic=dynamic)
    return gm, rewrite(gm, **options)


def ops(gm: fx.GraphModule) -> list[str]:
    """The graph's calls by short name, in order, sub-graphs included; anchors and getitems are left out."""
    names = []
    for sub in subgraphs(gm):
        for node in sub.graph.nodes:
            if node.op == "call_function":
                target = node.target
                name = getattr(target, "__name__", str(target)).split(".")[0]
                if name not in ("anchor", "getitem"):
                    names.append(name)
            elif node.op == "call_method":
                names.append(str(node.target))
    return names


def golden(gm: fx.GraphModule) -> str:
    """The graph as text, with placeholders numbered, so that names chosen by Dynamo do not matter."""
    names: dict[fx.Node, str] = {}
    lines = []

    def show(value: Any) -> str:
        if isinstance(value, fx.Node):
            return names[value]
        if isinstance(value, (list, tuple)):
            inside = ", ".join(show(v) for v in value)
            return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' * (len(value) == 1)})"
        return repr(value)

    for node in gm.graph.nodes:
        if node.op == "placeholder":
            source = getattr(node, "_dynamo_source", None)
            tail = str(source.name).replace("_modules", "").replace("_parameters", "") if source else ""
            names[node] = "".join(c for c in tail.split("]", 1)[-1] if c.isalnum()) or "x"
        elif node.op == "output":
            lines.append(f"return {show(node.args[0])}")
        else:
            names[node] = f"v{len(lines)}"
            target = getattr(node.target, "__name__", str(node.target))
            lines.append(f"v{len(lines)} = {target}({', '.join(show(a) for a in node.args)})")
    return "\n".join(lines)
