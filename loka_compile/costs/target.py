"""What a GEMM costs on a GPU that is not here: the cost tables shipped in ``data/<target>.csv``. No torch import.

Each line of a file is one measured candidate at one shape; costs/surface.py turns a candidate's lines into latency over
all shapes. What was not measured is derived by these rules, and all of it is an estimate:

* The GEMM of another role is the same kernel at its own m, n, k (all roles are "NT", gemm.py), unless the file has
  lines of that role.
* An operand's quantisation follows its stored rows and columns and its bytes: fp32 input is read at twice the bytes,
  tensorwise reads the input twice (amax, then cast). 128x128 blocks cost what 1x128 blocks do.
* A transposed operand (the weight in grad_input, both operands in grad_weight) costs one more read and write of its FP8
  bytes at the rate of the same quantiser.
* An operand with a proven bound costs nothing under tensorwise scaling: the scale is fixed and the cast is fused into
  the producer. Under the other scalings an amax remains, and so does the cost. Its transposed copy is still paid for.
* Every GEMM pays for both its operands here; what GEMMs share is credited where a plan is made (selection/), from the
  parts that ``Latency`` keeps apart.
* On a target with fused kernels, a tensorwise operand that such a kernel quantises (``Gemm.a_fused``, ``b_fused``)
  costs the bytes it adds, at the copy bandwidth.
* There, a BlockNorm behind a GEMM is in its epilogue if the GEMM is torch's, tensorwise or rowwise, or 16-bit high
  precision. Behind any other (``Gemm.norm``) it costs a launch and the result written and read once more.
* The baseline of an fp32 site is TF32: half the bf16 rate of flops, twice the bytes.
* Rows that do not start on 16 bytes make high precision slow (479 columns: by a factor of 4). Inductor pads such a GEMM
  where it is bound by compute; then the baseline is the padded GEMM and a copy of the operands, if that is faster. One
  that was not measured counts as if its rows were whole: FP8 gets no advantage from an extrapolation.
"""

from __future__ import annotations

import copy
import functools
import importlib.resources
import itertools
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

from loka_compile.costs.file import (
    RECIPES,
    GemmKey,
    Points,
    QuantizeKey,
    may_be_padded,
    odd_gemm,
    odd_operand,
    parse,
    whole_rows,
)
from loka_compile.costs.surface import Shape, Surface
from loka_compile.costs.traffic import element_bytes, megabytes, quantize_bytes
from loka_compile.errors import UnknownNameError
from loka_compile.gemm import Gemm, Recipe, Role, Scaling
from loka_compile.selection.operands import LAYOUT_FREE, TRANSPOSED
from loka_compile.table import BASELINE

_SUFFIX = ".csv"
#: bf16 and fp16 run at the same rate and move the same bytes.
_ALIKE = {"float16": "bfloat16"}
_MEGA = 1e-6
#: Scalings of torch's own GEMM that the fused kernels stand in for (lowering/fused/forward.py).
_FUSABLE = {Scaling.TENSORWISE, Scaling.ROWWISE}


@dataclass(frozen=True)
class Latency:
    """Microseconds of one GEMM of one candidate.

    ``measured`` says that this very GEMM shape is in the table; ``comparable`` that one like it is. Where none is,
    ``gemm_us`` is no less than the baseline.
    """

    quantize_a_us: float
    quantize_b_us: float
    gemm_us: float
    measured: bool = False
    #: The parts of quantize_a_us and quantize_b_us that are the layout's: a transposed copy of what is quantised
    #: anyway, or the bytes that a fused kernel writes for it. The rest serves every reader of that form
    #: (selection/operands.py).
    a_layout_us: float = 0.0
    b_layout_us: float = 0.0
    comparable: bool = True

    @property
    def quantize_us(self) -> float:
        """Quantisation of both operands."""
        return self.quantize_a_us + self.quantize_b_us

    @property
    def total_us(self) -> float:
        """Quantisation and GEMM."""
        return self.quantize_us + self.gemm_us


