"""The figure of throughputs: arithmetic, and what is left out."""

import json

import pytest

from benchmarks import figure4
from loka_compile.bench.workload import read_layers

HEAD = "m,n,k,role,dtype,provider,recipe,quantize_a_us,quantize_b_us,gemm_us,baseline_us\n"


@pytest.fixture
def costs(tmp_path):
    """Every layer takes 40 us in bf16; rowwise 10 and 5 + 5 to quantise; DeepGEMM was measured at the first alone."""
    lines = []
    for index, layer in enumerate(read_layers(figure4.SHAPES, ["loka27"])):
        shape = f"{layer.batch},{layer.outputs},{layer.inputs},forward,bfloat16"
        lines.append(f"{shape},torch,rowwise,5,5,10,40")
        if index == 0:
            lines.append(f"{shape},deepgemm,blockwise,60,20,20,40")
    path = tmp_path / "mine.csv"
    path.write_text("# gpu: A GPU\n# torch: 2\n" + HEAD + "\n".join(lines) + "\n")
    return path


def test_rates_and_files(costs, tmp_path, capsys):
    figure4.main(tmp_path, str(costs))
    result = json.loads((tmp_path / "figure4_mine.json").read_text())
    assert result["gpu"] == "A GPU"
    assert result["layers"][0] == "2048x256 @ 256x768"
    flops = 2 * 2048 * 256 * 768
    first = result["points"]["torch:rowwise"][0]
    assert first["TFLOP/s without quantising"] == pytest.approx(flops / 10e-6 / 1e12, abs=0.06)
    assert first["TFLOP/s"] == pytest.approx(flops / 20e-6 / 1e12, abs=0.06)
    assert (first["speed-up without quantising"], first["speed-up"], first["share of quantising"]) == (4.0, 2.0, 0.5)
    assert [p is None for p in result["points"]["deepgemm:blockwise"]] == [False] + [True] * 26
    means = result["geometric mean"]
    assert means["torch:rowwise"]["speed-up"] == pytest.approx(2.0)
    assert means["torch:rowwise"]["layers"] == 27
    assert means["deepgemm:blockwise"]["worst speed-up"] == 0.4
    assert means["best of all"]["speed-up"] == pytest.approx(2.0)
    assert means["bf16"]["speed-up"] == 1.0
    assert (tmp_path / "figure4_mine.png").read_bytes().startswith(b"\x89PNG")
    assert "torch:rowwise" in capsys.readouterr().out
