"""The cache of tables between runs: one file per key, shared by concurrent processes. No torch import.

Files lie in ``$LOKA_CACHE_DIR``, else in the user's cache folder. A cache must never stop a training run: what cannot
be read is logged, put aside and measured again; what cannot be written is logged.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from loka_compile.errors import CorruptFileError, StaleTableError
from loka_compile.table import Table

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

#: Environment variable that names another folder.
VARIABLE = "LOKA_CACHE_DIR"
#: Seconds to wait for another process that writes the same table.
PATIENCE = 60.0

logger = logging.getLogger(__name__)


def cache_dir() -> Path:
    """The folder of cached tables (not made by this call): ``$LOKA_CACHE_DIR`` or platformdirs' user cache."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("loka_compile"))


def cache_path(key: str) -> Path:
    """The file of ``key``: its readable part, and a hash of the whole, so that no two keys share a file."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "_", key)[:40].strip("._") or "table"
    return cache_dir() / f"{readable}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def load_cached(key: str) -> Table | None:
    """The table cached under ``key``, or None. Never raises on a bad or missing file.

    A damaged file is logged with its path and moved aside to ``<file>.corrupt``; one of another format version is
    logged and left to be overwritten.
    """
    path = cache_path(key)
    try:
        return Table.load(path)
    except FileNotFoundError:
        return None
    except StaleTableError as error:
        logger.info("cached table not used: %s", error)
    except CorruptFileError as error:
        _put_aside(path, error)
    except OSError as error:
        logger.warning("cached table %s cannot be read: %s", path, error)
    return None


def save_cached(key: str, table: Table) -> Path | None:
    """Store ``table`` under ``key``, merged with what is there; returns the file, or None if it cannot be written.

    Several processes may do this at once: a lock file orders them, each merges its rows, readers see whole files only.
    A cached table with which ``table`` cannot be merged (another device or version) is replaced.
    """
    path = cache_path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_suffix(".lock")):
            present = load_cached(key)
            if present is not None:
                try:
                    table = present.merge(table)
                except StaleTableError as error:
                    logger.info("cached table %s is replaced: %s", path, error)
            table.save(path)
    except OSError as error:
        logger.warning("table cannot be cached in %s: %s. Set %s to a writable folder.", path, error, VARIABLE)
        return None
    return path


def _put_aside(path: Path, error: CorruptFileError) -> None:
    aside = path.with_name(path.name + ".corrupt")
    try:
        os.replace(path, aside)
    except FileNotFoundError:
        return  # another process was first
    except OSError as failure:
        logger.warning("cached table ignored: %s (and it cannot be moved aside: %s)", error, failure)
        return
    logger.warning("cached table ignored and moved to %s: %s", aside, error)


@contextlib.contextmanager
def locked(path: Path, patience: float | None = None) -> Iterator[None]:
    """Hold an exclusive lock on ``path`` (created, never removed: removing would let two holders in).

    The lock goes with its process, so a killed one leaves none behind. Where there is no ``fcntl`` nothing is locked:
    files stay whole, but of two writers at the same time the later one's rows win.

    Raises:
        OSError: the lock was not free for ``patience`` (``PATIENCE``) seconds.
    """
    patience = PATIENCE if patience is None else patience
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if fcntl is not None:
            deadline = time.monotonic() + patience
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() > deadline:
                        raise OSError(f"{path} stayed locked for {patience:.0f} s by another process") from error
                    time.sleep(0.01)
        yield
    finally:
        os.close(handle)
