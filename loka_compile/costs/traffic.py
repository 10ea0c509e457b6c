"""How many bytes GEMMs and quantisers move. No torch import."""

from __future__ import annotations

from loka_compile.costs.surface import Shape
from loka_compile.gemm import Scaling


def megabytes(shape: Shape, width: int) -> float:
    """Megabytes of both inputs at ``width`` bytes per element, and of the output (16 bits, or wider as the inputs)."""
    m, n, k = shape
    return (width * (m * k + n * k) + max(2, width) * m * n) * 1e-6


def element_bytes(dtype: str) -> int:
    """Bytes of an element: of fp32, or of bf16 and fp16."""
    return 4 if dtype == "float32" else 2


def quantize_bytes(scaling: Scaling, dtype: str) -> int:
    """Bytes that a quantiser moves per element: what it reads (tensorwise: twice), and one byte written."""
    return (2 if scaling is Scaling.TENSORWISE else 1) * element_bytes(dtype) + 1
