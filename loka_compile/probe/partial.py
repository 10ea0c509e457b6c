"""From a folder of statistics to a table, site by site, so that a killed run loses one site and not all."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from loka_compile.errors import TableError
from loka_compile.probe.gate import Effort
from loka_compile.probe.quantify import quantify_stats
from loka_compile.probe.storage import load_stats
from loka_compile.table import Table

logger = logging.getLogger(__name__)


def make_table(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    target: str | None = None,
    providers: Sequence[str] | None = None,
    effort: Effort | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Table:
    """Measure every candidate on the statistics in ``folder`` and write the table to ``out``.

    What is done lies in ``<out>.part`` meanwhile. Another call with the same statistics and arguments goes on there.

    Args:
        folder: of a probe; the statistics of all its ranks are merged.
        out: the table file.
        target, providers, effort: as for :func:`loka_compile.probe.quantify.quantify_stats`.
        progress: called with (sites done, sites in all, the last one's name).

    Raises:
        ProbeError, CorruptFileError: there are no statistics, or they are damaged.
        UnknownNameError: no such target or provider.
        OSError: the table cannot be written.
    """
    stats = load_stats(folder)
    part = Path(f"{os.fspath(out)}.part")
    of = _digest(Path(folder), target, providers, effort or Effort())
    table = _begun(part, of)
    done = set() if table is None else set(table.header.fingerprint)
    todo = [site for site in sorted(stats) if site not in done]
    for number, site in enumerate(todo, len(stats) - len(todo)):
        if progress is not None:
            progress(number, len(stats), site)
        one = quantify_stats({site: stats[site]}, providers, target=target, effort=effort)
        table = one if table is None else table.merge(one)
        # The time of making says in a partial table what it is a part of.
        Table(dataclasses.replace(table.header, created=of), table.rows).save(part)
    assert table is not None  # load_stats refuses an empty folder
    if progress is not None:
        progress(len(stats), len(stats), "")
    table.save(out)
    part.unlink(missing_ok=True)
    return table


def _begun(part: Path, of: str) -> Table | None:
    """The sites that an earlier call has done, if it was about the same."""
    if not part.exists():
        return None
    try:
        table = Table.load(part)
    except TableError as error:
        logger.warning("%s is not used: %s", part, error)
        return None
    return table if table.header.created == of else None


def _digest(folder: Path, target: str | None, providers: Sequence[str] | None, effort: Effort) -> str:
    """What a partial table depends on: the statistics (their indices name the hashes of all else) and the arguments."""
    indices = [path.read_text() for path in sorted(folder.glob("rank*.json"))]
    parts = [*indices, target, None if providers is None else sorted(providers), dataclasses.astuple(effort)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
