"""The plan that saves the most time within a budget of loss: a small integer program, solved exactly."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from loka_compile.errors import ConfigError
from loka_compile.loss.effects import Effect, Sensitivity
from loka_compile.plan import Plan
from loka_compile.selection.candidates import Candidate, Key, candidates_of, native_of
from loka_compile.selection.combination import Item
from loka_compile.selection.decision import Decision, Verdict
from loka_compile.selection.thresholds import Limits, PerSite
from loka_compile.table import BASELINE, Table

#: A tolerance that recommendation models are held to (relative log loss): 0.02 %.
TOLERANCE = 2e-4


@dataclass(frozen=True)
class LossPlan:
    """A plan within a budget, and what it was bought for."""

    plan: Plan
    #: Relative increase of the loss that the effects of its kernels add up to, and the standard error of that sum.
    increase: float
    stderr: float
    budget: float
    #: Microseconds per step that FP8 saves by the table, and what it would save without the budget.
    saved_us: float
    saved_without_budget_us: float
    #: GEMMs that the budget keeps in high precision: site, role, candidate, its effect, and the microseconds that it
    #: would save alone, its own quantisation paid.
    excluded: tuple[tuple[str, str, str, Effect | None, float], ...] = ()

    def __str__(self) -> str:
        """A summary, with one line per exclusion."""
        lines = [
            f"loss {self.increase:+.4%} +- {self.stderr:.4%} (one standard error) of a budget of {self.budget:.4%}; "
            f"saves {self.saved_us:.1f} of {self.saved_without_budget_us:.1f} us"
        ]
        for site, role, candidate, effect, saved in self.excluded:
            why = f"{effect.change:+.4%} of loss" if effect is not None else "effect on the loss not measured"
            lines.append(f"  left out: {site} {role} {candidate}: {why} for {saved:.1f} us")
        return "\n".join(lines)


@dataclass(frozen=True)
class _Choice:
    """One candidate of one GEMM in the program. ``cost`` is relative loss, never below 0."""

    key: Key
    candidate: Candidate
    own_us: float
    items: frozenset[Item]
    cost: float
    effect: Effect | None


def plan_by_loss(
    table: Table,
    sensitivity: Sensitivity,
    *,
    max_loss_increase: float = TOLERANCE,
    max_mere: float = 0.2,
    min_speedup: float = 1.05,
    providers: Collection[str] | None = None,
    per_site: PerSite | None = None,
) -> LossPlan:
    """Choose the kernels that save the most time while their effects on the loss add up to no more than a budget.

    As :func:`make_plan` (error gate, speed gate, shared quantisations paid once, at the middle of the measured batch
    sizes), with one condition more. A measured gain of loss counts as 0: it is luck, and buys nothing. A forward
    kernel whose effect is not known is not taken; GEMMs of the backward whose effects were not measured are left to the
    error gate. That single effects add up is an assumption: :func:`loss_of_plan` checks it.

    Args:
        table: measurements of the model's GEMMs.
        sensitivity: from :func:`loss_sensitivity`, of the same model.
        max_loss_increase: budget over the whole model, relative: 2e-4 is 0.02 %.
        max_mere: as for :func:`make_plan`, likewise ``min_speedup``, ``providers``, ``per_site``.

    Raises:
        ConfigError: the budget is negative or no number, or scipy (``pip install "loka-compile[loss]"``) is missing.
    """
    if not isinstance(max_loss_increase, (int, float)) or not max_loss_increase >= 0:
        raise ConfigError(f"option 'max_loss_increase' is {max_loss_increase!r}; legal: a number >= 0, such as 2e-4")
    limits = Limits.of(max_mere, min_speedup, providers, per_site)
    gemms = candidates_of(table, limits)
    measured = {role for _, role, _ in sensitivity.arms}
    choices, unknown = _choices(gemms, sensitivity, measured)
    native = {key: _native_us(found, limits.at(key[0]).min_speedup) for key, found in gemms.items()}
    prices = _prices(choices)
    chosen = _solve(choices, native, prices, max_loss_increase)
    without = _solve([*choices, *unknown], native, _prices([*choices, *unknown]), math.inf)
    taken = {c.key: c for c in chosen}
    excluded = tuple(
        (*c.key, c.candidate.verdict.candidate, c.effect, _saved([c], native, limits, _prices([c])))
        for c in without
        if c.key not in taken
    )
    effects = [c.effect for c in chosen if c.effect is not None]
    plan = Plan(
        [_decision(key, found, taken.get(key), table, excluded, limits) for key, found in gemms.items()],
        max_mere=max_mere, min_speedup=min_speedup, per_site=limits.overrides, header=table.header,
    )  # fmt: skip
    return LossPlan(
        plan, math.fsum(max(0.0, e.change) for e in effects), math.sqrt(math.fsum(e.stderr**2 for e in effects)),
        float(max_loss_increase), _saved(chosen, native, limits, prices),
        _saved(without, native, limits, _prices([*choices, *unknown])), excluded,
    )  # fmt: skip


def _choices(
    gemms: Mapping[Key, list[Candidate]], sensitivity: Sensitivity, measured: set[str]
) -> tuple[list[_Choice], list[_Choice]]:
    """Candidates with the effect that counts, and those of the forward whose effect is not known."""
    known: list[_Choice] = []
    unknown: list[_Choice] = []
    for key, found in gemms.items():
        for candidate in found:
            if not candidate.usable:
                continue
            at = Fraction(candidate.span.middle)
            effect = sensitivity.effect(*key, candidate.verdict.candidate)
            choice = _Choice(
                key, candidate, float(candidate.own.at(at)), frozenset(candidate.items),
                0.0 if effect is None else max(0.0, effect.change), effect,
            )  # fmt: skip
            missing = effect is None and (key[1] == "forward" or key[1] in measured)
            (unknown if missing else known).append(choice)
    return known, unknown


def _native_us(found: list[Candidate], min_speedup: float) -> float:
    """High precision's time with the margin that FP8 has to beat; NaN where nothing is known."""
    usable = next((c for c in found if c.usable), None)
    return math.nan if usable is None else float(usable.baseline.at(Fraction(usable.span.middle))) / min_speedup


