"""The fused GEMM as Inductor generates it, in Triton's interpreter, against fp64. Run by ``test_fused_codegen.py`` in a
process of its own.

The interpreter runs one program after another, so programs cannot wait for each other: the waiting is taken out and the
kernel runs twice, the second time on parts that are all there."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the interpreter must be chosen before the first kernel is defined", allow_module_level=True)

import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
import triton
from torch._inductor.codecache import PyCodeCache
from torch._inductor.graph import GraphLowering

sys.path.insert(0, str(Path(__file__).parent))
from codegen_cases import Driver

from loka_compile._compat import inductor_pointwise, inductor_templates
from loka_compile.kernels import reference as ref
from loka_compile.kernels.config import GemmConfig
from loka_compile.lowering.fused import lowerings


def layer(a: Any, b: Any, sa: Any, sb: Any, r: Any) -> Any:
    # fp32 throughout, because the interpreter's casts are wrong in the last bits.
    y, rstd = torch.ops.loka.gemm_block_norm(a, b, sa, sb, 256, 1e-5, torch.float32, True, True, r)
    return y * torch.ops.loka.gate(y), y, rstd


def in_body(activation: str, block: int = 256) -> Any:
    """The activation in the template's body; what it keeps is h, or y for HardSwish."""

    def fn(a: Any, b: Any, sa: Any, sb: Any, r: Any) -> Any:
        fp32, flags = torch.float32, (True, True, True, False)
        out, kept, rstd, _, _ = torch.ops.loka.gemm_norm_activation(
            a, b, sa, sb, activation, block, 1e-5, fp32, fp32, *flags, r
        )
        return out, kept, rstd

    return fn


class Caught(Exception):
    """The code is there; it need not run."""


def kernels_of(fn: Any, args: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, int]]:
    """The generated kernels as interpreted functions, and how many programs of each Inductor launches, in order."""
    codes: list[str] = []

    def catch(code: str) -> None:
        codes.append(code)
        raise Caught

    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(catch))
    triton.runtime.driver.set_active(Driver())
    torch._dynamo.reset()
    with (
        inductor_config.patch(cpu_backend="triton", force_disable_caches=True),
        pytest.raises(Exception, match="Caught"),
    ):
        torch.compile(fn)(*args)
    kernels = dict(re.findall(r"async_compile\.triton\('(triton_tem_\w+)', '''(.*?)'''", codes[0], re.S))
    found = []
    for name, launch in re.findall(r"(triton_tem_\w+)\.run\((.*)\)", codes[0]):
        source = re.sub(r"@triton_heuristics\.template\(.*?\n\)\n", "", kernels[name], flags=re.S)
        source = source.replace("while waiting:", "while False:")
        found.append((getattr(PyCodeCache.load(source), name), int(launch.split(", ")[-4])))
    return found


