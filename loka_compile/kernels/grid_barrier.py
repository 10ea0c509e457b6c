"""Programs of one launch that wait for each other: a maximum over a whole tensor without a second kernel.

The programs must all be resident, so a kernel that meets is launched cooperatively (:func:`together`): the driver then
starts all of its programs or none. Triton's interpreter runs one program after another; there the same kernel is
launched once for what is before the meeting and once for what is behind it (:func:`phases`).

The state is int32: programs that came, programs that left, the maximum as bits of fp32. It is all zero before a launch,
and the last program to leave makes it so again: one state serves all kernels of a graph, one after another.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from loka_compile.kernels import device as dev

#: Elements of a state.
STATE = 3


@triton.jit
def report(STATE, largest_bits):
    """Take part in the maximum: ``largest_bits`` is the largest of :func:`loka_compile.kernels.device.bits` here."""
    tl.atomic_max(STATE + 2, largest_bits, sem="relaxed")


@triton.jit
def meet(STATE):
    """Wait until every program of the launch has come here; what they reported before is then there to be read."""
    count = tl.num_programs(0)
    tl.debug_barrier()  # what other threads of this program reported comes before the next line
    tl.atomic_add(STATE, 1, sem="acq_rel")
    waiting = tl.atomic_add(STATE, 0, sem="acquire") < count
    while waiting:
        waiting = tl.atomic_add(STATE, 0, sem="acquire") < count


@triton.jit
def largest(STATE):
    """The maximum that was reported, as fp32. Read by an atomic: the first-level cache may hold an older value."""
    return tl.atomic_max(STATE + 2, 0, sem="relaxed").to(tl.float32, bitcast=True)


@triton.jit
def leave(STATE):
    """The last program to leave makes the state zero. Nothing of it may be read afterwards."""
    if tl.atomic_add(STATE + 1, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        for i in tl.static_range(3):
            tl.store(STATE + i, 0)


def together(device: torch.device, registers: int | None = None) -> dict[str, Any]:
    """Arguments of a launch whose programs meet; ``registers`` a thread let several share a multiprocessor."""
    bound = dev.bounded(registers)
    return {"launch_cooperative_grid": True, **bound} if device.type == "cuda" else bound


def phases(device: torch.device) -> tuple[int, ...]:
    """With which PHASE to launch: 0 is all in one; 1 is what is before the meeting, 2 what is behind it."""
    return (0,) if device.type == "cuda" else (1, 2)
