"""The files of a training run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from examples.training.checkpoint import atomic_write, checkpoints, load_checkpoint, save_checkpoint
from examples.training.loop import Trainer


class RunFolder:
    """The files of a run: ``config.json``, ``metrics.jsonl`` with one line per window, ``checkpoint-<step>.pt``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    @property
    def metrics_file(self) -> Path:
        """One JSON object per line."""
        return self.path / "metrics.jsonl"

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Keep what the run was started with."""
        atomic_write(self.path / "config.json", lambda f: f.write((json.dumps(config, indent=2) + "\n").encode()))

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one window's metrics. NaN is written as null, which every JSON reader takes."""
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        with self.metrics_file.open("a") as file:
            file.write(json.dumps(clean) + "\n")

    def records(self) -> list[dict[str, Any]]:
        """All windows so far. A last line that a crash cut off is left out."""
        if not self.metrics_file.exists():
            return []
        lines = self.metrics_file.read_text().split("\n")
        return [json.loads(line) for line in lines[:-1] if line]

    def save(self, trainer: Trainer) -> None:
        """Write a checkpoint."""
        save_checkpoint(self.path, trainer.step_count, trainer.state_dict())

    def resume(self, trainer: Trainer) -> int:
        """Load the newest checkpoint, drop the windows that came after it; returns its step, 0 without one."""
        found = checkpoints(self.path)
        step = 0
        if found:
            trainer.load_state_dict(load_checkpoint(found[-1][1]))
            step = trainer.step_count
        kept = [r for r in self.records() if r["step"] <= step]
        atomic_write(self.metrics_file, lambda f: f.write("".join(json.dumps(r) + "\n" for r in kept).encode()))
        return step
