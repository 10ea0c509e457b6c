"""The fused kernels' operators against torch's rules for custom operators: no hidden mutation, shapes as promised."""

from __future__ import annotations

import pytest
import torch

import loka_compile.lowering.fused.joint  # noqa: F401  (registers them)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
loka = torch.ops.loka


def fp8(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(E4M3)


def state() -> torch.Tensor:
    return torch.zeros(10, dtype=torch.int32)


GRADIENT = (torch.randn(19, 384).bfloat16(), torch.randn(19, 384).bfloat16(), torch.rand(19, 2))
ONE = torch.tensor(0.5)
CALLS = {
    "meeting_state": (loka.meeting_state.default, (ONE,)),
    "everything": (loka.block_norm_backward_fp8.default, (*GRADIENT, state(), 256, "hardswish", E4M3, *[True] * 4)),
    "q alone": (
        loka.block_norm_backward_fp8.default, (*GRADIENT, state(), 256, "", E5M2, False, True, False, False)
    ),
    "grad_input": (
        loka.grad_input_fp8.default,
        (fp8(19, 32), fp8(384, 32).t(), ONE, ONE, *GRADIENT[1:], state(), 256, "silu", E4M3, True, True, True, True),
    ),
    "grouped": (
        loka.grouped_scaled_mm.default,
        ([fp8(24, 48)] * 3, [fp8(40, 48)] * 3, [ONE] * 3, [ONE] * 3, torch.bfloat16, True),
    ),
    "weights": (loka.quantize_weights.default, ([torch.randn(24, 48), torch.randn(7, 5)], E4M3, [True, False])),
    "materialised": (loka.materialise.default, (torch.randn(3, 5).t(),)),
    "turned": (loka.turn_fp8.default, (fp8(19, 48),)),
    "residual": (
        loka.gemm_block_norm.default,
        (fp8(19, 32), fp8(384, 32).t(), ONE, ONE, 256, 1e-5, torch.bfloat16, True, True, GRADIENT[0]),
    ),
    "blocks": (
        loka.gemm_block_norm.default,
        (fp8(19, 256), fp8(384, 256).t(), torch.rand(2, 19).t(), torch.rand(3, 4), 256, 1e-5, torch.bfloat16, True,
         True),
    ),
    "everything of SwishNorm": (
        loka.gemm_norm_activation.default,
        (fp8(19, 32), fp8(384, 32).t(), ONE, ONE, "swish_norm", 256, 1e-5, *[torch.bfloat16] * 2, *[True] * 4,
         GRADIENT[0]),
    ),
    "SwishNorm alone": (
        loka.gemm_norm_activation.default,
        (*[torch.randn(64, 64)] * 2, None, None, "swish_norm", 256, 1e-5, *[torch.float32] * 2, True, True, False,
         False),
    ),
    "HardSwish in FP8 alone": (
        loka.gemm_norm_activation.default,
        (fp8(19, 32), fp8(384, 32).t(), ONE, ONE, "hardswish", 256, 1e-5, *[torch.bfloat16] * 2, True, False, False,
         True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name: str) -> None:
    op, args = CALLS[name]
    # The check of the schema multiplies its inputs, which FP8 cannot on a CPU.
    in_fp8 = any(t.dtype == E4M3 for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor))
    torch.library.opcheck(op, args, test_utils=("test_faketensor",) if in_fp8 else ("test_schema", "test_faketensor"))
