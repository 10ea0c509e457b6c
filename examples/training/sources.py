"""Data sources by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from examples.data.criteo import CriteoStream
from examples.data.stream import DatasetStream, Stream
from examples.data.synthetic import SyntheticConfig, SyntheticStream

SOURCES = ("synthetic", "nycflights", "criteo")


def open_source(
    name: str,
    batch_size: int,
    *,
    device: str | torch.device = "cpu",
    seed: int = 0,
    files: Sequence[str | Path] = (),
    **changes: Any,
) -> Stream:
    """The stream of that name.

    Args:
        device: where the synthetic source draws, and where nycflights is held; Criteo files are read by the CPU.
        seed: of the synthetic source.
        files: Criteo files or folders.
        changes: fields of `SyntheticConfig`, arguments of `CriteoStream`, or ``rows`` of nycflights.

    Raises:
        ValueError: there is no such source, or an argument is illegal or missing.
    """
    if name not in SOURCES:
        raise ValueError(f"no data source {name!r}; there are: {', '.join(SOURCES)}")
    if (name == "criteo") != bool(files):
        raise ValueError("the Criteo source reads files (--files), the others do not")
    try:
        if name == "synthetic":
            return SyntheticStream(SyntheticConfig(batch_size=batch_size, seed=seed, **changes), device)
        if name == "criteo":
            return CriteoStream(files, batch_size, **changes)
        from examples.data import nycflights

        return DatasetStream(nycflights.load(**changes).to(device), batch_size)
    except TypeError as error:
        raise ValueError(f"source {name}: {error}") from error
