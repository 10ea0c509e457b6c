"""Table files: round trips, strict reading, headers, merging, digests."""

import dataclasses
import json
import math
import os
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loka_compile import jsonio
from loka_compile.errors import CorruptFileError, StaleTableError, TableError, UnknownNameError
from loka_compile.gemm import Role
from loka_compile.table import Header, Measurement, Table

HEADER = Header(
    target="h200",
    device="cpu",
    driver="580.1",
    torch="2.13.0",
    triton="3.6.0",
    libraries={"fbgemm": "mslk-cuda 1.1.0"},
    fingerprint={"a#0": (384, 199), "b.c#1": (1, 13)},
    dropped_rows={"a#0": 3},
    created="2026-11-29T20:00:00+00:00",
)


def row(site="a#0", role="forward", recipe="rowwise", **values):
    defaults = dict(m_min=1, m_max=4096, n=384, k=199, dtype="bfloat16", provider="torch", mere=0.09, samples=4,
                    quantize_us=2.0, gemm_us=8.0, baseline_us=20.0)  # fmt: skip
    return Measurement(site, role, recipe=recipe, **{**defaults, **values})


def table(*rows, **header):
    return Table(dataclasses.replace(HEADER, **header), rows or [row()])


def test_speedup_counts_quantisation_and_is_nan_when_unknown():
    assert row().speedup == 2.0
    assert row().total_us == 10.0
    assert math.isnan(row(quantize_us=math.nan).speedup)
    assert math.isnan(row(baseline_us=math.nan).speedup)
    assert math.isnan(row(quantize_us=0.0, gemm_us=0.0).speedup)


def test_role_enum_becomes_its_plain_name_and_others_are_refused():
    assert type(row(role=Role.GRAD_WEIGHT).role) is str
    assert row(role=Role.GRAD_WEIGHT).role == "grad_weight"
    with pytest.raises(UnknownNameError, match=r"dgrad.*forward, grad_input, grad_weight"):
        row(role="dgrad")


number = st.floats(allow_nan=True, allow_infinity=True)
rows_of_any_kind = st.lists(
    st.builds(
        Measurement,
        site=st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
        role=st.sampled_from([r.value for r in Role]),
        m_min=st.integers(0, 10),
        m_max=st.integers(10, 2**40),
        n=st.integers(1, 10**6),
        k=st.integers(1, 10**6),
        dtype=st.just("float32"),
        provider=st.sampled_from(["torch", "émulé"]),
        recipe=st.text(max_size=3),
        quantize_us=number,
        gemm_us=number,
        mere=number,
        sqnr_db=number,
        samples=st.integers(0, 100),
        refused=st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    ),
    max_size=5,
    unique_by=lambda r: r.key,
)


