"""Pointwise operators that Inductor fuses into what surrounds them, made of NVIDIA's own instructions.

Private: ``make_pointwise`` and ``virtualized.ops``, with ``inline_asm_elementwise`` (torch 2.11 to 2.14).
"""

from __future__ import annotations

from typing import Any

import torch

from loka_compile.kernels.config import GATE_PTX


def has_ptx(device: torch.device) -> bool:
    """Whether generated kernels may hold NVIDIA's instructions; also where there is no GPU to ask."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def gate(x: Any) -> Any:
    """Lower ``relu6(x + 3) / 6`` of an fp32 node, for who multiplies by x afterwards: what becomes of a NaN is open."""
    from torch._inductor.lowering import make_pointwise
    from torch._inductor.virtualized import ops

    def by_instruction(value: Any) -> Any:
        return ops.inline_asm_elementwise(
            value, asm=GATE_PTX, constraints="=f,f", dtype=torch.float32, is_pure=True, pack=1
        )

    def by_comparisons(value: Any) -> Any:
        def constant(number: float) -> Any:
            return ops.constant(number, torch.float32)

        found = ops.add(ops.mul(value, constant(1 / 6)), constant(0.5))
        found = ops.where(ops.lt(found, constant(0.0)), constant(0.0), found)
        return ops.where(ops.gt(found, constant(1.0)), constant(1.0), found)

    return make_pointwise(by_instruction if has_ptx(x.get_device()) else by_comparisons)(x)
