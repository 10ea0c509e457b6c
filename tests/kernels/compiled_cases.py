"""Compiles Triton kernels for sm_90 without a GPU and prints, as JSON, what became of them. See test_compiles.py."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from loka_compile.kernels import (
    block_norm_backward,
    block_norm_backward_fp8,
    device,
    gemm_block_norm,
    grad_input_fp8,
    grid_barrier,
    grouped_gemm,
    quantize,
    scaled_gemm,
)  # fmt: skip
from loka_compile.kernels.config import GemmConfig
from loka_compile.lowering.fused.configs import backward_config, find, gemm_kernel
from loka_compile.lowering.fused.configs import config_for as shipped
from loka_compile.lowering.providers.triton_configs import config_for

FP8 = torch.float8_e4m3fn
MULTIPROCESSORS = 132


class Driver:
    """What Triton asks of a GPU before it compiles for one."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def watch(found: list[dict[str, Any]]) -> None:
    """Let launches of our kernels compile only, and note the result."""
    triton.runtime.driver.set_active(Driver())
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
    grid_barrier.phases = lambda device: (0,)  # as on a GPU
    for module in (
        block_norm_backward, block_norm_backward_fp8, gemm_block_norm, grad_input_fp8, grouped_gemm, quantize,
        scaled_gemm,
    ):  # fmt: skip
        for name, kernel in list(vars(module).items()):
            if isinstance(kernel, JITFunction) and name.endswith("kernel"):

                def run(*args: Any, grid: Any, warmup: Any, original: Any = kernel.run, **options: Any) -> None:
                    found.append(facts(original(*args, grid=grid, warmup=True, **options)))

                kernel.run = run