@settings(max_examples=60, deadline=None)
@given(rows_of_any_kind)
def test_round_trip_keeps_every_value(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("t") / "t.json"
    before = Table(HEADER, rows)
    before.save(path)
    after = Table.load(path)
    assert after.header == before.header
    # repr tells NaN, infinities and the last bit apart, and -0.0 from 0.0.
    assert [repr(r) for r in after.rows] == [repr(r) for r in before.rows]
    assert after.digest() == before.digest()


def test_file_is_strict_json_with_one_row_per_line(tmp_path):
    table(row(mere=math.nan, max_error=math.inf), row(recipe="tensorwise")).save(tmp_path / "t.json")
    text = (tmp_path / "t.json").read_text()
    document = json.loads(text, parse_constant=lambda name: pytest.fail(f"bare {name}"))
    assert document["rows"][0]["mere"] is None
    assert document["rows"][0]["max_error"] == "inf"
    assert sum('"site"' in line for line in text.splitlines()) == 2


def test_header_has_one_site_per_line(tmp_path):
    sites = {"a#0": (384, 199), "[\n 1,\n 2\n]": (7, 8)}
    table(fingerprint=sites).save(tmp_path / "t.json")
    lines = (tmp_path / "t.json").read_text().splitlines()
    assert sum(line.strip().startswith('"a#0": [384, 199]') for line in lines) == 1
    assert Table.load(tmp_path / "t.json").header.fingerprint == sites


def test_rows_are_in_key_order_whatever_order_they_came_in():
    rows = [row(recipe="z"), row(site="b.c#1"), row(role="grad_weight"), row(recipe="a")]
    assert table(*rows).rows == table(*reversed(rows)).rows
    assert table(*rows).digest() == table(*reversed(rows)).digest()


def test_two_rows_of_one_key_are_refused_in_memory_and_in_a_file(tmp_path):
    with pytest.raises(TableError, match=r"two rows for a#0 forward torch:rowwise at 1\.\.4096"):
        table(row(), row(mere=0.1))
    path = tmp_path / "t.json"
    table().save(path)
    path.write_text(path.read_text().replace('"rows": [', '"rows": [' + json.dumps(jsonio.encode(vars(row()))) + ","))
    with pytest.raises(CorruptFileError, match="two rows"):
        Table.load(path)


def test_digest_ignores_time_of_making_and_sees_everything_else():
    base = table().digest()
    assert table(created="later").digest() == base
    assert table(row(mere=0.09000001)).digest() != base
    assert table(row(refused="no")).digest() != base
    for change in ({"target": "b200"}, {"torch": "2.12"}, {"fingerprint": {"a#0": (384, 200)}}, {"libraries": {}}):
        assert table(**change).digest() != base


@pytest.mark.parametrize("keep", [0, 1, 40, 400, -3])
def test_truncated_file_is_corrupt_and_named(tmp_path, keep):
    path = tmp_path / "cut.json"
    table().save(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CorruptFileError, match=r"cut\.json"):
        Table.load(path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: d.update(format="something else"), r'no "loka_compile table" file'),
        (lambda d: d.pop("format"), "no .* file"),
        (lambda d: d.update(surprise=1), "surprise"),
        (lambda d: d.pop("rows"), "rows must be a list, not null"),
        (lambda d: d.update(rows={}), "rows must be a list"),
        (lambda d: d["rows"].insert(0, 7), "row 0 must be an object"),
        (lambda d: d["rows"][0].pop("recipe"), "row 0 lacks the key 'recipe'"),
        (lambda d: d["rows"][0].update(colour="red"), "row 0 has unknown keys \\['colour'\\]"),
        (lambda d: d["rows"][0].update(mere="small"), "row 0, key 'mere' must be a number"),
        (lambda d: d["rows"][0].update(mere=True), "key 'mere'"),
        (lambda d: d["rows"][0].update(mere=10**400), "key 'mere' is too large"),
        (lambda d: d["rows"][0].update(n=3.5), "key 'n' must be a whole number"),
        (lambda d: d["rows"][0].update(n=None), "key 'n' must be a whole number"),
        (lambda d: d["rows"][0].update(site=4), "key 'site' must be a string"),
        (lambda d: d["rows"][0].update(role="sideways"), "row 0: unknown role 'sideways'"),
        (lambda d: d.update(header=[]), "header must be an object"),
        (lambda d: d["header"].update(fingerprint={"a#0": [384]}), r"site 'a#0' must be \[N, K\]"),
        (lambda d: d["header"].update(fingerprint={"a#0": [384, "x"]}), "site 'a#0' must be a whole number"),
        (lambda d: d["header"].update(fingerprint=3), "'fingerprint' must be an object"),
        (lambda d: d["header"].update(torch=2), "key 'torch' must be a string"),
        (lambda d: d["header"].update(libraries={"x": 1}), "library 'x'"),
        (lambda d: d["header"].update(weather="rain"), "weather"),
    ],
)
def test_wrong_content_is_named(tmp_path, damage, message):
    path = tmp_path / "t.json"
    table().save(path)
    document = json.loads(path.read_text())
    damage(document)
    path.write_text(json.dumps(document))
    with pytest.raises(CorruptFileError, match=message):
        Table.load(path)


@pytest.mark.parametrize("text", ["[]", "3", "null", '{"format": NaN}', "\x00", "[" * 100_000])
def test_what_is_not_ours_is_corrupt(tmp_path, text):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(CorruptFileError):
        Table.load(tmp_path / "t.json")


def test_bytes_that_are_not_utf8_are_corrupt(tmp_path):
    (tmp_path / "t.json").write_bytes(b'{"format": "\xff"}')
    with pytest.raises(CorruptFileError):
        Table.load(tmp_path / "t.json")


@pytest.mark.parametrize("version", [0, 1, 3, "2", None])
def test_other_format_version_is_stale(tmp_path, version):
    path = tmp_path / "t.json"
    table().save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": version}))
    with pytest.raises(StaleTableError, match="reads version 2"):
        Table.load(path)


def test_missing_file_stays_a_file_not_found(tmp_path):
    with pytest.raises(FileNotFoundError):
        Table.load(tmp_path / "none.json")


def test_failed_write_keeps_the_old_file_and_leaves_nothing_behind(tmp_path, monkeypatch):
    path = tmp_path / "t.json"
    table().save(path)
    before = path.read_text()

    def no_space(*args):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="no space"):
        table(row(mere=0.5)).save(path)
    assert path.read_text() == before
    assert os.listdir(tmp_path) == ["t.json"]


def test_a_reader_that_is_half_through_goes_on_in_the_old_file(tmp_path):
    path = tmp_path / "t.json"
    table(*(row(recipe=f"r{i}") for i in range(50))).save(path)
    whole = path.read_text()
    with open(path) as reader:
        start = reader.read(100)
        table().save(path)
        assert start + reader.read() == whole
    assert len(Table.load(path)) == 1


def test_a_reader_never_sees_a_part_of_a_file(tmp_path):
    path = tmp_path / "t.json"
    small, large = table(), table(*(row(recipe=f"r{i}") for i in range(200)))
    small.save(path)
    stop = threading.Event()

    def write():
        while not stop.is_set():
            large.save(path)
            small.save(path)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        sizes = {len(Table.load(path)) for _ in range(60)}
    finally:
        stop.set()
        writer.join()
    assert sizes <= {1, 200}


