"""The vocabulary of a GEMM: its role, its shape, and the recipes it can run in. No torch import.

Every GEMM is written the way FP8 hardware wants it ("NT"): ``out[m, n] = A[m, k] @ B[n, k].T`` with the
contraction ``k`` contiguous in both operands. For a linear layer ``y[M, N] = x[M, K] @ W[N, K].T``:

    role          out          A            B            m, n, k
    forward       y            x            W            M, N, K
    grad_input    dx           dy           W.T          M, K, N
    grad_weight   dW           dy.T         x.T          N, K, M
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Role(str, Enum):
    """Which of a linear layer's three GEMMs this is."""

    FORWARD = "forward"
    GRAD_INPUT = "grad_input"
    GRAD_WEIGHT = "grad_weight"

    def __str__(self) -> str:
        return self.value


class Scaling(str, Enum):
    """How many elements of an operand share one fp32 scale. Blocks run along the contraction dimension."""

    NONE = "none"
    TENSORWISE = "tensorwise"
    ROWWISE = "rowwise"
    #: With scales that are powers of two (OCP MX).
    BLOCK_1X32 = "1x32"
    BLOCK_1X128 = "1x128"
    BLOCK_128X128 = "128x128"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Recipe:
    """How one GEMM is computed in FP8: scaling and dtype of each operand, and how products are accumulated.

    ``fast_accum`` leaves partial sums in the tensor core's reduced-precision accumulator; without it they are
    promoted to fp32 every 128 products. The two are recipes of their own because their errors differ; the name of one
    with fast accumulation ends in ``_fast``, so that files which know names alone tell them apart (:func:`is_fast`).
    """

    name: str
    a: Scaling
    b: Scaling
    fast_accum: bool = False
    a_dtype: str = "float8_e4m3fn"
    b_dtype: str = "float8_e4m3fn"

    @property
    def is_high_precision(self) -> bool:
        """True for the baseline, which quantises nothing."""
        return self.a is Scaling.NONE


NATIVE = Recipe("native", Scaling.NONE, Scaling.NONE)
TENSORWISE = Recipe("tensorwise", Scaling.TENSORWISE, Scaling.TENSORWISE)
TENSORWISE_FAST = Recipe("tensorwise_fast", Scaling.TENSORWISE, Scaling.TENSORWISE, fast_accum=True)
ROWWISE = Recipe("rowwise", Scaling.ROWWISE, Scaling.ROWWISE)
ROWWISE_FAST = Recipe("rowwise_fast", Scaling.ROWWISE, Scaling.ROWWISE, fast_accum=True)
#: Activations or gradients in 1x128 blocks against a weight in 128x128 blocks (forward, grad_input).
BLOCKWISE = Recipe("blockwise", Scaling.BLOCK_1X128, Scaling.BLOCK_128X128)
#: Both operands in 1x128 blocks along the batch (grad_weight).
BLOCKWISE_1X128 = Recipe("blockwise_1x128", Scaling.BLOCK_1X128, Scaling.BLOCK_1X128)
#: Both operands in 128x128 blocks: one quantisation of a tensor serves all of its GEMMs by byte transposes.
BLOCKWISE_128X128 = Recipe("blockwise_128x128", Scaling.BLOCK_128X128, Scaling.BLOCK_128X128)
#: MXFP8 of Blackwell's tensor cores: blocks of 32 along the contraction, scales of 8 exponent bits.
MXFP8 = Recipe("mxfp8", Scaling.BLOCK_1X32, Scaling.BLOCK_1X32)
#: The FP8 of AMD's MI300: no infinity, no negative zero, largest number 240.
_FNUZ = "float8_e4m3fnuz"
TENSORWISE_FNUZ = Recipe("tensorwise_fnuz", Scaling.TENSORWISE, Scaling.TENSORWISE, a_dtype=_FNUZ, b_dtype=_FNUZ)
ROWWISE_FNUZ = Recipe("rowwise_fnuz", Scaling.ROWWISE, Scaling.ROWWISE, a_dtype=_FNUZ, b_dtype=_FNUZ)


def is_fast(recipe: str) -> bool:
    """Whether the recipe of this name has fast accumulation."""
    return recipe.endswith("_fast")


def refused_for_role(recipe: str, role: str) -> str:
    """Why no plan gives a GEMM of that role to the recipe of that name, or "" (docs/models.md has the measurement)."""
    if role == Role.GRAD_WEIGHT and is_fast(recipe):
        return "fast accumulation is not for grad_weight, which sums over the batch"
    return ""


@dataclass(frozen=True)
class Gemm:
    """One GEMM of a model: ``out[m, n] = A[m, k] @ B[n, k].T``.

    ``m``, ``n``, ``k`` are plain numbers; a dynamic batch enters as its hint, and ``dynamic`` names the letters that
    vary from call to call. ``a_bound`` and ``b_bound`` are proven upper bounds of the operands' absolute values
    (16 after BlockNorm over blocks of 256): such an operand is quantised with a fixed scale, without an amax.
    ``a_fused`` and ``b_fused``: a tensorwise quantisation of that operand is part of a fused kernel (the one that
    produces it, or the one that quantises all weights), so that only the bytes written count.
    ``norm``: a BlockNorm reads the result; "epilogue" where a GEMM of ours could do it, "apart" where none can.
    """

    site: str
    role: Role
    m: int
    n: int
    k: int
    dtype: str = "bfloat16"
    dynamic: str = ""
    a_bound: float | None = None
    b_bound: float | None = None
    a_fused: bool = False
    b_fused: bool = False
    norm: str = ""

    @property
    def flops(self) -> int:
        """Floating-point operations, a multiply-add counted as two."""
        return 2 * self.m * self.n * self.k

    def __str__(self) -> str:
        return f"{self.site} {self.role} {self.m}x{self.n}x{self.k} {self.dtype}"