def usage(compiled: Any) -> dict[str, int]:
    """Registers ("REG") and spilt bytes ("STACK") of a thread."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        said = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return {name: int(number) for name, number in re.findall(r"(REG|STACK):(\d+)", said.stdout)}


def facts(compiled: Any) -> dict[str, Any]:
    """Name, shared memory, spilt bytes, registers, tensor core instructions."""
    numbers = usage(compiled)
    return {
        "kernel": compiled.metadata.name, "shared": compiled.metadata.shared, "warps": compiled.metadata.num_warps,
        "registers": numbers["REG"], "stack": numbers["STACK"],
        "ahead": compiled.asm["ptx"].count("cp.async.cg.shared"),
        "mma": sorted(set(re.findall(r"wgmma\.mma_async\S+", compiled.asm["ptx"]))),
        "tma": "cp.async.bulk.tensor" in compiled.asm["ptx"],
    }  # fmt: skip


def gemms(found: list[dict[str, Any]]) -> dict[str, Any]:
    results = {}
    for mode, (m, n, k) in [
        ("rowwise_fast", (1024, 256, 7680)), ("tensorwise_fast", (4096, 4096, 2048)), ("rowwise", (4096, 4096, 2048)),
        ("blockwise", (4096, 4096, 2048)), ("blockwise_1x128", (199, 3456, 640)), ("blockwise_128x128", (1, 1, 13)),
    ]:  # fmt: skip
        blocks = -(-k // 128)
        scales = {
            "t": (torch.empty(()), torch.empty(()), 0, 0), "r": (torch.empty(m, 1), torch.empty(n, 1), 0, 0),
            "blockwise": (torch.empty(blocks, m).t(), torch.empty(-(-n // 128), blocks), 1, 128),
            "blockwise_1x128": (torch.empty(blocks, m).t(), torch.empty(blocks, n).t(), 1, 1),
            "blockwise_128x128": (torch.empty(-(-m // 128), blocks), torch.empty(-(-n // 128), blocks), 128, 128),
        }  # fmt: skip
        scale_a, scale_b, rows_a, rows_b = scales[mode if mode in scales else mode[0]]
        config: GemmConfig = config_for(mode, m, n, k, MULTIPROCESSORS)
        found.clear()
        scaled_gemm.scaled_gemm(
            torch.empty(m, k, dtype=FP8), torch.empty(n, k, dtype=FP8), scale_a, scale_b, torch.bfloat16,
            fast=mode.endswith("_fast"), config=config, rows_a=rows_a, rows_b=rows_b,
        )  # fmt: skip
        results[f"{mode} {m}x{n}x{k}"] = list(found)
    return results


def grouped(found: list[dict[str, Any]]) -> dict[str, Any]:
    results = {}
    for width, batch in [(512, 4096), (1024, 4096), (384, 208)]:
        found.clear()
        a, scale = [torch.empty(width, batch, dtype=FP8) for _ in range(4)], [torch.empty(())] * 4
        config = shipped("grouped_gemm", width, width, batch, 1)
        grouped_gemm.grouped_gemm(a, a, scale, scale, torch.bfloat16, fast=True, config=config)
        results[f"{width} {batch}"] = list(found)
    return results


def in_parts(found: list[dict[str, Any]]) -> dict[str, Any]:
    results = {}
    for block_m, warps, stages, splits in [(64, 8, 4, 8), (64, 4, 4, 2), (128, 8, 3, 16)]:
        found.clear()
        a, b, out = (
            torch.empty(1024, 7680, dtype=FP8),
            torch.empty(256, 7680, dtype=FP8),
            torch.empty(1024, 256, dtype=FP8),
        )
        config = GemmConfig(block_m, 256, 128, warps, stages, tma=True, splits=splits)
        one, options = torch.empty(()), {"block": 256, "eps": 1e-5, "fast": True}
        gemm_block_norm.launch(a, b, one, one, None, None, out, config=config, **options)
        results[f"{block_m} {splits}"] = list(found)
    return results


def quantisers(found: list[dict[str, Any]]) -> dict[str, Any]:
    results = {}
    # As on the GPU, though the tensors are here.
    device.early = lambda _: {"PDL": True, "launch_pdl": True}
    device.ptx = lambda _: True
    for scaling in ("tensorwise", "rowwise", "1x128", "128x128"):
        for name, (with_q, with_qt) in {"x": (True, False), "x.T": (False, True), "both": (True, True)}.items():
            found.clear()
            x = torch.empty(4096, 4096, dtype=torch.bfloat16)
            quantize.quantize(x, scaling, FP8, with_q=with_q, with_qt=with_qt)
            results[f"{scaling} {name}"] = list(found)
    return results


def backward(
    m: int, n: int, wide: torch.dtype, kept: torch.dtype, activation: str, with_xt: bool, with_dx: bool = False
) -> None:
    """The kernel whose programs meet, as shipped."""
    grad, state = torch.empty(m, n, dtype=wide), torch.empty(grid_barrier.STATE, dtype=torch.int32)
    block_norm_backward_fp8.block_norm_backward_fp8(
        grad, torch.empty(m, n, dtype=kept), torch.empty(m, -(-n // 256)), state, block=256, activation=activation,
        dtype=FP8, with_xt=with_xt, with_dx=with_dx, config=backward_config(m, n, wide.itemsize),
    )  # fmt: skip


def with_residency(found: list[dict[str, Any]], m: int, n: int, itemsize: int) -> list[dict[str, Any]]:
    """What was found, and how many programs must share a multiprocessor."""
    return [kernel | {"resident": backward_config(m, n, itemsize).resident} for kernel in found]


def meeting(found: list[dict[str, Any]]) -> dict[str, Any]:
    results = {}
    device.ptx = lambda _: True
    for m, n in [(4096, 512), (4096, 1024), (4096, 2048), (199, 3456)]:
        for with_xt, activation in ((False, "hardswish"), (True, "hardswish"), (False, "silu"), (True, "silu")):
            found.clear()
            backward(m, n, torch.bfloat16, torch.bfloat16, activation, with_xt)
            results[f"{m}x{n} {activation} {with_xt}"] = with_residency(found, m, n, 2)
    for wide, kept in ((torch.float16, torch.float16), (torch.bfloat16, FP8), (torch.float32, torch.float32)):
        found.clear()
        backward(4096, 512 if wide.itemsize == 4 else 2048, wide, kept, "hardswish", True, with_dx=True)
        results[f"{wide} {kept}"] = with_residency(found, 4096, 512 if wide.itemsize == 4 else 2048, wide.itemsize)
    found.clear()
    x, weight, one = torch.empty(4096, 512, dtype=FP8), torch.empty(512, 512, dtype=FP8), torch.empty(())
    state = torch.empty(grid_barrier.STATE, dtype=torch.int32)
    grad_input_fp8.grad_input_fp8(
        x, weight, one, one, torch.empty(4096, 512, dtype=torch.bfloat16), torch.empty(4096, 2), state, block=256,
        activation="hardswish", dtype=FP8, fast=True, config=shipped("grad_input_fp8", 4096, 512, 512, 1), with_xt=True,
    )  # fmt: skip
    results["grad_input"] = list(found)
    return results


def gradients(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The gradient of a large layer, whose cast is a kernel of its own."""
    results = {}
    bf16 = torch.bfloat16
    for m, n, wide, with_xt, activation in (
        (4096, 4096, bf16, False, "hardswish"), (4096, 4096, bf16, True, "hardswish"), (4096, 4096, bf16, True, "silu"),
        (4096, 4096, torch.float32, True, "hardswish"), (8192, 4100, bf16, True, "hardswish"),
        (8190, 4104, bf16, True, "hardswish"),
    ):  # fmt: skip
        found.clear()
        grad = torch.empty(m, n, dtype=wide)
        block_norm_backward.block_norm_backward(
            grad, torch.empty_like(grad), torch.empty(m, -(-n // 256)), block=256, activation=activation,
            with_xt=with_xt,
        )  # fmt: skip
        results[f"{m}x{n} {wide} {activation} {with_xt}"] = list(found)
    return results


def fused(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Scales in blocks, SwishNorm and results in 1x128 blocks, as the operators configure them."""
    results = {}
    for in_blocks, activation, quantised, kept in [
        (True, "hardswish", False, False), (True, "hardswish", True, True), (True, "swish_norm", True, False),
        (True, "swish_norm", False, True), (False, "swish_norm", False, True), (False, "swish_norm", True, False),
    ]:  # fmt: skip
        for m, n, k in [(4096, 512, 512), (4096, 1024, 1024)]:
            kernel = gemm_kernel(in_blocks, activation == "swish_norm", quantised)
            if find(kernel, m, n, k, 1) is None:
                continue
            found.clear()
            blocks = torch.empty(k // 128, m).t(), torch.empty(n // 128, k // 128)
            scales = blocks if in_blocks else (torch.empty(()), torch.empty(()))
            out = torch.empty(m, n, dtype=torch.bfloat16)
            gemm_block_norm.launch(
                torch.empty(m, k, dtype=FP8), torch.empty(n, k, dtype=FP8), *scales, None if quantised else out,
                torch.empty(m, n // 256) if kept else None, out.to(FP8) if quantised else None, block=256, eps=1e-5,
                fast=True, config=shipped(kernel, m, n, k, 1, crowded=True), activation=activation,
                kept=out if kept else None, q_scales=torch.empty(n // 128, m) if quantised else None,
            )  # fmt: skip
            results[f"{kernel} {m}x{n}x{k}"] = list(found)
    return results


if __name__ == "__main__":
    noted: list[dict[str, Any]] = []
    watch(noted)
    json.dump(
        {
            "gemms": gemms(noted),
            "quantisers": quantisers(noted),
            "meeting": meeting(noted),
            "gradients": gradients(noted),
            "grouped": grouped(noted),
            "in parts": in_parts(noted),
            "fused": fused(noted),
        },
        sys.stdout,
    )
