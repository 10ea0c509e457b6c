"""The files of a quality protocol: one folder, one set-up, one pair of files for each run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.quality_stats import Floats
from examples.training.checkpoint import atomic_write


class OtherSetupError(ValueError):
    """A folder holds runs of another protocol, which must not be compared with these."""


class Runs:
    """The finished runs of a folder: ``<arm>-seed<n>.npz`` with losses [1 or 2, steps], and a .json beside it."""

    def __init__(self, folder: Path, setup: dict[str, Any]) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._check_setup(setup)

    def _check_setup(self, setup: dict[str, Any]) -> None:
        """One folder, one protocol: runs on other streams must not be compared."""
        path = self.folder / "setup.json"
        if path.exists():
            found = json.loads(path.read_text())
            if found != setup:
                other = [f"{k}: {found.get(k)!r} there, {v!r} now" for k, v in setup.items() if found.get(k) != v]
                raise OtherSetupError(f"{self.folder} holds runs of another set-up ({'; '.join(other)})")
        else:
            atomic_write(path, lambda f: f.write((json.dumps(setup, indent=2) + "\n").encode()))

    def _path(self, arm: str, seed: int) -> Path:
        return self.folder / f"{arm}-seed{seed}.npz"

    def done(self, arm: str, seed: int) -> bool:
        return self._path(arm, seed).exists()

    def save(self, arm: str, seed: int, losses: Floats, facts: dict[str, Any]) -> None:
        """The losses last: they are what makes a run finished."""
        path = self._path(arm, seed)
        atomic_write(path.with_suffix(".json"), lambda f: f.write((json.dumps(facts, indent=2) + "\n").encode()))
        atomic_write(path, lambda f: np.savez_compressed(f, losses=losses))

    def losses(self, arm: str, seed: int) -> Floats:
        with np.load(self._path(arm, seed)) as file:
            return file["losses"]

    def facts(self, arm: str, seed: int) -> dict[str, Any]:
        return json.loads(self._path(arm, seed).with_suffix(".json").read_text())
