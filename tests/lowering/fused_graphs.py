"""Graphs for the tests of the fusion passes: traced over fake tensors, on a CUDA device that need not exist."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import loka_compile.lowering.fused.ops
import loka_compile.ops  # noqa: F401

aten = torch.ops.aten
loka = torch.ops.loka
E4M3 = torch.float8_e4m3fn


def trace(fn: Callable[..., Any], *inputs: tuple[tuple[int, ...], torch.dtype], device: str = "cuda") -> fx.GraphModule:
    """``fn`` over empty tensors of the given shapes and dtypes, as an aten graph with values in ``meta``."""
    with FakeTensorMode():
        return make_fx(fn)(*[torch.empty(shape, dtype=dtype, device=device) for shape, dtype in inputs])


def targets(gm: fx.GraphModule) -> Counter[str]:
    return Counter(str(node.target) for node in gm.graph.nodes if node.op == "call_function")


def quantise(x: torch.Tensor, dtype: torch.dtype = E4M3) -> tuple[torch.Tensor, torch.Tensor]:
    """Tensorwise by its own amax, as loka_compile.lowering.quantize traces."""
    from loka_compile.gemm import Scaling
    from loka_compile.lowering.quantize import quantize

    q = quantize(x, Scaling.TENSORWISE, dtype=dtype)
    return q.data, q.scale


def fp8_linear(x: torch.Tensor, w: torch.Tensor, sx: torch.Tensor, sw: torch.Tensor, **more: Any) -> torch.Tensor:
    """x [M, K] and w [N, K] in FP8."""
    out_dtype, fast = more.get("out_dtype", torch.bfloat16), more.get("fast", True)
    return aten._scaled_mm.default(x, w.t(), sx, sw, None, None, out_dtype, fast)


def relative(found: torch.Tensor | None, expected: torch.Tensor) -> float:
    """Relative Frobenius error of ``found``."""
    assert found is not None
    return ((found.double() - expected).norm() / expected.norm()).item()
