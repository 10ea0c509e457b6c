"""The demo end to end on a tiny model: both arms, the printout, the JSON, the figures."""

from __future__ import annotations

import io
import json
import struct
import zlib

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from examples import demo, demo_report
from examples.data import Dataset
from examples.models import wukong
from tests.backend.helpers_backend import Interpreted

BATCH = 64


@pytest.fixture(scope="module")
def clicks() -> Dataset:
    """A stream whose label depends on two numerics and one category, so that a model has something to learn."""
    torch.manual_seed(0)
    rows, tables = 40 * BATCH, (4, 9)
    numerics = torch.randn(rows, 6)
    categories = torch.stack([torch.randint(n, (rows,)) for n in tables], dim=1)
    logits = 2 * numerics[:, 0] - 2 * numerics[:, 1] + categories[:, 0] - 2
    labels = (torch.rand(rows) < logits.sigmoid()).float()
    names = tuple(f"n{i}" for i in range(6))
    return Dataset(numerics, categories, labels, names, ("a", "b"), tables, marks=((0, "Jan"), (1000, "Feb")))


def png_size(data: bytes) -> tuple[int, int]:
    """Width and height of a PNG, after checking every chunk's CRC."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, kinds = 8, []
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        body = data[at + 8 : at + 8 + length]
        assert struct.unpack(">I", data[at + 8 + length : at + 12 + length])[0] == zlib.crc32(kind + body)
        kinds.append(kind)
        at += 12 + length
    assert (kinds[0], kinds[-1]) == (b"IHDR", b"IEND")
    return struct.unpack(">II", data[16:24])


def run(clicks, out, **changes):
    screen = Console(file=io.StringIO(), width=120)
    arguments = {"batch": BATCH, "size": "tiny", "device": "cpu", "data": clicks, "console": screen, "out": out}
    return demo.run(**arguments | changes), screen.file.getvalue()


def test_the_same_function_in_both_arms_gives_the_same_loss(clicks, tmp_path):
    result, text = run(clicks, tmp_path, backend="aot_eager")
    eager, other = result["arms"].values()
    assert result["relative_log_loss_percent"] == pytest.approx(0.0, abs=1e-3)
    assert other["auc"] == pytest.approx(eager["auc"], abs=1e-4)
    assert eager["auc"] > 0.75  # it learns: chance is 0.5
    assert eager["normalised_entropy"] < 0.95
    assert png_size((tmp_path / "loss.png").read_bytes()) == (1350, 900)
    assert not (tmp_path / "plan.png").exists()
    assert "aot_eager" in text
    again, _ = run(clicks, tmp_path, backend="aot_eager")
    assert again["arms"]["fp32 eager"]["log_loss"] == eager["log_loss"]
    other_seed, _ = run(clicks, tmp_path, backend="aot_eager", seed=1)
    assert other_seed["arms"]["fp32 eager"]["log_loss"] != eager["log_loss"]


def test_loka_arm_probes_plans_and_runs_fp8(clicks, tmp_path, monkeypatch):
    # Code generation takes most of the demo's time and has tests of its own: here torch's operators run the graphs.
    Interpreted().install(monkeypatch)
    # Widths that torch's FP8 kernels take; any speed-up counts, since nothing this small gains.
    small = {**wukong.SIZES["tiny"], "mlp": (32, 32), "head": (32,), "layers": 1}
    monkeypatch.setitem(wukong.SIZES, "tiny", small)
    options = {"auto_calls": 2, "min_speedup": 0.01}
    result, text = run(clicks, tmp_path, options=options, mods_arm=True)
    assert result["options"] == {"table": "auto", "target": "h200", **options}
    assert result == json.loads((tmp_path / "metrics.json").read_text())
    eager, mods, loka = (result["arms"][name] for name in (demo.BASE, demo.MODS, "loka"))
    assert mods["auc"] == pytest.approx(eager["auc"], abs=0.05)
    assert loka["auc"] == pytest.approx(eager["auc"], abs=0.05)
    assert abs(result["relative_log_loss_percent"]) < 10
    assert [(c["arm"], c["base"]) for c in result["comparisons"]] == [
        (demo.MODS, demo.BASE), ("loka", demo.BASE), ("loka", demo.MODS),
    ]  # fmt: skip
    changed_model, both, precision = (c["percent"] for c in result["comparisons"])
    assert both == result["relative_log_loss_percent"]
    # FP8 rounds, so the arms part; by less than the other function does.
    assert 0 < abs(precision) < max(abs(both), abs(changed_model))
    assert result["chains"]["head.0#0"] == {
        "kind": "linear-norm-swish", "mods": ["bias_removal", "block_norm", "hard_swish"],
    }  # fmt: skip
    chosen = [g for g in result["gemms"] if g["fp8"]]
    assert {g["role"] for g in chosen} == set(demo_report.ROLES)
    assert sum(result["counts"].values()) == len(result["gemms"])
    for gemm in chosen:
        winner = next(c for c in gemm["candidates"] if c["kernel"] == gemm["kernel"])
        assert winner["mere"] == gemm["mere"]
        # The candidate's speed-up is its own, the decision's that in company: a shared quantisation counts once.
        assert winner["speedup"] <= gemm["speedup"]
        assert 0 < gemm["mere"] <= 0.2
        assert len(gemm["shape"]) == 3
    # Prediction layers have one output; FP8 kernels take none.
    assert not [g for g in chosen if g["site"] == "head.3#0" and g["role"] == "forward"]
    for expected in ("rewritten", "refused", "plan for", "head.0#0", chosen[0]["kernel"], "relative log loss"):
        assert expected in text
    assert png_size((tmp_path / "plan.png").read_bytes()) == (1800, 750)
    assert "loka report" in (tmp_path / "report.txt").read_text(encoding="utf-8")


def test_without_a_table_the_mods_are_all_that_is_shown(clicks, tmp_path, monkeypatch):
    Interpreted().install(monkeypatch)
    result, text = run(clicks, tmp_path, examples=8 * BATCH, options={"table": "off"})
    assert set(result["chains"]) > {"head.0#0", "layers.1.fmb.mlp.3#0"}
    assert (result["gemms"], result["counts"]) == ([], {})
    assert "no plan was made" in text
    assert not (tmp_path / "plan.png").exists()


def test_too_few_examples_are_refused(clicks, tmp_path):
    with pytest.raises(ValueError, match="make 7 batches of 64; the demo needs at least eight"):
        run(clicks, tmp_path, examples=7 * BATCH + 3)
    with pytest.raises(ValueError, match="none to try alone with backend 'eager'"):
        run(clicks, tmp_path, backend="eager", mods_arm=True)
    assert list(tmp_path.iterdir()) == []


def test_command_line_refuses_what_is_not_json():
    import typer

    app = typer.Typer()
    app.command()(demo.main)
    result = CliRunner().invoke(app, ["--options", "{mods: none}"])
    assert result.exit_code == 2
    assert "not JSON" in result.output
