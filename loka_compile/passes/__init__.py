"""Graph passes: torch-level FX graph in, rewritten graph out. The order below is the order in which they run.

To add a pass of ours: one file here, one line below, one test file. A user's own pass is placed with
:func:`register_pass`, relative to one of these names.
"""

from __future__ import annotations

from loka_compile.passes.base import Changes, Match, Pass, PassContext, PassFn, Refusal, Tier
from loka_compile.passes.bias_removal import bias_removal
from loka_compile.passes.block_norm import block_norm
from loka_compile.passes.hard_swish import hard_swish
from loka_compile.passes.residual_dtype import residual_dtype
from loka_compile.passes.sites import sites
from loka_compile.passes.token_mixing import token_mixing

DEFAULT_PASSES: tuple[Pass, ...] = (
    Pass("bias_removal", Tier.MODEL, bias_removal, __name__),
    Pass("block_norm", Tier.MODEL, block_norm, __name__),
    Pass("hard_swish", Tier.MODEL, hard_swish, __name__),
    Pass("residual_dtype", Tier.NUMERICS, residual_dtype, __name__),
    Pass("token_mixing", Tier.NUMERICS, token_mixing, __name__),
    Pass("sites", Tier.EXACT, sites, __name__),
)

__all__ = ["DEFAULT_PASSES", "Changes", "Match", "Pass", "PassContext", "PassFn", "Refusal", "Tier"]
