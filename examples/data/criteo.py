"""Click logs in Criteo's format, streamed from day files of any size with little memory.

One example a line, tab-separated: a label 0 or 1, 13 integers, 26 categories as up to 16 hexadecimal digits; an empty
column is missing. This is the format of the Criteo display-advertising sets (Kaggle and Terabyte), which must be had
from their owner; `python -m examples.train --data criteo --files DIR` takes them as they are, or gzipped.

A chunk of bytes is parsed as a whole with numpy (no loop over lines). A line that does not follow the format is left
out, counted, and the first few are reported as file:line; too many stop the run, since then the file is something else.
"""

from __future__ import annotations

import gzip
import re
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import torch
from numpy.typing import NDArray

from examples.data.criteo_lines import COLUMNS, N_CATEGORIES, N_INTEGERS, ParsedLines, parse_lines
from examples.data.stream import Batch, Schema

#: Bytes read at a time, and the longest line that is taken for one (a regular line has less than 500).
CHUNK = 4 * 2**20
LONGEST_LINE = 64 * 1024
#: Bad lines that are reported one by one.
REPORTED = 5


class CriteoFormatError(ValueError):
    """A file is not in Criteo's format; the text names file and line."""


@dataclass
class BadLines:
    """What was left out: a count for each reason, and the first few places."""

    reasons: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Lines left out so far."""
        return sum(self.reasons.values())

    def add(self, path: Path, line: int, reason: str) -> None:
        """Count one more; ``line`` counts from one."""
        self.reasons[reason] += 1
        if len(self.examples) < REPORTED:
            self.examples.append(f"{path}:{line}: {reason}")

    def __str__(self) -> str:
        if not self.count:
            return "no bad lines"
        reasons = ", ".join(f"{reason} ({n:,})" for reason, n in self.reasons.most_common())
        return f"{self.count:,} bad lines left out: {reasons}; first: {'; '.join(self.examples)}"


def day_files(paths: Sequence[str | Path]) -> list[Path]:
    """Files in the order of their days: a folder stands for its files, and ``day_2`` comes before ``day_10``.

    Raises:
        FileNotFoundError: a path does not exist, or a folder has no file.
    """

    def order(path: Path) -> list[tuple[bool, int, str]]:
        return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", path.name)]

    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted((p for p in path.iterdir() if p.is_file() and not p.name.startswith(".")), key=order)
            if not inside:
                raise FileNotFoundError(f"the folder {path} has no files")
            files += inside
        elif path.is_file():
            files.append(path)
        else:
            raise FileNotFoundError(f"there is no file {path}")
    return files


class CriteoStream:
    """Day files as a `Stream`: one pass, in order, whole batches only. At most a chunk and a batch are in memory.

    ``bad_lines`` holds what was left out so far, that is before the next example to come.

    Args:
        paths: files (plain or .gz) or folders of them; files are read in the order given, a folder's by their number.
        table_size: rows of each category's table; row 0 is "missing", the others are hashed to.
        numerics: "log1p": log(1 + max(x, 0)); "raw": the integer itself. A missing value is 0 in both.
        missing_flags: add a 0/1 column for "missing" behind the 13 numerics.
        max_bad: share of bad lines above which reading stops; looked at from 1,000 lines on, and at the end.
        chunk: bytes read at a time.

    Raises:
        CriteoFormatError: on reading, when more than ``max_bad`` of the lines are bad.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        batch_size: int,
        *,
        table_size: int = 100_000,
        numerics: str = "log1p",
        missing_flags: bool = False,
        max_bad: float = 0.01,
        chunk: int = CHUNK,
    ) -> None:
        if numerics not in ("log1p", "raw"):
            raise ValueError(f'numerics is {numerics!r}; legal: "log1p", "raw"')
        if table_size < 2 or batch_size < 1 or chunk < 1:
            raise ValueError("table_size must be at least 2, batch_size and chunk at least 1")
        self.files = day_files(paths)
        self.batch_size = batch_size
        self.schema = Schema(N_INTEGERS * (2 if missing_flags else 1), (table_size,) * N_CATEGORIES)
        self.bad_lines = BadLines()
        self._numerics, self._flags, self._max_bad, self._chunk = numerics, missing_flags, max_bad, chunk
        self._table_size = table_size
        #: Where the reader stands, and the parsed blocks that batches have not used up.
        self._read = _Place(0, 0, 1)
        self._open: BinaryIO | None = None
        self._blocks: deque[_Block] = deque()
        self._good = 0

    def __iter__(self) -> CriteoStream:
        return self

    def __next__(self) -> Batch:
        while sum(block.left for block in self._blocks) < self.batch_size:
            at_end = self._read.file == len(self.files)
            while self._blocks and (at_end or not self._blocks[0].left):
                block = self._blocks.popleft()
                self._count_bad(block, block.lines.lines)
                self._good += block.left
            self._judge(at_end)
            if at_end:
                raise StopIteration
            self._read_block()
        parts: list[tuple[ParsedLines, slice]] = []
        wanted = self.batch_size
        while wanted:
            block = self._blocks[0]
            rows = slice(block.taken, block.taken + min(wanted, block.left))
            parts.append((block.lines, rows))
            wanted -= rows.stop - rows.start
            block.taken = rows.stop
            self._count_bad(block, block.next_line)
            if not block.left:
                self._blocks.popleft()
        self._good += self.batch_size
        self._judge(at_end=False)
        return self._to_batch(parts)

    def state_dict(self) -> dict[str, Any]:
        """File, byte and line of the next example, and what was left out before it."""
        place = self._read
        if self._blocks:
            block = self._blocks[0]
            first = int(block.lines.start[block.taken])
            place = _Place(block.place.file, block.place.offset + first, block.place.line + block.next_line)
        return {
            "file": place.file, "name": self._name(place.file), "offset": place.offset, "line": place.line,
            "good": self._good, "reasons": dict(self.bad_lines.reasons), "examples": list(self.bad_lines.examples),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``; ValueError when the file at that position has another name."""
        if self._name(state["file"]) != state["name"]:
            name = self._name(state["file"])
            raise ValueError(f"the checkpoint stands in file {state['name']!r}, but file {state['file']} is {name!r}")
        self._close()
        self._blocks.clear()
        self._read = _Place(state["file"], state["offset"], state["line"])
        self._good = state["good"]
        self.bad_lines = BadLines(Counter(state["reasons"]), list(state["examples"]))

    def _name(self, file: int) -> str:
        return self.files[file].name if file < len(self.files) else ""

    def _close(self) -> None:
        if self._open is not None:
            self._open.close()
        self._open = None

    def _read_block(self) -> None:
        """Parse the next lines of the current file, or step to the next file."""
        place = self._read
        if self._open is None:
            path = self.files[place.file]
            # Stays open from block to block; closed at its end, on load_state_dict, or with the stream.
            opener = gzip.open if path.suffix == ".gz" else open
            self._open = cast(BinaryIO, opener(path, "rb"))
            self._open.seek(place.offset)
        text = self._open.read(self._chunk)
        if not text:
            self._close()
            self._read = _Place(place.file + 1, 0, 1)
            return
        if not text.endswith(b"\n"):
            text += self._rest_of_line(self._open)
        lines = parse_lines(text)
        self._read = _Place(place.file, self._open.tell(), place.line + lines.lines)
        self._blocks.append(_Block(place, lines))

    @staticmethod
    def _rest_of_line(file: BinaryIO) -> bytes:
        """Up to the end of the line; of an absurdly long one only so much that it is surely bad."""
        rest = file.readline(LONGEST_LINE)
        if rest.endswith(b"\n"):
            return rest
        if len(rest) == LONGEST_LINE:
            rest = b"\t" * COLUMNS
            while (more := file.readline(CHUNK)) and not more.endswith(b"\n"):
                pass
        # The last line of a file may lack its newline.
        return rest + b"\n"

    def _count_bad(self, block: _Block, before: int) -> None:
        """Count the bad lines of a block in front of its line ``before``."""
        while block.bad and block.bad[0][0] < before:
            line, reason = block.bad.popleft()
            self.bad_lines.add(self.files[block.place.file], block.place.line + line, reason)

    def _judge(self, at_end: bool) -> None:
        bad = self.bad_lines.count
        lines = bad + self._good
        if (lines >= 1000 or at_end) and bad > self._max_bad * lines:
            raise CriteoFormatError(
                f"{bad:,} of the first {lines:,} lines are not in Criteo's format (max_bad is {self._max_bad:.1%}). "
                f"{self.bad_lines}"
            )

    def _to_batch(self, parts: list[tuple[ParsedLines, slice]]) -> Batch:
        def join(name: str) -> NDArray[Any]:
            return np.concatenate([getattr(lines, name)[rows] for lines, rows in parts])

        missing = join("missing_integers")
        numerics = join("integers").astype(np.float64)
        if self._numerics == "log1p":
            numerics = np.log1p(np.maximum(numerics, 0.0))
        numerics = numerics.astype(np.float32)
        if self._flags:
            numerics = np.concatenate([numerics, missing.astype(np.float32)], axis=1)
        rows = hash_rows(join("categories"), self._table_size)
        rows[join("missing_categories")] = 0
        labels = join("labels").astype(np.float32)
        return Batch(torch.from_numpy(numerics), torch.from_numpy(rows), torch.from_numpy(labels))


@dataclass(frozen=True)
class _Place:
    """A position: number of the file, byte in it, line in it from one."""

    file: int
    offset: int
    line: int


class _Block:
    """Parsed lines, how many of them batches have taken, and the bad lines that are not counted yet."""

    def __init__(self, place: _Place, lines: ParsedLines) -> None:
        self.place = place
        self.lines = lines
        self.taken = 0
        self.bad = deque(lines.bad)

    @property
    def left(self) -> int:
        return len(self.lines) - self.taken

    @property
    def next_line(self) -> int:
        """Line (in the block) of the next good example, or the number of lines when there is none."""
        return int(self.lines.index[self.taken]) if self.left else self.lines.lines


def hash_rows(values: NDArray[np.uint64], table_size: int) -> NDArray[np.int64]:
    """Rows 1 to table_size - 1 for values [n, c], each column with a hash of its own (splitmix64's finaliser)."""
    with np.errstate(over="ignore"):
        x = values + (np.arange(values.shape[1], dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return (x % np.uint64(table_size - 1)).astype(np.int64) + 1
