"""The Criteo-format loader against a line-by-line reading of the same bytes."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.data.criteo import LONGEST_LINE, CriteoFormatError, CriteoStream, day_files, hash_rows
from examples.data.criteo_lines import parse_lines
from examples.data.stream import Batch


def line(rng: random.Random) -> str:
    integers = ["" if rng.random() < 0.3 else str(rng.randint(-3, 99_999)) for _ in range(13)]
    categories = ["" if rng.random() < 0.2 else f"{rng.getrandbits(32):08x}" for _ in range(26)]
    return "\t".join([str(rng.randint(0, 1)), *integers, *categories])


def write(path: Path, lines: list[str], end: str = "\n") -> list[str]:
    path.write_bytes("".join(text + end for text in lines).encode())
    return lines


def reference(text: str) -> tuple[int, list[int | None], list[int | None]] | None:
    """What a line means, read with Python's own parsers; None for a bad line."""
    columns = text.split("\t")
    if len(columns) != 40 or columns[0] not in ("0", "1"):
        return None
    try:
        integers = [None if c == "" else int(c) for c in columns[1:14]]
        categories = [None if c == "" else int(c, 16) for c in columns[14:]]
    except ValueError:
        return None
    return int(columns[0]), integers, categories


def check(stream: CriteoStream, lines: list[str]) -> None:
    good = [r for r in map(reference, lines) if r is not None]
    batches = list(stream)
    whole = len(good) // stream.batch_size * stream.batch_size
    assert [len(b.labels) for b in batches] == [stream.batch_size] * (whole // stream.batch_size)
    assert torch.cat([b.labels for b in batches]).tolist() == [g[0] for g in good[:whole]]
    numerics = torch.cat([b.numerics for b in batches]).numpy()
    expected = [[np.log1p(max(i or 0, 0)) for i in g[1]] for g in good[:whole]]
    np.testing.assert_allclose(numerics, np.array(expected, np.float32), rtol=1e-6)
    rows = torch.cat([b.categories for b in batches]).numpy()
    hashed = hash_rows(
        np.array([[c or 0 for c in g[2]] for g in good[:whole]], np.uint64), stream.schema.table_sizes[0]
    )
    missing = np.array([[c is None for c in g[2]] for g in good[:whole]])
    np.testing.assert_array_equal(rows, np.where(missing, 0, hashed))


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("chunk", [1, 300, 5000, 4 * 2**20])
def test_reads_what_python_reads(tmp_path: Path, chunk: int, end: str) -> None:
    rng = random.Random(1)
    lines = write(tmp_path / "day_0", [line(rng) for _ in range(103)], end)
    check(CriteoStream([tmp_path / "day_0"], 10, chunk=chunk), lines)


def test_a_last_line_without_newline_and_files_across_a_batch(tmp_path: Path) -> None:
    rng = random.Random(2)
    first = [line(rng) for _ in range(7)]
    (tmp_path / "day_2").write_text("\n".join(first))
    second = write(tmp_path / "day_10", [line(rng) for _ in range(8)])
    with gzip.open(tmp_path / "day_11.gz", "wt") as file:
        third = [line(rng) for _ in range(6)]
        file.write("\n".join(third))
    (tmp_path / "day_12").write_text("")
    stream = CriteoStream([tmp_path], 7)
    assert [f.name for f in stream.files] == ["day_2", "day_10", "day_11.gz", "day_12"]
    check(stream, first + second + third)
    assert str(stream.bad_lines) == "no bad lines"


BAD = {
    "": "blank line",
    "1\t2": "not 40 columns",
    "0" + "\t" * 40: "not 40 columns",
    "2" + "\t" * 39: "label is not 0 or 1",
    "\t" * 39: "label is not 0 or 1",
    "10" + "\t" * 39: "label is not 0 or 1",
    "0\t1.5" + "\t" * 38: "count is not an integer",
    "0\t-" + "\t" * 38: "count is not an integer",
    "0\t--1" + "\t" * 38: "count is not an integer",
    "0\t" + "9" * 19 + "\t" * 38: "count is not an integer",
    "0" + "\t" * 14 + "6g" + "\t" * 25: "category is not hexadecimal",
    "0" + "\t" * 39 + "f" * 17: "category is not hexadecimal",
    "0\t½" + "\t" * 38: "count is not an integer",
}


@pytest.mark.parametrize("chunk", [50, 2**20])
def test_bad_lines_are_counted_with_place_and_reason(tmp_path: Path, chunk: int) -> None:
    rng = random.Random(3)
    lines = [line(rng) for _ in range(40)]
    for place, text in zip(range(1, 40, 3), BAD, strict=True):
        lines[place] = text
    write(tmp_path / "day_0", lines)
    stream = CriteoStream([tmp_path / "day_0"], 3, max_bad=1.0, chunk=chunk)
    check(stream, [text for text in lines if text not in BAD])
    assert stream.bad_lines.count == len(BAD)
    reasons = list(BAD.values())
    assert dict(stream.bad_lines.reasons) == {r: reasons.count(r) for r in reasons}
    assert stream.bad_lines.examples == [f"{tmp_path}/day_0:{2 + 3 * i}: {reasons[i]}" for i in range(5)]
    assert str(stream.bad_lines).startswith("13 bad lines left out: count is not an integer (5), ")


def test_extremes_are_legal() -> None:
    text = "1\t-" + "9" * 18 + "\t" + "9" * 18 + "\t-0" + "\t" * 11 + "F" * 16 + "\t0" + "\t" * 24 + "\n"
    parsed = parse_lines(text.encode())
    assert parsed.bad == []
    assert parsed.integers[0, :3].tolist() == [-(10**18 - 1), 10**18 - 1, 0]
    assert parsed.missing_integers[0].tolist() == [False] * 3 + [True] * 10
    assert parsed.categories[0, :2].tolist() == [2**64 - 1, 0]
    assert parsed.missing_categories[0].tolist() == [False] * 2 + [True] * 24


def test_an_absurdly_long_line_is_one_bad_line_and_costs_no_memory(tmp_path: Path) -> None:
    rng = random.Random(4)
    before, after = [line(rng) for _ in range(5)], [line(rng) for _ in range(5)]
    write(tmp_path / "day_0", [*before, "7" * (3 * LONGEST_LINE), *after])
    stream = CriteoStream([tmp_path / "day_0"], 5, max_bad=0.2, chunk=1000)
    check(stream, before + after)
    assert stream.bad_lines.examples == [f"{tmp_path}/day_0:6: not 40 columns"]


def test_a_file_of_another_kind_stops_soon(tmp_path: Path) -> None:
    write(tmp_path / "notes.txt", ["hello"] * 200_000)
    stream = CriteoStream([tmp_path / "notes.txt"], 10, chunk=10_000)
    with pytest.raises(CriteoFormatError, match=r"lines are not in Criteo's format.*notes.txt:1: not 40 columns"):
        next(stream)
    assert stream.bad_lines.count < 5000
    # Few lines are judged at the end of the file.
    write(tmp_path / "few", [line(random.Random(0)), "hello"])
    with pytest.raises(CriteoFormatError, match="1 of the first 2 lines"):
        next(CriteoStream([tmp_path / "few"], 10))


@pytest.mark.parametrize("chunk", [40, 1000, 2**20])
@pytest.mark.parametrize("after", [0, 1, 4, 7])
def test_resumes_at_the_same_example(tmp_path: Path, after: int, chunk: int) -> None:
    rng = random.Random(5)
    for day in range(3):
        lines = [line(rng) for _ in range(17)]
        lines[rng.randrange(17)] = "bad"
        write(tmp_path / f"day_{day}", lines)

    def stream() -> CriteoStream:
        return CriteoStream([tmp_path], 6, max_bad=1.0, chunk=chunk)

    straight, stopped, resumed = stream(), stream(), stream()
    for _ in range(after):
        next(straight)
        next(stopped)
    resumed.load_state_dict(stopped.state_dict())
    assert resumed.state_dict() == stopped.state_dict()
    rest, again = list(straight), list(resumed)
    assert len(rest) == len(again) == 8 - after
    assert all(torch.equal(x, y) for a, b in zip(rest, again, strict=True) for x, y in zip(a[:3], b[:3], strict=True))
    assert resumed.bad_lines == straight.bad_lines


def test_resume_notices_another_file(tmp_path: Path) -> None:
    write(tmp_path / "a", [line(random.Random(0))])
    write(tmp_path / "b", [line(random.Random(0))])
    state = CriteoStream([tmp_path / "a"], 1).state_dict()
    with pytest.raises(ValueError, match="stands in file 'a', but file 0 is 'b'"):
        CriteoStream([tmp_path / "b"], 1).load_state_dict(state)


def test_numerics_and_flags(tmp_path: Path) -> None:
    write(tmp_path / "day_0", ["1\t7\t-2" + "\t" * 37])
    raw = next(CriteoStream([tmp_path / "day_0"], 1, numerics="raw", missing_flags=True))
    assert raw.numerics.tolist() == [[7, -2] + [0] * 11 + [0, 0] + [1] * 11]
    logs = next(CriteoStream([tmp_path / "day_0"], 1))
    torch.testing.assert_close(logs.numerics, torch.tensor([[np.log(8), 0.0] + [0.0] * 11], dtype=torch.float32))


def test_hash_is_spread_and_differs_by_column() -> None:
    values = np.repeat(np.arange(20_000, dtype=np.uint64)[:, None], 2, axis=1)
    rows = hash_rows(values, 101)
    assert rows.min() == 1
    assert rows.max() == 100
    for column in range(2):
        counts = np.bincount(rows[:, column], minlength=101)[1:]
        chi2 = ((counts - 200) ** 2 / 200).sum()
        assert 50 < chi2 < 160  # 99 degrees of freedom
    assert (rows[:, 0] == rows[:, 1]).mean() < 0.03


def test_missing_paths_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no file"):
        day_files([tmp_path / "day_0"])
    with pytest.raises(FileNotFoundError, match="has no files"):
        day_files([tmp_path])
    (tmp_path / "x").write_text("")
    with pytest.raises(ValueError, match='legal: "log1p", "raw"'):
        CriteoStream([tmp_path], 1, numerics="log")


COLUMN = st.one_of(
    st.just(""),
    st.integers(-(10**18) + 1, 10**18 - 1).map(str),
    st.integers(0, 2**64 - 1).map(lambda n: f"{n:x}"),
    st.text("0123456789abcdefABCDEF-+ .", max_size=20),
)


def strict(text: str) -> bool:
    """Python's int() is laxer than the format: it takes spaces, underscores and a plus sign."""
    columns = text.split("\t")
    return (
        reference(text) is not None
        and all(c.lstrip("-").isdecimal() and len(c.lstrip("-")) <= 18 for c in columns[1:14] if c)
        and all(c.isalnum() and len(c) <= 16 for c in columns[14:] if c)
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("0012"), st.lists(COLUMN, min_size=38, max_size=40)), max_size=8))
def test_any_text_is_parsed_or_refused(rows: list[tuple[str, list[str]]]) -> None:
    lines = ["\t".join([label, *columns]) for label, columns in rows]
    parsed = parse_lines("".join(text + "\n" for text in lines).encode())
    good = [i for i, text in enumerate(lines) if strict(text)]
    assert parsed.index.tolist() == good
    assert parsed.lines == len(lines)
    assert [i for i, _ in parsed.bad] == [i for i in range(len(lines)) if i not in good]
    for row, i in enumerate(good):
        label, integers, categories = reference(lines[i])
        assert parsed.labels[row] == label
        assert parsed.integers[row].tolist() == [n or 0 for n in integers]
        assert parsed.categories[row].tolist() == [n or 0 for n in categories]
        assert parsed.missing_integers[row].tolist() == [n is None for n in integers]


def test_batches_are_tensors_a_model_takes(tmp_path: Path) -> None:
    write(tmp_path / "day_0", [line(random.Random(6)) for _ in range(4)])
    stream = CriteoStream([tmp_path / "day_0"], 4, table_size=50)
    batch = next(stream)
    assert isinstance(batch, Batch)
    assert stream.schema.n_numerics == 13
    assert stream.schema.table_sizes == (50,) * 26
    assert batch.categories.dtype == torch.int64
    assert batch.categories.min() >= 0
    assert batch.categories.max() < 50
