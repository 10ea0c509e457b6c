"""The program for the paper's tables II and V and figure 6: a small run, and its parts."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import paper_errors
from benchmarks.bias_norms import plot_bias_norms
from benchmarks.paper_errors import geometric_mean, measure, summarise
from loka_compile.probe.site_stats import SiteStats, Stats


def test_a_small_run_writes_tables_and_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = paper_errors.main(
        ["--size", "tiny", "--batch", "32", "--steps", "60", "--every", "2", "--pairs", "3", "--rows", "16",
         "--ids", "50", "--budget", "0", "--out", str(tmp_path)]
    )  # fmt: skip
    written = json.loads((tmp_path / "paper_errors.json").read_text())
    assert (tmp_path / "figure6.png").stat().st_size > 10_000
    assert written["steps"] == 60
    assert len(written["layers"]) == 15
    assert not written["left_out"]
    sizes = [r["n"] * r["k"] for r in written["layers"]]
    assert sizes == sorted(sizes, reverse=True)
    assert written["table2_layers"] == [r["site"] for r in written["layers"][:4]]
    for inputs in ("normal", "learned", "raw"):
        cells = {label: written["all_layers"][label][inputs]["mere_floored"] for label in written["all_layers"]}
        assert cells["PyTorch BF16"] < 0.02 < min(v for k, v in cells.items() if k != "PyTorch BF16")
        five = written["table5"]
        assert five["faulty"][inputs]["mere_floored"] > 1.5 * five["fixed"][inputs]["mere_floored"]
    counts = written["figure6"]["counts"]
    assert sum(counts.values()) == len(written["figure6"]["values"]) == 10  # layers with a bias
    assert all(len(v) == 30 for v in written["figure6"]["values"].values())
    assert found["table2"].keys() == {label for label, *_ in paper_errors.ARMS}
    assert "0.47 0.53" in capsys.readouterr().out


def test_a_broken_arm_is_left_out_and_the_others_are_measured() -> None:
    stats = SiteStats("a#0", 32, 16, torch.float32)

    def broken(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such kernel")

    arms = {"exact": lambda x, w: x @ w.t(), "broken": broken}
    found = measure(stats, arms, "normal", 5, 8)
    assert list(found) == ["exact"]
    assert found["exact"].elements == 5 * 8 * 16
    assert found["exact"].mere_floored < 1e-5


def test_geometric_means() -> None:
    assert geometric_mean([1.0, 4.0, 16.0]) == pytest.approx(4.0)
    assert math.isnan(geometric_mean([]))
    assert math.isnan(geometric_mean([1.0, math.nan]))
    assert geometric_mean([1.0, math.inf]) == math.inf
    errors = {"PyTorch BF16": dict.fromkeys(paper_errors.METRICS, 0.5)}
    layers = [{"site": str(i), "n": i + 1, "k": 1, "errors": {"normal": errors}} for i in range(6)]
    found = summarise(layers)
    assert found["table2_layers"] == ["5", "4", "3", "2"]
    assert found["table2"]["PyTorch BF16"]["normal"]["mere"] == pytest.approx(0.5)
    assert math.isnan(found["table2"]["TorchAO RW"]["normal"]["mere"])


def test_figure_6_sorts_biases_by_what_they_do(tmp_path: Path) -> None:
    stats, time = Stats(), np.linspace(0, 1, 60)
    courses = {"up#0": 0.1 + time**2, "settled#0": 1 - np.exp(-8 * time), "gone#0": np.exp(-9 * time)}
    for site, course in courses.items():
        stats[site] = SiteStats(site, 4, 4, torch.float32)
        for step, value in enumerate(course):
            stats[site].bias_norm.append(10 * step, float(value))
    stats["without#0"] = SiteStats("without#0", 4, 4, torch.float32)
    found = plot_bias_norms(stats, tmp_path / "deep" / "f.png")
    assert found["behaviour"] == {"up#0": "diverging", "settled#0": "converging", "gone#0": "vanishing"}
    assert found["counts"] == {"vanishing": 1, "converging": 1, "diverging": 1}
    assert found["steps"]["up#0"][-1] == 590
    assert (tmp_path / "deep" / "f.png").read_bytes().startswith(b"\x89PNG")
