"""Makes the shipped cost table from what ``loka bench`` wrote: sorted, without what is not a time.

    python -m benchmarks.ship_table h200.csv loka_compile/data/h200.csv

Left out are lines without a time (their notes say what broke), the column of notes, kernels whose timing was disturbed
(a spread above 0.3: half of the rounds were off by that much; costs/ interpolates between the others), and FP8 kernels
with fp32 results: they differ from bf16 in the bytes that they write, from which costs/ derives them (within 3 % on the
H200, in the median). Times keep three digits, which is less than their spread, and the spread two.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Annotated

import typer

from loka_compile.bench.records import COLUMNS

SHIPPED = COLUMNS[:-1]
TIMES = ("quantize_a_us", "quantize_b_us", "gemm_us", "baseline_us")
#: Interquartile range over median.
DISTURBED = 0.3
ABOUT = (
    "# Cost table of one GPU for loka_compile/costs/. Times in microseconds; an empty cell was not measured.",
    "# Measured by benchmarks/h200_table.sh; kinds of lines: loka_compile/bench/records.py.",
)  # fmt: skip


def shipped(text: str) -> str:
    """The text of the shipped file."""
    comments = dict.fromkeys(line for line in text.splitlines() if line.startswith("#") and line not in ABOUT)
    rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    kept = [
        row for row in rows
        if any(row[name] for name in TIMES)
        and not (row["gemm_us"] and (row["dtype"] == "float32" or float(row["spread"] or 0) > DISTURBED))
    ]  # fmt: skip
    kept.sort(key=lambda r: (r["dtype"], r["provider"], r["recipe"], r["role"], *(int(r[size]) for size in "mnk")))
    out = io.StringIO()
    writer = csv.DictWriter(out, SHIPPED, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in kept:
        writer.writerow({**row, **{name: _digits(row[name], 3) for name in TIMES}, "spread": _digits(row["spread"], 2)})
    return "\n".join([*ABOUT, *comments]) + "\n" + out.getvalue()


def _digits(value: str, digits: int) -> str:
    if not value:
        return ""
    number = float(f"{float(value):.{digits}g}")
    return f"{number:g}"


def main(
    source: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="What loka bench wrote.")],
    target: Annotated[Path, typer.Argument(help="The file to ship.")],
) -> None:
    """Write the shipped table."""
    target.write_text(shipped(source.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
