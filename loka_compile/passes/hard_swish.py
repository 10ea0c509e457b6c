"""Replaces Swish behind a linear layer or its norm by HardSwish (paper section III-B.3).

silu(x), x * sigmoid(x)      ->   hardswish(x)
x * sigmoid(norm(x))         ->   x * hardsigmoid(norm(x))        (SwishNorm)
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import fx

from loka_compile.passes.base import Changes, Match, PassContext, source_line
from loka_compile.passes.chains import find_chains
from loka_compile.passes.nodes import argument, kind
from loka_compile.passes.rewrite import replace
from loka_compile.passes.sites import name_sites


def hard_swish(gm: fx.GraphModule, ctx: PassContext) -> Changes:
    """See the module's docstring."""
    findings = find_chains(gm, ctx.config.block_size)
    names = name_sites(gm)
    changes = Changes(refused=findings.refusals["activation"])
    for chain in findings.chains:
        act, gate = chain.activation, chain.gate
        if act is None or kind(act) == "hardswish" or (gate is not None and kind(gate) == "hardsigmoid"):
            continue
        changes.matched.append(Match(names.get(chain.linear, chain.linear.name), chain.kind, (), source_line(act)))
        if gate is not None and chain.is_swish_norm:
            replace(gate, F.hardsigmoid, (gate.args[0],))
        elif gate is not None:
            replace(act, F.hardswish, (gate.args[0],))
            if not gate.users:
                gate.graph.erase_node(gate)
        else:
            replace(act, F.hardswish, (argument(act, 0, "input"),))
    return changes
