"""One arm of one model, ready to be timed, in this process or in one of its own (``python -m benchmarks.e2e_arm``).

As a program it prepares the arm that its argument names, prints a line of JSON, then answers lines on its standard
input: ``time STEPS`` with seconds per step, ``kernels`` with microseconds by kernel. It ends with its input.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch._inductor.config

from benchmarks._children import end, last_line, start
from benchmarks.kernel_kinds import kernel_times
from benchmarks.quality_arms import ARMS, fp8_summary, planned_arm, prepare
from examples.data.stream import Batch
from examples.data.synthetic import SyntheticConfig, SyntheticStream
from examples.models.registry import MODELS, build
from examples.training.config import TrainConfig
from examples.training.loop import Trainer

#: Different batches that a measurement goes through.
BATCHES = 4
#: loka samples the first 20 calls before it plans, and compiles once more then.
WARM_UP = 25


class ArmFailedError(RuntimeError):
    """An arm could not be prepared, or its process died; the text says what it said last."""


@dataclass(frozen=True)
class Spec:
    """What is prepared. ``mode``: "training", "inference", or "frozen" (inference with weights as constants, which are
    cast and quantised once). ``data`` holds fields of `SyntheticConfig`."""

    model: str
    size: str
    mode: str
    arm: str
    data: Mapping[str, Any]
    backend: str
    device: str
    graphs: bool
    min_features: int
    model_options: Mapping[str, Any]
    #: File of a plan for an arm that would plan by itself, or "".
    plan: str = ""

    def __str__(self) -> str:
        return f"{self.model} {self.mode} {self.arm}"


class Handle(Protocol):
    """A prepared arm."""

    spec: Spec

    def facts(self) -> dict[str, Any]:
        """``cuda_graph`` ("yes", "no", or why it failed), ``loka``, ``peak_mib``, ``seconds`` of preparation."""

    def time(self, steps: int) -> float:
        """Seconds of one step, over so many."""

    def kernels(self) -> dict[str, float]:
        """Microseconds of one step by kernel, the longest first."""


class LocalArm:
    """An arm in this process: built, compiled and, on a GPU, captured."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        began = time.perf_counter()
        torch._dynamo.reset()
        data = dict(spec.data) if MODELS[spec.model][2] else {**spec.data, "history_length": 0}
        stream = SyntheticStream(SyntheticConfig(**data), spec.device)
        self._device = stream.device
        batches = [stream.batch(i) for i in range(BATCHES)]
        net = build(spec.model, spec.size, stream.schema, device=self._device, **spec.model_options)
        arm = planned_arm(spec.arm, Path(spec.plan)) if spec.plan else ARMS[spec.arm]
        config, transform = prepare(
            arm, TrainConfig(backend=spec.backend, warmup=0), min_features=spec.min_features, device=self._device.type
        )
        self._wait()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        trainer = Trainer(net, stream, config, device=self._device, transform=transform, capturable=spec.graphs)
        training = spec.mode == "training"
        net.train(training)

        def run(batch: Batch) -> object:
            if training:
                return trainer.step(batch)
            with torch.no_grad():
                return trainer.predict(batch)

        with self._constants():
            for i in range(WARM_UP):
                run(batches[i % BATCHES])
            replay, graph = capture(run, batches) if spec.graphs else (None, "no")
        self._call: Callable[[int], object] = replay or (lambda i: run(batches[i % BATCHES]))
        loka = None
        if config.backend == "loka":
            from loka_compile import reports

            loka = fp8_summary(reports()[-1])
        peak = torch.cuda.max_memory_allocated() / 2**20 if self._device.type == "cuda" else 0.0
        seconds = time.perf_counter() - began
        self._facts = {"cuda_graph": graph, "loka": loka, "peak_mib": peak, "seconds": seconds}

    def facts(self) -> dict[str, Any]:
        return self._facts

    def time(self, steps: int) -> float:
        with self._constants():
            self._wait()
            began = time.perf_counter()
            for i in range(steps):
                self._call(i)
            self._wait()
            return (time.perf_counter() - began) / steps

    def kernels(self) -> dict[str, float]:
        with self._constants():
            return kernel_times(lambda: self._call(0), 3, self._device)

    def _constants(self) -> Any:
        """Dynamo compiles again when this switch is not as it was."""
        return torch._inductor.config.patch(freezing=self.spec.mode == "frozen")

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def capture(
    run: Callable[[Batch], object], batches: list[Batch]
) -> tuple[Callable[[int], object], str] | tuple[None, str]:
    """The step as a CUDA graph over inputs of its own and "yes", or None and why capture failed."""
    inputs = Batch(*(None if t is None else t.clone() for t in batches[0]))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run(inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            run(inputs)
    except RuntimeError as error:
        torch.cuda.synchronize()
        return None, f"failed: {str(first_of(error)).splitlines()[0]}"

    def replay(i: int) -> None:
        for mine, new in zip(inputs, batches[i % len(batches)], strict=True):
            if mine is not None:
                mine.copy_(new)
        graph.replay()

    return replay, "yes"


def first_of(error: BaseException) -> BaseException:
    """What went wrong first: ending a broken capture is an error of its own."""
    while error.__context__ is not None:
        error = error.__context__
    return error


class RemoteArm:
    """An arm in a process of its own, so that arms compile side by side. `ready` tells when it can be asked."""

    def __init__(self, spec: Spec, log: Path, *, at_once: int) -> None:
        self.spec, self._log = spec, log
        self._child: subprocess.Popen[str] = start(
            "benchmarks.e2e_arm", [json.dumps(asdict(spec))], log, at_once=at_once, commands=True
        )
        self._facts: dict[str, Any] | None = None

    def ready(self) -> bool:
        """Whether it is prepared; raises ArmFailedError when it never will be."""
        if self._facts is None:
            assert self._child.stdout is not None
            if not select.select([self._child.stdout], [], [], 0)[0]:
                return False
            if line := self._child.stdout.readline():
                self._facts = json.loads(line)
            else:
                raise ArmFailedError(f"{self.spec}: {last_line(self._log) or 'no word'}")
        return True

    def facts(self) -> dict[str, Any]:
        assert self._facts is not None
        return self._facts

    def time(self, steps: int) -> float:
        return float(self._ask(f"time {steps}"))

    def kernels(self) -> dict[str, float]:
        return dict(self._ask("kernels"))

    def last_words(self) -> str:
        """What it printed last."""
        return last_line(self._log)

    def close(self) -> None:
        """End the process."""
        end(self._child, patience=3.0)

    def _ask(self, line: str) -> Any:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            self._child.stdin.write(line + "\n")
            self._child.stdin.flush()
            answer = self._child.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise ArmFailedError(f"{self.spec}: {last_line(self._log) or 'no word'}")
        return json.loads(answer)


def main(spec: Spec) -> None:
    """Prepare, then answer."""
    # What libraries print must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    arm = LocalArm(spec)
    print(json.dumps(arm.facts()), file=answers, flush=True)
    for line in sys.stdin:
        what, *rest = line.split()
        print(json.dumps(arm.time(int(rest[0])) if what == "time" else arm.kernels()), file=answers, flush=True)


if __name__ == "__main__":
    main(Spec(**json.loads(sys.argv[1])))
