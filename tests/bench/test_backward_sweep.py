"""benchmarks/backward_sweep.py without a GPU: its loop, its budget, and that a broken arm does not end it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import backward_sweep


def test_shapes_are_written_and_broken_arms_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def gradients(m: int, n: int) -> backward_sweep.Arms:
        return {"two kernels": [lambda: m], "broken": [lambda: m // 0]}

    def weights(width: int, batch: int) -> backward_sweep.Arms:
        return {"cuBLASLt, one by one": [lambda: width]}

    monkeypatch.setattr(backward_sweep, "gradients", gradients)
    monkeypatch.setattr(backward_sweep, "weights", weights)
    monkeypatch.setattr(backward_sweep, "grad_inputs", weights)
    monkeypatch.setattr(backward_sweep, "measure", lambda arms, rounds: {name: c[0]() for name, c in arms.items()})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(sys, "argv", ["backward_sweep.py", "--out", str(tmp_path)])
    backward_sweep.main()
    found = json.loads((tmp_path / "backward_sweep.json").read_text())["us"]
    assert found["gradients 4096x512"] == {"two kernels": 4096}
    assert found["weights 1024x4096"] == {"cuBLASLt, one by one": 1024}
    assert len(found) == len(backward_sweep.GRADIENTS) + len(backward_sweep.WEIGHTS)  # both kinds of weights: one name
    (tmp_path / "backward_sweep.json").unlink()
    monkeypatch.setattr(sys, "argv", ["backward_sweep.py", "--out", str(tmp_path), "--seconds", "-1"])
    backward_sweep.main()
    assert not (tmp_path / "backward_sweep.json").exists()


@pytest.mark.parametrize(("fast", "gated"), [(True, False), (False, False), (True, True)])
def test_a_configuration_that_does_not_compile_is_left_out(
    fast: bool, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import template_sweep

    from loka_compile.lowering.fused import lowerings

    def on_the_cpu(make):  # type: ignore[no-untyped-def]
        return lambda *size, device=None, **more: make(*size, **more)

    def compiled(fn):  # type: ignore[no-untyped-def]
        def call(*given):  # type: ignore[no-untyped-def]
            if lowerings.config_for("gemm_block_norm", 64, 256, 64, 1).stages == 3:
                raise RuntimeError("out of resources")
            return fn(*given)

        return call

    for name in ("full", "randn"):
        monkeypatch.setattr(torch, name, on_the_cpu(getattr(torch, name)))
    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(template_sweep, "capture", lambda calls, warmup: [call() for call in calls])
    monkeypatch.setattr(template_sweep, "copies_past_l2", lambda size: 2)
    lines: list[str] = []
    known = lowerings.config_for
    case = template_sweep.Case(torch.float8_e4m3fn, 64, 256, 64, True, fast, gated)
    found = template_sweep.graphs_of(case, template_sweep.SHAPES, lines.append)
    kept = [str(row) for row in template_sweep.SHAPES if row[4] != 3]
    assert list(found) == ["apart", "shipped", *kept, *["by comparisons"] * (not gated)]
    assert len(lines) == sum(row[4] == 3 for row in template_sweep.SHAPES)
    assert lowerings.config_for is known
    rounds = template_sweep.graphs_of(case, template_sweep.ROUNDS, lines.append)
    assert list(rounds) == ["apart", "shipped", *(str(row) for row in template_sweep.ROUNDS if row[4] != 3)]


def test_cases_are_chosen_by_list_and_name() -> None:
    import template_sweep

    chosen = template_sweep.selected(["uneven", "short"], "^(?!.*Swish).*1024x256 training")
    assert [case.name for _, case in chosen] == [f"{d} 4096x1024x256 training" for d in ("float8_e4m3fn", "bfloat16")]
    for name, cases in template_sweep.CASES.items():
        assert len({case.name for _, case in template_sweep.selected([name], "")}) == len(cases)
