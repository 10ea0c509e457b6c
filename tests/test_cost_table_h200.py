"""The shipped table of the H200: what it holds, and what follows from it for the models here."""

from __future__ import annotations

import csv
import importlib.resources
import statistics
import time
from pathlib import Path

import pytest

from benchmarks.gemm_steps import LinearLayer, linear_layers, plan_of
from benchmarks.leave_one_out import predictions
from benchmarks.libraries import speedup
from benchmarks.ship_table import SHIPPED, shipped
from loka_compile.bench.records import QUANTIZE, Records, Timing, baseline_key, kernel_key
from loka_compile.bench.workload import gemms, read_layers
from loka_compile.costs import CostTable
from loka_compile.costs.file import may_be_padded
from loka_compile.gemm import Gemm, Role
from loka_compile.table import BASELINE

FILE = importlib.resources.files("loka_compile") / "data" / "h200.csv"
SHAPES = Path(__file__).parents[1] / "benchmarks" / "shapes" / "lrm.csv"
TEXT = FILE.read_text()
ROWS = list(csv.DictReader(line for line in TEXT.splitlines() if not line.startswith("#")))
H200 = CostTable.load("h200")


def test_file_is_small_and_says_where_it_comes_from():
    assert len(TEXT.encode()) < 700_000
    assert tuple(ROWS[0]) == SHIPPED
    assert H200.meta["gpu"] == "NVIDIA H200"
    for name in ("driver", "torch", "triton", "cuda", "mslk-cuda", "python", "date", "method", "bandwidth_gb_s"):
        assert H200.meta[name], name
    assert shipped(TEXT) == TEXT


def test_every_layer_of_the_list_has_its_baselines_and_kernels():
    wanted = gemms(read_layers(SHAPES), list(Role), ["bfloat16"])
    found = {(r["m"], r["n"], r["k"], r["role"], r["dtype"]) for r in ROWS if r["provider"] == BASELINE[0]}
    missing = [g for g in wanted if (str(g.m), str(g.n), str(g.k), g.role.value, g.dtype) not in found]
    assert missing == []
    from loka_compile.lowering.providers import get_provider

    asked, disturbed = 0, []
    for provider, recipe in (
        ("torch", "tensorwise_fast"), ("torch", "rowwise"), ("fbgemm", "rowwise_fast"), ("triton", "rowwise_fast"),
        ("deepgemm", "blockwise"),
    ):  # fmt: skip
        kernel = get_provider(provider)
        for gemm in wanted:
            if not kernel.refuses_shape(gemm, kernel.recipe(recipe)):
                asked += 1
                if not H200.latency(gemm, provider, recipe).measured:
                    disturbed.append((str(gemm), provider, recipe))
    assert asked > 1000
    assert len(disturbed) < 0.02 * asked, disturbed


def test_measured_times_come_back():
    seen = 0
    for row in ROWS:
        gemm = Gemm("", Role(row["role"]), int(row["m"]), int(row["n"]), int(row["k"]), row["dtype"])
        if row["provider"] == BASELINE[0]:
            measured = float(row["baseline_us"])
            assert H200.baseline(gemm) == measured or (
                H200.baseline(gemm) < measured and may_be_padded(row["role"], gemm.m, gemm.n, gemm.k, row["dtype"])
            )
        elif row["provider"] != QUANTIZE:
            assert H200.latency(gemm, row["provider"], row["recipe"]).gemm_us == float(row["gemm_us"])
        seen += 1
    assert seen > 3000


def test_spreads_are_small():
    spreads = [float(row["spread"]) for row in ROWS]
    assert statistics.median(spreads) < 0.01
    assert statistics.quantiles(spreads, n=20)[18] < 0.15


@pytest.mark.parametrize(
    ("key", "median"),
    [((*BASELINE, "forward", "bfloat16", False), 0.04), (("torch", "tensorwise_fast", "", "bfloat16", False), 0.04)],
)
def test_a_shape_that_is_left_out_is_predicted(key, median):
    surface = H200.gemms[key]
    off = [abs(t / surface.points[s] - 1) for s, (t, comparable) in predictions(surface).items() if comparable]
    assert len(off) > 70
    assert statistics.median(off) < median


@pytest.mark.parametrize(
    "gemm",
    [
        Gemm("", Role.GRAD_WEIGHT, 16, 8, 131_072), Gemm("", Role.GRAD_WEIGHT, 8, 16, 131_072),
        Gemm("", Role.FORWARD, 131_072, 8, 16), Gemm("", Role.GRAD_INPUT, 131_072, 16, 8),
        Gemm("", Role.FORWARD, 4096, 1, 64), Gemm("", Role.FORWARD, 1, 1024, 1024), Gemm("", Role.FORWARD, 1, 16, 16),
        Gemm("", Role.FORWARD, 64, 64, 64), Gemm("", Role.FORWARD, 4096, 64, 64, "float32"),
    ],
    ids=str,
)  # fmt: skip
def test_fp8_is_not_said_to_pay_for_thin_products(gemm):
    for candidate in H200.candidates():
        assert H200.baseline(gemm) / H200.latency(gemm, *candidate).total_us < 1.0, candidate


