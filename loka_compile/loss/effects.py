"""What FP8 in single GEMMs does to the loss: estimates with their intervals, and the file that holds them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from loka_compile import jsonio
from loka_compile.errors import CorruptFileError, StaleTableError

#: What the "format" key of a file says, and the version of its structure.
FORMAT, VERSION = "loka_compile loss sensitivity", 1
#: Site, role, candidate ("torch:rowwise").
Arm = tuple[str, str, str]


@dataclass
class Running:
    """Mean and scatter of a stream of numbers (Welford)."""

    count: int = 0
    mean: float = 0.0
    scatter: float = 0.0

    def add(self, value: float) -> None:
        """One more number."""
        self.count += 1
        step = value - self.mean
        self.mean += step / self.count
        self.scatter += step * (value - self.mean)

    @property
    def stderr(self) -> float:
        """Standard error of the mean; NaN below two numbers."""
        return math.sqrt(self.scatter / (self.count - 1) / self.count) if self.count > 1 else math.nan


@dataclass(frozen=True)
class Effect:
    """Relative change of the loss, (FP8 - base) / base, with its interval. Batches are the independent samples."""

    site: str
    role: str
    candidate: str
    change: float
    stderr: float
    low: float
    high: float
    batches: int

    def __str__(self) -> str:
        """One readable line, in percent."""
        half = (self.high - self.low) / 2
        return f"{self.site} {self.role} {self.candidate}: {self.change:+.4%} +- {half:.4%}"


@dataclass
class Sensitivity:
    """Effects by GEMM and kernel; grows batch by batch and can be saved and gone on with."""

    #: Width of the intervals: 0.95 is 95 %.
    confidence: float = 0.95
    #: Batches seen. Going on skips as many.
    batches: int = 0
    base: Running = field(default_factory=Running)
    arms: dict[Arm, Running] = field(default_factory=dict)
    #: GEMM -> why it could not be measured.
    skipped: dict[tuple[str, str], str] = field(default_factory=dict)

    @property
    def base_loss(self) -> float:
        """Mean loss without FP8."""
        return self.base.mean

    def effect(self, site: str, role: str, candidate: str) -> Effect | None:
        """What is known of one kernel, or None. A ``_fast`` recipe that was not measured has the effect of its exact
        twin: fast accumulation is not emulated."""
        for name in (candidate, candidate.removesuffix("_fast")):
            running = self.arms.get((site, str(role), name))
            if running is not None and running.count:
                return self._effect((site, str(role), candidate), running)
        return None

    def effects(self) -> list[Effect]:
        """All of them, the largest change first."""
        found = [self._effect(arm, running) for arm, running in self.arms.items() if running.count]
        return sorted(found, key=lambda e: -e.change)

    def _effect(self, arm: Arm, running: Running) -> Effect:
        base = self.base_loss
        change, stderr = running.mean / base, running.stderr / abs(base)
        half = student(self.confidence, running.count) * stderr
        return Effect(*arm, change, stderr, change - half, change + half, running.count)

    def to_text(self, most: int = 20) -> str:
        """The largest effects as text."""
        lines = [f"loss {self.base_loss:.6g} without FP8, {self.batches} batches; change with one GEMM in FP8:"]
        lines += [f"  {effect}" for effect in self.effects()[:most]]
        lines += [f"  {site} {role}: {reason}" for (site, role), reason in sorted(self.skipped.items())]
        return "\n".join(lines)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON, atomically.

        Raises:
            OSError: the folder cannot be written.
        """
        document = {
            "format": FORMAT, "version": VERSION, "confidence": self.confidence, "batches": self.batches,
            "base": asdict(self.base),
            "arms": [[*arm, *asdict(running).values()] for arm, running in self.arms.items()],
            "skipped": [[*key, reason] for key, reason in self.skipped.items()],
        }  # fmt: skip
        jsonio.atomic_write(path, jsonio.dumps(document) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Sensitivity:
        """Read such a file.

        Raises:
            CorruptFileError: the file is damaged or something else.
            StaleTableError: its format has another version.
        """
        document = jsonio.read_document(path, FORMAT, VERSION)
        where = str(path)
        arms: dict[Arm, Running] = {}
        for index, entry in enumerate(jsonio.as_list(document.get("arms"), f"{where}: arms")):
            place = f"{where}: arm {index}"
            *names, count, mean, scatter = _parts(entry, 6, place)
            site, role, candidate = (jsonio.as_str(name, place) for name in names)
            values = {"count": count, "mean": mean, "scatter": scatter}
            arms[site, role, candidate] = jsonio.record(Running, values, place)
        skipped = {}
        for index, entry in enumerate(jsonio.as_list(document.get("skipped"), f"{where}: skipped")):
            place = f"{where}: skipped {index}"
            site, role, reason = (jsonio.as_str(part, place) for part in _parts(entry, 3, place))
            skipped[site, role] = reason
        return cls(
            jsonio.as_float(document.get("confidence"), f"{where}: confidence"),
            jsonio.as_int(document.get("batches"), f"{where}: batches"),
            jsonio.record(Running, document.get("base"), f"{where}: base"),
            arms,
            skipped,
        )

    def check(self, arms: Iterable[Arm], path: str | os.PathLike[str]) -> None:
        """Whether a file can be gone on with.

        Raises:
            StaleTableError: it holds other GEMMs or kernels.
        """
        missing, extra = set(arms) - set(self.arms), set(self.arms) - set(arms)
        if missing or extra:
            example = " ".join(sorted(missing or extra)[0])
            raise StaleTableError(
                f"{path} was begun with other kernels ({len(missing)} are missing, {len(extra)} are no longer asked "
                f"for, such as {example}); use another path, or delete the file"
            )


def student(confidence: float, count: int) -> float:
    """Quantile of Student's t for a two-sided interval of the mean of ``count`` numbers."""
    if count < 2:
        return math.nan
    from scipy import stats

    return float(stats.t.ppf(0.5 + confidence / 2, count - 1))


def _parts(entry: Any, count: int, where: str) -> list[Any]:
    parts = jsonio.as_list(entry, where)
    if len(parts) != count:
        raise CorruptFileError(f"{where} must have {count} entries, not {len(parts)}")
    return parts
