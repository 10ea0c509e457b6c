"""From rows to a plan: what is shared, and ranges of batch size, against every combination at every size."""

import dataclasses
import itertools
import math
import random

import pytest

from loka_compile.gemm import Role
from loka_compile.plan import Plan, make_plan
from loka_compile.selection.batch_cost import Line, crossing, envelope, fit
from loka_compile.selection.operands import OPERANDS, TRANSPOSED
from loka_compile.table import BASELINE, Header, Measurement, Table

ROLES = [r.value for r in Role]
#: recipe -> (form as stored, form transposed, quantising, a copy in the other layout)
FORMS = {"tensorwise": ("tensorwise", "tensorwise"), "rowwise": ("rowwise", "rowwise across"), "block": ("b", "b")}


def rows_of(site, role, m, gemm, once, copy, base, mere=0.1):
    """One row per recipe (times by recipe), and the baseline."""
    found = [Measurement(site, role, m, m, 8, 16, "bfloat16", *BASELINE, gemm_us=base, baseline_us=base, mere=0.0,
                         quantize_us=0.0)]  # fmt: skip
    for recipe, us in gemm.items():
        turned = TRANSPOSED[Role(role)]
        layout = [copy[recipe] if t and FORMS[recipe][0] == FORMS[recipe][1] else 0.0 for t in turned]
        found.append(Measurement(
            site, role, m, m, 8, 16, "bfloat16", "torch", recipe, mere=mere, gemm_us=us, baseline_us=base,
            quantize_us=2 * once[recipe] + sum(layout),
            a_form=FORMS[recipe][turned[0]], a_once_us=once[recipe], a_layout_us=layout[0],
            b_form=FORMS[recipe][turned[1]], b_once_us=once[recipe], b_layout_us=layout[1],
        ))  # fmt: skip
    return found


def cost_of(table, choice, min_speedup, m=None):
    """What a choice of recipes costs, written out from the rows: each (tensor, form) once, each copy once."""
    spent, paid = 0.0, {}
    for (site, role), recipe in choice.items():
        mine = [r for r in table.rows if (r.site, r.role) == (site, role) and r.recipe == recipe]
        row = mine[0] if m is None else next(r for r in mine if r.m_min == m)
        if recipe == "native":
            spent += row.baseline_us / min_speedup
            continue
        spent += row.gemm_us
        for which, operand, turned in zip("ab", OPERANDS[Role(role)], TRANSPOSED[Role(role)], strict=True):
            name = table.header.same.get(f"{site} {operand}", f"{site} {operand}")
            form = getattr(row, f"{which}_form")
            paid[name, form] = getattr(row, f"{which}_once_us")
            if getattr(row, f"{which}_layout_us"):
                paid[name, form, turned] = getattr(row, f"{which}_layout_us")
    return spent + sum(paid.values())


def cheapest(table, min_speedup, m=None):
    gemms = {(r.site, r.role): [] for r in table.rows}
    for r in table.rows:
        if r.recipe not in gemms[r.site, r.role]:
            gemms[r.site, r.role].append(r.recipe)
    return min(
        cost_of(table, dict(zip(gemms, recipes, strict=True)), min_speedup, m)
        for recipes in itertools.product(*gemms.values())
    )


def chosen(plan, m=None):
    return {(d.site, d.role): (d.recipe if m is None else d.at(m)[1]) for d in plan.decisions}


def random_table(seed, sites, sizes=(64,), same=None):
    """Times that are sums of a launch and a part that grows, drawn at random, so that anything may win."""
    rng = random.Random(seed)
    rows = []
    once = {r: (rng.uniform(0.5, 4), rng.uniform(0, 0.02)) for r in FORMS}
    copy = {r: (rng.uniform(0.1, 2), rng.uniform(0, 0.01)) for r in FORMS}
    for site, role in itertools.product(sites, ROLES):
        gemm = {r: (rng.uniform(2, 8), rng.uniform(0.02, 0.1)) for r in FORMS}
        base = (rng.uniform(4, 10), rng.uniform(0.05, 0.2))
        for m in sizes:
            line = [{r: c + d * m for r, (c, d) in part.items()} for part in (gemm, once, copy)]
            rows += rows_of(site, role, m, *line, base[0] + base[1] * m)
    return Table(Header(same=same or {}), rows)


