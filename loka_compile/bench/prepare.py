"""Work for the CPU before and beside the timing: self-tests, and compiling what compiles at its first use.

In processes of their own, because neither Dynamo nor a library's JIT runs in parallel within one. What they compile
lands in the caches on disk (Inductor's, Triton's, the library's), where the timing process finds it.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.pool import AsyncResult, Pool
from typing import Protocol

import torch

from loka_compile.bench.workload import Operand
from loka_compile.gemm import Gemm, Role


@dataclass(frozen=True)
class SelfTest:
    """A kernel's numeric test in one role."""

    provider: str
    recipe: str
    role: Role

    def run(self) -> str | None:
        """None, or the reason why the kernel must not be used."""
        from loka_compile.lowering.selftest import self_test

        return self_test(self.provider, self.recipe, self.role)


@dataclass(frozen=True)
class FirstCall:
    """Call a kernel once at a shape, so that its library compiles it."""

    provider: str
    recipe: str
    gemm: Gemm

    def run(self) -> str | None:
        """None; a kernel that raises is reported where it is timed."""
        from loka_compile.bench.operands import Operands
        from loka_compile.lowering.providers import get_provider

        provider = get_provider(self.provider)
        provider.supported()  # loads its library
        recipe, gemm, dtype = provider.recipe(self.recipe), self.gemm, torch.float8_e4m3fn
        operands = Operands(torch.device("cuda"), max(gemm.m, gemm.n) * gemm.k + 1024)
        a = operands.quantized(gemm.m, gemm.k, recipe.a, dtype)
        b = operands.quantized(gemm.n, gemm.k, recipe.b, dtype)
        provider.compute(a, b, recipe, getattr(torch, gemm.dtype))
        torch.cuda.synchronize()
        return None


@dataclass(frozen=True)
class CompileQuantizer:
    """Compile a quantiser without running it: Triton's tuning runs must not meet the timing."""

    operand: Operand

    def run(self) -> str | None:
        """None."""
        from loka_compile.bench.arms import quantizer

        x = torch.empty(
            self.operand.rows, self.operand.columns, dtype=getattr(torch, self.operand.dtype), device="cuda"
        )
        compile_only(quantizer(self.operand), x)
        return None


class Job(Protocol):
    """Anything that can be pickled, compared and run."""

    def run(self) -> str | None:
        """None, or what is wrong."""
        ...

    def __hash__(self) -> int: ...


class _CompiledError(Exception):
    """Thrown instead of running what was compiled."""


def compile_only(function: Callable[..., object], *inputs: torch.Tensor) -> None:
    """Compile ``function`` for these inputs with Inductor into the caches, without a launch."""
    from torch._inductor.compile_fx import compile_fx

    done = False

    def backend(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., object]:
        nonlocal done
        compile_fx(gm, example_inputs)
        done = True

        def stop(*_: object) -> object:
            raise _CompiledError

        return stop

    torch.compiler.reset()
    try:
        with torch.no_grad():
            torch.compile(function, backend=backend, dynamic=False, fullgraph=True)(*inputs)
    except Exception:
        # Of a module, Dynamo traces on into what handles the exception, and stumbles there.
        if not done:
            raise


def configure(patient: bool = False) -> None:
    """What timing and compiling processes have in common, so that their cache keys agree."""
    import torch._inductor.config

    if patient:
        os.nice(10)
    # The parallelism is between the processes.
    torch._inductor.config.compile_threads = 1
    torch.set_float32_matmul_precision("high")


#: Set in a worker whose device an earlier job broke.
_lost = False


def _run(job: Job) -> str | None:
    if _lost:
        time.sleep(60)  # this process is about to end: the job is late
    try:
        answer = job.run()
    except Exception as error:
        answer = f"{type(error).__name__}: {str(error).strip() or 'no text'}"
    return answer if _device_works() else f"it broke the device: {answer}"


def _device_works() -> bool:
    """Whether this process can go on; one that cannot ends a moment after it has handed in its answer."""
    global _lost
    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # many processes share one GPU's memory
    except RuntimeError:
        _lost = True
        threading.Timer(1.0, os._exit, [1]).start()
    return not _lost


class Preparation:
    """Processes that work through jobs in order, in the background; leaving the ``with`` block stops them.

    Args:
        workers: number of processes; 0 prepares nothing, and nothing is waited for.
        jobs: what to do; None: :meth:`add` will say. One that takes its process down is never finished; another
            process takes its place.
        apart: every job gets a process of its own.
        patient: give way to other processes.
    """

    def __init__(
        self, workers: int, jobs: Sequence[Job] | None = None, *, apart: bool = False, patient: bool = False
    ) -> None:
        self._pool: Pool | None = None
        self._results: dict[Job, AsyncResult[str | None]] = {}
        if workers > 0 and (jobs is None or jobs):
            self._pool = multiprocessing.get_context("spawn").Pool(
                min(workers, len(jobs or range(workers))), configure, (patient,), maxtasksperchild=1 if apart else None
            )  # fmt: skip
        self.add(jobs or ())

    def add(self, jobs: Sequence[Job]) -> None:
        """Further jobs, behind those there are; one that was given before is not done twice."""
        if self._pool is not None:
            for job in jobs:
                if job not in self._results:
                    self._results[job] = self._pool.apply_async(_run, (job,))

    def __enter__(self) -> Preparation:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.terminate()
            self._pool.join()

    def wait(self, jobs: Sequence[Job], seconds: float) -> None:
        """Until these jobs are done, but no longer than ``seconds``."""
        limit = time.monotonic() + seconds
        for job in jobs:
            if job in self._results:
                self._results[job].wait(max(0.0, limit - time.monotonic()))

    def done(self, job: Job) -> bool:
        """Whether the job is finished, well or not; True for one that was never given."""
        return job not in self._results or self._results[job].ready()

    def answer(self, job: Job) -> str | None:
        """What a finished job found wrong; None if nothing, or if it is not finished."""
        result = self._results.get(job)
        return result.get() if result is not None and result.ready() else None
