"""The file of measurements: what is written, how it goes on after a kill, and that costs/ reads it."""

import pytest

from loka_compile.bench.records import Records, Timing, baseline_key, kernel_key, quantizer_key
from loka_compile.bench.workload import Operand
from loka_compile.costs import CostTable
from loka_compile.errors import CorruptFileError, StaleTableError
from loka_compile.gemm import Gemm, Role, Scaling

HEADER = {"gpu": "NVIDIA H200", "driver": "580.1", "torch": "2.11.0", "triton": "3.6.0", "libraries": "fbgemm = mslk 1"}
FORWARD = Gemm("g/0", Role.FORWARD, 2048, 768, 256)
WEIGHT = Gemm("g/0", Role.GRAD_WEIGHT, 768, 256, 2048)


def test_lines_are_a_cost_table(tmp_path):
    records = Records(tmp_path / "h.csv", HEADER)
    records.add(baseline_key(FORWARD), Role.FORWARD, Timing(3.94321, 0.0123))
    records.add(baseline_key(WEIGHT), Role.GRAD_WEIGHT, Timing(7.5, 0.0))
    records.add(kernel_key(FORWARD, "torch", "rowwise"), Role.FORWARD, Timing(4.5, 0.01))
    records.add(kernel_key(WEIGHT, "torch", "rowwise"), Role.GRAD_WEIGHT, Timing(6.5, 0.01))
    for scaling, us in ((Scaling.ROWWISE, 1.7), (Scaling.TENSORWISE, 4.8)):
        for rows, columns, turned in ((2048, 256, False), (768, 256, False), (2048, 768, True), (2048, 256, True)):
            operand = Operand(rows, columns, scaling, turned, "bfloat16")
            records.add(quantizer_key(operand), Role.FORWARD, Timing(us + turned + rows / 1e4, 0.01))
    records.add_broken(kernel_key(WEIGHT, "torch", "tensorwise"), Role.GRAD_WEIGHT, "it, broke\nbadly")
    table = CostTable.from_csv(tmp_path / "h.csv")
    assert table.meta["gpu"] == "NVIDIA H200"
    assert table.baseline(FORWARD) == 3.943
    assert table.baseline(WEIGHT) == 7.5
    latency = table.latency(WEIGHT, "torch", "rowwise")
    assert latency.gemm_us == 6.5
    # A is dy.T [768, 2048], stored as [2048, 768]; B is x.T, stored as [2048, 256].
    assert (latency.quantize_a_us, latency.quantize_b_us) == pytest.approx((2.9048, 2.9048), abs=1e-3)
    assert table.latency(FORWARD, "torch", "rowwise").quantize_us == pytest.approx(1.9048 + 1.7768, abs=1e-3)
    assert table.latency(WEIGHT, "torch", "tensorwise") is None
    assert ("quantize", "rowwise") not in table.candidates()


def test_a_second_run_goes_on(tmp_path):
    records = Records(tmp_path / "h.csv", HEADER)
    keys = [
        baseline_key(FORWARD),
        kernel_key(WEIGHT, "torch", "rowwise"),
        quantizer_key(Operand(8, 9, Scaling.BLOCK_128X128, True, "float32")),
    ]
    for key in keys:
        records.add(key, Role.FORWARD, Timing(1.0, 0.0))
    records.add_broken(kernel_key(FORWARD, "torch", "rowwise"), Role.FORWARD, "why")
    again = Records(tmp_path / "h.csv", {**HEADER, "libraries": "fbgemm = mslk 1; torchao = torchao 2"})
    assert again.done == records.done
    assert set(keys) < again.done
    assert again.broken == {kernel_key(FORWARD, "torch", "rowwise"): "why"}
    # A shape is measured once for all roles.
    assert kernel_key(Gemm("x", Role.FORWARD, 768, 256, 2048), "torch", "rowwise") in again.done
    assert baseline_key(Gemm("x", Role.FORWARD, 768, 256, 2048)) not in again.done
    assert CostTable.from_csv(tmp_path / "h.csv").meta["libraries"] == "fbgemm = mslk 1; torchao = torchao 2"


def test_a_line_cut_short_by_a_kill_is_measured_again(tmp_path):
    records = Records(tmp_path / "h.csv", HEADER)
    records.add(baseline_key(FORWARD), Role.FORWARD, Timing(1.0, 0.0))
    records.add(baseline_key(WEIGHT), Role.GRAD_WEIGHT, Timing(2.0, 0.0))
    text = (tmp_path / "h.csv").read_text()
    (tmp_path / "h.csv").write_text(text[:-9])
    assert Records(tmp_path / "h.csv", HEADER).done == {baseline_key(FORWARD)}
    assert (tmp_path / "h.csv").read_text().endswith("\n")


def test_an_arm_that_killed_the_process_is_not_tried_again(tmp_path):
    records = Records(tmp_path / "h.csv", HEADER)
    good, bad = (kernel_key(FORWARD, "torch", recipe) for recipe in ("rowwise", "tensorwise"))
    records.trying(good, Role.FORWARD)
    records.survived()
    records.trying(bad, Role.FORWARD)
    again = Records(tmp_path / "h.csv", HEADER)
    assert again.broken == {bad: "the process died while this ran"}
    assert good not in again.done
    assert not list(tmp_path.glob("*.trying"))
    assert "the process died" in (tmp_path / "h.csv").read_text()


def test_other_devices_and_other_files_are_refused(tmp_path):
    Records(tmp_path / "h.csv", HEADER)
    with pytest.raises(StaleTableError, match=r"torch was '2\.11\.0', is '2\.13\.0'\. Give another file"):
        Records(tmp_path / "h.csv", {**HEADER, "torch": "2.13.0"})
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(StaleTableError, match="gpu was ''"):
        Records(tmp_path / "other.csv", HEADER)
    (tmp_path / "bare.csv").write_text("a,b\n1,2\n")
    with pytest.raises(CorruptFileError, match="no file of measurements"):
        Records(tmp_path / "bare.csv", {})
