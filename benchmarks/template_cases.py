"""What benchmarks/template_sweep.py measures: GEMMs with norm, activation and their output, fused and apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from _epilogue import hardswish

from loka_compile.gemm import Scaling
from loka_compile.lowering.quantize import packed, quantize
from loka_compile.ops import block_norm_ref

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16


@dataclass(frozen=True)
class Case:
    """One GEMM with its epilogue."""

    dtype: torch.dtype
    m: int
    n: int
    k: int
    training: bool
    fast: bool = True
    gated: bool = False
    blocks: bool = False

    @property
    def name(self) -> str:
        """How results call it."""
        kind = f"{str(self.dtype).removeprefix('torch.')} {self.m}x{self.n}x{self.k}"
        words = {"training": self.training, "exact": not self.fast, "SwishNorm": self.gated, "1x128": self.blocks}
        return " ".join([kind, *(word for word, true in words.items() if true)])


#: The shapes of issue 5, and what they are made of.
_SHIPPED = (
    Case(E4M3, 4096, 512, 512, True), Case(E4M3, 4096, 512, 512, False), Case(BF16, 4096, 512, 512, False),
    Case(BF16, 4096, 1024, 1024, False), Case(E4M3, 4096, 1024, 1024, True), Case(E4M3, 1024, 7680, 256, False),
    Case(E4M3, 4096, 2048, 2048, True), Case(BF16, 4096, 2048, 2048, False), Case(E4M3, 4096, 1024, 1024, False),
    Case(E4M3, 16384, 1024, 1024, True), Case(E4M3, 1024, 2048, 4096, False), Case(E4M3, 1024, 4096, 2048, False),
    Case(BF16, 1024, 2048, 4096, False), Case(BF16, 1024, 4096, 2560, False), Case(E4M3, 1024, 1024, 1024, True),
    Case(E4M3, 2048, 1024, 1024, True), Case(E4M3, 4096, 1024, 1024, False, fast=False),
    Case(E4M3, 4096, 1024, 1024, True, fast=False), Case(E4M3, 2048, 1024, 1024, True, fast=False),
    Case(E4M3, 4096, 2048, 2048, True, fast=False), Case(E4M3, 4096, 512, 512, True, fast=False),
    Case(E4M3, 4096, 1024, 1024, False, gated=True), Case(E4M3, 4096, 1024, 1024, True, gated=True),
    Case(BF16, 4096, 1024, 1024, False, gated=True), Case(BF16, 4096, 1024, 1024, True, gated=True),
    Case(E4M3, 4096, 2048, 2048, False, gated=True), Case(E4M3, 4096, 2048, 2048, True, gated=True),
    Case(BF16, 4096, 2048, 2048, False, gated=True), Case(BF16, 4096, 2048, 2048, True, gated=True),
    Case(E4M3, 4096, 4096, 4096, True, gated=True), Case(BF16, 4096, 4096, 4096, True, gated=True),
    Case(E4M3, 16384, 1024, 1024, True, gated=True), Case(BF16, 16384, 1024, 1024, True, gated=True),
    Case(E4M3, 4096, 512, 512, True, gated=True), Case(E4M3, 4096, 512, 512, True, fast=False, gated=True),
    Case(E4M3, 4096, 1024, 1024, True, fast=False, gated=True), Case(E4M3, 1024, 1024, 1024, True, gated=True),
    Case(E4M3, 1024, 2048, 4096, True, gated=True), Case(BF16, 1024, 2048, 4096, True, gated=True),
    Case(E4M3, 4096, 1024, 1024, False, gated=True, blocks=True),
    Case(E4M3, 4096, 2048, 2048, False, gated=True, blocks=True),
)  # fmt: skip
#: M, N, K whose tiles do not fill the last round of the device, and wide outputs of a short contraction.
_UNEVEN = (
    (4096, 1280, 1024), (4096, 1280, 2048), (4096, 2560, 2048), (4096, 1536, 1536), (2048, 2560, 2048),
    (8192, 1280, 1280), (4096, 3328, 1024), (4096, 4352, 1024), (2048, 3456, 3456), (1024, 2560, 4096),
    (4096, 1280, 4096), (4096, 2560, 8192),
)  # fmt: skip
_SHORT = (
    (1024, 7680, 256), (8192, 2048, 512), (4096, 2048, 512), (4096, 1024, 512), (16384, 512, 512), (16384, 256, 256),
    (4096, 1024, 256), (8192, 256, 512), (8192, 512, 256), (4096, 512, 256),
)  # fmt: skip
#: Outputs of few tiles.
_TINY = (
    (1024, 256, 256), (2048, 256, 256), (1024, 512, 512), (2048, 512, 512), (1024, 256, 512), (1024, 256, 1024),
    (1024, 512, 1024), (2048, 512, 1024), (4096, 512, 1024), (4096, 512, 512),
)  # fmt: skip
_FORMS = (
    Case(E4M3, 0, 0, 0, False), Case(E4M3, 0, 0, 0, True), Case(BF16, 0, 0, 0, False), Case(BF16, 0, 0, 0, True),
    Case(E4M3, 0, 0, 0, False, gated=True), Case(E4M3, 0, 0, 0, True, gated=True),
    Case(BF16, 0, 0, 0, False, gated=True), Case(BF16, 0, 0, 0, True, gated=True),
)  # fmt: skip


#: So short a K that a tile is mostly loads and stores.
_PAIRED = (
    (1024, 7680, 256), (2048, 2560, 256), (4096, 2048, 256), (8192, 1024, 256), (8192, 2048, 128), (4096, 1024, 256),
    (16384, 256, 256), (8192, 512, 256),
)  # fmt: skip


def _all(sizes: Iterable[tuple[int, int, int]], dtypes: Sequence[torch.dtype] = (E4M3, BF16)) -> tuple[Case, ...]:
    return tuple(replace(form, m=m, n=n, k=k) for m, n, k in sizes for form in _FORMS if form.dtype in dtypes)


#: Lists of cases by name.
CASES = {
    "shipped": _SHIPPED,
    "uneven": _all(_UNEVEN),
    "short": _all(_SHORT),
    "tiny": _all(_TINY),
    "paired": _all(_PAIRED, (E4M3,)),
}


def by_comparisons(y: torch.Tensor) -> torch.Tensor:
    """HardSwish as the epilogue had it before its gate was one instruction."""
    y = y.float()
    return torch.where(y <= -3, 0.0, torch.where(y >= 3, y, y * (y * (1 / 6) + 0.5)))


def layer(case: Case, activation: Callable[[torch.Tensor], torch.Tensor] = hardswish) -> Callable[..., object]:
    """What is compiled: GEMM, norm, activation and its output, with what the backward needs if training."""

    def fn(a: torch.Tensor, b: torch.Tensor, s: torch.Tensor) -> object:
        scales = (s, s) if case.dtype == E4M3 else (None, None)
        if case.gated:
            flags = (case.fast, not case.blocks, case.training, case.blocks)
            found = torch.ops.loka.gemm_norm_activation(a, b.t(), *scales, "swish_norm", 256, 1e-5, BF16, BF16, *flags)
            if case.blocks:
                return found[3:]
            return found[:3] if case.training else found[0]
        y, rstd = torch.ops.loka.gemm_block_norm(a, b.t(), *scales, 256, 1e-5, BF16, case.fast, case.training)
        q = (activation(y) * 16).to(E4M3)
        return (q, y, rstd) if case.training else q

    return fn


def apart(case: Case) -> Callable[..., object]:
    """The same from cuBLASLt's GEMM and what Inductor makes of the rest."""

    def fn(a: torch.Tensor, b: torch.Tensor, s: torch.Tensor) -> object:
        fp8 = case.dtype == E4M3
        h = torch._scaled_mm(a, b.t(), s, s, None, None, BF16, case.fast) if fp8 else a @ b.t()
        y, rstd = block_norm_ref(h, 256, 1e-5)
        if not case.gated:
            q = (F.hardswish(y.float()) * 16).to(E4M3)
            return (q, y, rstd) if case.training else q
        out = h * F.hardsigmoid(y)
        if case.blocks:
            q, scale = quantize(out, Scaling.BLOCK_1X128)
            return q, packed(scale.t())
        return (out, rstd) if case.training else out

    return fn
