"""Cost tables of one's own: files with roles and dtypes, few points, contradictions, bad lines."""

import math

import pytest

from loka_compile.costs import RECIPES, CostTable
from loka_compile.errors import CorruptFileError
from loka_compile.gemm import ROWWISE_FAST, Gemm, Role

SHAPES = [
    (2048, 768, 256), (1024, 512, 512), (1024, 256, 7680), (4096, 1024, 1024), (4096, 2048, 2048), (4096, 4096, 2048),
    (4096, 7680, 4096),
]  # fmt: skip


def gemm(m, n, k, role=Role.FORWARD, **more):
    return Gemm("s#0", role, m, n, k, **more)


HEAD = "m,n,k,role,dtype,provider,recipe,quantize_a_us,quantize_b_us,gemm_us,baseline_us,spread\n"


def own(tmp_path, body, head=HEAD):
    path = tmp_path / "mine.csv"
    path.write_text("# gpu: My GPU\n# note without a colon\n" + head + body)
    return CostTable.from_csv(path)


def test_larger_file_with_roles_and_both_operands(tmp_path):
    lines = []
    for m, n, k in SHAPES:
        for role, factor in (("forward", 1), ("grad_weight", 3)):
            work = 1e-9 * m * n * k
            lines.append(f"{m},{n},{k},{role},bfloat16,lib,rowwise,{2 * factor},{5 * factor},{4 + work * factor},"
                         f"{4 + 2 * work},0.1")  # fmt: skip
    table = own(tmp_path, "\n".join(lines) + "\n")
    assert table.target == "mine"
    assert table.meta["gpu"] == "My GPU"
    m, n, k = SHAPES[0]
    forward = table.latency(gemm(m, n, k), "lib", "rowwise")
    weight = table.latency(gemm(m, n, k, Role.GRAD_WEIGHT), "lib", "rowwise")
    # A kernel knows no role: the two measurements of a shape are averaged.
    assert forward.gemm_us == weight.gemm_us == pytest.approx(4 + 2e-9 * m * n * k, rel=1e-12)
    assert weight.quantize_a_us == 6.0
    assert weight.quantize_b_us == 15.0
    # [2048, 256] (A, 2 us) and [768, 256] (B, 5 us) are points of one quantiser.
    assert (forward.quantize_a_us, forward.quantize_b_us) == (2.0, 5.0)
    assert table.latency(gemm(m, n, k, Role.GRAD_INPUT), "lib", "rowwise").gemm_us == forward.gemm_us
    # Data that follow the model are predicted well where nothing was measured.
    assert table.latency(gemm(3000, 3000, 3000), "lib", "rowwise").gemm_us == pytest.approx(4 + 54, rel=0.05)


def test_measured_fp32_baseline_is_used(tmp_path):
    body = "".join(f"{m},{n},{k},forward,float32,lib,rowwise,2,,4,{1e-9 * m * n * k + 77}\n" for m, n, k in SHAPES)
    assert own(tmp_path, body).baseline(gemm(*SHAPES[0], dtype="float32")) == 1e-9 * math.prod(SHAPES[0]) + 77


def test_few_points_answer_for_themselves_only(tmp_path):
    table = own(tmp_path, "64,64,64,forward,bfloat16,lib,rowwise,1,1.5,4,5,0\n")
    assert table.latency(gemm(64, 64, 64), "lib", "rowwise").gemm_us == 4
    assert table.latency(gemm(64, 64, 128), "lib", "rowwise") is None
    assert math.isnan(table.baseline(gemm(64, 64, 128)))


def test_contradicting_measurements_still_come_back_exactly(tmp_path):
    times = dict(zip(SHAPES, [50, 3, 12, 14, 10, 100, 400], strict=True))  # larger and yet faster, here and there
    body = "".join(f"{m},{n},{k},forward,bfloat16,lib,rowwise,1,1,{t},5,\n" for (m, n, k), t in times.items())
    table = own(tmp_path, body)
    assert {s: table.latency(gemm(*s), "lib", "rowwise").gemm_us for s in SHAPES} == times


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("64,64,x,forward,bfloat16,lib,rowwise,1,1,4,5,", r"line 4, column 'k' must be a whole number, not 'x'"),
        ("64,64,64,sideways,bfloat16,lib,rowwise,1,1,4,5,", "line 4: unknown role 'sideways'"),
        ("64,64,64,forward,bfloat16,lib,magic,1,1,4,5,", "line 4: unknown recipe 'magic'.*rowwise"),
        ("64,64,64,forward,bfloat16,lib,rowwise,1,1,-4,5,", "column 'gemm_us' must be a time above 0"),
        ("64,64,64,forward,bfloat16,lib,rowwise,1,nan,4,5,", "column 'quantize_b_us'"),
        ("64,64,64,forward,bfloat16,lib,rowwise,1,1,four,5,", "not 'four'"),
        ("64,64", "column 'k'"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    with pytest.raises(CorruptFileError, match=message):
        own(tmp_path, line + "\n")


def test_missing_columns_are_named(tmp_path):
    with pytest.raises(CorruptFileError, match=r"lacks the columns \['gemm_us'\]"):
        own(tmp_path, "", head=HEAD.replace("gemm_us,", ""))


def test_every_recipe_of_the_vocabulary_is_known():
    assert RECIPES["rowwise_fast"] is ROWWISE_FAST
    assert len(RECIPES) >= 7