class CostTable:
    """Latencies of every measured candidate on one target."""

    def __init__(self, target: str, points: Points, meta: dict[str, str]) -> None:
        """Make a surface of the points of each kernel and each quantiser; it is fitted when first asked."""
        self.target = target
        #: What was measured on the GPU at hand, if anything was (bench/here.py).
        self.here: CostTable | None = None
        #: The ``# key: value`` lines of the file: GPU, versions, method.
        self.meta = meta
        bandwidth = re.match(r"[\d.]+", self.meta.get("bandwidth_gb_s", ""))
        # Microseconds per megabyte at the bandwidth of the data sheet: a byte cannot cost less.
        self._per_megabyte = 1e3 / float(bandwidth.group()) if bandwidth else 0.0
        #: Surfaces of kernels and baselines, and of quantisers.
        self.gemms = {key: self._gemm_surface(key, mean) for key, mean in points.means(points.gemm).items()}
        self.quantizers = {
            key: self._quantize_surface(key, mean) for key, mean in points.means(points.quantize).items()
        }

    def _gemm_surface(self, key: GemmKey, points: dict[Shape, float]) -> Surface:
        width = element_bytes(key[3]) if key[:2] == BASELINE else 1

        def features(shape: Shape) -> tuple[float, float, float, float]:
            """Launch; the serial walk of one tile along k; megaflops; megabytes of inputs and output."""
            m, n, k = shape
            return 1.0, float(k), 2 * m * n * k * _MEGA, megabytes(shape, width)

        return Surface(points, features, lambda shape: self._per_megabyte * megabytes(shape, width))

    def _quantize_surface(self, key: QuantizeKey, points: dict[Shape, float]) -> Surface:
        per_million = self._per_megabyte * quantize_bytes(key[0], key[2])

        def features(shape: Shape) -> tuple[float, float]:
            """Launch; millions of elements."""
            return 1.0, shape[0] * shape[1] * _MEGA

        return Surface(points, features, lambda shape: per_million * shape[0] * shape[1] * _MEGA)

    @classmethod
    def targets(cls) -> tuple[str, ...]:
        """Names of the shipped cost tables."""
        folder = importlib.resources.files("loka_compile") / "data"
        return tuple(sorted(f.name.removesuffix(_SUFFIX) for f in folder.iterdir() if f.name.endswith(_SUFFIX)))

    @classmethod
    def load(cls, target: str) -> CostTable:
        """The shipped cost table of ``target``; the same object on every call.

        Raises:
            UnknownNameError: there is none of that name; the text lists those there are.
        """
        if target not in cls.targets():
            raise UnknownNameError("target", target, cls.targets())
        return _load_shipped(target)

    @classmethod
    def from_csv(cls, path: str | os.PathLike[str], target: str | None = None) -> CostTable:
        """A cost table of one's own; ``target`` defaults to the name of the file.

        Raises:
            CorruptFileError: a line lacks a column, or holds no number where one belongs; the text names the line.
            OSError: the file cannot be opened.
        """
        target = target or Path(path).stem
        return cls(target, *parse(Path(path).read_text(encoding="utf-8"), target))

    def with_measured(self, here: CostTable) -> CostTable:
        """This table, with what ``here`` measured in the place of its own lines of the same shapes."""
        both = copy.copy(self)
        both.here = here
        both.gemms = {
            **self.gemms,
            **{k: self._gemm_surface(k, _updated(self.gemms.get(k), s)) for k, s in here.gemms.items()},
        }
        both.quantizers = {
            **self.quantizers,
            **{k: self._quantize_surface(k, _updated(self.quantizers.get(k), s)) for k, s in here.quantizers.items()},
        }
        return both

    def source(self, gemm: Gemm, provider: str, recipe: str) -> str:
        """Where the time of a kernel comes from: "measured" on the GPU at hand, or this table's name."""
        here = self.here is not None and self.here._gemm_us(provider, recipe, gemm)[1]
        return "measured" if here else f"cost table {self.target}"

    @functools.cached_property
    def has_fused_kernels(self) -> bool:
        """Whether configurations of our fused kernels ship for this target."""
        return (importlib.resources.files("loka_compile") / "data" / f"fused_{self.target}.json").is_file()

    def candidates(self) -> tuple[tuple[str, str], ...]:
        """The measured (provider, recipe) pairs, the baseline left out."""
        return tuple(sorted({key[:2] for key in self.gemms if key[:2] != BASELINE}))

    def latency(self, gemm: Gemm, provider: str, recipe: str | Recipe) -> Latency | None:
        """Cost of ``gemm`` under a candidate, or None if that candidate was never measured.

        Speeds are not extrapolated in favour of a candidate: without a comparable measured shape of both the kernel and
        the baseline, the kernel counts as no faster than the baseline.

        Args:
            recipe: a name out of gemm.py, or a Recipe of the caller's own (its scalings decide what quantising costs).
        """
        name = recipe if isinstance(recipe, str) else recipe.name
        if (provider, name) == BASELINE:
            return Latency(0.0, 0.0, self.baseline(gemm))
        scheme = recipe if isinstance(recipe, Recipe) else RECIPES.get(recipe)
        if scheme is None:
            return None
        time, measured, comparable = self._gemm_us(provider, name, gemm)
        if time is None:
            return None
        time += self._norm_us(gemm, fusable=provider == "torch" and {scheme.a, scheme.b} <= _FUSABLE)
        baseline, _, baseline_comparable = self._gemm_us(*BASELINE, gemm)
        comparable = comparable and baseline_comparable
        if not comparable and baseline is not None:
            time = max(time, self.baseline(gemm))
        turned_a, turned_b = TRANSPOSED[gemm.role]
        a = self._quantize_us(scheme.a, gemm.m, gemm.k, gemm, turned_a, gemm.a_bound, gemm.a_fused)
        b = self._quantize_us(scheme.b, gemm.n, gemm.k, gemm, turned_b, gemm.b_bound, gemm.b_fused)
        if a is None or b is None:
            return None
        a_layout = self._layout_us(a, scheme.a, gemm.m, gemm.k, gemm, turned_a, gemm.a_bound, gemm.a_fused)
        b_layout = self._layout_us(b, scheme.b, gemm.n, gemm.k, gemm, turned_b, gemm.b_bound, gemm.b_fused)
        return Latency(a, b, time, measured, a_layout, b_layout, comparable)

    def _layout_us(
        self,
        whole: float,
        scaling: Scaling,
        rows: int,
        contraction: int,
        gemm: Gemm,
        transposed: bool,
        bound: float | None,
        fused: bool,
    ) -> float:
        """The part of an operand's quantisation that another layout of it would cost again."""
        if scaling not in LAYOUT_FREE:
            return 0.0
        if fused and scaling is Scaling.TENSORWISE and self.has_fused_kernels and not (bound and not transposed):
            return min(whole, self._per_megabyte * rows * contraction * _MEGA)
        if not transposed:
            return 0.0
        straight = self._quantize_us(scaling, contraction, rows, gemm, False, bound, False)
        return 0.0 if straight is None else max(0.0, whole - straight)

    def baseline(self, gemm: Gemm) -> float:
        """Microseconds of ``gemm`` in high precision: bf16/fp16, or TF32 for float32; NaN if none was measured."""
        time, measured, _ = self._gemm_us(*BASELINE, gemm)
        if time is None:
            return math.nan
        if odd_gemm(gemm.role.value, gemm.m, gemm.n, gemm.k, gemm.dtype):
            wide = whole_rows(gemm)
            # By how many bytes rows are off decides by factors, so that no other odd shape speaks for this one.
            time = min(time, self.padded_us(gemm) if measured else self._gemm_us(*BASELINE, wide)[0] or time)
        return time + self._norm_us(gemm, fusable=element_bytes(gemm.dtype) == 2)

    def padded_us(self, gemm: Gemm) -> float:
        """``gemm`` in high precision where Inductor pads it: operands copied to rows of 16 bytes, the result a view.

        Infinite where it leaves it as it is.
        """
        if not may_be_padded(gemm.role.value, gemm.m, gemm.n, gemm.k, gemm.dtype):
            return math.inf
        wide, width = whole_rows(gemm), element_bytes(gemm.dtype)
        time, _, comparable = self._gemm_us(*BASELINE, wide)
        if time is None or not comparable:
            return math.inf
        for before, after in ((gemm.m * gemm.k, wide.m * wide.k), (gemm.n * gemm.k, wide.n * wide.k)):
            time += self.moving_us(width * (before + after)) if before != after else 0.0
        return time

    def _norm_us(self, gemm: Gemm, *, fusable: bool) -> float:
        """What a BlockNorm behind the GEMM costs more than in the epilogue of a fused kernel, which could take it from
        a GEMM that is ``fusable``: a launch, and the result written and read once more."""
        if not (gemm.norm and self.has_fused_kernels) or (fusable and gemm.norm == "epilogue"):
            return 0.0
        return self.moving_us(2 * gemm.m * gemm.n * element_bytes(gemm.dtype))

    def bytes_us(self, size: int) -> float:
        """Microseconds that a kernel takes longer for that many bytes, at the bandwidth of the data sheet."""
        return self._per_megabyte * size * _MEGA

    def moving_us(self, size: int) -> float:
        """Microseconds of a kernel that does nothing but move that many bytes, read and written ones together.

        The bandwidth of the data sheet, and the launch of the quickest quantiser; no bytes need no kernel.
        """
        fitted = [s.coefficients for s in self.quantizers.values() if s.coefficients is not None]
        launch = min((float(c[0]) for c in fitted), default=0.0)
        return launch + self._per_megabyte * size * _MEGA if size else 0.0

    def _gemm_us(self, provider: str, recipe: str, gemm: Gemm) -> tuple[float | None, bool, bool]:
        """Time, whether it was measured, whether a comparable shape was.

        Points of the GEMM's own role and dtype are preferred, but points that are like it to those that are not.
        """
        dtype = _ALIKE.get(gemm.dtype, gemm.dtype)
        shape = (gemm.m, gemm.n, gemm.k)
        baseline = (provider, recipe) == BASELINE
        found: tuple[float | None, bool, bool] = (None, False, False)
        odd = baseline and odd_gemm(gemm.role.value, *shape, dtype)
        roles = dict.fromkeys((gemm.role.value, Role.FORWARD.value)) if baseline else ("",)
        stores = dict.fromkeys((dtype, "bfloat16"))
        for rows in dict.fromkeys((odd, False)):
            for role, stored in itertools.product(roles, stores):
                surface = self.gemms.get((provider, recipe, role, stored, rows))
                time = None if surface is None else surface(shape)
                if surface is None or time is None:
                    continue
                comparable, measured = surface.comparable(shape), stored == dtype and shape in surface.points
                if stored != dtype:
                    time += self._wider(surface, shape, baseline)
                if comparable:
                    return time, measured, True
                if found[0] is None:
                    found = (time, measured, False)
        return found

    def _wider(self, surface: Surface, shape: Shape, baseline: bool) -> float:
        """What fp32 adds to a latency measured at 16 bits; non-negative and non-decreasing in every dimension.

        The baseline's flops and bytes double, its launch does not. An FP8 GEMM only writes a wider output.
        """
        if not baseline:
            return self._per_megabyte * 2 * max(1, shape[0]) * max(1, shape[1]) * _MEGA
        model = surface.model(shape)
        if model is None or surface.coefficients is None:
            return 0.0
        return model - float(surface.coefficients[0])

    def _quantize_us(
        self,
        scaling: Scaling,
        rows: int,
        contraction: int,
        gemm: Gemm,
        transposed: bool,
        bound: float | None,
        fused: bool,
    ) -> float | None:
        """Microseconds of one operand ``[rows, contraction]``, or None if its quantiser was never measured."""
        if scaling is Scaling.NONE:
            return 0.0
        if fused and scaling is Scaling.TENSORWISE and self.has_fused_kernels and not (bound and not transposed):
            # The producer writes one FP8 byte more per element; weights are read for it as well.
            is_weight = rows == gemm.n and gemm.role is not Role.GRAD_WEIGHT
            width = 1 + (element_bytes(gemm.dtype) if is_weight else 0)
            return self._per_megabyte * width * rows * contraction * _MEGA
        if scaling is Scaling.BLOCK_128X128 and not any(key[0] is scaling for key in self.quantizers):
            scaling = Scaling.BLOCK_1X128
        dtype = _ALIKE.get(gemm.dtype, gemm.dtype)
        shape = (contraction, rows) if transposed else (rows, contraction)
        free = bound is not None and scaling is Scaling.TENSORWISE
        odd = odd_operand(scaling, rows, contraction)
        for stored, turned, ragged in itertools.product(
            dict.fromkeys((dtype, "bfloat16")), dict.fromkeys((transposed, False)), dict.fromkeys((odd, False))
        ):
            surface = self.quantizers.get((scaling, turned, stored, ragged))
            time = None if surface is None else surface(shape)
            if surface is None or time is None:
                continue
            launch, per_million = (0.0, 0.0) if surface.coefficients is None else surface.coefficients.tolist()
            read_write = quantize_bytes(scaling, stored)
            megabyte = max(per_million / read_write, self._per_megabyte)
            elements = max(1, rows) * max(1, contraction) * _MEGA
            if free:
                return launch + megabyte * 2 * elements if transposed else 0.0
            time += megabyte * (quantize_bytes(scaling, dtype) - read_write) * elements
            if transposed and not turned:
                time += megabyte * 2 * elements
            return time
        return None


def target_of_device_name(name: str) -> str | None:
    """The shipped target that a device name stands for: ``"NVIDIA H200"`` -> ``"h200"``; None if there is none.

    A MIG slice is not the GPU that was measured and has no target.
    """
    if re.search(r"\bMIG\b", name, re.IGNORECASE):
        return None
    for target in CostTable.targets():
        if re.search(rf"\b{re.escape(target)}\b", name, re.IGNORECASE):
            return target
    return None


def _updated(old: Surface | None, new: Surface) -> dict[Shape, float]:
    return {**(old.points if old is not None else {}), **new.points}


@functools.cache
def _load_shipped(target: str) -> CostTable:
    file = importlib.resources.files("loka_compile") / "data" / f"{target}{_SUFFIX}"
    return CostTable(target, *parse(file.read_text(encoding="utf-8"), target))