def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 multiprocessors without instructions that the interpreter does not know."""
    lowerings.register()
    monkeypatch.setattr(inductor_templates, "is_aligned", lambda node: True)
    monkeypatch.setattr(inductor_templates, "launches_early", lambda device: False)
    monkeypatch.setattr(inductor_templates, "multiprocessors", lambda device: 16)
    monkeypatch.setattr(inductor_pointwise, "has_ptx", lambda device: False)


@pytest.mark.parametrize(
    ("m", "n", "k", "splits", "tma"),
    [(1, 384, 208, 4, False), (67, 384, 96, 2, True), (20, 100, 13, 2, False), (37, 384, 64, 1, True)],
)
def test_template(m: int, n: int, k: int, splits: int, tma: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_device(monkeypatch)
    config = GemmConfig(16, 256, 16, 4, 2, tma=tma, persistent=tma, splits=splits)
    monkeypatch.setattr(lowerings, "config_for", lambda *_: config)
    a, b, residual, scale = torch.randn(m, k), torch.randn(n, k), torch.randn(m, n) * 5, torch.full((1,), 0.5)
    *zeros, (kernel, programs) = kernels_of(layer, (a, b.t(), scale, scale, residual), monkeypatch)
    tiles = -(-m // 16) * -(-n // 256)
    assert programs == min(tiles, 16 // splits if splits > 1 or tma else tiles) * splits
    out = {"RSTD": torch.full((m, -(-n // 256)), torch.nan), "out_ptr0": torch.full((m, n), torch.nan)}
    out["out_ptr1"] = torch.full((m, n), torch.nan)
    given = {"A": a, "B": b, "SA": scale, "SB": scale, "R": residual, **out}
    given["PARTS"] = torch.full((tiles * splits * 16 * 256,), torch.nan)
    given["COUNTERS"] = torch.full((16,), -1, dtype=torch.int32)
    for fill, one in zeros:
        assert one == 1
        fill[(1,)](a, given["COUNTERS"])
    for _ in range(1 if splits == 1 else 2):
        kernel[(programs,)](*(given[name.removeprefix("arg_")] for name in kernel.arg_names))
    expected, expected_rstd = ref.block_norm(0.25 * a.double() @ b.double().t() + residual.double(), 256, 1e-5)
    torch.testing.assert_close(out["RSTD"].double(), expected_rstd, rtol=1e-4, atol=1e-6)
    found = sorted((out["out_ptr0"], out["out_ptr1"]), key=lambda t: t.min().item())
    torch.testing.assert_close(found[0].double(), expected, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(found[1].double(), F.hardswish(expected), rtol=1e-4, atol=2e-5)
    assert len(zeros) == (splits > 1)
    if splits > 1:
        turns = given["COUNTERS"] // 2  # of two launches
        tiles_of = [len(range(group, tiles, programs // splits)) for group in range(16 // splits)]
        assert turns.tolist()[: len(tiles_of)] == [16 * count for count in tiles_of]


@pytest.mark.parametrize(("m", "n", "k"), [(1, 384, 208), (37, 100, 13)])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("activation", ["", "swish_norm"])
def test_scales_and_activations(
    activation: str, rowwise: bool, with_residual: bool, m: int, n: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a scale is applied to the product or together with rstd, which an activation in the body decides, and a
    residual; rstd is that of the scaled product either way."""
    on_a_device(monkeypatch)
    monkeypatch.setattr(lowerings, "config_for", lambda *_: GemmConfig(16, 256, 16, 4, 2))
    a, b, residual = torch.randn(m, k), torch.randn(n, k), torch.randn(m, n) * 5 if with_residual else None
    sa, sb = (torch.rand(m, 1) * 1e-2, torch.rand(1, n) * 1e-2) if rowwise else (torch.rand(1) * 0.1, torch.rand(1))
    if not rowwise:
        sb = sb * 1e-3
    fn = in_body(activation) if activation else layer
    ((kernel, programs),) = kernels_of(fn, (a, b.t(), sa, sb, residual), monkeypatch)
    blocks = -(-n // 256)
    out = {"RSTD": torch.full((m, blocks), torch.nan), "KEPT": torch.full((m, n), torch.nan)}
    out |= {f"out_ptr{i}": torch.full((m, n), torch.nan) for i in range(2)}
    given = {"A": a, "B": b, "SA": sa, "SB": sb, "R": residual, **out}
    kernel[(programs,)](*(given[name.removeprefix("arg_")] for name in kernel.arg_names))
    h = sa.double() * (a.double() @ b.double().t()) * sb.double()
    h = h if residual is None else h + residual.double()
    y, rstd = ref.block_norm(h, 256, 1e-5)
    torch.testing.assert_close(out["RSTD"].double(), rstd, rtol=1e-4, atol=1e-6)
    if activation:
        torch.testing.assert_close(out["KEPT"].double(), h, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(out["out_ptr0"].double(), h * F.hardsigmoid(y), rtol=1e-4, atol=2e-5)
        return
    found = sorted((out["out_ptr0"], out["out_ptr1"]), key=lambda t: t.min().item())
    torch.testing.assert_close(found[0].double(), y, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(found[1].double(), F.hardswish(y), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("activation", ["hardswish", "swish_norm"])
@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize(("n", "block"), [(512, 256), (512, 128), (384, 64), (200, 128)])
def test_several_blocks_in_a_tile(
    n: int, block: int, rowwise: bool, activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a tile is wider than a block, whole or not."""
    on_a_device(monkeypatch)
    monkeypatch.setattr(lowerings, "config_for", lambda *_: GemmConfig(32, 256, 16, 4, 2))
    m, k = 37, 48
    a, b = torch.randn(m, k), torch.randn(n, k)
    sa, sb = (
        (torch.rand(m, 1) * 1e-2, torch.rand(1, n) * 1e-2) if rowwise else (torch.rand(1) * 0.1, torch.rand(1) * 0.01)
    )
    ((kernel, programs),) = kernels_of(in_body(activation, block), (a, b.t(), sa, sb, None), monkeypatch)
    out = {"RSTD": torch.full((m, -(-n // block)), torch.nan), "KEPT": torch.full((m, n), torch.nan)}
    out["out_ptr0"] = torch.full((m, n), torch.nan)
    given = {"A": a, "B": b, "SA": sa, "SB": sb, **out}
    kernel[(programs,)](*(given[name.removeprefix("arg_")] for name in kernel.arg_names))
    h = sa.double() * (a.double() @ b.double().t()) * sb.double()
    y, rstd = ref.block_norm(h, block, 1e-5)
    gated = activation == "swish_norm"
    torch.testing.assert_close(out["RSTD"].double(), rstd, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(out["KEPT"].double(), h if gated else y, rtol=1e-4, atol=2e-5)
    expected = h * F.hardsigmoid(y) if gated else F.hardswish(y)
    torch.testing.assert_close(out["out_ptr0"].double(), expected, rtol=1e-4, atol=2e-5)
