"""Which GEMMs and operands are measured, in which order."""

from pathlib import Path

import pytest

from loka_compile.bench.workload import Operand, gemms, operands, read_layers
from loka_compile.errors import CorruptFileError, UnknownNameError
from loka_compile.gemm import Role, Scaling

HEAD = "group,layer,M_batch,K_in,N_out,more\n"
SHIPPED = Path(__file__).parents[2] / "benchmarks/shapes/lrm.csv"


def layers_of(tmp_path, body, groups=()):
    (tmp_path / "s.csv").write_text(HEAD + body)
    return read_layers(tmp_path / "s.csv", groups)


def test_the_three_gemms_of_a_layer(tmp_path):
    found = gemms(layers_of(tmp_path, 'g,"l, with a comma",199,13,384,x\n'), list(Role), ["bfloat16"])
    assert [(g.role.value, g.m, g.n, g.k) for g in found] == [
        ("forward", 199, 384, 13), ("grad_input", 199, 13, 384), ("grad_weight", 384, 13, 199),
    ]  # fmt: skip
    assert found[0].site == "g/l, with a comma"


def test_order_is_dtype_role_layer_and_twins_are_dropped(tmp_path):
    layers = layers_of(tmp_path, "a,0,8,4,2,\nb,0,8,4,2,\nb,1,9,4,2,\n")
    found = gemms(layers, [Role.GRAD_WEIGHT, Role.FORWARD], ["float32", "bfloat16"])
    assert [(g.dtype, g.role.value, g.site) for g in found] == [
        (dtype, role, site)
        for dtype in ("float32", "bfloat16") for role in ("grad_weight", "forward") for site in ("a/0", "b/1")
    ]  # fmt: skip


def test_groups_are_prefixes_in_the_order_given(tmp_path):
    body = "wukong_a,0,1,1,1,\nloka27,0,2,1,1,\nwukong_b,0,3,1,1,\n"
    assert [layer.batch for layer in layers_of(tmp_path, body, ["loka", "wukong", "wukong_b"])] == [2, 1, 3]
    with pytest.raises(UnknownNameError, match=r"unknown group of layers 'dlrm'.*loka27, wukong_a"):
        layers_of(tmp_path, body, ["dlrm"])


@pytest.mark.parametrize("bad", ["0", "-3", "1.5", "", "many"])
def test_bad_sizes_are_named(tmp_path, bad):
    with pytest.raises(CorruptFileError, match=rf"line 3, column 'K_in' must be a whole number above 0, not '{bad}'"):
        layers_of(tmp_path, f"a,0,1,1,1,\na,1,1,{bad},1,\n")


def test_missing_columns_are_named(tmp_path):
    (tmp_path / "s.csv").write_text("m,n,k\n1,1,1\n")
    with pytest.raises(CorruptFileError, match=r"lacks the columns \['group', 'layer', 'M_batch', 'K_in', 'N_out'\]"):
        read_layers(tmp_path / "s.csv")


def test_operands_are_as_stored_and_carry_every_scaling(tmp_path):
    (forward, grad_input, grad_weight) = gemms(layers_of(tmp_path, "g,0,4096,16,512,\n"), list(Role), ["bfloat16"])
    x, w, dy = (4096, 16), (512, 16), (4096, 512)
    for gemm, expected in (
        (forward, {(*x, False), (*w, False)}),
        (grad_input, {(*dy, False), (*w, True)}),
        (grad_weight, {(*dy, True), (*x, True)}),
    ):
        found = operands([gemm])
        assert {(o.rows, o.columns, o.transposed) for group in found for o in group} == expected
        # 1x32 is for GPUs that no cost table is for yet.
        assert all({o.scaling for o in group} == set(Scaling) - {Scaling.NONE, Scaling.BLOCK_1X32} for group in found)
    assert operands([forward])[0][0] == Operand(4096, 16, Scaling.TENSORWISE, False, "bfloat16")


def test_operands_that_span_the_sizes_come_first(tmp_path):
    body = "".join(f"g,{m},{m},256,256,\n" for m in (1000, 1100, 2900, 3100, 100_000))
    found = [group[0].rows for group in operands(gemms(layers_of(tmp_path, body), [Role.FORWARD], ["bfloat16"]))]
    # 256 is the weight; 1100 and 2900 lie within a factor of three of 1000.
    assert found == [1000, 256, 3100, 100_000, 1100, 2900]


def test_the_shipped_layers_hold_the_shapes_of_the_issue():
    layers = read_layers(SHIPPED)
    loka27 = [layer for layer in layers if layer.group == "loka27"]
    assert len(loka27) == 27
    assert {layer.batch for layer in loka27} == {2048}
    assert (loka27[0].inputs, loka27[0].outputs) == (256, 768)
    assert (loka27[-1].inputs, loka27[-1].outputs) == (123_200, 1024)
    assert len([layer for layer in layers if layer.group == "loka_fig13"]) == 9
    assert {layer.group.partition("_")[0] for layer in layers} >= {"wukong", "dlrm", "hstu", "interformer", "dhen"}
    assert layers[0].group == "loka27"  # the most valuable first
