"""Trains one arm of the quality protocol, seed after seed; as a program, a process of ``benchmarks.quality --jobs``.

What is compiled for the first seed serves the others: weights, optimizers and stream start anew, the code stays. For
the arm ``loka`` that means one plan, made from samples of the first seed that was trained; it is kept beside the runs
(``loka-plan.json``), and later calls carry it out instead of sampling again.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks._children import end_with_parent
from benchmarks.quality_arms import ARMS, Arm, fp8_summary, planned_arm, prepare
from benchmarks.quality_runs import Runs
from benchmarks.quality_stats import Floats
from examples.models.registry import build
from examples.training.config import TrainConfig
from examples.training.loop import DivergedError, Trainer
from examples.training.sources import open_source

#: Secondary measures, averaged over the scored windows.
MEASURES = ("auc", "calibration", "ece", "normalised_entropy")


def base_config(setup: dict[str, Any], cuda_graph: bool) -> TrainConfig:
    """What all arms have in common."""
    return TrainConfig(
        backend=setup["backend"], window=setup["window"], cuda_graph=cuda_graph, **setup["train_options"]
    )


class ArmTraining:
    """The runs of one arm in one process.

    Args:
        jobs: how many processes share the machine; a throughput is then not that of the arm alone.
    """

    def __init__(
        self, arm: Arm, setup: dict[str, Any], runs: Runs, *, device: str, cuda_graph: bool, jobs: int = 1
    ) -> None:  # fmt: skip
        self.setup, self.runs, self.device, self.jobs = setup, runs, device, jobs
        self._plan = runs.folder / f"{arm.name}-plan.json"
        if arm.options.get("table") == "auto" and self._plan.exists():
            others = {k: v for k, v in arm.options.items() if k != "table"}
            arm = dataclasses.replace(arm, options={**others, "plan": str(self._plan)})
        self.arm = arm
        self._base = base_config(setup, cuda_graph)
        self._trainer: Trainer | None = None

    def _ready(self, seed: int) -> Trainer:
        """A trainer before its first step."""
        setup = self.setup
        stream = open_source(setup["data"], setup["batch_size"], device=self.device, seed=seed, **setup["data_options"])
        model = build(
            setup["model"], setup["size"], stream.schema, seed=seed + self.arm.other_seed, device=self.device,
            **setup["model_options"],
        )  # fmt: skip
        if self._trainer is not None and self._trainer.config.backend != "eager":
            self._trainer.restart(model.state_dict(), stream)
            return self._trainer
        torch._dynamo.reset()
        config, transform = prepare(self.arm, self._base, min_features=setup["min_features"], device=self.device)
        self._trainer = Trainer(model, stream, config, device=self.device, transform=transform)
        return self._trainer

    def train(self, seed: int, on_step: Callable[[int], None] | None = None) -> tuple[Floats, dict[str, Any]]:
        """One run: losses summed over each step [1 or 2, steps], and facts about it; both are saved, too."""
        started = time.perf_counter()
        trainer = self._ready(seed)
        losses: list[Floats] = []
        records: list[dict[str, Any]] = []
        diverged = ""
        try:
            for record, window in trainer.run(self.setup["steps"], on_step):
                losses.append(window.numpy())
                records.append(record)
        except DivergedError as error:
            diverged = str(error)
        if not records:
            raise ValueError(f"the stream ended before the first window of {trainer.config.window} steps was full")
        rates = [r["examples_per_second"] for r in records]
        scored = [r for r in records if r["step"] > self.setup["score_from"] * self.setup["steps"]] or records[-1:]
        facts: dict[str, Any] = {
            "arm": self.arm.name, "text": self.arm.text, "seed": seed, "diverged": diverged, "jobs": self.jobs,
            # The first windows compile and warm up. What shares a GPU has no throughput of its own.
            "examples_per_second": float(np.median(rates[len(rates) // 3 :])) if self.jobs == 1 else None,
            "seconds": time.perf_counter() - started,
            "scored": {k: float(np.mean([r[k] for r in scored])) for k in MEASURES},
        }  # fmt: skip
        if trainer.config.backend == "loka":
            facts["loka"] = self._loka()
        row = np.concatenate(losses, axis=1)
        self.runs.save(self.arm.name, seed, row, facts)
        return row, facts

    def _loka(self) -> dict[str, Any]:
        from loka_compile import reports

        report = reports()[-1]
        if self.arm.options.get("table") == "auto" and report.plan is not None and not self._plan.exists():
            report.plan.save(self._plan)
        return fp8_summary(report)


def main(spec: dict[str, Any]) -> None:
    """Train the seeds of one arm and say what happens, a line each."""
    setup, name = spec["setup"], spec["arm"]
    arm = planned_arm(name, Path(spec["plan"])) if spec["plan"] else ARMS[name]
    began = time.perf_counter()
    training = ArmTraining(
        arm, setup, Runs(Path(spec["out"]), setup), device=spec["device"], cuda_graph=spec["cuda_graph"],
        jobs=spec["jobs"],
    )  # fmt: skip
    every = max(1, setup["steps"] // 10)

    def on_step(step: int) -> None:
        if step % every == 0 or step in (1, 25):
            print(f"{time.perf_counter() - began:.1f} s: {name}, step {step} of {setup['steps']}", flush=True)

    for seed in spec["seeds"]:
        print(f"{time.perf_counter() - began:.1f} s: {name}, seed {seed}", flush=True)
        training.train(seed, on_step)


if __name__ == "__main__":
    end_with_parent()
    main(json.loads(sys.argv[1]))
