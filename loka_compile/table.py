"""The table: what was measured of every candidate kernel of every GEMM, and on what. No torch import.

One row per (site, role, range of batch sizes, provider, recipe). ``m``, ``n``, ``k`` are those of the *linear layer*
``y[M, N] = x[M, K] @ W[N, K].T`` in all three roles, so that ``m`` is always the batch. The header says on which
device, with which versions and for which model the rows hold; ``check`` compares that with what a caller has at hand.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loka_compile import jsonio
from loka_compile.errors import CorruptFileError, TableError, UnknownNameError
from loka_compile.gemm import Role
from loka_compile.header import Header

if TYPE_CHECKING:
    import pandas as pd
    import sympy

__all__ = ["BASELINE", "FORMAT", "VERSION", "Header", "Measurement", "RowChange", "Table"]

#: What the "format" key of a table file says.
FORMAT = "loka_compile table"
#: Version of the file's structure; a file of another version is refused.
#: Version 1 gated on ``mere`` without regard to rows; its ``mere`` means something else.
VERSION = 2
#: The candidate that every speed-up is relative to.
BASELINE = ("high_precision", "native")

Key = tuple[str, str, int, int, int, int, str, str, str]


@dataclass(frozen=True)
class Measurement:
    """One candidate kernel of one GEMM. Times in microseconds; NaN is "not known"; errors are against fp64.

    ``mere`` is what the gate asks about: the mean of |out - ref| / max(|ref|, 0.05 RMS), with the RMS of the whole
    result or, if that gives more and the rows are samples (forward, grad_input), of each row; on drawn operands or on
    raw rows, whichever is worse.

    Raises:
        UnknownNameError: ``role`` is not one of forward, grad_input, grad_weight.
    """

    site: str
    role: str
    #: Range of batch sizes that the row holds for, both ends included.
    m_min: int
    m_max: int
    n: int
    k: int
    dtype: str
    provider: str
    recipe: str
    #: Quantisation of both operands, without what is fused into a producer.
    quantize_us: float = math.nan
    gemm_us: float = math.nan
    #: The same GEMM in high precision: bf16, or TF32 for an fp32 site.
    baseline_us: float = math.nan
    #: The gate's metric (probe/gate.py) and its 95 % confidence interval: the larger of ``mere_floored`` and, in
    #: forward and grad_input, ``mere_by_row``; of drawn operands or of raw rows, whichever is worse. All other
    #: error columns are of those same operands.
    mere: float = math.nan
    mere_low: float = math.nan
    mere_high: float = math.nan
    #: The gate's metric on operands drawn from the learnt distributions, and on raw rows; NaN where there were none.
    mere_drawn: float = math.nan
    mere_raw: float = math.nan
    #: Mean of |out - ref| / max(|ref|, 0.05 RMS(ref)), with the RMS of the whole result, or of each row's own.
    mere_floored: float = math.nan
    mere_by_row: float = math.nan
    #: MERE as the paper writes it (section II-C).
    mere_paper: float = math.nan
    frobenius: float = math.nan
    sqnr_db: float = math.nan
    max_error: float = math.nan
    cosine: float = math.nan
    #: Independent operand pairs behind the errors.
    samples: int = 0
    #: Bytes by which the input kept for the backward shrinks when it is kept in FP8 (forward; 0 in other roles).
    saved_bytes: int = 0
    #: "measured", "cost table <target>" or "none".
    speed_source: str = "none"
    #: "real kernel" (the provider's own code on the header's device), "emulated" or "none".
    error_source: str = "none"
    #: Empty, or why this candidate cannot be used.
    refused: str = ""
    #: What quantize_us consists of, so that GEMMs which share an operand pay for it once (selection/). ``form`` names
    #: the quantised form of operand A or B, "" if it is not known: then nothing is shared. ``once_us`` is paid once per
    #: form of a tensor, ``layout_us`` once per layout of it.
    a_form: str = ""
    a_once_us: float = math.nan
    a_layout_us: float = 0.0
    b_form: str = ""
    b_once_us: float = math.nan
    b_layout_us: float = 0.0
    #: What else there is to know: the Gaussian underestimates the error, the interval is wide, the kernel looks faulty.
    remark: str = ""
    #: What it costs the operand's producer to write it in its own dtype, where it could write FP8 alone: it has to as
    #: soon as one reader wants that. 0 where it is written anyway, and for candidates that read what the producer
    #: quantises.
    a_stored_us: float = 0.0
    b_stored_us: float = 0.0

    def __post_init__(self) -> None:
        """Accept a Role where a str is declared, and nothing that is neither."""
        roles = [r.value for r in Role]
        if self.role not in roles:
            raise UnknownNameError("role", self.role, roles)
        # A Role is a str already, but its repr would leak into messages.
        object.__setattr__(self, "role", Role(self.role).value)

    @property
    def batch(self) -> float:
        """The batch size that the times stand for: the middle of the row's range."""
        return (self.m_min + self.m_max) / 2

    @property
    def total_us(self) -> float:
        """Quantisation and GEMM together, microseconds."""
        return self.quantize_us + self.gemm_us

    @property
    def speedup(self) -> float:
        """Baseline time over (quantise + GEMM) time; NaN where a time is not known."""
        total = self.total_us
        return self.baseline_us / total if total > 0 else math.nan

    @property
    def candidate(self) -> str:
        """Provider and recipe, written ``torch:rowwise_fast``."""
        return f"{self.provider}:{self.recipe}"

    @property
    def key(self) -> Key:
        """What identifies the row in its table."""
        return (
            self.site, self.role, self.m_min, self.m_max, self.n, self.k, self.dtype, self.provider, self.recipe
        )  # fmt: skip


