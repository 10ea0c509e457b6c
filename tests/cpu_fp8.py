"""FP8 products on CPUs that oneDNN has no kernel for (Sapphire Rapids, say): its reference multiplies there, which
takes 37 ns for each product of two numbers, and the suite most of an hour."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
#: Products below so many multiplications are torch's own in any case, with what it refuses.
SMALL = 1 << 18
#: Seconds of 2 million multiplications from which on torch's own are left: a kernel takes less than one thousandth.
SLOW = 0.02


def speed_up() -> bool:
    """Let large ``_scaled_mm`` on the CPU be made in fp32 if torch's own is the slow one. Returns whether it was."""
    a, b = (torch.zeros(rows, 256).to(torch.float8_e4m3fn) for rows in (32, 256))
    one = torch.ones(())
    try:
        for _ in range(2):  # a kernel is made in the first call
            start = time.perf_counter()
            torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)
            slow = time.perf_counter() - start > SLOW
    except (RuntimeError, NotImplementedError):
        return False  # no FP8 on this CPU at all
    if slow:
        _replace()
    return slow


def _replace() -> None:
    own = torch.library.get_kernel(aten._scaled_mm.default, "CPU")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

    def product(
        a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None = None,
        scale_result: Tensor | None = None, out_dtype: torch.dtype | None = None, use_fast_accum: bool = False,
    ) -> Tensor:  # fmt: skip
        plain = scale_result is None and out_dtype is not None and out_dtype.itemsize > 1
        if not plain or a.shape[0] * a.shape[1] * b.shape[1] < SMALL:
            return own.call_boxed(keys, a, b, scale_a, scale_b, bias, scale_result, out_dtype, use_fast_accum)
        made = a.float() @ b.float() * (scale_a * scale_b)
        return (made if bias is None else made + bias.float()).to(out_dtype)

    def into(*args: Any, out: Tensor) -> Tensor:
        return out.copy_(product(*args))

    global _library
    _library = torch.library.Library("aten", "IMPL")
    _library.impl("_scaled_mm", product, "CPU", allow_override=True)
    _library.impl("_scaled_mm.out", into, "CPU", allow_override=True)


_library: torch.library.Library
