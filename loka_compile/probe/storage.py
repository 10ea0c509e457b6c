"""Statistics on disk: one folder, for every rank an index and a file of tensors.

    rank0.json                                   step, options, norms over time, and the name and SHA-256 of the
    rank0-000000010000-<SHA-256>.safetensors     tensors of all sites, named "<number of the site>.<part>"

Both are written under another name, flushed to the disk and renamed, the index last. So whoever kills the process at
any moment leaves the last whole version behind; what it began is swept away by the next writer.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loka_compile.errors import CorruptFileError, ProbeError
from loka_compile.jsonio import atomic_write, dumps, read_document
from loka_compile.probe.site_stats import SiteStats, Stats, StatsOptions

FORMAT = "loka_compile probe statistics"
VERSION = 1

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Snapshot:
    """A copy of all statistics on the CPU, ready to be written."""

    step: int
    rank: int
    world: int
    options: StatsOptions
    tensors: dict[str, Tensor]
    sites: dict[str, Any]

    @classmethod
    def take(cls, stats: Mapping[str, SiteStats], step: int, options: StatsOptions, rank: int, world: int) -> Snapshot:
        """Copy everything (waits for the device)."""
        tensors: dict[str, Tensor] = {}
        sites: dict[str, Any] = {}
        for number, (site, one) in enumerate(sorted(stats.items())):
            parts, sites[site] = one.state()
            tensors |= {f"{number}.{name}": tensor.cpu().contiguous() for name, tensor in parts.items()}
        return cls(step, rank, world, options, tensors, sites)


@dataclass(frozen=True)
class Saved:
    """What was read back of one rank."""

    step: int
    rank: int
    world: int
    options: StatsOptions
    stats: Stats


def write(folder: str | os.PathLike[str], snapshot: Snapshot) -> Path:
    """Write a snapshot and make it the folder's version for its rank. Returns the index.

    Raises:
        OSError: the folder cannot be written, or is full. The version before stays.
    """
    from safetensors.torch import save_file

    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    stem = f"rank{snapshot.rank}"
    temporary = root / f"{stem}-{uuid.uuid4().hex}.tmp"
    try:
        save_file(snapshot.tensors, temporary)
        digest = _digest(temporary)
        _flush(temporary)
        # Named by its contents, so that it never takes the place of a file that an index still speaks of.
        data = root / f"{stem}-{snapshot.step:012d}-{digest[:12]}.safetensors"
        os.replace(temporary, data)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    index = {
        "format": FORMAT,
        "version": VERSION,
        "step": snapshot.step,
        "rank": snapshot.rank,
        "world": snapshot.world,
        "options": {**dataclasses.asdict(snapshot.options), "dtype": str(snapshot.options.dtype)},
        "file": data.name,
        "sha256": digest,
        "sites": snapshot.sites,
    }
    path = root / f"{stem}.json"
    atomic_write(path, dumps(index))
    _flush(root)
    for old in (*root.glob(f"{stem}-*.safetensors"), *root.glob(f"{stem}-*.tmp"), *root.glob(f".{stem}.json.*.tmp")):
        if old != data:
            old.unlink(missing_ok=True)
    return path


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        hasher = hashlib.sha256()
        while chunk := stream.read(1 << 24):
            hasher.update(chunk)
    return hasher.hexdigest()


def read(folder: str | os.PathLike[str], rank: int = 0, device: torch.device | str = "cpu") -> Saved | None:
    """The last whole version of one rank, or None if there is none.

    Raises:
        CorruptFileError: a file is damaged, or not one of ours.
        StaleTableError: it is of another version of the format.
    """
    path = Path(folder) / f"rank{rank}.json"
    if not path.exists():
        return None
    index = read_document(path, FORMAT, VERSION)
    try:
        options = StatsOptions(**{**index["options"], "dtype": _dtype(index["options"]["dtype"])})
        tensors = _tensors(path.with_name(index["file"]), index["sha256"])
        stats = Stats()
        for number, (site, rest) in enumerate(sorted(index["sites"].items())):
            own = {name.partition(".")[2]: t for name, t in tensors.items() if name.partition(".")[0] == str(number)}
            stats[site] = SiteStats.from_state(site, own, rest, options=options, device=device)
        return Saved(index["step"], index["rank"], index["world"], options, stats)
    except CorruptFileError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise CorruptFileError(
            f"{path} is damaged ({type(error).__name__}: {error}); delete it to start anew"
        ) from error


def _tensors(path: Path, digest: str) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    try:
        found = _digest(path)
    except OSError as error:
        raise CorruptFileError(f"{path} cannot be read: {error}") from error
    if found != digest:
        raise CorruptFileError(f"{path} is damaged: its contents are not what its index was written for")
    return dict(load_file(path))


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."))
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return dtype


def load_stats(folder: str | os.PathLike[str], device: torch.device | str = "cpu") -> Stats:
    """The statistics of all ranks that saved into ``folder``, merged.

    Raises:
        ProbeError: there are none, or ranks are missing or lag behind one another.
        CorruptFileError: a file is damaged.
    """
    ranks = sorted(int(p.stem.removeprefix("rank")) for p in Path(folder).glob("rank*.json"))
    if not ranks:
        raise ProbeError(f"{folder} holds no probe statistics")
    merged, steps, world = Stats(), set(), 0
    for rank in ranks:
        saved = read(folder, rank, device)
        assert saved is not None
        merged.merge(saved.stats)
        steps.add(saved.step)
        world = max(world, saved.world)
    if missing := sorted(set(range(world)) - set(ranks)):
        raise ProbeError(f"{folder} lacks the statistics of ranks {missing}, of {world}")
    if len(steps) > 1:
        logger.warning("%s: the ranks were saved at different steps: %s", folder, sorted(steps))
    return merged


class Writer:
    """Writes snapshots in a thread of its own. A newer one replaces one that still waits."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Nothing is written, and no thread runs, before the first snapshot."""
        self.folder = Path(folder)
        self.written = 0
        self.error: Exception | None = None
        self._waiting: Snapshot | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False

    def submit(self, snapshot: Snapshot) -> None:
        """Hand over a snapshot. Returns at once; a failure is logged and kept in ``error``."""
        with self._changed:
            self._waiting = snapshot
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="loka-probe-writer", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._closing)
                snapshot, self._waiting = self._waiting, None
            if snapshot is None:
                return
            try:
                write(self.folder, snapshot)
            except Exception as error:
                logger.exception("probe statistics of step %d could not be saved to %s", snapshot.step, self.folder)
                self.error = error
            else:
                self.written, self.error = self.written + 1, None

    def close(self) -> None:
        """Wait until everything is written.

        Raises:
            ProbeError: the last snapshot could not be written.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        if self.error is not None:
            raise ProbeError(f"the last statistics could not be saved to {self.folder}: {self.error}") from self.error
