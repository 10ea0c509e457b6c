"""The kernel libraries, one file each, imported when first asked for.

A library of your own: a file with a :class:`~loka_compile.lowering.providers.base.Provider` and one line here.
"""

from __future__ import annotations

import functools
import importlib

from loka_compile.errors import UnknownNameError
from loka_compile.lowering.providers.base import Provider

#: Name, module and class of every provider; the baseline first, then in the order in which ties are broken.
PROVIDERS = (
    ("high_precision", "loka_compile.lowering.providers.high_precision", "HighPrecision"),
    ("torch", "loka_compile.lowering.providers.torch_scaled_mm", "TorchScaledMM"),
    ("fbgemm", "loka_compile.lowering.providers.mslk", "Mslk"),
    ("deepgemm", "loka_compile.lowering.providers.deepgemm", "DeepGemm"),
    ("torchao", "loka_compile.lowering.providers.torchao", "TorchAO"),
    ("triton", "loka_compile.lowering.providers.triton_gemm", "TritonGemm"),
    ("torch_mx", "loka_compile.lowering.providers.torch_mx", "TorchMX"),
    ("torch_rocm", "loka_compile.lowering.providers.torch_rocm", "TorchROCm"),
    ("emulated", "loka_compile.lowering.providers.emulated", "Emulated"),
)

#: Those whose kernels are compiled, or chosen by timing, at the first call of each shape: seconds each.
COMPILE_AT_FIRST_CALL = frozenset({"deepgemm", "torchao", "triton"})


@functools.cache
def get_provider(name: str) -> Provider:
    """The provider of that name, one instance per process. Imports its file, not yet its library.

    Raises:
        UnknownNameError: no such provider; the text lists those there are.
    """
    for known, module, cls in PROVIDERS:
        if known == name:
            provider = getattr(importlib.import_module(module), cls)()
            assert isinstance(provider, Provider)
            return provider
    raise UnknownNameError("provider", name, [known for known, _, _ in PROVIDERS])


def available_providers(device: str | None = None) -> dict[str, str | None]:
    """Every provider's name with None if this machine can run it, else the reason why it is skipped.

    Args:
        device: "cuda" or "cpu", where the operands are; None is CUDA where there is one.
    """
    return {name: get_provider(name).supported(device=device) for name, _, _ in PROVIDERS}
