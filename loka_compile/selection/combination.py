"""The best combination of kernels where GEMMs share operands. Exact, pure, no torch import.

A kernel costs its own time, and some *items*: an operand quantised in some form, a second layout of it. An item is paid
for once, however many of the chosen kernels use it: x quantised for the forward serves grad_weight as well, the weight
serves forward and grad_input, an input that several layers read serves them all. So the cheapest kernel of each GEMM
need not be in the cheapest combination.

``best`` minimises the sum over a set of GEMMs by dynamic programming, one GEMM after the other. What has to be
remembered of those decided already is only which of the items that a later GEMM may want were paid for; GEMMs that
share nothing with the others are decided alone. A state that another one reaches for no more, by paying for the items
that it lacks, is dropped. Costs are fractions: sums are exact, and ties are ties.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, TypeVar

K = TypeVar("K", bound=Hashable)
Item = Hashable
Prices = Mapping[Item, Fraction]
#: Cost, sum of ties, and the choices so far as (GEMM, option, choices before), None at the beginning.
_State = tuple[int, float, Any]


@dataclass(frozen=True)
class Option:
    """One kernel that a GEMM could run in."""

    name: str
    #: Microseconds that are this GEMM's alone.
    own: Fraction
    #: What it needs besides, at the prices of the whole.
    items: frozenset[Item] = frozenset()
    #: Between equally fast ones the smaller sum of these wins, then the earlier options.
    tie: float = 0.0


def total(chosen: Iterable[Option], prices: Prices) -> Fraction:
    """Microseconds of these kernels together, each item once."""
    chosen = list(chosen)
    items = frozenset().union(*(option.items for option in chosen)) if chosen else frozenset()
    return sum((o.own for o in chosen), Fraction(0)) + sum((prices[i] for i in items), Fraction(0))


def best(options: Mapping[K, Sequence[Option]], prices: Prices) -> dict[K, Option]:
    """For each GEMM the option that makes the whole cheapest.

    Raises:
        ValueError: a GEMM has no option.
    """
    if any(not given for given in options.values()):
        raise ValueError("a GEMM without options cannot be decided")
    chosen: dict[K, Option] = {}
    for group in components({key: frozenset().union(*(o.items for o in given)) for key, given in options.items()}):
        chosen.update(_solve({key: options[key] for key in group}, prices))
    return {key: chosen[key] for key in options}


def components(items: Mapping[K, frozenset[Item]]) -> list[list[K]]:
    """GEMMs that may share an item, directly or through others, together; in the order given."""
    groups: list[tuple[list[K], set[Item]]] = []
    for key, mine in items.items():
        together: tuple[list[K], set[Item]] = ([], set())
        apart = []
        for group in groups:
            if group[1] & mine:
                together[0].extend(group[0])
                together[1].update(group[1])
            else:
                apart.append(group)
        together[0].append(key)
        together[1].update(mine)
        groups = [*apart, together]
    place = {key: index for index, key in enumerate(items)}
    return sorted((sorted(keys, key=place.__getitem__) for keys, _ in groups), key=lambda keys: place[keys[0]])


def _solve(options: Mapping[K, Sequence[Option]], prices: Prices) -> dict[K, Option]:
    users = Counter(item for given in options.values() for item in frozenset().union(*(o.items for o in given)))
    shared = {item for item, count in users.items() if count > 1}
    useful = {key: _undominated(given, prices, shared) for key, given in options.items()}
    order = _order({key: frozenset().union(*(o.items for o in given)) for key, given in useful.items()})
    costs = _Costs(useful, prices, shared)
    later = [0]
    for _, items in reversed(order):
        later.append(later[-1] | costs.mask(items))
    # Paid items that are still of interest -> cost, sum of ties, and what was chosen, linked backwards.
    states: dict[int, _State] = {0: (0, 0.0, None)}
    for (key, _), open_items in zip(order, later[-2::-1], strict=True):
        found: dict[int, _State] = {}
        choices = [(option, costs.own(option), costs.mask(option.items)) for option in useful[key]]
        for paid, (cost, tie, link) in states.items():
            for option, own, wanted in choices:
                value = cost + own + costs.price(wanted & ~paid), tie + option.tie
                left = (paid | wanted) & open_items
                if left not in found or value < found[left][:2]:
                    found[left] = (*value, (key, option, link))
        states = _undominated_states(found, costs)
    (link,) = (link for _, _, link in states.values())
    by_name = {key: {o.name: o for o in given} for key, given in options.items()}
    chosen: dict[K, Option] = {}
    while link is not None:
        key, option, link = link
        chosen[key] = by_name[key][option.name]
    return {key: chosen[key] for key in options}


class _Costs:
    """The fractions of one problem as whole numbers (of their common denominator), sets of items as bits."""

    def __init__(self, options: Mapping[Any, Sequence[Option]], prices: Prices, shared: set[Item]) -> None:
        self._bits = {item: 1 << place for place, item in enumerate(shared)}
        fractions = [o.own for given in options.values() for o in given] + [prices[item] for item in shared]
        self._unit = math.lcm(*(f.denominator for f in fractions)) if fractions else 1
        self._prices = {bit: self._whole(prices[item]) for item, bit in self._bits.items()}
        self._known: dict[int, int] = {}

    def _whole(self, fraction: Fraction) -> int:
        return fraction.numerator * (self._unit // fraction.denominator)

    def mask(self, items: Iterable[Item]) -> int:
        """The set as a number with a bit for each item."""
        return sum(self._bits[item] for item in items)

    def own(self, option: Option) -> int:
        """What is the option's alone."""
        return self._whole(option.own)

    def price(self, mask: int) -> int:
        """Of a set of items."""
        if mask not in self._known:
            self._known[mask] = sum(price for bit, price in self._prices.items() if bit & mask)
        return self._known[mask]


def _undominated_states(states: Mapping[int, _State], costs: _Costs) -> dict[int, _State]:
    """Less those that another one reaches for no more, by paying for what it lacks."""
    kept: dict[int, _State] = {}
    for paid, state in sorted(states.items(), key=lambda entry: entry[1][:2]):
        if not any((s[0] + costs.price(paid & ~other), s[1]) <= state[:2] for other, s in kept.items()):
            kept[paid] = state
    return kept


def _undominated(given: Sequence[Option], prices: Prices, shared: set[Item]) -> list[Option]:
    """Options with the items that only they want folded into their own cost, less those that cannot be the best."""
    folded = [
        replace(o, own=o.own + sum((prices[i] for i in o.items - shared), Fraction(0)), items=o.items & shared)
        for o in given
    ]
    kept: list[Option] = []
    for option in sorted(folded, key=lambda o: (o.own, o.tie)):  # stable: the earlier one of equals stays first
        if not any(other.items <= option.items for other in kept):
            kept.append(option)
    return kept


def _order(items: Mapping[K, frozenset[Item]]) -> list[tuple[K, frozenset[Item]]]:
    """An order in which few items are of interest at a time: next comes what leaves the fewest open."""
    rest = dict(items)
    order: list[tuple[K, frozenset[Item]]] = []
    seen: frozenset[Item] = frozenset()
    while rest:
        uses = Counter(item for mine in rest.values() for item in mine)

        def open_after(key: K, seen: frozenset[Item] = seen, uses: Counter[Item] = uses) -> int:
            return sum(1 for item in seen | rest[key] if uses[item] > (item in rest[key]))

        key = min(rest, key=open_after)
        order.append((key, rest[key]))
        seen |= rest.pop(key)
    return order