@pytest.mark.parametrize("seed", range(40))
def test_the_combination_of_a_site_is_the_cheapest_of_all(seed):
    table = random_table(seed, ["a#0"])
    for min_speedup in (1.0, 1.05, 1.4):
        plan = make_plan(table, min_speedup=min_speedup)
        assert cost_of(table, chosen(plan), min_speedup) == pytest.approx(cheapest(table, min_speedup), rel=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_neighbouring_sites_that_share_tensors_are_decided_together(seed):
    same = {"b#0 input": "a#0 input", "b#0 grad_output": "a#0 grad_output"}
    table = random_table(seed, ["a#0", "b#0"], same=same)
    plan = make_plan(table)
    assert cost_of(table, chosen(plan), 1.05) == pytest.approx(cheapest(table, 1.05), rel=1e-9)


@pytest.mark.timeout(60)
def test_a_net_of_sites_is_solved_in_seconds():
    """120 sites in one component: groups of five read one x, groups of three have one dy. 4**360 combinations."""
    same = {f"s{i:03d}#0 input": f"s{i - i % 5:03d}#0 input" for i in range(120) if i % 5}
    same |= {f"s{i:03d}#0 grad_output": f"s{i - i % 3:03d}#0 grad_output" for i in range(120) if i % 3}
    names = [f"s{i:03d}#0" for i in range(120)]
    table = random_table(1, names, same=same)
    choice = chosen(make_plan(table))
    together = cost_of(table, choice, 1.05)
    # No two GEMMs of a site could change their kernels and make the whole cheaper.
    for recipes_of in itertools.product([*FORMS, "native"], repeat=2):
        other = choice | {("s007#0", role): r for role, r in zip(("forward", "grad_weight"), recipes_of, strict=True)}
        assert cost_of(table, other, 1.05) >= together - 1e-9


def site(gemm, once, copy, base, **more):
    return Table(Header(), [r for role in ROLES for r in rows_of("a#0", role, 64, gemm, once, copy, base, **more)])


def test_a_site_pays_together_where_no_gemm_pays_alone():
    # Alone: 10 + 2 * 4 (+ copies) against 17. Together: 3 * 10 + 3 * 4 + 3 * 0.5 against 51.
    table = site({"tensorwise": 10.0}, {"tensorwise": 4.0}, {"tensorwise": 0.5}, 17.0)
    plan = make_plan(table, min_speedup=1.05)
    assert set(plan.counts()) == {"torch:tensorwise"}
    forward = plan.lookup("a#0", "forward")
    assert forward.reason == (
        "pays in combination; input quantised once with grad_weight; weight quantised once with grad_input"
    )
    assert forward.verdicts[0].reason == ""
    assert forward.verdicts[0].speedup == pytest.approx(17 / 18)  # alone
    assert forward.speedup == pytest.approx(17 / (10 + 2 + 2))  # half of each operand
    # What the decisions say adds up to what the site takes.
    total = sum(17 / plan.lookup("a#0", role).speedup for role in ROLES)
    assert total == pytest.approx(3 * 10 + 3 * 4 + 3 * 0.5)
    # Without the backward there is nobody to share with.
    inference = Table(Header(), [r for r in table.rows if r.role == "forward"])
    assert make_plan(inference, min_speedup=1.05).lookup("a#0", "forward").is_high_precision


def test_the_margin_is_that_of_the_whole():
    # 43.5 against 51: 1.1724.
    table = site({"tensorwise": 10.0}, {"tensorwise": 4.0}, {"tensorwise": 0.5}, 17.0)
    assert set(make_plan(table, min_speedup=1.17).counts()) == {"torch:tensorwise"}
    assert set(make_plan(table, min_speedup=1.18).counts()) == {"high_precision:native"}


def test_an_inaccurate_gemm_takes_its_share_of_the_bill_away():
    rows = [r for r in site({"tensorwise": 10.0}, {"tensorwise": 4.0}, {"tensorwise": 0.5}, 17.0).rows
            if r.role != "grad_weight"]  # fmt: skip
    rows += rows_of("a#0", "grad_weight", 64, {"tensorwise": 10.0}, {"tensorwise": 4.0}, {"tensorwise": 0.5}, 17.0, 0.9)
    plan = make_plan(Table(Header(), rows), min_speedup=1.05)
    # forward and grad_input: 20 + 3 * 4 + 0.5 against 34: 1.046.
    assert set(plan.counts()) == {"high_precision:native"}
    assert plan.lookup("a#0", "grad_weight").reason.endswith("error 0.9 > 0.2")


def test_rowwise_shares_nothing_between_layouts():
    table = site({"rowwise": 10.0}, {"rowwise": 4.0}, {"rowwise": 0.5}, 17.0)
    assert set(make_plan(table, min_speedup=1.05).counts()) == {"high_precision:native"}


def test_rows_without_parts_are_decided_one_by_one():
    table = site({"tensorwise": 10.0}, {"tensorwise": 4.0}, {"tensorwise": 0.5}, 17.0)
    bare = [dataclasses.replace(r, a_form="", b_form="") for r in table.rows]
    assert set(make_plan(Table(Header(), bare), min_speedup=1.05).counts()) == {"high_precision:native"}


# --- lines over the batch size ---


def test_fit_gives_back_a_line_and_never_falls():
    assert fit({64: 3.0}) == Line(3)
    line = fit({m: 4.0 + 0.25 * m for m in (16, 64, 1000)})
    assert float(line.const) == pytest.approx(4.0)
    assert float(line.slope) == pytest.approx(0.25)
    falling = fit({64: 10.0, 128: 9.0})
    assert falling.slope == 0
    assert 9 < falling.const < 10
    assert fit({64: 0.0, 128: 0.0}) == Line()


def test_the_tables_cost_is_a_sympy_expression():
    import sympy

    table = random_table(1, ["a#0"], sizes=(64, 256, 1024))
    expression = table.cost("a#0", "forward", "torch", "rowwise")
    (m,) = expression.free_symbols
    assert m == sympy.Symbol("M", integer=True, positive=True)
    for row in table.rows:
        if (row.role, row.recipe) == ("forward", "rowwise"):
            assert float(expression.subs(m, row.m_min)) == pytest.approx(row.total_us, rel=1e-6)
    one = random_table(1, ["a#0"]).cost("a#0", Role.FORWARD, "torch", "rowwise")
    assert one.is_number
    assert table.cost("nowhere", "forward", "torch", "rowwise") is None


def test_envelope_of_many_lines_is_their_minimum_everywhere():
    rng = random.Random(5)
    for _ in range(50):
        lines = [Line(*(fit({1: rng.randint(0, 60)}).const, fit({1: rng.randint(0, 20)}).const)) for _ in range(7)]
        parts = envelope(lambda x, lines=lines: min(lines, key=lambda a: a.at(x)), lambda line: line, fit({1: 0}).const,
                         fit({1: 40}).const)  # fmt: skip
        for tenth in range(401):
            x = fit({1: 0}).const + tenth * fit({1: 1}).const / 10
            held = [line for start, line in parts if start <= x][-1]
            assert held.at(x) == min(line.at(x) for line in lines)
    assert crossing(Line(10, 1), Line(4, 2)) == 6
    assert crossing(Line(1, 1), Line(2, 1)) is None


@pytest.mark.parametrize("seed", range(12))
def test_ranges_hold_the_cheapest_combination_at_every_size(seed):
    sizes = (1, 40, 160)
    table = random_table(seed, ["a#0"], sizes)
    plan = make_plan(table)
    for m in sizes:
        assert cost_of(table, chosen(plan, m), 1.05, m) == pytest.approx(cheapest(table, 1.05, m), rel=1e-6)
    # Between them, and at both sides of each boundary: the same lines, read off at that size.
    edges = {e for d in plan.decisions for r in d.ranges for e in (r.m_from - 1, r.m_from) if e > 0}
    for m in edges | {7, 99, 130}:
        lines = random_table(seed, ["a#0"], (m,))
        assert cost_of(lines, chosen(plan, m), 1.05) == pytest.approx(cheapest(lines, 1.05), rel=1e-6)


def crossing_table(sizes=(16, 64, 512)):
    """High precision below 100 rows, FP8 from there on: 4 + 0.1 M against 10 + 0.04 M."""
    rows = []
    for m in sizes:
        base, fp8 = 4 + 0.1 * m, 10 + 0.04 * m
        rows += [
            Measurement("a#0", "forward", m, m, 8, 16, "bfloat16", *BASELINE, quantize_us=0, gemm_us=base,
                        baseline_us=base, mere=0.0),
            Measurement("a#0", "forward", m, m, 8, 16, "bfloat16", "torch", "rowwise", quantize_us=0, gemm_us=fp8,
                        baseline_us=base, mere=0.1),
        ]  # fmt: skip
    return Table(Header(), rows)


def test_a_plan_with_ranges_its_boundary_and_outside(tmp_path):
    plan = make_plan(crossing_table(), min_speedup=1.0)
    (decision,) = plan.decisions
    assert decision.kernels == "high_precision:native, from M = 100 torch:rowwise"
    assert not decision.is_high_precision
    native, fp8 = ("high_precision", "native"), ("torch", "rowwise")
    assert [decision.at(m) for m in (0, 1, 99, 100, 101, 512, 10**9)] == [native] * 3 + [fp8] * 4
    plan.save(tmp_path / "p.json")
    again = Plan.load(tmp_path / "p.json")
    assert again.decisions[0].ranges == decision.ranges
    assert again.digest() == plan.digest()
    one = make_plan(crossing_table((512,)), min_speedup=1.0)
    assert one.decisions[0].ranges == ()
    assert one.digest() != plan.digest()
    assert [str(c) for c in one.diff(plan)] == [
        "a#0 forward: torch:rowwise -> high_precision:native, from M = 100 torch:rowwise"
    ]


def test_one_kernel_over_all_sizes_has_no_ranges():
    (decision,) = make_plan(crossing_table((128, 512)), min_speedup=1.0).decisions
    assert (decision.candidate, decision.ranges) == ("torch:rowwise", ())


def test_a_candidate_that_was_not_measured_at_every_size_is_out():
    table = crossing_table()
    more = [dataclasses.replace(r, recipe="fast", gemm_us=1.0) for r in table.rows if r.provider == "torch"][:2]
    (decision,) = make_plan(Table(Header(), [*table.rows, *more]), min_speedup=1.0).decisions
    verdict = next(v for v in decision.verdicts if v.recipe == "fast")
    assert verdict.reason == "not measured at M = 512"
    assert decision.recipe != "fast"


def test_sites_with_more_rows_per_sample_have_their_own_sizes():
    """A layer that is applied to 26 rows per sample shares a weight with one that is applied to one."""
    rows = []
    for name, factor in (("a#0", 1), ("b#0", 26)):
        for m in (16, 512):
            size = m * factor
            base, fp8, x = 4 + 0.1 * m, 9.04 + 0.03 * m, 0.01 * m
            rows += [
                Measurement(name, "forward", size, size, 8, 16, "bfloat16", *BASELINE, quantize_us=0, gemm_us=base,
                            baseline_us=base, mere=0.0),
                Measurement(name, "forward", size, size, 8, 16, "bfloat16", "torch", "rowwise", quantize_us=2 + x,
                            gemm_us=fp8, baseline_us=base, mere=0.1, a_form="x", a_once_us=x, b_form="w",
                            b_once_us=2.0),
            ]  # fmt: skip
    plan = make_plan(Table(Header(same={"b#0 weight": "a#0 weight"}), rows), min_speedup=1.0)
    starts = {d.site: d.ranges[1].m_from for d in plan.decisions}
    # Both together: 2 * (4 + 0.1 m) against 2 * (9.04 + 0.03 m + 0.01 m) + 2, at m = 100.67.
    assert starts == {"a#0": 101, "b#0": 2618}
    assert not math.isnan(plan.decisions[0].speedup)


# --- what a producer writes for its readers ---


def chain(*, forward=10.0, grad_weight=10.0, write=4.0, base=11.0, roles=("forward", "grad_weight"), rowwise=False):
    """A site whose input an epilogue can write in FP8 for nothing; in the model's dtype it costs ``write``."""
    rows = []
    for role in roles:
        us = forward if role == "forward" else grad_weight
        which = "a" if role == "forward" else "b"
        shape = ("b#0", role, 64, 64, 8, 16, "bfloat16")
        rows.append(Measurement(*shape, *BASELINE, quantize_us=0, gemm_us=base, baseline_us=base, mere=0.0,
                                **{f"{which}_stored_us": write}))  # fmt: skip
        rows.append(Measurement(*shape, "torch", "tensorwise", quantize_us=0, gemm_us=us, baseline_us=base, mere=0.1,
                                a_form="t a", a_once_us=0.0, b_form="t b", b_once_us=0.0))  # fmt: skip
        if rowwise:
            rows.append(Measurement(*shape, "torch", "rowwise", quantize_us=0, gemm_us=us - 1, baseline_us=base,
                                    mere=0.1, a_form="r a", a_once_us=0.0, b_form="r b", b_once_us=0.0,
                                    **{f"{which}_stored_us": write}))  # fmt: skip
    return Table(Header(), rows)


def recipes(table, **options):
    return [d.recipe for d in make_plan(table, **options).decisions]


def test_fp8_in_the_producers_epilogue_saves_the_tensor_in_its_own_dtype():
    # Inference: 10 against 11 does not make 1.2, 10 against 11 / 1.2 + 4 does.
    assert recipes(chain(roles=("forward",), write=0.0), min_speedup=1.2) == ["native"]
    plan = make_plan(chain(roles=("forward",)), min_speedup=1.2)
    assert [d.recipe for d in plan.decisions] == ["tensorwise"]
    assert plan.decisions[0].reason == "pays in combination; input written in FP8 alone"


def test_the_saving_takes_every_reader():
    # grad_weight in FP8 is slower than in high precision, by 2 against the 4 that writing costs.
    assert recipes(chain(grad_weight=13.0), min_speedup=1.0) == ["tensorwise", "tensorwise"]
    # By 5 it is not worth it, and then forward has to live without the saving, which it can.
    assert recipes(chain(grad_weight=16.0), min_speedup=1.0) == ["tensorwise", "native"]
    assert recipes(chain(grad_weight=16.0, forward=12.0), min_speedup=1.0) == ["native", "native"]
    assert recipes(chain(grad_weight=13.0, forward=12.0), min_speedup=1.0) == ["tensorwise", "tensorwise"]


def test_a_faster_kernel_that_reads_the_tensor_as_it_is():
    assert recipes(chain(rowwise=True, roles=("forward",))) == ["tensorwise"]  # 10 against 9 + 4
    assert recipes(chain(rowwise=True, roles=("forward",), write=0.5)) == ["rowwise"]


def test_neighbours_that_read_one_output_save_it_together():
    rows = [dataclasses.replace(r, site=name) for name in ("b#0", "c#0")
            for r in chain(roles=("forward",), forward=12.0, base=11.0).rows]  # fmt: skip
    assert recipes(Table(Header(same={"c#0 input": "b#0 input"}), rows), min_speedup=1.0) == ["tensorwise"] * 2
    # 24 against 22 + 4 pays; with 14 each it does not, although each alone would gain what both have to save.
    rows = [dataclasses.replace(r, gemm_us=14.0) if r.recipe == "tensorwise" else r for r in rows]
    assert recipes(Table(Header(same={"c#0 input": "b#0 input"}), rows), min_speedup=1.0) == ["native"] * 2
    assert recipes(Table(Header(), rows), min_speedup=1.0) == ["tensorwise"] * 2


def test_grad_weight_sums_over_the_batch_without_fast_accumulation():
    """Measured in training (docs/models.md): only there does it move the log loss."""
    rows = []
    for role in ROLES:
        for recipe, us in (("tensorwise", 6.0), ("tensorwise_fast", 5.0)):
            rows.append(Measurement(
                "a", role, 64, 64, 8, 16, "bfloat16", "torch", recipe, mere=0.1, gemm_us=us, baseline_us=20.0,
                quantize_us=1.0,
            ))  # fmt: skip
    plan = make_plan(Table(Header(), rows))
    assert chosen(plan) == {
        ("a", "forward"): "tensorwise_fast", ("a", "grad_input"): "tensorwise_fast", ("a", "grad_weight"): "tensorwise",
    }  # fmt: skip
    refused = {v.candidate: v.reason for d in plan.decisions if d.role == "grad_weight" for v in d.verdicts}
    assert "sums over the batch" in refused["torch:tensorwise_fast"]