LIBRARIES = {name for name, _ in H200.candidates()}


def test_nothing_of_the_demos_model_pays_and_something_of_the_large_one_does():
    small = plan_of(linear_layers("wukong", "demo", 4096), H200, providers=LIBRARIES)
    assert set(small.counts()) == {"high_precision:native"}
    counts = plan_of(linear_layers("wukong", "h200", 8192), H200, providers=LIBRARIES).counts()
    assert sum(n for name, n in counts.items() if name != "high_precision:native") > 10


def test_rows_off_16_bytes_count_as_inductor_runs_them():
    """479 columns: padded to 480 as torch.compile does it, not the four times slower kernel that torch.mm takes."""
    for role, (m, n, k) in zip(Role, ((8192, 1024, 479), (8192, 479, 1024), (1024, 479, 8192)), strict=True):
        odd, even = Gemm("", role, m, n, k), Gemm("", role, m, -(-n // 8) * 8, -(-k // 8) * 8)
        assert H200.baseline(even) < H200.baseline(odd) < 1.8 * H200.baseline(even)
        assert H200.gemms[(*BASELINE, role.value, "bfloat16", True)]((m, n, k)) > 3 * H200.baseline(odd)
    # Bound by memory: Inductor leaves it, and so does the table.
    thin = Gemm("", Role.FORWARD, 1_048_576, 24, 27)
    assert H200.baseline(thin) == H200.gemms[(*BASELINE, "forward", "bfloat16", True)]((thin.m, thin.n, thin.k))
    # 34 columns were not measured: 27 do not speak for them, and FP8 shall not win by a guess.
    assert H200.baseline(Gemm("", Role.FORWARD, 1_048_576, 24, 34)) == H200.baseline(
        Gemm("", Role.FORWARD, 1_048_576, 24, 40)
    )
    plan = plan_of(linear_layers("dlrm", "h200", 8192), H200, providers=LIBRARIES)
    assert set(plan.counts()) == {"high_precision:native"}


def test_a_library_more_makes_no_plan_slower():
    layers = [
        LinearLayer(layer.name, layer.batch, layer.inputs, layer.outputs, tuple(Role))
        for layer in read_layers(SHAPES, ["wukong_22GF"])
    ]
    alone, kernels = speedup(layers, H200, {"torch"})
    assert {name.partition(":")[0] for name in kernels} == {"torch", "high_precision"}
    every, _ = speedup(layers, H200, LIBRARIES)
    assert every >= alone > 1.5


def test_loading_is_quick():
    start = time.process_time()
    table = CostTable.from_csv(str(FILE), "h200")
    table.latency(Gemm("", Role.FORWARD, 3000, 3000, 3000), "torch", "rowwise")
    assert time.process_time() - start < 1.5  # 0.2 s; surfaces are fitted when asked


def test_shipping_keeps_the_times_and_drops_the_rest(tmp_path):
    records = Records(tmp_path / "raw.csv", {"gpu": "G"})
    gemm = Gemm("", Role.FORWARD, 64, 32, 16)
    records.add(kernel_key(gemm, "torch", "rowwise"), Role.FORWARD, Timing(12.3456, 0.01234))
    records.add(kernel_key(gemm, "fbgemm", "rowwise"), Role.FORWARD, Timing(98765.4, 0.0))
    records.add(kernel_key(gemm, "fbgemm", "rowwise_fast"), Role.FORWARD, Timing(50.0, 0.4))  # disturbed
    wide = Gemm("", Role.FORWARD, 64, 32, 16, "float32")
    records.add(kernel_key(wide, "torch", "rowwise"), Role.FORWARD, Timing(13.0, 0.0))
    records.add(baseline_key(wide), Role.FORWARD, Timing(20.0, 0.0))
    records.add_broken(kernel_key(gemm, "torch", "tensorwise"), Role.FORWARD, "why, oh why")
    text = shipped((tmp_path / "raw.csv").read_text())
    assert [line for line in text.splitlines() if not line.startswith("#")] == [
        ",".join(SHIPPED),
        "64,32,16,forward,bfloat16,fbgemm,rowwise,,,98800,,0",
        "64,32,16,forward,bfloat16,torch,rowwise,,,12.3,,0.012",
        "64,32,16,forward,float32,high_precision,native,,,,20,0",
    ]
    assert "# gpu: G" in text
