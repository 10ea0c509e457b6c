"""Prints, as JSON, the kernels that Inductor generates for fused operators. Run in a process of its own by
``test_fused_codegen.py``: it makes Inductor and Triton believe in an H200, without a GPU, and catches the code."""

from __future__ import annotations

import json
import logging
import math
import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
import triton
from torch._inductor.codecache import PyCodeCache
from torch._inductor.graph import GraphLowering
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
sys.path.insert(0, str(Path(__file__).parents[2]))
from compiled_cases import usage

from loka_compile._compat import inductor_templates
from loka_compile.kernels.config import GemmConfig
from loka_compile.lowering.fused import lowerings


class Driver:
    """Says that an sm_90 is active."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


E4M3 = torch.float8_e4m3fn


def hardswish(y: Any) -> Any:
    """As the forward fusion writes it, in fp32."""
    return y.float() * torch.ops.loka.gate(y.float())


def inference(a: Any, b: Any, sa: Any, sb: Any) -> Any:
    y, _ = torch.ops.loka.gemm_block_norm(a, b, sa, sb, 256, 1e-5, torch.bfloat16, True, False)
    return (hardswish(y) * 16).to(E4M3)


def fixed_scale(a: Any, b: Any, sa: Any, sb: Any) -> Any:
    sixteenth = torch.ops.loka.constant(1 / 16, torch.device("cpu"))
    h = inference(a, b, sixteenth, sb)
    return inference(h, b, sixteenth, sb)


def training(a: Any, b: Any, sa: Any, sb: Any) -> Any:
    y, rstd = torch.ops.loka.gemm_block_norm(a, b, sa, sb, 256, 1e-5, torch.bfloat16, True, True)
    return (hardswish(y) * 16).to(E4M3), y, rstd


def residual(a: Any, b: Any, sa: Any, sb: Any) -> Any:
    y, _ = torch.ops.loka.gemm_block_norm(a, b, sa, sb, 256, 1e-5, torch.bfloat16, False, False)
    return hardswish(y).to(y.dtype) + torch.ones(y.shape, dtype=y.dtype)


def autocast(a: Any, b: Any, sa: Any, sb: Any) -> Any:
    y, rstd = torch.ops.loka.gemm_block_norm(a, b, sa, sb, 256, 1e-5, torch.float32, True, True)
    return (hardswish(y) * 16).to(E4M3), y.to(torch.bfloat16), rstd


def fp32_model(a: Any, b: Any, sa: Any, sb: Any) -> Any:
    y, rstd = torch.ops.loka.gemm_block_norm(a, b, sa, sb, 256, 1e-5, torch.float32, True, True)
    return (F.hardswish(y) * 16).clamp(-448, 448).to(E4M3), y, rstd


def bf16_to_fp32(a: Any, b: Any, sa: Any, sb: Any) -> Any:
    a, b = a.to(torch.bfloat16), b.to(torch.bfloat16)
    return torch.ops.loka.gemm_block_norm(a, b, None, None, 256, 1e-5, torch.float32, True, True)


def residual_before(a: Any, b: Any, sa: Any, sb: Any) -> Any:
    y, _ = torch.ops.loka.gemm_block_norm(a, b, sa, sb, 256, 1e-5, torch.bfloat16, True, False, b)
    return (hardswish(y) * 16).to(E4M3)


def fp32_residual(a: Any, b: Any, sa: Any, sb: Any) -> Any:
    r = torch.ones(a.shape[0], b.shape[1])
    y, rstd = torch.ops.loka.gemm_block_norm(a, b, sa, sb, 256, 1e-5, torch.bfloat16, True, True, r)
    return (hardswish(y) * 16).to(E4M3), y, rstd


def fp32_residual_gated(a: Any, b: Any, sa: Any, sb: Any) -> Any:
    r, dtypes, flags = torch.ones(a.shape[0], b.shape[1]), (torch.bfloat16,) * 2, (True, True, True, False)
    return torch.ops.loka.gemm_norm_activation(a, b, sa, sb, "swish_norm", 256, 1e-5, *dtypes, *flags, r)


def in_blocks(a: Any, b: Any, sa: Any, sb: Any, squares: bool = True) -> Any:
    """Scales as the provider ``torch`` lays them out: rows adjacent, blocks of K filled up to four."""
    kb, n = a.shape[1] // 128, b.shape[1]
    scale_a = (sa * torch.ones(kb, a.shape[0])).t()
    scale_b = sb * torch.ones(n // 128, -(-kb // 4) * 4) if squares else (sb * torch.ones(kb, n)).t()
    return inference(a, b, scale_a, scale_b)


def silu(a: Any, b: Any, sa: Any, sb: Any) -> Any:
    y, rstd = torch.ops.loka.gemm_block_norm(a, b, sa, sb, 256, 1e-5, torch.bfloat16, True, True)
    return (torch.nn.functional.silu(y.float()) * 16).to(E4M3), y, rstd


def residual_behind(a: Any, b: Any, sa: Any, sb: Any) -> Any:
    """Added to the activation; the sum is written in bf16 and in FP8."""
    r = torch.ones(a.shape[0], b.shape[1], dtype=torch.bfloat16)
    y, rstd = torch.ops.loka.gemm_block_norm(a, b, sa, sb, 256, 1e-5, torch.bfloat16, True, True)
    total = (hardswish(y) + r).to(torch.bfloat16)
    return total, (total.float() * 16).clamp(-448, 448).to(E4M3), y, rstd


def rowwise(fn: Any) -> Any:
    """``fn`` with a scale for each row of A and each column of B."""
    return lambda a, b, sa, sb: fn(a, b, sa * torch.ones(a.shape[0], 1), sb * torch.ones(1, b.shape[1]))


def rows_of_blocks(a: Any, b: Any, sa: Any, sb: Any) -> Any:
    return in_blocks(a, b, sa, sb, False)


def activated(kind: str, with_out: bool, kept: bool, quantised: bool, dtype: torch.dtype = torch.bfloat16) -> Any:
    def fn(a: Any, b: Any, sa: Any, sb: Any) -> Any:
        dtypes, flags = (dtype, dtype), (True, with_out, kept, quantised)
        found = torch.ops.loka.gemm_norm_activation(a, b, sa, sb, kind, 256, 1e-5, *dtypes, *flags)
        return [found[0].float() + 1 if with_out and not kept else found[0], *found[1:]]

    return fn


def twice(a: Any, b: Any, sa: Any, sb: Any) -> Any:
    y, _ = torch.ops.loka.gemm_block_norm(a, b, sa, sb, 256, 1e-5, torch.bfloat16, True, False)
    z, _ = torch.ops.loka.gemm_block_norm(a, b, sa, sb, 256, 1e-3, torch.bfloat16, True, False)
    return y, z


def joined(a: Any, b: Any, sa: Any, sb: Any) -> Any:
    x = a.to(torch.bfloat16)
    x = torch.ops.loka.materialise(torch.cat([x * 2, x.flip(1)], 1)).float()
    scale = x.abs().amax(1, keepdim=True) / 448
    return (x / scale).to(E4M3), scale


CASES: dict[str, tuple[Any, int, int, int, bool | None]] = {
    "joined": (joined, 4096, 1024, 1024, None),
    "inference": (inference, 4096, 1024, 1024, None),
    "fixed scale, twice": (fixed_scale, 4096, 1024, 1024, None),
    "more tiles than multiprocessors": (training, 4096, 2048, 1024, None),
    "training": (training, 4096, 1024, 1024, None),
    "short last block": (training, 199, 384, 64, None),
    "unaligned": (inference, 199, 512, 13, None),
    "residual": (residual, 256, 512, 256, None),
    "residual before the norm": (residual_before, 384, 512, 384, None),
    "few tiles": (training, 4096, 512, 512, None),
    "few tiles, rowwise": (rowwise(training), 4096, 512, 512, None),
    "few tiles, fp32 residual": (fp32_residual, 4096, 512, 1024, None),
    "few tiles, fp32 residual, SwishNorm": (fp32_residual_gated, 4096, 512, 1024, None),
    "very few tiles, fp32 residual": (fp32_residual, 1024, 256, 256, None),
    "paired": (training, 4096, 1024, 256, None),
    "paired, rowwise": (rowwise(training), 4096, 1024, 256, None),
    "paired, SwishNorm": (activated("swish_norm", True, True, False), 4096, 1024, 256, None),
    "paired, SiLU": (silu, 4096, 1024, 256, None),
    "paired, residual behind, both": (rowwise(residual_behind), 4096, 1024, 256, None),
    "very few tiles": (training, 256, 512, 256, None),
    "dynamic batch": (training, 256, 512, 256, True),
    "moving rows": (training, 4096, 1024, 1024, None),
    "autocast": (autocast, 4096, 1024, 1024, None),
    "fp32 model": (fp32_model, 4096, 1024, 1024, None),
    "fp32 model, few tiles": (fp32_model, 256, 1024, 512, None),
    "fp32 from bf16": (bf16_to_fp32, 4096, 1024, 1024, None),
    "fp32 from bf16, few tiles": (bf16_to_fp32, 256, 1024, 512, None),
    "block scales": (in_blocks, 4096, 1024, 1024, None),
    "block scales, short last block": (in_blocks, 199, 384, 128, None),
    "block scales, dynamic batch": (in_blocks, 256, 512, 256, True),
    "1x128 scales": (rows_of_blocks, 4096, 1024, 1024, None),
    "SwishNorm": (activated("swish_norm", True, False, False), 4096, 1024, 1024, None),
    "SwishNorm, training": (activated("swish_norm", True, True, False), 4096, 1024, 1024, None),
    "SwishNorm, training, two waves": (activated("swish_norm", True, True, False), 4096, 2048, 2048, None),
    "SwishNorm, FP8 alone, two waves": (activated("swish_norm", False, False, True), 4096, 2048, 2048, None),
    "SwishNorm, short last block": (activated("swish_norm", True, True, False), 199, 384, 64, None),
    "SwishNorm, FP8 alone": (activated("swish_norm", False, False, True), 4096, 1024, 1024, None),
    "SwishNorm, all": (activated("swish_norm", True, True, True), 199, 384, 64, True),
    "SwishNorm, fp32 model": (activated("swish_norm", True, True, True, torch.float32), 4096, 1024, 1024, None),
    "SwishNorm, fp32 kept": (activated("swish_norm", False, True, True, torch.float32), 4096, 1024, 1024, None),
    "HardSwish, FP8 and y": (activated("hardswish", False, True, True), 4096, 1024, 1024, None),
}
#: Cases whose contraction is cut: the shape, and the configuration that stands for the shipped one.
SPLIT: dict[str, tuple[Any, int, int, int, bool | None, GemmConfig]] = {
    "split": (training, 1024, 256, 7680, None, GemmConfig(64, 256, 128, 8, 4, tma=True, splits=8)),
    "split, unaligned": (training, 199, 384, 479, None, GemmConfig(64, 256, 64, 4, 4, tma=True, splits=4)),
    "split, dynamic batch": (inference, 256, 512, 2048, True, GemmConfig(64, 256, 128, 4, 4, tma=True, splits=2)),
    "split twice": (twice, 256, 256, 4096, None, GemmConfig(64, 256, 128, 4, 4, tma=True, splits=8)),
}
_SPLITS = GemmConfig(64, 256, 128, 8, 4, tma=True, splits=8)
#: Cases whose configuration asks for parts where none are made.
WHOLE: dict[str, tuple[Any, int, int, int, bool | None, GemmConfig]] = {
    "block scales, not split": (in_blocks, 256, 512, 2048, None, _SPLITS),
    "SwishNorm, not split": (activated("swish_norm", True, True, True), 256, 512, 2048, None, _SPLITS),
    "HardSwish, not split": (activated("hardswish", False, True, True), 256, 512, 2048, None, _SPLITS),
}
#: Cases whose template is also compiled for an sm_90, to see what it takes.
COMPILED = {
    "inference",
    "training",
    "moving rows",
    "more tiles than multiprocessors",
    *SPLIT,
    *(
        name
        for name in CASES
        if name.startswith(("few", "very few", "paired", "fp32", "block", "1x128", "SwishNorm", "HardSwish"))
    ),
}


def resources(code: str) -> dict[str, Any]:
    """Of the template in Inductor's code, compiled by Triton for an sm_90: bytes of shared memory per program, spilt
    bytes and gates of a thread, and what it does to memory before it waits for the kernel in front."""
    for name, source in re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", code, re.S):
        if not name.startswith("triton_tem_") or "tl.dot(" not in source:
            continue
        made = getattr(PyCodeCache.load(source), name)
        (config,) = made.configs
        names = made.fn.arg_names
        constants = {**made.triton_meta.get("constants", {}), **config.kwargs}
        signature = {**made.triton_meta["signature"], **dict.fromkeys(constants, "constexpr")}
        pointers = [n for n, kind in signature.items() if kind.startswith("*")]
        kernel = ASTSource(
            made.fn, signature, {(names.index(n),): v for n, v in constants.items() if n in names},
            {(names.index(n),): [["tt.divisibility", 16]] for n in pointers},
        )  # fmt: skip
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        compiled = triton.compile(kernel, target=GPUTarget("cuda", 90, 32), options=options)
        ptx = compiled.asm["ptx"]
        before = ptx.partition("griddepcontrol.wait")[0]
        early = [op for op in ("tensormap.", "st.global", "ld.global", "atom.", "cp.async") if op in before]
        return {
            "shared": int(compiled.metadata.shared),
            "early": early,
            "stack": usage(compiled)["STACK"],
            "gates": ptx.count("fma.rn.sat.f32"),
            "threads": 32 * config.num_warps,
            "tile": math.prod(int(size) for size in re.findall(r"BLOCK_[MN] : tl.constexpr = (\d+)", source)),
            "scratch": compiled.metadata.global_scratch_size,
        }
    raise AssertionError("no template in the code")


def main() -> None:
    logging.disable(logging.CRITICAL)
    triton.runtime.driver.set_active(Driver())
    lowerings.register()
    inductor_templates.is_aligned = lambda node: True
    inductor_config.cpu_backend = "triton"
    inductor_config.force_disable_caches = True
    codes: list[str] = []
    GraphLowering.save_output_code = staticmethod(codes.append)  # type: ignore[assignment, method-assign]
    found = {}
    shipped = lowerings.config_for
    for name, (fn, m, n, k, dynamic, *config) in {**CASES, **SPLIT, **WHOLE}.items():
        lowerings.config_for = (lambda *_, c=config[0]: c) if config else shipped
        torch._dynamo.reset()
        codes.clear()
        a, b = torch.zeros(m, k).to(E4M3), torch.zeros(n, k).to(E4M3).t()
        if name == "moving rows":  # and nothing else, as in a model whose weights are what they are
            torch._dynamo.mark_dynamic(a, 0)
        try:
            torch.compile(fn, dynamic=dynamic)(a, b, torch.ones(1), torch.full((1,), 2.0))
        except Exception as error:  # Triton cannot compile for a CPU; the code was caught before.
            if not codes or "compatible backends" not in str(error):
                raise
        found[name] = {
            "kernels": sorted(set(re.findall(r"def (triton_\w+)\(", codes[-1]))),
            "descriptors": codes[-1].count("tl.make_tensor_descriptor("),
            "stores": codes[-1].count("tl.store("),
            "constants": len(set(re.findall(r"^constant\d+ = ", codes[-1], re.M))),
            "counters": codes[-1].count("COUNTERS"),
            "launches": codes[-1].count(".run("),
            "rows": [int(size) for size in re.findall(r"BLOCK_M : tl.constexpr = (\d+)", codes[-1])],
            **(resources(codes[-1]) if name in COMPILED else {}),
        }
    print("RESULT" + json.dumps(found))


if __name__ == "__main__":
    main()
