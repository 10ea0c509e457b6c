"""Faulty kernels: the probe's inputs show every planted defect, standard-normal ones do not (paper, table V)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import planted_defects
from benchmarks.defects import DEFECTS, Defect, DroppedLastBlock, HiddenFastAccumulation, Sound, StalePadding
from loka_compile.gemm import ROWWISE, Scaling
from loka_compile.lowering.providers import get_provider

EXPECTED = {
    "dropped last K block", "swapped scales of two tiles", "scale of a wrong row", "uninitialised padding rows",
    "fast accumulation where promised not",
}  # fmt: skip


def test_the_probes_inputs_find_what_standard_normal_ones_miss(tmp_path: Path) -> None:
    rows = planted_defects.main(["--steps", "60", "--pairs", "2", "--out", str(tmp_path)])
    assert {row["defect"] for row in rows} == EXPECTED == {defect.name for defect in DEFECTS}
    assert all(row["probe_verdict"] == "found" and row["probe"] > 1.2 for row in rows)
    verdicts = {row["defect"]: row["normal_verdict"] for row in rows}
    assert verdicts["uninitialised padding rows"] == verdicts["fast accumulation where promised not"] == "missed"
    assert verdicts["scale of a wrong row"] == "understated"
    written = json.loads((tmp_path / "planted_defects.json").read_text())
    assert written["rows"] == json.loads(json.dumps(rows))
    text = (tmp_path / "planted_defects.md").read_text()
    assert all(f"| {name} |" in text for name in EXPECTED)


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda d: d.name)
def test_a_defect_is_all_that_sets_a_kernel_apart(defect: Defect) -> None:
    """Where the defect has nothing to spoil, the result is that of the emulation, bit by bit."""
    recipe = defect.provider.recipe_used
    torch.manual_seed(0)
    x, w = torch.randint(1, 3, (128, 256)).float(), torch.randint(1, 3, (64, 256)).float()
    x[:, [0, 128]] = w[:, [0, 128]] = 2.0  # every row and every block has the same scale
    if defect.provider is DroppedLastBlock:
        x[:, 128:] = 0
    if defect.provider is HiddenFastAccumulation:  # 14 bits hold these sums
        x.fill_(2.0)
        w.fill_(2.0)
    args = (x, False, w, False, recipe, torch.float32)
    faulty = defect.provider()
    for _ in range(2):
        assert torch.equal(faulty.gemm(*args), get_provider("emulated").gemm(*args))
    sound = Sound(recipe)
    assert list(sound.recipes) == [recipe.name]
    assert torch.equal(sound.gemm(*args), get_provider("emulated").gemm(*args))


def test_the_accumulator_keeps_14_bits_and_cuts_the_rest_off() -> None:
    x, w = torch.zeros(1, 64), torch.zeros(1, 64)
    x[0, 0], w[0, 0] = 1.0, 1.0  # 448 * 448, just below 2**18: the last bit that is kept weighs 2**4
    x[0, 32], w[0, 32] = 3 / 448, 9 / 448  # 27 in the second step
    args = (x, False, w, False, ROWWISE, torch.float32)
    assert get_provider("emulated").gemm(*args).item() == pytest.approx((448**2 + 27) / 448**2, rel=1e-6)
    assert HiddenFastAccumulation().gemm(*args).item() == pytest.approx((448**2 + 16) / 448**2, rel=1e-6)


def test_stale_padding_takes_its_amax_from_what_the_buffer_held() -> None:
    provider, small = StalePadding(), torch.ones(112, 32)
    provider.gemm(1000 * small, False, small, False, provider.recipe_used, torch.float32)
    b = provider.quantize(small, Scaling.TENSORWISE, torch.float8_e4m3fn, False, None)
    assert float(b.scale) == pytest.approx(1000 / 448)
    assert b.data.shape == (112, 32)
    other = provider.quantize(small, Scaling.TENSORWISE, torch.float8_e4m3fn, True, None)
    assert float(other.scale) == pytest.approx(1 / 448)
    assert other.data.shape == (32, 112)
