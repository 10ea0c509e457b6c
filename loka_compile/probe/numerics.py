"""What all statistics share: plain fp32/fp64 arithmetic whatever the user has set, and scales that avoid overflow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

#: Exponents beyond these would make the inverse scale a denormal number.
MAX_EXPONENT = 120
#: A scale is kept until a magnitude outgrows it by this power of two: squares then still fit into fp32.
HEADROOM = 20


@contextlib.contextmanager
def plain_math(device: torch.device) -> Iterator[None]:
    """No autograd, no autocast, no inference tensors: statistics outlive the mode in which they were taken."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype for matrix products of ``x``: fp64 where fp32 products are set to be rounded to TF32 or bf16.

    The setting is global, so a thread beside the training must not change it, not even for a moment.
    """
    if x.dtype == torch.float64:
        return x.dtype
    backend = torch.backends.cuda if x.device.type == "cuda" else torch.backends.mkldnn
    exact = getattr(backend.matmul, "fp32_precision", "ieee") in ("none", "ieee")
    return torch.float32 if exact else torch.float64


def exponent_of(amax: Tensor) -> Tensor:
    """The int32 exponent e with amax <= 2**e, clamped; 0 for a magnitude of zero."""
    return torch.frexp(amax).exponent.clamp(-MAX_EXPONENT, MAX_EXPONENT)


def grown_exponent(exponent: Tensor, old_amax: Tensor, new_amax: Tensor) -> Tensor:
    """The exponent to go on with: the old one until magnitudes outgrow it, the first one that is not of a zero."""
    wanted = exponent_of(new_amax)
    keep = (old_amax > 0) & (wanted <= exponent + HEADROOM)
    return torch.where(keep, exponent, wanted)


def power_of_two(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """2**exponent, exactly (``pow`` promises that on no device): the bits of an fp32 number, for -126 to 127."""
    return ((exponent + 127) << 23).view(torch.float32).to(dtype)


def tensor_bytes(*tensors: Tensor | None) -> int:
    """Bytes held by the tensors, counted by shape."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
