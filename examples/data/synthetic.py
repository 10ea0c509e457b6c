"""An endless click stream whose true probabilities are known, made on the device that trains on it.

No public data set can tell a relative log-loss difference of 0.02 % from noise; a planted teacher can, as a model can
be scored against the true probability instead of a drawn label. What is planted is meant to be hard in the ways that
click data are hard for FP8:

* numerics with log-normal bodies, a Pareto multiplier on 5 % of the values, zeros and missing values, per column like
  the Criteo data's (medians from 1 to 3,000, tail indices from 0.9 to 3.5, up to 77 % missing);
* ids from Zipf distributions over up to 200,000 values, each with a lifetime: then, in two days, a new one takes over;
* a teacher of linear, pairwise, tanh-MLP and numeric x id terms, whose parameters turn slowly, under a daily cycle;
  with histories, also the likeness of the candidate (first category) to what the history holds.

The mean click rate stays put: each day's bias is solved for on a sample of that day. Over 100 days the mean of every
whole day is within 5 % of `ctr` (a test holds it to that), the daily cycle moving it within the day.

Every batch is a pure function of the configuration and the step, so runs can be compared example by example, and a
run resumed anywhere. Equal bits are promised on one kind of device; CPU and GPU draw different numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from examples.data.stream import Batch, Schema
from examples.data.teacher import Teacher

#: Per numeric column: median of the body, standard deviation of its logarithm, Pareto index of the multiplier, share of
#: zeros, share of missing values. Chosen to resemble an excerpt of the Criteo data, not fitted to it.
NUMERICS = (
    (2.0, 1.3, 1.8, 0.25, 0.45), (4.0, 1.8, 1.2, 0.15, 0.00), (7.0, 1.6, 0.9, 0.02, 0.21), (5.0, 0.9, 2.5, 0.02, 0.22),
    (3000.0, 2.0, 1.5, 0.01, 0.03), (35.0, 1.8, 1.5, 0.03, 0.22), (4.0, 1.5, 1.4, 0.15, 0.04),
    (8.0, 1.0, 3.5, 0.02, 0.00), (45.0, 1.4, 1.8, 0.02, 0.04), (1.5, 0.3, 3.0, 0.40, 0.45),
    (2.0, 1.0, 2.0, 0.15, 0.04), (1.5, 1.2, 1.5, 0.60, 0.77), (5.0, 1.1, 2.2, 0.03, 0.22),
)  # fmt: skip
PARETO_SHARE = 0.05
#: Counts above this are cut off: beyond, fp32 no longer holds every integer.
MAX_COUNT = 2.0**24
#: Examples that a day's bias is solved on.
CALIBRATION = 32_768
#: Days in which a new id takes the place of an old one: were it at once, a frequent id would move the mean click rate.
HANDOVER = 2.0
#: Distinguishes the random streams that one seed feeds.
_BATCH, _CALIBRATION = 0, 1


@dataclass(frozen=True)
class SyntheticConfig:
    """What the stream looks like.

    Raises:
        ValueError: a value is out of range.
    """

    batch_size: int = 8192
    seed: int = 0
    #: "log1p": log(1 + x), the tame arm; "raw": x over its body's mean, cut off at ``raw_clamp``, the hard arm.
    numerics: str = "log1p"
    raw_clamp: float = 1000.0
    #: "raw" in another unit: x over this many times its body's mean.
    raw_unit: float = 1.0
    #: The Pareto indices are multiplied by this: below 1, tails are heavier and bodies as they were.
    tail: float = 1.0
    #: Columns of each of the 13 kinds. Production models read hundreds of numerics; with 16 (208 columns) the layer
    #: that reads them is wide enough for plain FP8 to convert it.
    numeric_copies: int = 1
    #: Add a 0/1 column for "missing" behind the numerics.
    missing_flags: bool = False
    #: Number of categories, and of distinct live ids in the smallest and the largest of them.
    categories: int = 26
    min_ids: int = 8
    max_ids: int = 200_000
    #: Rows of an embedding table are twice the live ids, but at most this many; ids beyond share rows.
    max_rows: int = 400_000
    #: Longest history, in ids of the first category; 0 leaves histories away.
    history_length: int = 0
    #: Examples of one day; days in which an id lives before a new one takes its place.
    day: int = 1_000_000
    lifetime: float = 20.0
    #: Mean click rate, and the amplitude of the daily cycle in logits.
    ctr: float = 0.25
    daily_cycle: float = 0.2
    #: Largest angle (radians) by which the teacher's parameters turn away from where they start; 0 stands still.
    drift: float = 0.5
    #: Standard deviation of the teacher's logit: how predictable clicks are.
    signal: float = 1.8

    def __post_init__(self) -> None:
        if self.numerics not in ("log1p", "raw"):
            raise ValueError(f'numerics is {self.numerics!r}; legal: "log1p", "raw"')
        sizes = (self.batch_size, self.categories, self.day, self.max_rows, self.numeric_copies)
        if min(sizes) < 1 or not 2 <= self.min_ids <= self.max_ids:
            raise ValueError(f"sizes must be positive and min_ids between 2 and max_ids: {self}")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; legal: 0 or more")
        if (
            not 0 < self.ctr < 1
            or min(self.lifetime, self.raw_clamp, self.raw_unit, self.tail, self.signal) <= 0
            or self.history_length < 0
        ):
            raise ValueError(
                f"ctr lies between 0 and 1; lifetime, raw_clamp, raw_unit, tail and signal are positive: {self}"
            )

    @property
    def ids(self) -> tuple[int, ...]:
        """Live ids of each category: evenly spread over the logarithm, the largest first (it is the history's)."""
        steps = max(self.categories - 1, 1)
        ratio = self.max_ids / self.min_ids
        return tuple(max(2, round(self.max_ids * ratio ** (-i / steps))) for i in range(self.categories))

    @property
    def counts(self) -> int:
        """Numeric columns, flags apart."""
        return len(NUMERICS) * self.numeric_copies

    @property
    def schema(self) -> Schema:
        """The widths that a model must be built for."""
        width = self.counts * (2 if self.missing_flags else 1)
        return Schema(width, tuple(min(2 * n, self.max_rows) for n in self.ids), self.history_length)


class Draws(NamedTuple):
    """What a batch is made of: random numbers and two scalars. ``n`` examples, F numerics, C categories, T of history.

    ``body`` [n, F] normal; uniform: ``kinds`` [3, n, F], ``ids`` [2, n, C], ``past`` [2, n, T] and ``lengths`` [n, 1]
    (None without histories), ``clicks`` [n]; ``time`` [] float64 in days; ``offset`` [] float32, added to all logits.
    """

    body: Tensor
    kinds: Tensor
    ids: Tensor
    past: Tensor | None
    lengths: Tensor | None
    time: Tensor
    clicks: Tensor | None = None
    offset: Tensor | None = None


class SyntheticStream:
    """The stream of a `SyntheticConfig` on ``device``; a `Stream` without end."""

    def __init__(self, config: SyntheticConfig, device: str | torch.device = "cpu") -> None:
        self.config = config
        self.schema = config.schema
        self.batch_size = config.batch_size
        self.device = torch.device(device)
        self._step = 0
        self._biases: dict[int, Tensor] = {}
        self._generator = torch.Generator(self.device)
        self._teacher = Teacher(config.categories, config.counts, config.seed, config.drift, self.device)
        ids = torch.tensor(config.ids, dtype=torch.float64)
        column = torch.arange(config.categories, dtype=torch.float64)
        # Exponents from 1.02 (flat) to 1.3 (steep), scattered over the categories.
        exponent = 1.02 + 0.28 * ((column * 0.618) % 1.0)
        self._ids = ids.long().to(self.device)
        self._rows = torch.tensor(self.schema.table_sizes, device=self.device)
        self._power = (1.0 - exponent).float().to(self.device)
        self._span = ((ids + 1) ** (1.0 - exponent) - 1.0).float().to(self.device)
        # Small categories (weekdays, countries) get no new values.
        self._renews = (ids >= 100).float().to(self.device)
        median, deviation, tail, zero, missing = torch.tensor(NUMERICS * config.numeric_copies, dtype=torch.float64).T
        self._log_median = median.log().float().to(self.device)
        self._log_deviation = deviation.float().to(self.device)
        self._tail = (-1.0 / (config.tail * tail)).float().to(self.device)
        self._zero, self._missing = zero.float().to(self.device), missing.float().to(self.device)
        # What a standardised logarithm and the raw arm are measured with: the body's, not the tail's, scale.
        self._centre = torch.log1p(median).float().to(self.device)
        self._scale = (config.raw_unit * torch.exp(median.log() + deviation**2 / 2)).float().to(self.device)

    def __iter__(self) -> SyntheticStream:
        return self

    def __next__(self) -> Batch:
        return self.compose(self.next_draws())

    def state_dict(self) -> dict[str, Any]:
        """The step, and the configuration that gives it a meaning."""
        return {"step": self._step, "config": dataclasses.asdict(self.config)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``; ValueError when it belongs to another stream."""
        if state["config"] != dataclasses.asdict(self.config):
            raise ValueError(f"the checkpoint's stream is {state['config']}, not {dataclasses.asdict(self.config)}")
        self._step = int(state["step"])

    def batch(self, step: int) -> Batch:
        """The batch of that step, whatever was asked for before."""
        return self.compose(self.draws(step))

    def next_draws(self) -> Draws:
        """What the next batch is made of; `compose` makes it."""
        found = self.draws(self._step)
        self._step += 1
        return found

    def draws(self, step: int) -> Draws:
        """The random numbers of a batch, and when it is: all that differs from one batch to the next."""
        config = self.config
        time = step * config.batch_size / config.day
        self._seed(_BATCH, step)
        events = self._events(time, config.batch_size)
        self._seed(_BATCH, step, label=True)
        clicks = self._uniform(config.batch_size)
        cycle = config.daily_cycle * math.sin(2 * math.pi * time)
        return Draws(*events, clicks=clicks, offset=self._bias(time) + cycle)

    def compose(self, draws: Draws) -> Batch:
        """The batch of these draws, by tensor operations alone: a CUDA graph can hold them."""
        assert draws.clicks is not None
        assert draws.offset is not None
        x, missing, categories, history, logits = self._see(draws)
        probability = torch.sigmoid(logits + draws.offset)
        labels = (draws.clicks < probability).float()
        return Batch(self._view(x, missing), categories, labels, history, probability)

    def _seed(self, purpose: int, index: int, label: bool = False) -> None:
        # The CPU generator keeps 32 bits of a seed: an odd multiplier keeps all indices of one purpose distinct there.
        base = (self.config.seed * 4 + purpose * 2 + label) * 0x9E3779B97F4A7C15
        base ^= base >> 29
        self._generator.manual_seed((base + index * 0x85EBCA6B) & (2**63 - 1))

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, device=self.device, generator=self._generator)

    def _events(self, time: float, n: int) -> tuple[Tensor | None, ...]:
        """The first fields of `Draws` for ``n`` examples."""
        columns, fields, length = self.config.counts, self.config.categories, self.config.history_length
        body = torch.randn(n, columns, device=self.device, generator=self._generator)
        kinds = self._uniform(3, n, columns)
        ids = self._uniform(2, n, fields)
        past = self._uniform(2, n, length) if length else None
        lengths = self._uniform(n, 1) if length else None
        # Filled by a kernel: a copy from the host would wait.
        return body, kinds, ids, past, lengths, torch.full((), time, dtype=torch.float64, device=self.device)

    def _see(self, draws: Draws) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
        """Counts [n, F], missing [n, F], table rows [n, C], history [n, T] or None, logits without bias [n]."""
        counts, missing = self._counts(draws)
        levels = torch.log1p(counts) - self._centre
        levels = (levels / self._log_deviation.clamp(min=0.5)).clamp(-4.0, 4.0).masked_fill(missing, 0.0)
        ids = self._live_ids(draws.ids, slice(None), draws.time)
        history = history_ids = None
        if draws.past is not None and draws.lengths is not None:
            history_ids = self._live_ids(draws.past, slice(0, 1), draws.time)
            # Right-aligned: the most recent event is always the last column. Lengths are uniform from 0 to T.
            length = draws.lengths * (self.config.history_length + 1)
            age = torch.arange(self.config.history_length, 0, -1, device=self.device)
            absent = age > length
            history = (history_ids % self._rows[0]).masked_fill(absent, -1)
            history_ids = history_ids.masked_fill(absent, -1)
        with full_precision():
            logits = self.config.signal * self._teacher.logits(levels, ids, history_ids, draws.time)
        return counts, missing, ids % self._rows, history, logits

    def _counts(self, draws: Draws) -> tuple[Tensor, Tensor]:
        body = torch.exp(self._log_median + self._log_deviation * draws.body)
        kind, tail, present = draws.kinds.unbind(0)
        # U ** (-1 / alpha) is a Pareto multiplier; 1 - U keeps it off zero.
        multiplier = (1.0 - tail) ** self._tail
        x = torch.where(kind < PARETO_SHARE, body * multiplier, body)
        x = torch.where(kind > 1.0 - self._zero, 0.0, x)
        return x.clamp(max=MAX_COUNT).floor(), present < self._missing

    def _live_ids(self, draws: Tensor, columns: slice, time: Tensor) -> Tensor:
        """Zipf ranks, as the ids that hold these ranks at that time: generation * live ids + rank."""
        uniform, handover = draws.unbind(0)
        # Inverse of the continuous distribution x ** -s on [1, n + 1): no table, one power per id.
        rank = (1.0 + uniform * self._span[columns]) ** (1.0 / self._power[columns]) - 1.0
        rank = rank.long().clamp(min=0).minimum(self._ids[columns] - 1)
        # Each rank has its own birthday, so that new ids come in one by one.
        phase = (rank * 0x9E3779B1 & 0xFFFFFF).float() / 2**24
        handover = handover * (HANDOVER / self.config.lifetime)
        generation = (time / self.config.lifetime + phase + handover).floor() * self._renews[columns]
        return generation.long() * self._ids[columns] + rank

    def _view(self, counts: Tensor, missing: Tensor) -> Tensor:
        """The numerics as the model sees them; a missing value is zero."""
        if self.config.numerics == "log1p":
            seen = torch.log1p(counts)
        else:
            seen = (counts / self._scale).clamp(max=self.config.raw_clamp)
        seen = seen.masked_fill(missing, 0.0)
        return torch.cat([seen, missing.float()], dim=1) if self.config.missing_flags else seen

    def _bias(self, time: float) -> Tensor:
        """The bias that keeps the mean click rate, a straight line between the solutions of two midnights."""
        day = math.floor(time)
        share = time - day
        return (1.0 - share) * self._midnight(day) + share * self._midnight(day + 1)

    def _midnight(self, day: int) -> Tensor:
        if day not in self._biases:
            self._seed(_CALIBRATION, day)
            logits = self._see(Draws(*self._events(float(day), CALIBRATION)))[-1]
            self._biases[day] = solve_bias(logits, self.config.ctr)
        return self._biases[day]


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Matrix products in fp32: a trainer that switches to TF32 must see the same clicks as others."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def solve_bias(logits: Tensor, rate: float) -> Tensor:
    """The scalar b, as a tensor, with mean(sigmoid(logits + b)) = rate: bisection that never waits for the device."""
    low = torch.full((), -30.0, device=logits.device)
    high = torch.full((), 30.0, device=logits.device)
    for _ in range(40):
        middle = (low + high) / 2
        too_high = torch.sigmoid(logits + middle).mean() > rate
        low, high = torch.where(too_high, low, middle), torch.where(too_high, middle, high)
    return (low + high) / 2
