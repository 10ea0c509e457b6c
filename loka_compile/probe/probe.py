"""``with loka_compile.probe(model) as p:`` around a training loop learns what every linear layer's GEMMs see.

Training is cut into windows, from one optimizer step to the next. Every ``every``-th window is sampled: its layers run
with taps (see :mod:`loka_compile.probe.taps`), which copy some rows of each call and return. The arithmetic is done by
a worker beside the training, a few jobs per step, within a time budget. In all other windows the model is untouched.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from loka_compile.errors import ProbeError, StaleTableError
from loka_compile.probe import taps as tapping
from loka_compile.probe.gate import Effort
from loka_compile.probe.intake import Intake, rank, world_size
from loka_compile.probe.ranks import merge_across_ranks
from loka_compile.probe.site_stats import Stats, StatsOptions
from loka_compile.probe.storage import Snapshot, Writer, read
from loka_compile.probe.summary import ProbeReport, SiteSummary

if TYPE_CHECKING:
    from loka_compile.lowering.providers.base import Provider
    from loka_compile.table import Table

#: Sampled windows in a row without any tap, before a warning.
BLIND_WINDOWS = 3

logger = logging.getLogger(__name__)
#: Seconds of a step that earn something; what is beyond them was a pause.
PAUSE = 10.0


class Probe:
    """A probing session over one model. Use it as a context manager, from the thread that trains.

    Args:
        model: the module that is trained: plain, compiled or wrapped (DDP, FSDP2). Its ``nn.Linear`` are the sites.
        every: windows from one sampled one to the next.
        save_every: windows from one saving to ``dir`` to the next; the end is saved on exit as well.
        dir: where statistics are kept, a pair of files per rank. What is there already goes on being learnt.
        rows: rows of one call that are taken, drawn uniformly; wide rows are fewer (32 MiB a call).
        budget: part of the training time that statistics may take beside it; None is no limit. Where it does not
            suffice, layers are sampled less often, in turns. What the taps themselves cost comes on top.
        grace: seconds of statistics that are free before the budget counts.
        precision: "fp32", or "fp64" for covariances, U and V to 1e-10.
        full_limit: widest layer whose covariance is kept in full.
        momentum: of the weights' moving averages, 0.9 to 0.99.
        taps: "switched" (layers are tapped in sampled windows only; a compiled model has two graphs) or "always"
            (one graph, whose taps return at once in other windows).
        seed: of the random choice of rows.

    Raises:
        ProbeError: an argument is out of range; on entering: the model has no linear layer, or is being probed.
        StaleTableError: on entering: the statistics in ``dir`` are of another model or were kept in another way.
        CorruptFileError: on entering: the files in ``dir`` are damaged.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 100,
        save_every: int = 10_000,
        dir: str | Path | None = None,
        rows: int = 1024,
        budget: float | None = 0.005,
        grace: float = 2.0,
        precision: str = "fp32",
        full_limit: int = StatsOptions.full_limit,
        momentum: float = StatsOptions.momentum,
        taps: str = "switched",
        seed: int = 0,
    ) -> None:
        """Nothing is touched before the context is entered."""
        _check("every", every, every >= 1, "at least 1")
        _check("save_every", save_every, save_every >= 1, "at least 1")
        _check("rows", rows, rows >= 1, "at least 1")
        _check("budget", budget, budget is None or 0 < budget < 1, "None or between 0 and 1")
        _check("precision", precision, precision in ("fp32", "fp64"), "'fp32' or 'fp64'")
        _check("momentum", momentum, 0 < momentum < 1, "between 0 and 1")
        _check("taps", taps, taps in ("switched", "always"), "'switched' or 'always'")
        self.root = tapping.unwrapped(model)
        self.every, self.save_every = every, save_every
        self.dir = None if dir is None else Path(dir)
        dtype = torch.float64 if precision == "fp64" else torch.float32
        self.options = StatsOptions(dtype=dtype, full_limit=full_limit, momentum=momentum)
        self.steps = self.windows = self.over_budget = 0
        self.unsupported: dict[str, str] = {}
        self._intake = Intake(self.options, rows=rows, budget=budget, grace=grace, seed=seed)
        self._always = taps == "always"
        self._writer = None if self.dir is None else Writer(self.dir)
        self._layers: list[tuple[nn.Linear, Tensor]] = []
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._parameters: set[int] = set()
        self._clock: weakref.ref[Optimizer] | None = None
        self._entered = self._manual = False
        self._blind = 0
        self._last_tick = 0.0
        #: Steps in which there is nothing to do but to count them, and what they have earned so far in seconds.
        self._quiet = 0
        self._earned = 0.0
        self._hook: Any = None
        #: How Inductor compiles while layers are tapped.
        self._compiling = ExitStack()

    @property
    def every(self) -> int:
        """Windows from one sampled one to the next; may be changed between steps."""
        return self._every

    @every.setter
    def every(self, windows: int) -> None:
        self._every, self._quiet = windows, 0

    def __enter__(self) -> Probe:
        """Find the layers, take up what was saved, and open the first window."""
        if self._entered:
            raise ProbeError("this probe was entered before; make a new one, with the same dir to go on")
        self._find_layers()
        self._resume()
        self._entered = True
        self._parameters = {id(p) for p in self.root.parameters()}
        self._hook = register_optimizer_step_post_hook(self._on_optimizer_step)
        if self._always:
            self._attach()
        self._last_tick = time.perf_counter()
        self._open_window()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the model as it was, finish the statistics and save them."""
        self._hook.remove()
        if self._intake.sampling:
            self._close_window()
        self._detach()
        try:
            self._drain()
            if self._writer is not None:
                self._save()
                self._drain()
                self._writer.close()
        except Exception:
            if error is None:
                raise
            logger.exception("the probe could not finish its statistics")  # the training's own error goes first
        finally:
            self._intake.worker.close()

    def _drain(self) -> None:
        try:
            self._intake.worker.drain()
        except Exception as error:
            raise ProbeError(f"a statistic failed ({error}); nothing was added to any since") from error

    # What the user asks.

    @property
    def stats(self) -> Stats:
        """All statistics of this rank so far; waits until every copied row is in. Read them between steps."""
        self._drain()
        return self._intake.stats

    def merged(self, group: dist.ProcessGroup | None = None) -> Stats:
        """The statistics of all ranks together, on every rank. All ranks must call it."""
        return merge_across_ranks(self.stats, group)

    def report(self) -> ProbeReport:
        """Counts, memory and time, and one line per site."""
        self._earn()
        stats, intake = self.stats, self._intake
        called = {site.rpartition("#")[0] for site in stats}
        return ProbeReport(
            steps=self.steps,
            windows=self.windows,
            over_budget=self.over_budget,
            dropped=intake.dropped,
            spent_s=sum(b.spent for b in intake.budgets.values()),
            allowance_s=sum(b.allowance for b in intake.budgets.values()),
            saved=self._writer.written if self._writer is not None else 0,
            save_error=str(self._writer.error or "") if self._writer is not None else "",
            sites=tuple(SiteSummary.of(stats[site]) for site in sorted(stats)),
            unseen=tuple(name for name in dict.fromkeys(intake.names) if name not in called),
            unsupported=dict(self.unsupported),
            bytes=stats.nbytes,
            most_staged_bytes=intake.most_staged,
        )

    def quantify(
        self,
        providers: Iterable[str | Provider] | None = None,
        *,
        target: str | None = None,
        pairs: int = 100,
        cap: int = 400,
        width: float = 0.02,
        rows: int = 128,
        operands: str = "both",
        progress: Callable[[str], None] | None = None,
        bench_seconds: float = 120.0,
    ) -> Table:
        """Error and cost of every candidate kernel on operands like those that were seen.

        Args:
            providers: names or instances; None is every registered one.
            target: whose cost table gives the speeds; "here" measures them on the GPU at hand; None: errors only.
            pairs: input/weight pairs drawn per GEMM at least.
            cap: pairs at most.
            width: pairs are drawn until the 95 % interval of the gate's metric is narrower than this part of it.
            rows: rows of one pair.
            operands: "drawn" from the learnt distributions, the "raw" rows that were kept, or "both": the worse counts.
            progress: called with each site's name when it is done.
            bench_seconds: for measuring speeds, with ``target="here"``.

        Raises:
            ProbeError: an argument is out of range, or a site was never seen.
            UnknownNameError: there is no such provider or target.
            ConfigError: speeds shall be measured here, and there is no CUDA device.
        """
        from loka_compile.probe.quantify import quantify_stats

        return quantify_stats(
            self.stats, providers, target=target, effort=Effort(pairs, cap, width, rows), operands=operands,
            progress=progress, bench_seconds=bench_seconds,
        )  # fmt: skip

    # The clock.

    def step(self) -> None:
        """End the window: for loops without a ``torch.optim`` optimizer. After the first call only these count."""
        self._manual = True
        self._tick()

    def _on_optimizer_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """The first optimizer that steps and holds one of the model's parameters is the clock."""
        if self._manual:
            return
        clock = None if self._clock is None else self._clock()
        if clock is optimizer and self._quiet:
            # Nearly every step of a training ends here. Small models take a millisecond or two for one, in which
            # each further call costs a thousandth, being never in the CPU's caches.
            now = time.perf_counter()
            passed = now - self._last_tick
            self._earned += passed if passed < PAUSE else PAUSE
            self._last_tick = now
            self.steps += 1
            self._quiet -= 1
            return
        if clock is None:
            if not any(id(p) in self._parameters for group in optimizer.param_groups for p in group["params"]):
                return
            self._clock, clock = weakref.ref(optimizer), optimizer
        if clock is optimizer:
            self._tick()

    def _tick(self) -> None:
        now = time.perf_counter()
        self._earned += min(now - self._last_tick, PAUSE)
        self._last_tick = now
        self._earn()
        if self._intake.sampling:
            self._close_window()
        self.steps += 1
        worker = self._intake.worker
        if worker.pending:
            worker.release(-(-worker.pending // self.every))
        if self._writer is not None and self.steps % self.save_every == 0:
            self._save()
            worker.release(worker.pending)
        self._open_window()
        self._quiet = 0 if self._intake.sampling or worker.pending else self._steps_until_something()

    def _earn(self) -> None:
        for budget in self._intake.budgets.values():
            budget.earn(self._earned)
        self._earned = 0.0

    def _steps_until_something(self) -> int:
        """How many of the coming steps neither open a window nor save."""
        rests = [self.every - self.steps % self.every]
        if self._writer is not None:
            rests.append(self.save_every - self.steps % self.save_every)
        return min(rests) - 1

    # Windows.

    def _open_window(self) -> None:
        if self.steps % self.every or self._intake.worker.error is not None:
            return
        if not self._intake.open(self.steps):
            self.over_budget += 1
            return
        if not self._always:
            self._attach()

    def _close_window(self) -> None:
        seen = self._intake.close()
        if not self._always:
            self._detach()
        if seen:
            self.windows, self._blind = self.windows + 1, 0
            return
        self._blind += 1
        if self._blind == BLIND_WINDOWS:
            logger.warning(
                "%d sampled windows passed and no layer showed its input. The probe cannot see a model that is "
                "replayed from a CUDA graph captured by hand, or compiled with guards on modules switched off.",
                self._blind,
            )

    def _find_layers(self) -> None:
        session = tapping.register(self._intake)
        numbers: dict[int, int] = {}
        for name, module in self.root.named_modules():
            if tapping.is_attached(module):
                raise ProbeError(f"module {name!r} is being probed already; leave that probe first")
            if not isinstance(module, nn.Linear):
                continue
            if "forward" in module.__dict__:
                self.unsupported[name] = "its forward is an attribute of the instance, which no subclass can wrap"
                continue
            # Layers that share a weight are calls of one site, as in the backend: it goes by the weight's first name.
            weight = module._parameters.get("weight")
            number = numbers.setdefault(id(module if weight is None else weight), len(self._intake.names))
            if number == len(self._intake.names):
                self._intake.names.append(name or "weight")
                if not isinstance(weight, nn.parameter.UninitializedParameter):
                    self._shapes[self._intake.names[-1]] = tuple(module.weight.shape)
            self._layers.append((module, torch.tensor([session, number])))
        if not self._layers:
            raise ProbeError(f"{type(self.root).__name__} holds no nn.Linear that could be probed")
        self._root_token = torch.tensor([session, -1])

    def _attach(self) -> None:
        self._compiling.enter_context(tapping.between_cuda_graphs())
        training_only = self.root.training
        for module, token in self._layers:
            if not isinstance(module._parameters.get("weight"), nn.parameter.UninitializedParameter):
                tapping.attach(module, token, training_only=training_only)
        tapping.attach(self.root, self._root_token, training_only=training_only, root=True)

    def _detach(self) -> None:
        self._compiling.close()
        for module, _ in self._layers:
            tapping.detach(module)
        tapping.detach(self.root)

    # Files.

    def _resume(self) -> None:
        saved = None if self.dir is None else read(self.dir, rank())
        if saved is None:
            return
        if saved.options != self.options or saved.world != world_size():
            raise StaleTableError(
                f"the statistics in {self.dir} were kept as {saved.options} by {saved.world} ranks, this probe keeps "
                f"{self.options} on {world_size()}; use another dir"
            )
        for site, stats in saved.stats.items():
            name = site.rpartition("#")[0]
            shape = self._shapes.get(name, (stats.out_features, stats.in_features))
            if name not in self._intake.names or shape != (stats.out_features, stats.in_features):
                now = f"has {shape} there" if name in self._intake.names else "has no such layer"
                raise StaleTableError(f"the statistics in {self.dir} hold {stats!r}; this model {now}. Use another dir")
        self._intake.stats.merge(saved.stats)
        self.steps = saved.step

    def _save(self) -> None:
        writer, step, stats = self._writer, self.steps, self._intake.stats
        assert writer is not None
        self._intake.worker.submit(
            lambda: writer.submit(Snapshot.take(stats, step, self.options, rank(), world_size()))
        )


def _check(name: str, value: object, legal: bool, text: str) -> None:
    if not legal:
        raise ProbeError(f"{name} is {value!r}; it must be {text}")