@dataclass(frozen=True)
class RowChange:
    """A row that two tables do not share; None is "absent"."""

    before: Measurement | None
    after: Measurement | None


class Table:
    """Header and rows. Rows are kept in the order of their keys, whatever order they came in.

    Raises:
        TableError: two rows have the same key.
    """

    def __init__(self, header: Header, rows: Iterable[Measurement]) -> None:
        """Sort the rows and refuse duplicates."""
        self.header = header
        self.rows = tuple(sorted(rows, key=lambda row: row.key))
        for first, second in zip(self.rows, self.rows[1:], strict=False):
            if first.key == second.key:
                rows_of = f"{first.site} {first.role} {first.candidate} at {first.m_min}..{first.m_max}"
                raise TableError(f"two rows for {rows_of}")

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.rows)

    def __repr__(self) -> str:
        """Size and target."""
        sites = len(self.header.fingerprint)
        return f"Table({len(self.rows)} rows, {sites} sites, target={self.header.target or None!r})"

    def check(
        self,
        *,
        fingerprint: Mapping[str, Sequence[int]] | None = None,
        target: str | None = None,
        device: str | None = None,
        driver: str | None = None,
        torch: str | None = None,
        triton: str | None = None,
        libraries: Mapping[str, str] | None = None,
        exact: bool = False,
    ) -> None:
        """Compare the header with what the caller has; what is None is not compared.

        Every site of ``fingerprint`` (site -> [N, K]) must be in the table with that shape. Sites of the table that the
        model lacks are allowed (a graph break leaves a part of the model's sites) unless ``exact``.

        Raises:
            StaleTableError: the text lists each difference.
        """
        self.header.check(
            "the table", fingerprint=fingerprint, libraries=libraries, exact=exact,
            target=target, device=device, driver=driver, torch=torch, triton=triton,
        )  # fmt: skip

    def merge(self, other: Table) -> Table:
        """Both tables' rows under the union of their sites: parts of one model, runs, or ranks.

        Where both have a row, the one with more samples stays; between equals the larger error, then the larger JSON
        text (so that merging is commutative, associative and idempotent).

        Raises:
            StaleTableError: the headers differ in device, target or versions, or in the shape of a site.
        """
        mine, theirs = self.header, other.header
        shared = {site: shape for site, shape in theirs.fingerprint.items() if site in mine.fingerprint}
        mine.check(
            "the table to merge with", fingerprint=shared, libraries=theirs.libraries,
            target=theirs.target, device=theirs.device, driver=theirs.driver, torch=theirs.torch, triton=theirs.triton,
        )  # fmt: skip
        theirs.check("the table to be merged", libraries=mine.libraries)
        rows: dict[Key, Measurement] = {}
        for row in (*self.rows, *other.rows):
            held = rows.get(row.key)
            rows[row.key] = row if held is None else max(held, row, key=_weight)
        header = dataclasses.replace(
            mine,
            fingerprint={**mine.fingerprint, **theirs.fingerprint},
            same={**mine.same, **theirs.same},
            dropped_rows={
                site: max(mine.dropped_rows.get(site, 0), theirs.dropped_rows.get(site, 0))
                for site in {**mine.dropped_rows, **theirs.dropped_rows}
            },
            created=max(mine.created, theirs.created),
        )
        return Table(header, rows.values())

    def diff(self, other: Table) -> tuple[RowChange, ...]:
        """Rows that are absent from one table or differ in any value, in the order of their keys."""
        before, after = ({row.key: row for row in table.rows} for table in (self, other))
        changes = []
        for key in sorted(before.keys() | after.keys()):
            old, new = before.get(key), after.get(key)
            if old is None or new is None or _text(old) != _text(new):
                changes.append(RowChange(old, new))
        return tuple(changes)

    def cost(self, site: str, role: Role | str, provider: str, recipe: str) -> sympy.Expr | None:
        """Microseconds of a candidate, quantisation included, as a sympy expression in the batch size ``M``.

        Fitted to the rows of that candidate: a constant where there is one batch size. None where a time is not known.
        """
        from loka_compile.selection.batch_cost import fit

        wanted = (site, str(role), provider, recipe)
        rows = [row for row in self.rows if (row.site, row.role, row.provider, row.recipe) == wanted]
        points = {row.batch: row.total_us for row in rows}
        return fit(points).sympy() if points and all(map(math.isfinite, points.values())) else None

    def to_pandas(self) -> pd.DataFrame:
        """One row per measurement, the fields as columns, and ``speedup``."""
        import pandas as pd

        columns = [*(f.name for f in dataclasses.fields(Measurement)), "speedup"]
        data = [{**dataclasses.asdict(row), "speedup": row.speedup} for row in self.rows]
        return pd.DataFrame(data, columns=columns)

    def digest(self) -> str:
        """SHA-256 (hex) of the content; the time of making and the order of rows do not enter."""
        header = self.header.to_json(timestamps=False)
        content = {"version": VERSION, "header": header, "rows": [_text(row) for row in self.rows]}
        return hashlib.sha256(jsonio.dumps(content, sort_keys=True).encode()).hexdigest()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table as JSON, one row per line, atomically.

        Raises:
            OSError: the folder cannot be written.
        """
        rows = ",\n  ".join(_text(row) for row in self.rows)
        head = f'{{\n "format": "{FORMAT}",\n "version": {VERSION},\n "header": {self.header.dumps()},\n'
        jsonio.atomic_write(path, f'{head} "rows": [\n  {rows}\n ]\n}}\n')

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Table:
        """Read a table file, checking every key and type.

        Raises:
            CorruptFileError: the file is damaged or not a table; the text names the file and the row.
            StaleTableError: the file's format has another version.
            OSError: the file cannot be opened.
        """
        document = jsonio.read_document(path, FORMAT, VERSION)
        extra = sorted(set(document) - {"format", "version", "header", "rows"})
        if extra:
            raise CorruptFileError(f"{path} has unknown keys {extra}")
        header = Header.from_json(document.get("header"), f"{path}: header")
        rows = []
        for index, entry in enumerate(jsonio.as_list(document.get("rows"), f"{path}: rows")):
            where = f"{path}: row {index}"
            try:
                rows.append(jsonio.record(Measurement, entry, where))
            except UnknownNameError as error:
                raise CorruptFileError(f"{where}: {error}") from error
        try:
            return cls(header, rows)
        except TableError as error:
            raise CorruptFileError(f"{path}: {error}") from error


def _text(row: Measurement) -> str:
    return jsonio.dumps(dataclasses.asdict(row))


def _weight(row: Measurement) -> tuple[int, float, str]:
    # An unknown error counts as the worst: a row that knows less must not hide behind one that knows more.
    return row.samples, math.inf if math.isnan(row.mere) else row.mere, _text(row)
