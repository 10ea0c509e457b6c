"""Reads the lines of a cost table and sorts them by what they measure. No torch import.

A line may hold any of four times, the empty ones were not measured:

    quantize_a_us, quantize_b_us   one operand of a GEMM of this role, with the scaling of the recipe
    gemm_us                        the provider's kernel on quantised operands. They are [m, k] and [n, k], contiguous,
                                   whatever the role, so that the lines of all roles are points of one kernel
    baseline_us                    the GEMM in high precision, on operands as this role finds them stored
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from loka_compile import gemm as vocabulary
from loka_compile.costs.surface import Shape
from loka_compile.errors import CorruptFileError
from loka_compile.gemm import Gemm, Recipe, Role, Scaling
from loka_compile.table import BASELINE

#: The recipes that gemm.py defines, by name.
RECIPES: Mapping[str, Recipe] = {r.name: r for r in vars(vocabulary).values() if isinstance(r, Recipe)}
#: Columns that every line must have; others (spreads, notes) are allowed and ignored.
COLUMNS = (
    "m", "n", "k", "role", "dtype", "provider", "recipe", "quantize_a_us", "quantize_b_us", "gemm_us", "baseline_us"
)  # fmt: skip

#: Multiply-adds per element of operands and result above which Inductor counts a product as bound by compute (its
#: ``shape_padding``): half of the data sheet's flops over the bandwidth, 103 for an H200.
_COMPUTE_BOUND = 100

K = TypeVar("K")
#: Provider, recipe, role ("" for kernels: they know none), dtype, whether :func:`odd_gemm`.
GemmKey = tuple[str, str, str, str, bool]
#: Scaling, whether the operand is the transpose of what is stored, dtype, whether :func:`odd_operand`.
QuantizeKey = tuple[Scaling, bool, str, bool]


def odd_gemm(role: str, m: int, n: int, k: int, dtype: str) -> bool:
    """Whether a row of an operand or of the result does not start at 16 bytes: high precision is much slower then."""
    step = 16 // (4 if dtype == "float32" else 2)
    rows = (m, n) if role == Role.GRAD_WEIGHT.value else (k, n)
    return any(size % step for size in rows)


def may_be_padded(role: str, m: int, n: int, k: int, dtype: str) -> bool:
    """Whether Inductor would pad this GEMM in high precision if that is faster: it is odd, and bound by compute."""
    return odd_gemm(role, m, n, k, dtype) and m * n * k > _COMPUTE_BOUND * (m * k + n * k + m * n)


def whole_rows(gemm: Gemm) -> Gemm:
    """The GEMM with all sizes rounded up to 16 bytes: what padding makes of an odd one."""
    step = 16 // (4 if gemm.dtype == "float32" else 2)
    m, n, k = (-(-size // step) * step for size in (gemm.m, gemm.n, gemm.k))
    return replace(gemm, m=m, n=n, k=k)


def odd_operand(scaling: Scaling, rows: int, contraction: int) -> bool:
    """Whether blocks do not fit: a quantiser takes more than one pass then."""
    sizes = {Scaling.BLOCK_1X128: (contraction,), Scaling.BLOCK_128X128: (rows, contraction)}.get(scaling, ())
    return any(size % 128 for size in sizes)


def parse(text: str, target: str) -> tuple[Points, dict[str, str]]:
    """The measurements in the text of a file, and its ``# key: value`` lines.

    Raises:
        CorruptFileError: a line lacks a column, or holds no number where one belongs; the text names the line.
    """
    meta: dict[str, str] = {}
    body: list[tuple[int, str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        match = re.match(r"#\s*([a-z_-]+):\s*(.*)", line)
        if match:
            meta[match.group(1)] = match.group(2)
        elif line.strip() and not line.startswith("#"):
            body.append((number, line))
    reader = csv.DictReader([line for _, line in body])
    missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise CorruptFileError(f"cost table {target!r} lacks the columns {missing}")
    points = Points()
    for (number, _), row in zip(body[1:], reader, strict=False):
        points.add(row, f"cost table {target!r}, line {number}")
    return points, meta


class Points:
    """The lines of a file sorted into what they measure; different times of one thing are averaged."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.gemm: dict[GemmKey, dict[Shape, list[float]]] = {}
        self.quantize: dict[QuantizeKey, dict[Shape, list[float]]] = {}

    def add(self, line: Mapping[str, str], where: str) -> None:
        """Sort the times of one line in; CorruptFileError names ``where`` and the column."""
        m, n, k = (_whole(line[name], f"{where}, column {name!r}") for name in "mnk")
        role, dtype = line["role"], line["dtype"]
        if role not in [r.value for r in Role]:
            raise CorruptFileError(f"{where}: unknown role {role!r}")
        recipe = RECIPES.get(line["recipe"])
        if recipe is None:
            raise CorruptFileError(f"{where}: unknown recipe {line['recipe']!r}; known are {sorted(RECIPES)}")
        time = {
            name: _microseconds(line[name], f"{where}, column {name!r}")
            for name in ("quantize_a_us", "quantize_b_us", "gemm_us", "baseline_us")
        }
        odd = odd_gemm(role, m, n, k, dtype)
        if time["gemm_us"] is not None:
            candidate = (line["provider"], recipe.name)
            of = (role, dtype, odd) if candidate == BASELINE else ("", dtype, False)
            self._put(self.gemm, (*candidate, *of), (m, n, k), time["gemm_us"])
        if time["baseline_us"] is not None:
            self._put(self.gemm, (*BASELINE, role, dtype, odd), (m, n, k), time["baseline_us"])
        turned_a, turned_b = role == Role.GRAD_WEIGHT.value, role != Role.FORWARD.value
        for rows, scaling, turned, us in (
            (m, recipe.a, turned_a, time["quantize_a_us"]), (n, recipe.b, turned_b, time["quantize_b_us"])
        ):  # fmt: skip
            if us is not None:
                kind = (scaling, turned, dtype, odd_operand(scaling, rows, k))
                self._put(self.quantize, kind, (k, rows) if turned else (rows, k), us)

    @staticmethod
    def _put(into: dict[Any, dict[Shape, list[float]]], key: Any, shape: Shape, time: float) -> None:
        into.setdefault(key, {}).setdefault(shape, []).append(time)

    @staticmethod
    def means(of: dict[K, dict[Shape, list[float]]]) -> dict[K, dict[Shape, float]]:
        """One time for every shape."""
        return {
            key: {shape: math.fsum(sorted(set(times))) / len(set(times)) for shape, times in points.items()}
            for key, points in of.items()
        }


def _whole(value: str | None, where: str) -> int:
    if value is None or not value.strip().isdigit():
        raise CorruptFileError(f"{where} must be a whole number, not {value!r}")
    return int(value)


def _microseconds(value: str | None, where: str) -> float | None:
    if value is None or not value.strip():
        return None
    try:
        time = float(value)
    except ValueError:
        time = math.nan
    if not (math.isfinite(time) and time > 0):
        raise CorruptFileError(f"{where} must be a time above 0 or empty, not {value!r}")
    return time
