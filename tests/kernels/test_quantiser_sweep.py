"""The sweep's logic on a CPU: broken and wrong candidates are named and left out, the fastest right one is reported."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import quantiser_sweep as sweep

from loka_compile.lowering.quantize_op import quantize_fp8_ref

CASES = [(scaling.value, output) for scaling in sweep.SCALINGS for output in sweep.OUTPUTS]


def pretend(broken: str, wrong: str) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The plain ops instead of a kernel; two candidates fail, one loudly and one quietly."""

    def launch(x: torch.Tensor, scaling: str, output: str, tiles: sweep.Tiles) -> tuple[torch.Tensor, ...]:
        if sweep.short(tiles) == broken:
            raise RuntimeError("out of shared memory")
        made = list(quantize_fp8_ref(x, scaling, sweep.FP8, *sweep.OUTPUTS[output]))
        if sweep.short(tiles) == wrong:
            at = 0 if output != "x.T" else 2
            made[at] = made[at].clone()
            made[at].view(torch.uint8)[3, 5] ^= 1
        return tuple(made)

    return launch


def timer(arms: dict[str, list[Callable[[], object]]]) -> dict[str, float]:
    """Later candidates are faster, two changes together faster still."""
    return {name: (1.0 if " cast" in name else 100.0 - i) for i, name in enumerate(arms)}


@pytest.mark.parametrize(("scaling", "output"), CASES)
def test_sweep(scaling: str, output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [sweep.short(tiles) for tiles in sweep.candidates(scaling, output)]
    assert len(set(names)) == len(names)
    broken, wrong = (names[1], names[-1]) if len(names) > 2 else ("", "")
    monkeypatch.setattr(sweep, "launch", pretend(broken, wrong))
    x = torch.randn(130, 256).bfloat16()
    row = sweep.sweep(130, 256, scaling, output, timer, 1.0, sweep.Check(x, scaling), [x, x])
    assert set(row["broken"]) == {broken, wrong} - {""}
    assert not wrong or "1 numbers" in row["broken"][wrong]
    assert not row["broken"].keys() & row["times_us"].keys()
    assert row["ranking"][0] == min(row["times_us"], key=row["times_us"].__getitem__)
    two = (
        {"amax": "first pass", "cast": "second"}
        if scaling == "tensorwise" or (scaling == "rowwise" and output != "x")
        else {}
    )
    assert {key.split()[0] for key in row["best"]} >= set(two)
    assert row["of_copy"]["shipped"] == pytest.approx(row["bytes"] / row["times_us"]["shipped"] / 1e3)
    assert f"{130}x256" in sweep.line(row)


def test_awkward_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "launch", pretend("", ""))
    assert sweep.check_awkward(CASES, device="cpu") == []
    right, wrong = pretend("", ""), pretend("", "shipped")

    def launch(x: torch.Tensor, scaling: str, output: str, tiles: sweep.Tiles) -> tuple[torch.Tensor, ...]:
        return (wrong if output == "x.T" else right)(x, scaling, output, tiles)

    monkeypatch.setattr(sweep, "AWKWARD", [(130, 300)])
    monkeypatch.setattr(sweep, "launch", launch)
    found = sweep.check_awkward([("1x128", "x"), ("1x128", "x.T")], device="cpu")
    assert found == ["130x300 1x128 x.T: 1 numbers of x.T"]


def test_winners() -> None:
    rows = [
        {"scaling": "1x128", "output": "x", "of_copy": {"shipped": 0.8, "a": 0.9, "b": 0.2}},
        {"scaling": "1x128", "output": "x", "of_copy": {"shipped": 0.8, "a": 0.7, "c": 1.0}},
    ]
    # Only what was right everywhere counts: 0.9 and 0.7 make 0.79.
    assert sweep.winners(rows) == ["     1x128    x 80 % (least 80) shipped | 79 % (least 70) a"]


def test_wrong_scales_are_noticed() -> None:
    x = torch.randn(130, 256).bfloat16()
    made = quantize_fp8_ref(x, "rowwise", sweep.FP8, True, True)
    check = sweep.Check.__new__(sweep.Check)
    check.straight, check.turned = made, (made[2], made[3])
    assert check.wrong(made, "both") == ""
    assert check.wrong((made[0], made[1] * 1.01, made[2], made[3]), "both") == "scales of x"
    assert check.wrong((made[0], made[1], made[2], made[3] * 1.01), "x.T") == "scales of x.T"
