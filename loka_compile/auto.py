"""``table="auto"``: run the first calls in high precision and sample them, then plan and compile once more."""

from __future__ import annotations

import dataclasses
import logging
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from loka_compile._compat.recompile import SavedCapture
from loka_compile.compile_fx import compile_rewritten
from loka_compile.lowering.hooks import Lowering
from loka_compile.planning import Planning
from loka_compile.probe.quantify import quantify
from loka_compile.report import Report, new_report
from loka_compile.sampling import Sampler
from loka_compile.store import save_cached

logger = logging.getLogger(__name__)


class PlanAfterSampling:
    """A compiled graph that replaces itself by a planned one after some calls.

    Dynamo's guards and the caller see one function throughout. A backward of the first version that is still in flight
    at the switch keeps its own compiled code. Calls from several threads are safe: one of them switches, the others go
    on with the version that they find.
    """

    # Dynamo wraps what a backend returns and copies its ``__dict__``: with one, the first version and the first batch,
    # whose autograd graph remembers the stream it was made on, would live on behind our back.
    __slots__ = ("__weakref__", "_capture", "_lock", "_lowering", "_patches", "_planning", "_run", "_sampler")

    def __init__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        planning: Planning,
        lowering: Lowering,
        patches: Mapping[str, Any],
    ) -> None:
        calls = planning.config.auto_calls
        self._planning, self._lowering, self._patches = planning, lowering, patches
        self._capture: SavedCapture | None = SavedCapture(gm, example_inputs)
        self._sampler: Sampler = Sampler(calls, planning.config.fuse)
        self._lock = threading.Lock()
        report = lowering.report
        report.notes.append(f"the first {calls} calls run in high precision and are sampled")
        sampling = dataclasses.replace(
            lowering, tap=self._sampler.insert_taps, salt=f"{lowering.salt}sampling {self._sampler.id}", ran=[]
        )
        # A tap is Python code, which a replayed CUDA graph would not run.
        self._run: Callable[..., Any] = compile_rewritten(
            gm, example_inputs, sampling, {**patches, "triton.cudagraphs": False}
        )

    def __call__(self, *args: Any) -> Any:
        """Run the graph; switches to the planned version once enough calls were sampled."""
        # DDP's optimizer runs every bucket's graph on fake tensors while it compiles: these are no calls to sample.
        if self._capture is not None and not any(isinstance(arg, FakeTensor) for arg in args):
            with self._lock:
                if self._capture is not None:
                    if self._sampler.step >= self._planning.config.auto_calls:
                        self._switch()
                    else:
                        self._sampler.step += 1
        return self._run(*args)

    def _switch(self) -> None:
        capture = self._capture
        assert capture is not None
        self._sampler.close()
        report = new_report(keep_graphs=self._planning.config.inspect)
        report.inherit(self._lowering.report)
        self._plan(report)
        lowering = dataclasses.replace(self._lowering, report=report, plan=report.plan, ran=[])
        self._run = capture.compile(lambda gm, inputs: compile_rewritten(gm, inputs, lowering, self._patches))
        # Only now: until then other threads wait at the lock.
        self._capture = None

    def _plan(self, report: Report) -> None:
        """Table and plan from the samples. What goes wrong here must not end a training run."""
        planning, config = self._planning, self._planning.config
        try:
            table = quantify(
                self._sampler.samples(), target=planning.target, providers=config.providers,
                least_speedup=0.0 if config.inspect else config.least_speedup,  # who looks wants to see them all
            )  # fmt: skip
            if not config.inspect:  # a look at a model (explain) samples too little to be kept
                save_cached(planning.cache_key, table)
            report.plan, report.table = planning.accept(table), table
        except Exception as error:
            logger.exception("planning failed")
            message = f"planning failed ({type(error).__name__}: {error}); this graph stays in high precision"
            report.notes.append(message)
            warnings.warn(f"loka: {message}", RuntimeWarning, stacklevel=4)
            return
        report.notes.append(f"planned after sampling {config.auto_calls} calls")
        if planning.note:
            report.notes.append(planning.note)
        logger.info("planned %s", report.plan)
