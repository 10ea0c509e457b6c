"""``table="auto"``: run the first calls in high precision and sample them, then plan and compile once more."""

from __future__ import annotations

import copy
import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx
from torch._guards import TracingContext, tracing

from loka_compile.compile_fx import compile_rewritten
from loka_compile.lowering.hooks import Lowering
from loka_compile.planning import Planning
from loka_compile.probe.quantify import quantify
from loka_compile.report import new_report
from loka_compile.sampling import Sampler
from loka_compile.store import save_cached

logger = logging.getLogger(__name__)


class PlanAfterSampling:
    """A compiled graph that replaces itself by a planned one after some calls.

    Dynamo's guards and the caller see one function throughout. A backward of the first version that is still in flight
    at the switch keeps its own compiled code. Calls from several threads are safe: one of them switches, the others go
    on with the version that they find.
    """

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
        self._gm: fx.GraphModule | None = copy.deepcopy(gm)
        self._inputs: Sequence[Any] | None = list(example_inputs)
        self._context = TracingContext.try_get()
        self._sampler = Sampler(calls)
        self._lock = threading.Lock()
        report = lowering.report
        report.notes.append(f"the first {calls} calls run in high precision and are sampled")
        sampling = dataclasses.replace(
            lowering, tap=self._sampler.insert_taps, salt=f"{lowering.salt}sampling {self._sampler.id}", ran=[]
        )
        # A tap is Python code, which a replayed CUDA graph would not run.
        self._run: Callable[..., Any] = compile_rewritten(
            gm, example_inputs, sampling, {**patches, "triton.cudagraphs": False, "force_disable_caches": True}
        )

    def __call__(self, *args: Any) -> Any:
        """Run the graph; switches to the planned version once enough calls were sampled."""
        if self._gm is not None:
            with self._lock:
                if self._gm is not None:
                    if self._sampler.step >= self._planning.config.auto_calls:
                        self._switch()
                    else:
                        self._sampler.step += 1
        return self._run(*args)

    def _switch(self) -> None:
        gm, inputs = self._gm, self._inputs
        assert gm is not None and inputs is not None
        self._sampler.close()
        config = self._planning.config
        table = quantify(self._sampler.samples(), target=self._planning.target, providers=config.providers)
        save_cached(self._planning.cache_key, table)
        plan = self._planning.accept(table)
        report = new_report(keep_graphs=config.inspect)
        first = self._lowering.report
        report.inherit(first)
        report.plan, report.table = plan, table
        report.notes.append(f"planned after sampling {config.auto_calls} calls")
        lowering = dataclasses.replace(self._lowering, report=report, plan=plan, ran=[])
        logger.info("planned %s", plan)
        with tracing(self._context):
            self._run = compile_rewritten(gm, inputs, lowering, self._patches)
        # Only now: another thread may still be on its way to the first version.
        self._gm = self._inputs = self._context = None