def _prices(choices: Collection[_Choice]) -> dict[Item, float]:
    prices: dict[Item, float] = {}
    for choice in choices:
        for item, line in choice.candidate.items.items():
            price = float(line.at(Fraction(choice.candidate.span.middle)))
            prices[item] = max(price, prices.get(item, 0.0))
    return prices


def _solve(
    choices: list[_Choice], native: Mapping[Key, float], prices: Mapping[Item, float], budget: float
) -> list[_Choice]:
    """Minimise time: a binary for each choice and each item. A GEMM without a choice is in high precision."""
    if not choices:
        return []
    try:
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import lil_matrix
    except ImportError as error:
        raise ConfigError(
            f"a plan within a loss budget needs scipy ({error}): pip install 'loka-compile[loss]'"
        ) from error
    items = sorted({item for c in choices for item in c.items}, key=str)
    place = {item: len(choices) + index for index, item in enumerate(items)}
    size = len(choices) + len(items)
    gain = [c.own_us - native[c.key] for c in choices] + [prices[item] for item in items]
    keys = list(dict.fromkeys(c.key for c in choices))
    links = [(index, place[item]) for index, c in enumerate(choices) for item in c.items]
    rows = lil_matrix((len(keys) + len(links) + 1, size))
    upper = np.zeros(rows.shape[0])
    for row, key in enumerate(keys):  # at most one kernel per GEMM
        upper[row] = 1
        for index, c in enumerate(choices):
            if c.key == key:
                rows[row, index] = 1
    for row, (index, item) in enumerate(links, len(keys)):  # a kernel needs its items
        rows[row, index], rows[row, item] = 1, -1
    # In units of the budget, or the solver's tolerance would swallow effects of a millionth.
    scale = budget if 0 < budget < math.inf else 1.0
    for index, c in enumerate(choices):
        rows[-1, index] = c.cost / scale
    upper[-1] = budget / scale if budget < math.inf else math.inf
    found = milp(
        np.array(gain), integrality=np.ones(size), bounds=Bounds(0, 1),
        constraints=LinearConstraint(rows.tocsr(), -np.inf, upper), options={"mip_rel_gap": 0.0},
    )  # fmt: skip
    if found.x is None:
        raise RuntimeError(f"the integer program was not solved: {found.message}")
    return [c for index, c in enumerate(choices) if found.x[index] > 0.5]


def _saved(
    chosen: Collection[_Choice], native: Mapping[Key, float], limits: Limits, prices: Mapping[Item, float]
) -> float:
    """Microseconds against high precision, without the margin."""
    baseline = math.fsum(native[c.key] * limits.at(c.key[0]).min_speedup for c in chosen)
    used = {item for c in chosen for item in c.items}
    return baseline - math.fsum(c.own_us for c in chosen) - math.fsum(prices[item] for item in used)


def _decision(
    key: Key, found: list[Candidate], choice: _Choice | None, table: Table, excluded: Any, limits: Limits
) -> Decision:
    verdicts = tuple(c.verdict for c in found)
    if choice is not None:
        verdict: Verdict = choice.candidate.verdict
        effect = "effect on the loss not measured" if choice.effect is None else f"{choice.effect.change:+.4%} of loss"
        return Decision(
            *key, verdict.provider, verdict.recipe, f"within the loss budget: {effect}", verdict.speedup, verdict.mere,
            tuple(dataclasses.replace(v, reason=v.reason or "slower in this combination") if v is not verdict else v
                  for v in verdicts),
        )  # fmt: skip
    left_out = next((entry for entry in excluded if entry[:2] == key), None)
    native = native_of(table, key)
    if left_out is not None:
        effect = left_out[3]
        cost = "its effect on the loss is not known" if effect is None else f"{effect.change:+.4%} of loss"
        reason = f"left out by the loss budget: {left_out[2]} saves {left_out[4]:.1f} us, but {cost}"
    else:
        reason = native.refused or next((v.reason for v in verdicts if v.reason), "no FP8 kernel pays")
    return Decision(*key, *BASELINE, reason, 1.0, native.mere, verdicts)
