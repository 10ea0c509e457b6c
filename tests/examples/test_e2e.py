"""Throughput of whole models: a smoke run on the CPU, and the sorting of kernels into kinds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.e2e import app
from benchmarks.kernel_kinds import KINDS, breakdown, kernel_times, kind_of


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_qqtst_128x256_128x6_2x1_v_bz_TNT", "gemm"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "gemm"),
        ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm90<...>>", "gemm"),
        ("triton_tem_fused_mm_3", "gemm + norm"),
        ("_grad_input_fp8_kernel", "gemm + norm"),
        ("_grouped_gemm_kernel", "gemm"),
        ("_backward_kernel", "norm and activation"),
        ("_backward_fp8_kernel", "norm and activation"),
        ("_cast_transpose_kernel", "quantise"),
        ("_amax_weights_kernel", "quantise"),
        ("_both_1x128_kernel", "quantise"),
        ("triton_tem_fused_block_norm_hardswish_0", "gemm + norm"),
        ("triton_red_fused_native_layer_norm_silu_2", "norm and activation"),
        ("triton_per_fused__to_copy_abs_amax_clamp_float8_5", "quantise"),
        ("void at::native::indexSelectLargeIndex<float, long>", "embedding"),
        ("void cub::DeviceRadixSortOnesweepKernel", "embedding"),
        ("void at::native::(anonymous namespace)::indexFuncLargeIndex index_add", "embedding"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("void pytorch_flash::flash_fwd_kernel", "attention"),
        ("Memcpy DtoD (Device -> Device)", "other"),
        ("aten::addmm", "gemm"),
        ("aten::embedding", "embedding"),
    ],
)
def test_kind_of(kernel: str, kind: str) -> None:
    assert kind_of(kernel) == kind


def test_breakdown_finds_the_time_where_it_is_spent() -> None:
    a = torch.randn(400, 400)
    times = breakdown(kernel_times(lambda: [a @ a for _ in range(5)], 2, torch.device("cpu")))
    assert tuple(times) == KINDS
    assert times["gemm"] > 0.5 * sum(times.values())


def test_smoke_run(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app,
        ["--out", str(tmp_path), "--models", "dcnv2,hstu", "--size", "tiny", "--backend", "eager",
         "--arms", "bf16,mods", "--batch-size", "64", "--history", "3", "--steps", "2", "--rounds", "2",
         "--device", "cpu",
         "--data-options", '{"categories": 3, "max_ids": 50}'],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "e2e.json").read_text())
    assert found["device"] == "CPU"
    for model in ("dcnv2", "hstu"):
        for mode in ("training", "inference"):
            base, mods = (found["models"][model][mode][arm] for arm in ("bf16", "mods"))
            assert base["speedup"] == 1.0
            assert mods["speedup"] == pytest.approx(base["milliseconds"] / mods["milliseconds"])
            assert base["examples_per_second"] == pytest.approx(64e3 / base["milliseconds"])
            assert sum(base["microseconds_by_kind"].values()) > 0
        training, inference = (found["models"][model][m]["bf16"] for m in ("training", "inference"))
        assert training["milliseconds"] > inference["milliseconds"]
        assert training["microseconds_by_kind"]["optimizer"] > inference["microseconds_by_kind"]["optimizer"] == 0
    for name in ("speedup.png", "latency.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    result = CliRunner().invoke(app, ["--out", str(tmp_path), "--models", "bert"])
    assert result.exit_code == 2
    assert "no model 'bert'" in result.output


SMALL = [
    "--models", "dlrm", "--size", "tiny", "--backend", "eager", "--batch-size", "32", "--steps", "1", "--rounds", "2",
    "--device", "cpu", "--data-options", '{"categories": 3, "max_ids": 50}',
]  # fmt: skip


def test_arms_in_processes_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Eager arms have no plan: loka cannot be prepared, and is left out with its last words.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    arguments = ["--out", str(tmp_path), *SMALL, "--arms", "bf16,loka", "--modes", "inference", "--jobs", "2"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "e2e.json").read_text())
    (arm,) = found["models"]["dlrm"]["inference"].values()
    assert arm["rounds"] == 2
    assert arm["cuda_graph"] == "no"
    assert sum(arm["microseconds_by_kind"].values()) > 0
    assert "needs a compiler" in found["left_out"]["dlrm inference loka"]
    assert "dlrm inference loka is left out" in result.output


def test_what_there_is_no_time_for_is_left_out_and_named(tmp_path: Path) -> None:
    arguments = ["--out", str(tmp_path), *SMALL, "--arms", "bf16,mods", "--seconds", "1e-9"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "e2e.json").read_text())
    assert found["models"] == {}
    assert set(found["left_out"].values()) == {"no time was left"}
    assert len(found["left_out"]) == 4


def test_only_an_arm_that_plans_by_itself_takes_a_plan(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["--out", str(tmp_path), *SMALL, "--arms", "mods", "--plan", "mods=x.json"])
    assert result.exit_code == 2
    assert "no arm of these plans by itself: mods" in " ".join(result.output.replace("│", " ").split())
