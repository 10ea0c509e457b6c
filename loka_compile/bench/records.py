"""The file that a measurement writes: a cost table (costs/) that grows line by line. No torch import.

Three kinds of lines, each with the median of one thing and its spread (interquartile range / median):

    baseline    provider high_precision, recipe native: ``baseline_us`` of this role's layouts
    kernel      a provider and a recipe: ``gemm_us``. Every role hands a kernel the same contiguous operands, so that a
                shape is measured once; ``role`` is the first that asked
    quantiser   provider ``quantize``: ``quantize_a_us`` of operand A [m, k] of this role (grad_weight: stored as
                [k, m]), with the first scaling of ``recipe``; n is 0

A line without a time has a ``note`` that says why: it was tried and is not tried again.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from loka_compile.bench.workload import Operand
from loka_compile.errors import CorruptFileError, StaleTableError
from loka_compile.gemm import Gemm, Role, Scaling
from loka_compile.table import BASELINE

COLUMNS = (
    "m", "n", "k", "role", "dtype", "provider", "recipe", "quantize_a_us", "quantize_b_us", "gemm_us", "baseline_us",
    "spread", "note",
)  # fmt: skip
#: Stands in the place of a provider in the lines of quantisers.
QUANTIZE = "quantize"
#: The recipe whose operand A has the scaling.
_RECIPE = {
    Scaling.TENSORWISE: "tensorwise",
    Scaling.ROWWISE: "rowwise",
    Scaling.BLOCK_1X128: "blockwise_1x128",
    Scaling.BLOCK_128X128: "blockwise_128x128",
}
#: Lines of the header that must agree before a file is continued.
_IDENTITY = ("gpu", "driver", "torch", "triton")

Key = tuple[str, ...]


@dataclass(frozen=True)
class Timing:
    """Median microseconds of one call, and the interquartile range over all rounds relative to it."""

    us: float
    spread: float


def baseline_key(gemm: Gemm) -> Key:
    """Identifies a baseline: its role decides the operands' layouts."""
    return (str(gemm.m), str(gemm.n), str(gemm.k), gemm.role.value, gemm.dtype, *BASELINE)


def kernel_key(gemm: Gemm, provider: str, recipe: str) -> Key:
    """Identifies a kernel at one shape, whatever the role."""
    return (str(gemm.m), str(gemm.n), str(gemm.k), "", gemm.dtype, provider, recipe)


def quantizer_key(operand: Operand) -> Key:
    """Identifies a quantiser at one shape."""
    role = Role.GRAD_WEIGHT if operand.transposed else Role.FORWARD
    m, k = (operand.columns, operand.rows) if operand.transposed else (operand.rows, operand.columns)
    return (str(m), "0", str(k), role.value, operand.dtype, QUANTIZE, _RECIPE[operand.scaling])


class Records:
    """A file of measurements, created or continued.

    Args:
        path: the file. A last line that a kill cut short is removed.
        header: what the lines hold for; the first lines of a new file. gpu, driver, torch and triton of an old one must
            agree; other differences (a library more) are added as a line.

    Raises:
        StaleTableError: the file was measured on another device or with other versions.
        CorruptFileError: the file is not one of ours.
    """

    def __init__(self, path: str | os.PathLike[str], header: Mapping[str, str]) -> None:
        self.path = Path(path)
        self._trying = self.path.with_name(self.path.name + ".trying")
        self.done: set[Key] = set()
        #: What was broken, by key; among ``done``.
        self.broken: dict[Key, str] = {}
        lines = [f"# {name}: {value}" for name, value in header.items()]
        if self.path.exists() and self.path.stat().st_size:
            self._continue(header)
        else:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._write("\n".join([*lines, ",".join(COLUMNS)]) + "\n")
        if self._trying.exists():
            # The process that wrote this did not come to take it back.
            gone = json.loads(self._trying.read_text(encoding="utf-8"))
            self.add_broken(tuple(gone["key"]), Role(gone["role"]), "the process died while this ran")
            self._trying.unlink()

    def _continue(self, header: Mapping[str, str]) -> None:
        text = self.path.read_text(encoding="utf-8")
        if not text.endswith("\n"):
            text = text[: text.rfind("\n") + 1]
            self.path.write_text(text, encoding="utf-8")
        found = dict(re.findall(r"^# *([a-z_-]+): *(.*)$", text, re.MULTILINE))
        differing = [n for n in _IDENTITY if found.get(n, "") != header.get(n, "")]
        if differing:
            pairs = "; ".join(f"{n} was {found.get(n, '')!r}, is {header.get(n, '')!r}" for n in differing)
            raise StaleTableError(f"{self.path} cannot be continued here: {pairs}. Give another file to --out.")
        body = [line for line in text.splitlines() if line and not line.startswith("#")]
        reader = csv.DictReader(body)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise CorruptFileError(f"{self.path} is no file of measurements: its columns are {reader.fieldnames}")
        for row in reader:
            key = tuple(row[name] for name in COLUMNS[:7])
            if row["provider"] not in (BASELINE[0], QUANTIZE):
                key = (*key[:3], "", *key[4:])
            self.done.add(key)
            if row["note"]:
                self.broken[key] = row["note"]
        for name, value in header.items():
            if name not in _IDENTITY and found.get(name, "") != value:
                self._write(f"# {name}: {value}\n")

    def trying(self, key: Key, role: Role) -> None:
        """Note what is about to run for the first time: if it kills the process, the next one knows."""
        self._trying.write_text(json.dumps({"key": key, "role": role.value}), encoding="utf-8")

    def survived(self) -> None:
        """Take the note back."""
        self._trying.unlink(missing_ok=True)

    def add(self, key: Key, role: Role, timing: Timing) -> None:
        """Append a measurement."""
        column = {BASELINE[0]: "baseline_us", QUANTIZE: "quantize_a_us"}.get(key[5], "gemm_us")
        self._append(key, role, {column: f"{timing.us:.4g}", "spread": f"{timing.spread:.2g}"})

    def add_broken(self, key: Key, role: Role, reason: str) -> None:
        """Append a line that says why there is no time."""
        self.broken[key] = reason
        self._append(key, role, {"note": " ".join(reason.split())[:200]})

    def _append(self, key: Key, role: Role, values: Mapping[str, str]) -> None:
        row = {**dict(zip(COLUMNS[:7], key, strict=True)), "role": key[3] or role.value, **values}
        buffer = io.StringIO()
        csv.DictWriter(buffer, COLUMNS, restval="", lineterminator="\n").writerow(row)
        self._write(buffer.getvalue())
        self.done.add(key)

    def _write(self, text: str) -> None:
        # Opened anew for every line: what is written is on the disk when the process is killed.
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text)