def test_saved_file_follows_the_umask(tmp_path):
    old = os.umask(0o027)
    try:
        table().save(tmp_path / "sub" / "t.json")
    finally:
        os.umask(old)
    assert (tmp_path / "sub" / "t.json").stat().st_mode & 0o777 == 0o640


def test_check_passes_what_fits_and_what_is_not_asked():
    table().check()
    table().check(fingerprint={"a#0": [384, 199]}, target="h200", device="cpu", driver="580.1", torch="2.13.0",
                  triton="3.6.0", libraries={"fbgemm": "mslk-cuda 1.1.0"})  # fmt: skip
    table().check(fingerprint=HEADER.fingerprint, exact=True)


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        ({"target": "b200"}, "target is 'h200', expected 'b200'"),
        ({"target": ""}, "target is 'h200', expected 'none'"),
        ({"device": "NVIDIA H200"}, "device is 'cpu', expected 'NVIDIA H200'"),
        ({"driver": "1"}, "driver is '580.1'"),
        ({"torch": "2.11.0"}, "torch is '2.13.0', expected '2.11.0'"),
        ({"triton": ""}, "triton"),
        ({"libraries": {"fbgemm": "mslk-cuda 1.2.0"}}, "library fbgemm is 'mslk-cuda 1.1.0'"),
        ({"libraries": {"deepgemm": "1"}}, "library deepgemm is 'absent'"),
        ({"fingerprint": {"a#0": (384, 200)}}, r"site 'a#0' has \[N, K\] = \[384, 199\], the model \[384, 200\]"),
        ({"fingerprint": {"new#0": (8, 8)}}, r"site 'new#0' \[N, K\] = \[8, 8\] is not in it"),
        ({"fingerprint": {"a#0": (384, 199)}, "exact": True}, r"site 'b\.c#1' is not in the model"),
    ],
)
def test_check_names_what_differs(expected, message):
    with pytest.raises(StaleTableError, match=message):
        table().check(**expected)


def test_check_names_every_difference_but_not_a_thousand():
    with pytest.raises(StaleTableError) as caught:
        table().check(target="b200", torch="9")
    assert "target" in str(caught.value)
    assert "torch" in str(caught.value)
    with pytest.raises(StaleTableError, match="and 92 more"):
        table().check(fingerprint={f"s{i}#0": (1, 1) for i in range(100)})


def test_merge_unites_sites_rows_and_keeps_the_better_sampled_row():
    left = table(row(samples=4, mere=0.3), row(recipe="tensorwise"), fingerprint={"a#0": (384, 199)})
    right = table(row(samples=50, mere=0.1), row(site="b.c#1"), fingerprint={"b.c#1": (1, 13)}, dropped_rows={"a#0": 7})
    both = left.merge(right)
    assert both.header.fingerprint == {"a#0": (384, 199), "b.c#1": (1, 13)}
    assert both.header.dropped_rows == {"a#0": 7}
    assert [(r.site, r.recipe, r.mere) for r in both.rows] == [
        ("a#0", "rowwise", 0.1), ("a#0", "tensorwise", 0.09), ("b.c#1", "rowwise", 0.09)
    ]  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("xyz"), st.integers(0, 2), number), max_size=6), st.integers(0, 6))
def test_merge_is_commutative_and_idempotent(entries, cut):
    def part(chosen):
        return table(*{name: row(recipe=name, samples=s, mere=e) for name, s, e in chosen}.values())

    left, right = part(entries[:cut]), part(entries[cut:])
    assert left.merge(right).digest() == right.merge(left).digest()
    assert left.merge(left).digest() == left.digest()
    assert left.merge(right).merge(right).digest() == left.merge(right).digest()


@pytest.mark.parametrize(
    "header",
    [{"target": "b200"}, {"device": "NVIDIA H200"}, {"torch": "1"}, {"driver": "2"}, {"libraries": {}},
     {"libraries": {"fbgemm": "mslk-cuda 1.1.0", "x": "1"}}, {"fingerprint": {"a#0": (1, 1)}}],
)  # fmt: skip
def test_merge_refuses_a_foreign_table(header):
    with pytest.raises(StaleTableError):
        table().merge(table(**header))


def test_diff_finds_added_removed_and_changed_rows():
    before = table(row(), row(recipe="gone"), row(recipe="same", mere=math.nan))
    after = table(row(mere=0.2), row(recipe="new"), row(recipe="same", mere=math.nan))
    found = [(c.before and c.before.recipe, c.after and c.after.recipe) for c in before.diff(after)]
    assert found == [("gone", None), (None, "new"), ("rowwise", "rowwise")]
    assert before.diff(before) == ()


def test_to_pandas_has_all_fields_and_the_speedup():
    frame = table(row(), row(recipe="tensorwise", gemm_us=18.0)).to_pandas()
    assert list(frame.columns) == [f.name for f in dataclasses.fields(Measurement)] + ["speedup"]
    assert frame.speedup.tolist() == [2.0, 1.0]
    assert Table(HEADER, []).to_pandas().empty
