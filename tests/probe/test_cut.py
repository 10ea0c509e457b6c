"""Cutting samples into batches: disjoint, aligned, with the largest values in each."""

import torch

from loka_compile.probe.samples import cut


def test_batches_are_disjoint_aligned_and_hold_partners():
    x = torch.arange(200.0).reshape(200, 1)
    found = cut([(x[:90], x[:90] * 2), (x[90:], x[90:] * 2)], torch.float32, 4, 32)
    assert (len(found.batches), found.rows, found.dropped) == (4, 200, 0)
    values = [set(b.operands[0].flatten().tolist()) for b in found.batches]
    assert all(len(v) == 32 for v in values)
    assert len(set.union(*values)) == 4 * 32
    assert all(torch.equal(b.operands[1], b.operands[0] * 2) for b in found.batches)
    assert all(b.representative in (31, 32) for b in found.batches)  # the largest row may be an extra one


def test_row_with_the_largest_value_of_each_operand_is_always_kept():
    torch.manual_seed(0)
    for line in (0, 17, 999):
        x, y = torch.randn(1000, 8), torch.randn(1000, 4)
        x[line, 3] = -1e4
        y[500 + line // 2, 0] = 1e5
        found = cut([(x, y)], torch.float32, 2, 16)
        assert max(b.operands[0].abs().max() for b in found.batches) == 1e4
        assert max(b.operands[1].abs().max() for b in found.batches) == 1e5
        assert all(b.operands[0].shape[0] == 16 and b.representative in (14, 15, 16) for b in found.batches)


def test_extra_rows_stand_behind_the_representative_ones():
    x = torch.ones(320, 1)
    x[3] = 9.0
    (batch,) = cut([(x,)], torch.float32, 1, 32).batches
    assert batch.representative == 31
    assert batch.operands[0][:, 0].tolist() == [1.0] * 31 + [9.0]


def test_shorter_partner_decides_and_few_rows_make_few_batches():
    found = cut([(torch.zeros(40, 2), torch.zeros(33, 2))], torch.float32, 4, 128)
    assert [b.operands[0].shape[0] for b in found.batches] == [16, 16]
    assert found.rows == 33
    assert [b.representative for b in cut([(torch.zeros(7, 2),)], torch.float32, 4, 128).batches] == [7]
    assert cut([], torch.float32, 4, 128).batches == []
