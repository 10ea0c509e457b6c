"""Operands that cost nothing to make: views into a few large buffers of random numbers.

Filling a fresh tensor per arm and copy would take longer than timing it. Views at different places of a buffer are as
good: each is other memory, and the numbers are random (a GPU multiplies zeros faster than data).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from loka_compile.gemm import Scaling
from loka_compile.lowering.quantize import BLOCK, BLOCK_MX, Quantized

#: Start of a view: kernels want 16 bytes, a little more does not hurt.
_ALIGN = 256


class Arena:
    """Random memory of one dtype; :meth:`take` hands out one view behind the other and starts over at the end.

    Args:
        elements: size of the buffer; no view can be larger.
        dtype: bf16, fp16, fp32 (standard normal), or an FP8 format (as a quantiser fills it).
        device: where it lies.
    """

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        unit = torch.randn(min(elements, 1 << 26), device=device, generator=generator)
        if dtype.itemsize == 1:
            # A normal sample's amax is at 5 to 6 standard deviations; the quantiser puts it at the format's maximum.
            unit = (unit * 80).clamp(-448, 448)
        filled = unit.to(dtype)
        self.buffer = torch.empty(elements, dtype=dtype, device=device)
        raw = self.buffer.view(torch.uint8) if dtype.itemsize == 1 else self.buffer
        source = filled.view(torch.uint8) if dtype.itemsize == 1 else filled
        for start in range(0, elements, source.numel()):
            part = raw[start : start + source.numel()]
            part.copy_(source[: part.numel()])
        self._next = 0

    def take(self, rows: int, columns: int) -> Tensor:
        """A contiguous [rows, columns], no autograd view, at a place of its own until the buffer is through."""
        count = rows * columns
        if count > self.buffer.numel():
            raise ValueError(f"{rows} x {columns} elements exceed the buffer of {self.buffer.numel()}")
        if self._next + count > self.buffer.numel():
            self._next = 0
        start, self._next = self._next, -(-(self._next + count) // _ALIGN) * _ALIGN
        # set_ and not a slice: torch.compile would look at the whole buffer as the base of a view.
        return self.buffer.new_empty(0).set_(self.buffer.untyped_storage(), start, (rows, columns), (columns, 1))

    def rewind(self) -> None:
        """Start at the beginning again: the next arm reads what this one did."""
        self._next = 0


class Operands:
    """Arenas by dtype, made when first asked for."""

    def __init__(self, device: torch.device, elements: int = 1 << 31) -> None:
        self.device, self.elements = device, elements
        self._arenas: dict[torch.dtype, Arena] = {}
        self._scales: dict[tuple[int, ...], Tensor] = {}

    def take(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """See :meth:`Arena.take`."""
        if dtype not in self._arenas:
            self._arenas[dtype] = Arena(self.elements, dtype, self.device)
        return self._arenas[dtype].take(rows, columns)

    def rewind(self) -> None:
        """See :meth:`Arena.rewind`."""
        self._scales.clear()
        for arena in self._arenas.values():
            arena.rewind()

    def quantized(self, rows: int, k: int, scaling: Scaling, dtype: torch.dtype) -> Quantized:
        """An operand [rows, k] as a quantiser would have made it: FP8 data and scales of a plausible size.

        Until :meth:`rewind`, operands of one shape share their scales: a hundredth of the bytes at most.
        """
        blocks: tuple[int, ...] = {
            Scaling.TENSORWISE: (),
            Scaling.ROWWISE: (rows, 1),
            Scaling.BLOCK_1X32: (rows, math.ceil(k / BLOCK_MX)),
            Scaling.BLOCK_1X128: (rows, math.ceil(k / BLOCK)),
            Scaling.BLOCK_128X128: (math.ceil(rows / BLOCK), math.ceil(k / BLOCK)),
        }[scaling]
        if blocks not in self._scales:
            self._scales[blocks] = torch.rand(blocks, device=self.device) * 0.01 + 0.005
        return Quantized(self.take(rows, k, dtype), self._scales[blocks])


def copies_past_l2(sizes: Sequence[int], l2: int, least: int = 4, most: int = 64) -> int:
    """How many sets of tensors, ``sizes`` bytes each, fill the L2 cache twice: then none is found there again."""
    return max(least, min(most, -(-2 * l2 // max(1, sum(sizes)))))
