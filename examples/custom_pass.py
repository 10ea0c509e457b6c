"""A rewrite pass of your own, ``python -m examples.custom_pass``: towers written with ReLU6 join the Mods.

Loka's Mods know linear -> norm -> Swish. A model whose towers end in ReLU6 has no such chain; but ReLU6 and HardSwish
bound their output alike, and HardSwish(x) = x * ReLU6(x + 3) / 6. The pass below swaps the one for the other *before*
loka's own passes look at the graph, so that they find their chains: LayerNorm becomes BlockNorm, biases go, and
what follows can be quantised with a fixed scale.

A pass is a function ``(gm, ctx) -> Changes``. It edits the torch-level FX graph in place and says what it did; loka
times it, checks the graph that it leaves, shows its matches in the report, and puts its source into the compile cache's
key. Register it before the first compile: what is compiled already stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
import typer
from torch import fx, nn

import loka_compile
from loka_compile import Changes, Match, PassContext, Refusal
from loka_compile.passes.base import source_line

NAME = "relu6_to_hard_swish"


def relu6_to_hard_swish(gm: fx.GraphModule, ctx: PassContext) -> Changes:
    """Replace every ReLU6, as a function or as the ``hardtanh`` that nn.ReLU6 calls, by HardSwish."""
    changes = Changes()
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or node.target not in (F.relu6, F.hardtanh):
            continue
        if node.target is F.hardtanh and _bounds(node) != (0.0, 6.0):
            changes.refused.append(Refusal(node.name, f"clamps to {_bounds(node)}, which is not ReLU6's 0 to 6"))
            continue
        with gm.graph.inserting_before(node):
            new = gm.graph.call_function(F.hardswish, (node.args[0] if node.args else node.kwargs["input"],))
        # Shape, dtype and the user's source line stay what they were.
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
        changes.matched.append(Match(new.name, "relu6", source=source_line(new)))
    return changes


def _bounds(node: fx.Node) -> tuple[float, float]:
    """Lower and upper limit of a ``hardtanh`` call."""
    values = dict(zip(("input", "min_val", "max_val"), node.args, strict=False)) | dict(node.kwargs)
    return float(values.get("min_val", -1.0)), float(values.get("max_val", 1.0))


@contextmanager
def registered() -> Iterator[None]:
    """The pass runs in every compile inside this block; without the block, register it once at the program's start."""
    loka_compile.register_pass(relu6_to_hard_swish, name=NAME, tier="model", before="bias_removal")
    try:
        yield
    finally:
        loka_compile.unregister_pass(NAME)


def tower(width: int = 256) -> nn.Module:
    """linear -> LayerNorm -> ReLU6, twice, and a prediction layer."""
    return nn.Sequential(
        nn.Linear(64, width), nn.LayerNorm(width), nn.ReLU6(),
        nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU6(),
        nn.Linear(width, 1),
    )  # fmt: skip


def main() -> None:
    """Show what loka finds in a ReLU6 tower, without the pass and with it."""
    torch.manual_seed(0)
    model, x = tower(), torch.randn(128, 64)
    print("without the pass:")
    loka_compile.explain(model, x, options={"table": "off"})
    torch.compiler.reset()  # the same model compiles again below, instead of running the code that it has
    with registered():
        print("with the pass:")
        loka_compile.explain(model, x, options={"table": "off"})


if __name__ == "__main__":
    typer.run(main)
