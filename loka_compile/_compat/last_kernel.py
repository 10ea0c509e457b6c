"""Which operator of a library a function ends in, and what it hands to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: Operators of torch itself that are FP8 kernels.
_SCALED = ("_scaled_mm", "_scaled_mm_v2")


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.call: Callable[[], Any] | None = None
        self.result: Any = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace not in ("aten", "prims") or func.overloadpacket.__name__ in _SCALED:
            self.call, self.result = (lambda: func(*args, **kwargs)), result
        return result


def last_kernel(function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Run ``function`` once and return its last operator that is not plain torch, bound to its operands.

    What came before (scales brought into another layout) is left out, a cast of the result is kept. Without such an
    operator (a kernel launched by itself) it is ``function`` as it is.
    """
    with _Recorder() as recorder:
        out = function()
    call, result = recorder.call, recorder.result
    if call is None:
        return function
    if isinstance(result, torch.Tensor) and result.dtype == out.dtype:
        return call
    return lambda: call().to(out.dtype)
