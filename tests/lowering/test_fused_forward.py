"""The forward fusion on graphs: what it rewrites, what it refuses and why, and that the result means the same."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from fused_graphs import E4M3, aten, fp8_linear, loka, targets, trace

from loka_compile.lowering.fused import configs, forward, product
from loka_compile.lowering.fused.forward import fuse, will_fuse
from loka_compile.report import Report

BF16, F32 = torch.bfloat16, torch.float32
FUSED = "loka.gemm_block_norm.default"


def chain(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor) -> Tensor:
    return F.hardswish(loka.block_norm(fp8_linear(x, w, sx, sw), 256, 1e-5)[0])


def fp8_inputs(m: int, n: int, k: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [((m, k), E4M3), ((n, k), E4M3), ((), F32), ((), F32)]


@pytest.mark.parametrize(("m", "n"), [(4096, 1024), (1, 384), (199, 3456), (64, 256), (64, 128)])
def test_fp8_gemm_and_norm_become_one_operator(m: int, n: int) -> None:
    gm, report = trace(chain, *fp8_inputs(m, n, 448)), Report()
    assert fuse(gm.graph, report) == 1
    gm.graph.lint()
    found = targets(gm)
    assert found[FUSED] == 1
    assert not {t for t in found if "_scaled_mm" in t or t == "loka.block_norm.default"}
    # HardSwish is spelt out for the epilogue.
    assert "aten.hardswish.default" not in found
    assert "FP8 GEMM + BlockNorm(256) + HardSwish in one kernel" in report.fusions[0]
    node = next(n for n in gm.graph.nodes if str(n.target) == FUSED)
    assert node.args[4:] == (256, 1e-5, BF16, True, False, None)


def test_rstd_is_written_only_where_it_is_read() -> None:
    def training(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor) -> tuple[Tensor, Tensor]:
        y, rstd = loka.block_norm(fp8_linear(x, w, sx, sw), 256, 1e-5)
        return F.hardswish(y), rstd

    gm, report = trace(training, *fp8_inputs(64, 512, 64)), Report()
    assert fuse(gm.graph, report) == 1
    assert next(n for n in gm.graph.nodes if str(n.target) == FUSED).args[8] is True
    assert "kept for the backward" in report.fusions[0]
    assert [tuple(v.shape) for v in (o.meta["val"] for o in gm.graph.output_node().args[0])] == [(64, 512), (64, 2)]


def test_bf16_gemm_views_and_casts_in_between() -> None:
    def mixed(x: Tensor, w: Tensor) -> Tensor:
        z = (x @ w.t()).view(8, 16, 512).to(F32)
        return loka.block_norm(z, 256, 1e-5)[0]

    gm, report = trace(mixed, ((128, 448), BF16), ((512, 448), BF16)), Report()
    assert fuse(gm.graph, report) == 1
    value = gm.graph.output_node().args[0].meta["val"]
    assert (tuple(value.shape), value.dtype) == ((8, 16, 512), F32)
    assert "bfloat16 GEMM" in report.fusions[0]


def under_autocast(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """What autocast makes of a layer and of the cast in front of the next: the norm and its activation are fp32."""
    y = loka.block_norm((x @ w.t()).to(F32), 256, 1e-5)[0]
    return F.hardswish(y).to(BF16), y.to(BF16)


@pytest.mark.parametrize(
    ("fn", "dtype"),
    [
        (under_autocast, BF16),
        (lambda x, w: F.hardswish(loka.block_norm((x @ w.t()).to(F32), 256, 1e-5)[0]), F32),
        (lambda x, w: (lambda y: (y.sum(1), y.to(BF16)))(loka.block_norm((x @ w.t()).to(F32), 256, 1e-5)[0]), F32),
    ],
)
def test_a_wide_result_that_is_rounded_anyway_takes_no_wide_tile(fn: Any, dtype: torch.dtype) -> None:
    """An fp32 tile leaves room for two stages of the pipeline instead of three (128x256 on an H200)."""
    gm = trace(fn, ((128, 448), BF16), ((512, 448), BF16))
    dtypes = [v.meta["val"].dtype for v in gm.graph.output_node().all_input_nodes]
    assert fuse(gm.graph, Report()) == 1
    (node,) = [n for n in gm.graph.nodes if str(n.target) == FUSED]
    assert node.args[6] == dtype
    assert node.meta["val"][0].dtype == dtype
    config = configs.config_for("gemm_block_norm", 8192, 2048, 2048, 2)
    assert config.fitting(2, dtype.itemsize, 232448).stages == (3 if dtype == BF16 else 2)
    assert [v.meta["val"].dtype for v in gm.graph.output_node().all_input_nodes] == dtypes


def test_operators_that_branch_and_join_are_looked_through_once() -> None:
    def deep(x: Tensor, w: Tensor) -> Tensor:
        y = loka.block_norm((x @ w.t()).to(F32), 256, 1e-5)[0]
        for _ in range(60):  # as many paths as 2**60
            y = y * 0.5 + y
        return y.to(BF16)

    gm = trace(deep, ((128, 448), BF16), ((512, 448), BF16))
    assert fuse(gm.graph, Report()) == 1
    assert next(n for n in gm.graph.nodes if str(n.target) == FUSED).args[6] == BF16


def test_a_result_that_is_rounded_later_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "on_this_device", lambda value: "")
    shapes = (((37, 448), BF16), ((640, 448), BF16))
    before, after = (trace(under_autocast, *shapes, device="cpu") for _ in range(2))
    assert fuse(after.graph, Report()) == 1
    after.recompile()
    x, w = (torch.randn(shape).to(dtype) for shape, dtype in shapes)
    for found, expected in zip(after(x, w), before(x, w), strict=True):
        assert found.dtype == expected.dtype == BF16
        # Before, the product is rounded, and by the twin on a CPU y in front of HardSwish: 2**-8 of y each, up to 2**-7
        # at 3, times HardSwish's slope of at most 1.5. Near -3 the result itself is next to nothing.
        torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-6)


def summed(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor, residual: Tensor) -> Tensor:
    z = fp8_linear(x, w, sx, sw).view(residual.shape)
    return F.hardswish(loka.block_norm(residual + z, 256, 1e-5)[0])


@pytest.mark.parametrize("shape", [(48, 512), (4, 12, 512)])
def test_a_residual_before_the_norm_is_added_in_the_kernel(shape: tuple[int, ...]) -> None:
    gm, report = trace(summed, *fp8_inputs(48, 512, 64), (shape, BF16)), Report()
    assert fuse(gm.graph, report) == 1
    assert "FP8 GEMM + residual + BlockNorm(256) + HardSwish in one kernel" in report.fusions[0]
    added = [n for n in gm.graph.nodes if str(n.target) == "aten.add.Tensor"]
    assert all(isinstance(n.args[1], float) for n in added)  # HardSwish's, spelt out
    node = next(n for n in gm.graph.nodes if str(n.target) == FUSED)
    assert tuple(node.args[9].meta["val"].shape) == (48, 512)
    assert tuple(gm.graph.output_node().args[0].meta["val"].shape) == shape


def test_a_sum_that_others_read_or_that_broadcasts_is_no_residual() -> None:
    def read_twice(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        z = fp8_linear(x, w, sx, sw) + residual
        return loka.block_norm(z, 256, 1e-5)[0], z

    def of_two(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor, residual: Tensor) -> Tensor:
        z = fp8_linear(x, w, sx, sw) + residual + residual
        return loka.block_norm(z, 256, 1e-5)[0]

    report = Report()
    assert fuse(trace(read_twice, *fp8_inputs(48, 512, 64), ((48, 512), BF16)).graph, report) == 0
    assert "read by others" in report.fusions[0]
    for fn, shape in ((of_two, (48, 512)), (summed, (1, 512))):
        if fn is summed:
            fn = lambda x, w, sx, sw, r: loka.block_norm(fp8_linear(x, w, sx, sw) + r, 256, 1e-5)[0]  # noqa: E731
        report = Report()
        assert fuse(trace(fn, *fp8_inputs(48, 512, 64), (shape, BF16)).graph, report) == 0
        assert "not a GEMM's result" in report.fusions[0]


def test_of_two_products_the_one_that_nothing_else_reads() -> None:
    def both(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        first, second = fp8_linear(x, w, sx, sw), fp8_linear(x, v, sx, sw)
        return loka.block_norm(first + second, 256, 1e-5)[0], first

    gm, report = trace(both, *fp8_inputs(48, 512, 64), ((512, 64), E4M3)), Report()
    assert fuse(gm.graph, report) == 1
    node = next(n for n in gm.graph.nodes if str(n.target) == FUSED)
    assert node.args[9] is next(n for n in gm.graph.nodes if "_scaled_mm" in str(n.target))
    assert node.args[1].args[0].name.startswith("v")


def test_quantiser_after_it_loses_clamps_that_cannot_act() -> None:
    def quantised(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor) -> Tensor:
        h = chain(x, w, sx, sw)
        return (h.float() * 16).clamp(-448, 448).to(E4M3)

    def too_large(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor) -> Tensor:
        h = chain(x, w, sx, sw)
        return aten.clamp_max(aten.clamp_min(h.float() * 32, -448), 448).to(E4M3)

    def split_clamp(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor) -> Tensor:
        h = chain(x, w, sx, sw)
        return aten.clamp_max(aten.clamp_min(h.float() * 16, -448), 448).to(E4M3)

    for fn, clamps in ((split_clamp, 0), (too_large, 2)):
        gm, report = trace(fn, *fp8_inputs(64, 512, 64)), Report()
        fuse(gm.graph, report)
        found = targets(gm)
        assert found["aten.clamp_min.default"] + found["aten.clamp_max.default"] == clamps
        assert "FP8 output" in report.fusions[0]
    gm, report = trace(quantised, *fp8_inputs(64, 512, 64)), Report()
    assert fuse(gm.graph, report) == 1


def _plain(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor, block: int = 256) -> Tensor:
    return loka.block_norm(fp8_linear(x, w, sx, sw), block, 1e-5)[0]


def _shared(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor) -> tuple[Tensor, Tensor]:
    z = fp8_linear(x, w, sx, sw)
    return loka.block_norm(z, 256, 1e-5)[0], z


def _with_bias(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor) -> Tensor:
    z = aten._scaled_mm.default(x, w.t(), sx, sw, torch.zeros(w.shape[0], dtype=BF16, device=x.device), None, BF16)
    return loka.block_norm(z, 256, 1e-5)[0]


def _no_gemm(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor) -> Tensor:
    return loka.block_norm(x.to(BF16), 256, 1e-5)[0]


@pytest.mark.parametrize(
    ("fn", "n", "reason"),
    [
        (_shared, 512, "read by others"),
        (lambda x, w, sx, sw: _plain(x, w, sx, sw, 512), 1024, "does not fit a tile"),
        (lambda x, w, sx, sw: _plain(x, w, sx, sw), 256 + 16, "leave a last block of 16"),
        (_with_bias, 512, "not a GEMM's result"),
        (_no_gemm, 512, "not a GEMM's result"),
    ],
    ids=["shared", "block", "last block", "bias", "no GEMM"],
)
def test_refusals_name_the_reason_and_leave_the_graph_alone(fn: Callable[..., Any], n: int, reason: str) -> None:
    gm, report = trace(fn, *fp8_inputs(64, n, 512)), Report()
    before = targets(gm)
    norm = next(node for node in gm.graph.nodes if str(node.target) == "loka.block_norm.default")
    assert not will_fuse(norm)
    assert fuse(gm.graph, report) == 0
    assert targets(gm) == before
    assert reason in report.fusions[0]


def test_fp32_and_the_cpu_are_refused() -> None:
    def fp32(x: Tensor, w: Tensor) -> Tensor:
        return loka.block_norm(x @ w.t(), 256, 1e-5)[0]

    report = Report()
    assert fuse(trace(fp32, ((64, 64), F32), ((512, 64), F32)).graph, report) == 0
    assert "float32 operands" in report.fusions[0]
    report = Report()
    assert fuse(trace(chain, *fp8_inputs(64, 512, 64), device="cpu").graph, report) == 0
    assert "for CUDA, not cpu" in report.fusions[0]


@pytest.mark.parametrize("shape", [(1024, 256, 7680), (512, 512, 2048)])
def test_what_a_library_and_a_kernel_behind_it_do_faster_is_left_apart(shape: tuple[int, int, int]) -> None:
    gm, report = trace(chain, *fp8_inputs(*shape)), Report()
    assert fuse(gm.graph, report) == 0
    assert targets(gm)["loka.gemm_block_norm.default"] == 0
    assert "not measured to be faster" in report.fusions[0]


def test_a_configuration_may_cut_the_contraction_inside_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = {"when": {"k": [4096, 8192]}, "config": {"block_m": 64, "warps": 8, "stages": 4, "tma": True, "splits": 8}}
    monkeypatch.setattr(configs, "_rules", lambda: {"gemm_block_norm": [rule, {}]})
    gm, report = trace(chain, *fp8_inputs(1024, 256, 7680)), Report()
    assert fuse(gm.graph, report) == 1
    found = targets(gm)
    assert found["loka.gemm_block_norm.default"] == 1
    assert found["loka.block_norm.default"] == 0
    assert report.fusions[0].endswith("FP8 GEMM + BlockNorm(256) + HardSwish in one kernel, K in 8 parts")
    assert configs.config_for("gemm_block_norm", 1024, 256, 2048, 1).splits == 1


def test_the_rewritten_graph_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "on_this_device", lambda value: "")

    def training(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, rstd = loka.block_norm(fp8_linear(x, w, sx, sw, out_dtype=F32), 256, 1e-5)
        h = F.hardswish(y)
        return (h * 16).clamp(-448, 448).to(E4M3), y, rstd

    for m, n, k in ((37, 640, 64), (1, 384, 128), (16, 256, 600)):
        shapes = fp8_inputs(m, n, k)
        before, after = trace(training, *shapes, device="cpu"), trace(training, *shapes, device="cpu")
        assert fuse(after.graph, Report()) == 1
        after.recompile()
        x, w = (torch.randn(m, k) * 4).to(E4M3), (torch.randn(n, k) * 4).to(E4M3)
        args = (x, w, torch.tensor(0.03), torch.tensor(0.5))
        for found, expected in zip(after(*args), before(*args), strict=True):
            assert found.dtype == expected.dtype
            torch.testing.assert_close(
                found.float(), expected.float(), rtol=2e-3 if found.dtype == F32 else 0.13, atol=1e-4
            )


def test_hardswish_in_the_epilogue_keeps_knees_and_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "on_this_device", lambda value: "")

    def only(y: Tensor) -> Tensor:
        return F.hardswish(y)

    gm = trace(only, ((8,), F32), device="cpu")
    y = next(n for n in gm.graph.nodes if n.op == "placeholder")
    forward._cheapen_epilogue(gm.graph, y, 16.0)
    gm.recompile()
    values = torch.tensor([-16.0, -3.0, -2.9999, 0.0, 2.9999, 3.0, 16.0, float("nan")])
    torch.testing.assert_close(gm(values), F.hardswish(values), equal_nan=True)
