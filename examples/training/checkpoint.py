"""Checkpoints that are whole or absent: written beside their name, flushed, then renamed over it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

#: Raised with every change of what a checkpoint holds.
FORMAT = 1
_NAME = re.compile(r"checkpoint-(\d+)\.pt")


class CheckpointError(RuntimeError):
    """A checkpoint is damaged, of another format, or of another run; the text says which."""


def atomic_write(path: Path, write: Any) -> None:
    """Call ``write(file)`` on a temporary file in the same folder, then rename it to ``path``.

    After a crash at any moment ``path`` holds either all of the old content or all of the new.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def save_checkpoint(folder: Path, step: int, state: Mapping[str, Any], keep: int = 2) -> Path:
    """Write ``checkpoint-<step>.pt`` and remove all but the ``keep`` newest."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"checkpoint-{step}.pt"
    atomic_write(path, lambda file: torch.save({"format": FORMAT, "step": step, **state}, file))
    for _, old in checkpoints(folder)[:-keep]:
        old.unlink()
    return path


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, file) of the checkpoints in a folder, oldest first."""
    found = [(int(m[1]), p) for p in folder.glob("checkpoint-*.pt") if (m := _NAME.fullmatch(p.name))]
    return sorted(found)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint into CPU memory.

    Raises:
        CheckpointError: the file is damaged or of another format.
    """
    try:
        # weights_only: tensors and plain values, never code.
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}). Remove it, and the run goes on from the checkpoint before it."
        ) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of format {FORMAT} of examples.train")
    return state
