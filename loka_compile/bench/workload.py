"""Which GEMMs and operands to measure, most valuable first. No torch import."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from loka_compile.errors import CorruptFileError, UnknownNameError
from loka_compile.gemm import Gemm, Role, Scaling

#: Columns of a file of layers; others are ignored.
COLUMNS = ("group", "layer", "M_batch", "K_in", "N_out")
SCALINGS = (Scaling.TENSORWISE, Scaling.ROWWISE, Scaling.BLOCK_1X128, Scaling.BLOCK_128X128)
#: Operands that differ by less than this factor in both sizes say little new about a quantiser.
APART = 3.0


@dataclass(frozen=True)
class Layer:
    """A linear layer ``y[M, N] = x[M, K] @ W[N, K].T`` applied to ``batch`` rows."""

    group: str
    name: str
    batch: int
    inputs: int
    outputs: int

    def gemm(self, role: Role, dtype: str) -> Gemm:
        """One of its three GEMMs, with sizes as gemm.py defines them."""
        m, k, n = self.batch, self.inputs, self.outputs
        sizes = {Role.FORWARD: (m, n, k), Role.GRAD_INPUT: (m, k, n), Role.GRAD_WEIGHT: (n, k, m)}[role]
        return Gemm(f"{self.group}/{self.name}", role, *sizes, dtype=dtype)


@dataclass(frozen=True)
class Operand:
    """One tensor as it is stored, and how it is quantised. ``transposed``: the GEMM contracts over its rows."""

    rows: int
    columns: int
    scaling: Scaling
    transposed: bool
    dtype: str

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.rows * self.columns


def read_layers(path: str | os.PathLike[str], groups: Sequence[str] = ()) -> list[Layer]:
    """The layers of a CSV file.

    Args:
        path: with the columns ``group, layer, M_batch, K_in, N_out``.
        groups: beginnings of group names: only these, in this order; empty is all, as they stand in the file.

    Raises:
        CorruptFileError: a column is missing or a size is no whole number above 0; names the line.
        UnknownNameError: no group begins so.
        OSError: the file cannot be opened.
    """
    with Path(path).open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise CorruptFileError(f"{path} lacks the columns {missing}; a file of layers has {', '.join(COLUMNS)}")
        layers = [_layer(row, f"{path}, line {reader.line_num}") for row in reader]
    if not groups:
        return layers
    chosen = []
    for prefix in groups:
        found = [layer for layer in layers if layer.group.startswith(prefix)]
        if not found:
            raise UnknownNameError("group of layers", prefix, {layer.group for layer in layers})
        chosen += [layer for layer in found if layer not in chosen]
    return chosen


def _layer(row: dict[str, str], where: str) -> Layer:
    sizes = []
    for name in COLUMNS[2:]:
        text = (row.get(name) or "").strip()
        if not text.isdigit() or int(text) == 0:
            raise CorruptFileError(f"{where}, column {name!r} must be a whole number above 0, not {row.get(name)!r}")
        sizes.append(int(text))
    return Layer(row["group"], row["layer"], *sizes)


def gemms(layers: Iterable[Layer], roles: Sequence[Role], dtypes: Sequence[str]) -> list[Gemm]:
    """The layers' different GEMMs: one dtype after the other, in each the roles, in each the layers in order."""
    layers = list(layers)
    found: dict[tuple[object, ...], Gemm] = {}
    for dtype in dtypes:
        for role in roles:
            for layer in layers:
                gemm = layer.gemm(role, dtype)
                found.setdefault((gemm.m, gemm.n, gemm.k, role, dtype), gemm)
    return list(found.values())


def operands(wanted: Iterable[Gemm]) -> list[list[Operand]]:
    """What the GEMMs' quantisers read, the quantisers of one stored tensor together.

    First a selection of tensors that are ``APART``, which spans all sizes, then the rest; each in the order of the
    GEMMs. A quantiser's time is smooth in the size of its tensor, so that the selection says most.
    """
    tensors: dict[tuple[int, int, bool, str], None] = {}
    for gemm in wanted:
        a_turned, b_turned = gemm.role is Role.GRAD_WEIGHT, gemm.role is not Role.FORWARD
        for rows, turned in ((gemm.m, a_turned), (gemm.n, b_turned)):
            stored = (gemm.k, rows) if turned else (rows, gemm.k)
            tensors[(*stored, turned, gemm.dtype)] = None
    kept: list[tuple[int, int, bool, str]] = []
    rest: list[tuple[int, int, bool, str]] = []
    for tensor in tensors:
        near = any(tensor[2:] == other[2:] and _apart(tensor[:2], other[:2]) < APART for other in kept)
        (rest if near else kept).append(tensor)
    return [
        [Operand(rows, columns, scaling, turned, dtype) for scaling in SCALINGS]
        for rows, columns, turned, dtype in kept + rest
    ]


def _apart(one: Sequence[int], other: Sequence[int]) -> float:
    """The largest factor between two shapes' sizes."""
    return math.exp(max(abs(math.log(a / b)) for a, b in zip(one, other, strict=True)))
