"""Replaces LayerNorm and RMSNorm behind a linear layer by BlockNorm (paper section III-B.2).

    layer_norm(linear(x), (N,), w, b, eps)   ->   anchor(block_norm(linear(x), 256, eps)[0], [w, b])

BlockNorm has no parameters; the anchor gives the norm's own a zero gradient.
"""

from __future__ import annotations

import torch
from torch import fx

from loka_compile.passes.base import Changes, Match, PassContext, chain_unused, source_line
from loka_compile.passes.chains import find_chains
from loka_compile.passes.nodes import argument, kind
from loka_compile.passes.rewrite import anchor, replace
from loka_compile.passes.sites import name_sites


def block_norm(gm: fx.GraphModule, ctx: PassContext) -> Changes:
    """See the module's docstring."""
    findings = find_chains(gm, ctx.config.block_size)
    names = name_sites(gm)
    changes = Changes(refused=findings.refusals["norm"])
    for chain in findings.chains:
        norm = chain.norm
        if norm is None or kind(norm) == "block_norm":
            continue
        params = chain.norm_params
        match = Match(names.get(chain.linear, chain.linear.name), chain.kind, chain_unused(chain), source_line(norm))
        x = argument(norm, 0, "input")
        is_layer_norm = kind(norm) == "layer_norm"
        eps = argument(norm, 4, "eps", 1e-5) if is_layer_norm else argument(norm, 3, "eps")
        new = replace(norm, torch.ops.loka.block_norm.default, (x, ctx.config.block_size, eps), output=0)
        anchor(new, params)
        changes.matched.append(match)
    return changes
