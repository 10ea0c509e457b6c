"""The cheapest combination against every combination there is."""

import itertools
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loka_compile.selection.combination import Option, best, components, total

ITEMS = ["x tensorwise", "x rowwise", "w tensorwise", "dy tensorwise", "dy rowwise", "x copy"]
costs = st.integers(0, 40).map(Fraction)


@st.composite
def problems(draw):
    """Up to five GEMMs with up to four options each, over few items, so that many are shared."""
    keys = [f"g{i}" for i in range(draw(st.integers(1, 5)))]
    option = st.tuples(costs, st.frozensets(st.sampled_from(ITEMS), max_size=3), st.sampled_from([0.0, 0.1]))
    options = {
        key: [Option(f"o{i}", *parts) for i, parts in enumerate(draw(st.lists(option, min_size=1, max_size=4)))]
        for key in keys
    }
    return options, {item: draw(costs) for item in ITEMS}


def every_combination(options, prices):
    for chosen in itertools.product(*options.values()):
        yield total(chosen, prices), sum(o.tie for o in chosen)


@settings(max_examples=400, deadline=None)
@given(problems())
def test_best_is_the_cheapest_of_all(problem):
    options, prices = problem
    chosen = best(options, prices)
    assert list(chosen) == list(options)
    assert all(chosen[key] in options[key] for key in options)
    cheapest = min(every_combination(options, prices))
    assert total(chosen.values(), prices) == cheapest[0]
    assert sum(o.tie for o in chosen.values()) == pytest.approx(cheapest[1])


def test_an_item_is_paid_once():
    prices = {"q": Fraction(6)}
    native, fp8 = Option("native", Fraction(10)), Option("fp8", Fraction(5), frozenset({"q"}))
    assert best({"a": [native, fp8]}, prices)["a"] is native  # 5 + 6 against 10
    both = best({"a": [native, fp8], "b": [native, fp8]}, prices)  # 5 + 5 + 6 against 20
    assert [o.name for o in both.values()] == ["fp8", "fp8"]
    assert total(both.values(), prices) == 16


def test_the_dearer_kernel_wins_where_it_shares():
    prices = {"rowwise": Fraction(2), "tensorwise": Fraction(4)}
    forward = [Option("rowwise", Fraction(10), frozenset({"rowwise"})),
               Option("tensorwise", Fraction(9), frozenset({"tensorwise"}))]  # fmt: skip
    grad = [Option("tensorwise", Fraction(9), frozenset({"tensorwise"})), Option("native", Fraction(14))]
    assert best({"f": forward}, prices)["f"].name == "rowwise"  # 12 against 13
    assert [o.name for o in best({"f": forward, "w": grad}, prices).values()] == ["tensorwise", "tensorwise"]


def test_one_tensor_read_by_many_is_solved_exactly_and_quickly():
    # 40 GEMMs read one x in one of four forms each: 4**40 combinations, few states.
    prices = {f"x{i}": Fraction(30 + i) for i in range(4)}
    options = {
        g: [Option(f"o{i}", Fraction(10 + (g * 7 + i * 3) % 5), frozenset({f"x{i}"})) for i in range(4)]
        for g in range(40)
    }
    chosen = best(options, prices)
    # Of a single x, the best is the sum over GEMMs of the cheapest among the paid forms: try all sets of forms.
    want = min(
        sum(prices[f"x{i}"] for i in paid) + sum(min(options[g][i].own for i in paid) for g in options)
        for size in range(1, 5) for paid in itertools.combinations(range(4), size)
    )  # fmt: skip
    assert total(chosen.values(), prices) == want


def test_a_chain_of_sites_is_solved_exactly():
    # Site i shares something with site i + 1 only: 3**60 combinations.
    n = 60
    prices = {f"e{i}": Fraction(3 + i % 4) for i in range(n + 1)}
    options = {
        i: [Option("none", Fraction(9)), Option("left", Fraction(6 - i % 2), frozenset({f"e{i}"})),
            Option("both", Fraction(1 + i % 3), frozenset({f"e{i}", f"e{i + 1}"}))]
        for i in range(n)
    }  # fmt: skip
    chosen = best(options, prices)
    # The same by a recursion written for chains: the state is whether e[i] is paid already.
    paid, unpaid = Fraction(0), Fraction(0)
    for i in reversed(range(n)):
        left, right = prices[f"e{i}"], prices[f"e{i + 1}"]

        def cost(have, paid=paid, unpaid=unpaid, i=i, left=left, right=right):
            need = Fraction(0) if have else left
            return min(options[i][0].own + unpaid, options[i][1].own + need + unpaid,
                       options[i][2].own + need + right + paid)  # fmt: skip

        paid, unpaid = cost(True), cost(False)
    assert total(chosen.values(), prices) == unpaid


def test_components_hold_what_shares_directly_or_not():
    items = {"a": {1}, "b": {2}, "c": {2, 1}, "d": set(), "e": {3}}
    assert components({k: frozenset(v) for k, v in items.items()}) == [["a", "b", "c"], ["d"], ["e"]]


def test_no_option_is_an_error():
    with pytest.raises(ValueError, match="without options"):
        best({"a": []}, {})
