"""The prediction of shapes that were left out: right where the data follow the model, and honest where they do not."""

import itertools
import json

import pytest

from benchmarks import leave_one_out
from loka_compile.costs.surface import Surface

SIZES = (256, 512, 1024, 2048)
HEAD = "m,n,k,role,dtype,provider,recipe,quantize_a_us,quantize_b_us,gemm_us,baseline_us\n"


def baseline(m, n, k):
    return 4 + 2e-9 * m * n * k


def write(path, kernel):
    lines = [
        f"{m},{n},{k},forward,bfloat16,torch,rowwise,0.2,0.2,{kernel(m, n, k)},{baseline(m, n, k)}"
        for m, n, k in itertools.product(SIZES, repeat=3)
    ]
    path.write_text(HEAD + "\n".join(lines) + "\n")
    return str(path)


def test_data_that_follow_the_model_are_predicted(tmp_path):
    leave_one_out.main(write(tmp_path / "t.csv", lambda *s: baseline(*s) / 2), tmp_path / "o.json")
    result = json.loads((tmp_path / "o.json").read_text())
    row = result["surfaces"]["torch rowwise  bfloat16 False"]
    assert row["points"] == row["count"] == 64
    assert row["median"] < 0.01
    assert result["speed-ups"]["slower than bf16 in truth"] == 0
    # Of the smallest ones quantising eats the advantage.
    assert 32 < result["speed-ups"]["FP8 taken"] <= 64


def test_a_kernel_that_is_bad_at_one_shape_is_a_wrong_claim(tmp_path):
    def kernel(*shape):
        return baseline(*shape) * (1.5 if shape == (1024, 2048, 1024) else 0.5)

    leave_one_out.main(write(tmp_path / "t.csv", kernel), tmp_path / "o.json")
    found = json.loads((tmp_path / "o.json").read_text())["speed-ups"]
    assert found["slower than bf16 in truth"] == 1
    ((what, claimed, truth),) = found["wrong"]
    assert "1024x2048x1024" in what
    assert claimed > 1.05
    assert truth == found["slowest of those taken"] == pytest.approx(1 / 1.5, rel=0.15)


def test_what_is_left_out_is_left_out():
    surface = Surface(
        {(10,): 1.0, (20,): 2.0, (40,): 4.0, (80,): 8.0, (5000,): 1.0}, lambda s: (1.0, s[0]), lambda s: 0.0
    )
    found = leave_one_out.predictions(surface)
    assert set(found) == set(surface.points)
    rest = leave_one_out.without(surface, (5000,))
    assert (5000,) not in rest.points
    assert found[(5000,)] == (rest((5000,)), False)
    assert found[(20,)][1]
    assert leave_one_out.without(rest, (10,)) is None  # three points carry no model
