"""Where a step's time goes: kernels sorted into a few kinds by their names, for the counterpart of figure 11."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch
from torch.profiler import ProfilerActivity, profile

KINDS = ("gemm", "gemm + norm", "norm and activation", "quantise", "attention", "embedding", "optimizer", "other")

# The first that matches; a fused kernel carries the names of all that is in it, so what it is for comes first. Without
# max-autotune the only templates are ours: a GEMM with its norm.
_RULES = (
    ("optimizer", r"adam|multi_tensor|foreach"),
    ("gemm + norm", r"gemm_block_norm|triton_tem|^_grad_input_fp8_kernel|^_kernel$"),
    ("norm and activation", r"^_backward(_fp8)?_kernel"),
    ("quantise", r"^_(cast|amax|weights|blocks|rows|both_1x128)\w*kernel"),
    ("attention", r"flash|fmha|attention|softmax"),
    (
        "gemm",
        r"gemm|nvjet|cutlass|xmma|scaled_mm|triton_mm|\bmm\b|::bmm|::addmm|::linear|::matmul|splitk|::mm",
    ),
    ("embedding", r"embedding|radix|sort|scatter|gather|scan|cumsum|index_?(ing|add|copy|put|select|func|elementwise)"),
    ("quantise", r"float8|fp8|e4m3|e5m2|quant|amax"),
    ("norm and activation", r"norm|silu|swish|sigmoid|relu|tanh|mul_sum|welford"),
)


def kind_of(kernel: str) -> str:
    """The kind of a kernel (or, on a CPU, of an operator), by its name."""
    name = kernel.lower()
    return next((kind for kind, pattern in _RULES if re.search(pattern, name)), "other")


def kernel_times(call: Callable[[], object], repeats: int, device: torch.device) -> dict[str, float]:
    """Microseconds of one call by kernel, the longest first: kernel time on a GPU, own time of operators on a CPU."""
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]) as recorded:
        for _ in range(repeats):
            call()
        if on_gpu:
            torch.cuda.synchronize()
    times = {
        event.key: (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / repeats
        for event in recorded.key_averages()
    }
    return dict(sorted(times.items(), key=lambda item: -item[1]))


def breakdown(times: Mapping[str, float]) -> dict[str, float]:
    """The same by kind."""
    found = dict.fromkeys(KINDS, 0.0)
    for kernel, spent in times.items():
        found[kind_of(kernel)] += spent
    return found
