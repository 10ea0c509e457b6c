"""The plan: exact thresholds, choice, ties, reasons, files."""

import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loka_compile.errors import ConfigError, CorruptFileError, StaleTableError, TableError, UnknownNameError
from loka_compile.gemm import Role
from loka_compile.plan import Decision, Plan, Verdict, make_plan
from loka_compile.table import Header, Measurement, Table

HEADER = Header(target="h200", device="cpu", torch="2.13.0", fingerprint={"a#0": (8, 16)})


def row(recipe="rowwise", provider="torch", *, site="a#0", role="forward", total=10.0, base=20.0, mere=0.1, **more):
    shape = {"m_min": 1, "m_max": 64, "n": 8, "k": 16, "dtype": "bfloat16"} | more
    return Measurement(site, role, provider=provider, recipe=recipe, quantize_us=total / 4, gemm_us=total * 3 / 4,
                       baseline_us=base, mere=mere, **shape)  # fmt: skip


def baseline(**values):
    return row("native", "high_precision", total=20.0, mere=0.001, **values)


def plan_of(*rows, **options):
    return make_plan(Table(HEADER, rows), **options)


def only(*rows, **options):
    (decision,) = plan_of(*rows, **options).decisions
    return decision


@pytest.mark.parametrize(
    ("mere", "taken"),
    [(0.2, True), (math.nextafter(0.2, 1), False), (math.nextafter(0.2, 0), True), (0.0, True)],
)
def test_error_gate_is_closed_at_its_threshold(mere, taken):
    assert only(row(mere=mere), max_mere=0.2).is_high_precision is not taken


@pytest.mark.parametrize(
    ("base", "taken"),
    [(10.5, True), (math.nextafter(10.5, 0), False), (math.nextafter(10.5, 11), True), (1e9, True)],
)
def test_speed_gate_is_closed_at_its_threshold(base, taken):
    # 10.5 / 10 is exactly the double nearest to 1.05.
    assert 10.5 / 10.0 == 1.05
    assert only(row(base=base), min_speedup=1.05).is_high_precision is not taken


@pytest.mark.parametrize("mere", [math.nan, math.inf])
@pytest.mark.parametrize("limit", [0.2, 1e308, math.inf])
def test_unknown_or_infinite_error_never_passes(mere, limit):
    decision = only(row(mere=mere), max_mere=limit)
    assert decision.is_high_precision
    assert ("non-finite" if math.isinf(mere) else "not known") in decision.reason


def test_unknown_cost_never_passes():
    decision = only(row(total=math.nan))
    assert decision.is_high_precision
    assert "no cost known" in decision.reason


def test_confidence_interval_is_not_gated_on():
    assert not only(row(mere=0.19, mere_low=0.1, mere_high=0.28)).is_high_precision
    assert only(row(mere=0.21, mere_low=0.1, mere_high=0.28)).is_high_precision


def test_fastest_eligible_wins_whatever_its_error():
    decision = only(row("slow", total=12, mere=0.01), row("fast", total=11, mere=0.19), row("wrong", total=1, mere=0.3))
    assert decision.candidate == "torch:fast"
    assert decision.speedup == pytest.approx(20 / 11)
    assert decision.mere == 0.19
    assert decision.reason == "fastest of 2 eligible"


def test_quantisation_counts_in_the_choice():
    lean = Measurement("a#0", "forward", 1, 64, 8, 16, "bfloat16", "torch", "lean", 1.0, 11.0, 20.0, 0.1)
    heavy = Measurement("a#0", "forward", 1, 64, 8, 16, "bfloat16", "torch", "heavy", 9.0, 8.0, 20.0, 0.1)
    assert only(lean, heavy).candidate == "torch:lean"


def test_ties_go_to_the_smaller_error_then_to_the_name():
    assert only(row("a", mere=0.12), row("b", mere=0.11)).candidate == "torch:b"
    assert only(row("b"), row("a")).candidate == "torch:a"
    assert only(row("z", "alpha"), row("a", "beta")).candidate == "alpha:z"


def test_no_eligible_candidate_says_why_the_nearest_lost():
    both = (row("slow", total=19.5), row("wrong", total=5, mere=0.3), row("bad", refused="K % 16"))
    assert only(*both, baseline()).reason == "best is torch:slow: speed-up 1.026 < 1.05"
    assert only(*both[1:], row("worse", mere=0.4, total=1)).reason == "best is torch:wrong: error 0.3 > 0.2"
    assert only(row("a", refused="K % 16")).reason == "best is torch:a: K % 16"
    assert only(row("a", refused="no"), row("b", refused="no")).reason == "all 2 candidates: no"
    assert only(baseline()).reason == "no candidate was measured"


def test_refused_baseline_explains_the_site():
    decision = only(baseline(refused="the weight of site a#0 holds NaN or Inf"), row(refused="x"))
    assert decision.reason == "the weight of site a#0 holds NaN or Inf"


def test_high_precision_decision_has_the_baselines_numbers():
    decision = only(baseline(), row(mere=1.0))
    assert (decision.provider, decision.recipe) == ("high_precision", "native")
    assert (decision.speedup, decision.mere) == (1.0, 0.001)
    # The baseline is what candidates are compared with, not a candidate.
    assert [v.candidate for v in decision.verdicts] == ["torch:rowwise"]


def test_verdicts_hold_every_candidate_the_decision_first():
    decision = only(row("fast", total=5), row("slow", total=19.9), row("wrong", mere=0.5), row("bad", refused="K=13"))
    assert [(v.recipe, v.reason) for v in decision.verdicts] == [
        ("fast", ""), ("slow", "speed-up 1.005 < 1.05"), ("wrong", "error 0.5 > 0.2"), ("bad", "K=13")
    ]  # fmt: skip


def test_providers_restrict_and_say_so():
    rows = (row("fast", "deepgemm", total=5), row("slow", "torch", total=10))
    decision = only(*rows, providers=["torch"])
    assert decision.candidate == "torch:slow"
    reasons = {v.candidate: v.reason for v in decision.verdicts}
    assert reasons["deepgemm:fast"] == "provider 'deepgemm' is not among the enabled ones (torch)"
    assert only(*rows, providers=()).is_high_precision


def test_each_gemm_is_decided_apart():
    plan = plan_of(row(), row(role="grad_input", mere=0.9), row(site="b#0", role="grad_weight", base=10.0))
    assert [(d.site, d.role, d.candidate) for d in plan.decisions] == [
        ("a#0", "forward", "torch:rowwise"),
        ("a#0", "grad_input", "high_precision:native"),
        ("b#0", "grad_weight", "high_precision:native"),
    ]
    assert plan.lookup("a#0", Role.FORWARD) is plan.lookup("a#0", "forward") is plan.decisions[0]
    assert plan.lookup("a#0", "grad_weight") is None
    assert plan.lookup("nowhere", "forward") is None
    assert plan.counts() == {"high_precision:native": 2, "torch:rowwise": 1}


def test_several_batch_sizes_of_one_kernel_count_with_the_worst_error():
    small, large = {"m_min": 64, "m_max": 64}, {"m_min": 128, "m_max": 128}
    rows = (row(total=10, base=18, mere=0.1, **small), row(total=15, base=36, mere=0.15, **large))
    decision = only(*rows)
    assert decision.candidate == "torch:rowwise"
    assert decision.ranges == ()
    assert decision.speedup == pytest.approx(54 / 25)
    assert decision.mere == 0.15
    assert only(rows[0], row(total=15, base=36, mere=0.25, **large)).is_high_precision
    assert only(rows[0], row(total=15, base=36, mere=math.nan, **large)).is_high_precision
    assert only(rows[0], row(total=15, base=36, refused="no", **large)).is_high_precision


measured = st.lists(
    st.builds(
        row,
        recipe=st.sampled_from(["r1", "r2", "r3"]),
        provider=st.sampled_from(["p", "q"]),
        site=st.sampled_from(["a#0", "b#1"]),
        role=st.sampled_from([r.value for r in Role]),
        total=st.sampled_from([5.0, 10.0, 19.0]) | st.floats(1e-3, 1e3) | st.just(math.nan),
        base=st.just(20.0) | st.floats(1e-3, 1e3),
        mere=st.sampled_from([0.2, 0.1, math.nan, math.inf]) | st.floats(0, 1),
        refused=st.sampled_from(["", "", "", "no"]),
    ),
    max_size=12,
    unique_by=lambda r: r.key,
)


@settings(max_examples=200, deadline=None)
@given(measured, st.floats(0, 1), st.floats(0.5, 3))
def test_plan_takes_the_fastest_of_exactly_the_eligible(rows, max_mere, min_speedup):
    plan = plan_of(*rows, max_mere=max_mere, min_speedup=min_speedup)
    assert {(d.site, d.role) for d in plan.decisions} == {(r.site, r.role) for r in rows}
    for decision in plan.decisions:
        mine = [r for r in rows if (r.site, r.role) == (decision.site, decision.role)]
        eligible = [
            r for r in mine
            if not r.refused and math.isfinite(r.mere) and r.mere <= max_mere and r.speedup >= min_speedup
        ]  # fmt: skip
        if not eligible:
            assert decision.is_high_precision
            assert decision.reason
            continue
        chosen = [r for r in mine if r.candidate == decision.candidate]
        assert chosen[0] in eligible
        assert chosen[0].total_us == min(r.total_us for r in eligible)
        assert len(decision.verdicts) == len(mine)
        assert {v.candidate for v in decision.verdicts if not v.reason} == {r.candidate for r in eligible}


@settings(max_examples=50, deadline=None)
@given(measured, st.randoms())
def test_order_of_rows_does_not_matter(rows, rng: random.Random):
    shuffled = list(rows)
    rng.shuffle(shuffled)
    assert repr(plan_of(*rows).decisions) == repr(plan_of(*shuffled).decisions)


@pytest.mark.parametrize(
    "options",
    [{"max_mere": -0.1}, {"max_mere": math.nan}, {"max_mere": "0.2"}, {"max_mere": True}, {"max_mere": None},
     {"min_speedup": 0}, {"min_speedup": -1}, {"min_speedup": math.nan}, {"min_speedup": "fast"}],
)  # fmt: skip
def test_bad_thresholds_are_named(options):
    (name,) = options
    with pytest.raises(ConfigError, match=name):
        plan_of(row(), **options)


# --- files ---


def sample_plan():
    return plan_of(row(), row("tensorwise", mere=math.inf), baseline(), row(role="grad_weight", refused="K=13"),
                   baseline(role="grad_weight"), max_mere=0.15, min_speedup=1.2)  # fmt: skip


def test_plan_round_trip(tmp_path):
    plan = sample_plan()
    plan.save(tmp_path / "p.json")
    again = Plan.load(tmp_path / "p.json")
    assert repr(again.decisions) == repr(plan.decisions)
    assert (again.max_mere, again.min_speedup, again.header) == (0.15, 1.2, HEADER)
    assert again.digest() == plan.digest()
    again.save(tmp_path / "q.json")
    assert (tmp_path / "q.json").read_text() == (tmp_path / "p.json").read_text()


def test_empty_plan_round_trip(tmp_path):
    Plan([]).save(tmp_path / "p.json")
    again = Plan.load(tmp_path / "p.json")
    assert (len(again), again.header, again.counts()) == (0, None, {})


def test_infinite_threshold_round_trip(tmp_path):
    plan_of(row(), max_mere=math.inf).save(tmp_path / "p.json")
    assert Plan.load(tmp_path / "p.json").max_mere == math.inf


def edited(tmp_path, change):
    path = tmp_path / "p.json"
    sample_plan().save(path)
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    return path


def test_edited_decision_is_honoured(tmp_path):
    # Tensorwise had an infinite error: the hand that wrote it knows better.
    path = edited(tmp_path, lambda d: d["decisions"][0].update(recipe="tensorwise"))
    again = Plan.load(path)
    assert again.lookup("a#0", "forward").candidate == "torch:tensorwise"
    assert again.digest() != sample_plan().digest()
    assert [str(c) for c in sample_plan().diff(again)] == ["a#0 forward: torch:rowwise -> torch:tensorwise"]


def test_shortest_plan_written_by_hand(tmp_path):
    decision = {"site": "a#0", "role": "grad_input", "provider": "my_lib", "recipe": "anything"}
    document = {"format": "loka_compile plan", "version": 1, "decisions": [decision]}
    (tmp_path / "p.json").write_text(json.dumps(document))
    plan = Plan.load(tmp_path / "p.json")
    assert plan.lookup("a#0", "grad_input").candidate == "my_lib:anything"
    assert math.isnan(plan.lookup("a#0", "grad_input").speedup)
    plan.check(fingerprint={"elsewhere#0": (1, 1)}, target="b200")  # no header: fits everything


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: d.update(decisions=None), "decisions must be a list"),
        (lambda d: d["decisions"].append("x"), "decision 2 must be an object"),
        (lambda d: d["decisions"][1].pop("provider"), r"decision 1 \('a#0' 'grad_weight'\) lacks the key 'provider'"),
        (lambda d: d["decisions"][0].update(provider=""), "decision 0, key 'provider' must be a non-empty string"),
        (lambda d: d["decisions"][0].update(recipe="  "), "key 'recipe' must be a non-empty string"),
        (lambda d: d["decisions"][0].update(recipe=None), "key 'recipe'"),
        (lambda d: d["decisions"][0].update(site=""), "key 'site'"),
        (lambda d: d["decisions"][0].update(role="backward"), "decision 0 .*unknown role 'backward'"),
        (lambda d: d["decisions"][0].update(kernel="x"), "unknown keys \\['kernel'\\]"),
        (lambda d: d["decisions"][0].update(mere=[]), "key 'mere'"),
        (lambda d: d["decisions"][0].update(verdicts={}), "'verdicts' must be a list"),
        (lambda d: d["decisions"][0]["verdicts"][0].pop("recipe"), "verdict 0 lacks the key 'recipe'"),
        (lambda d: d["decisions"].append(d["decisions"][0]), "two decisions for a#0 forward"),
        (lambda d: d.update(max_mere="x"), "max_mere"),
        (lambda d: d.update(table=3), "table must be an object"),
        (lambda d: d.update(tables={}), "tables"),
        (lambda d: d.update(format="loka_compile table"), "no .*plan"),
    ],
)
def test_damaged_plan_is_named(tmp_path, damage, message):
    with pytest.raises(CorruptFileError, match=message):
        Plan.load(edited(tmp_path, damage))


def test_truncated_and_outdated_plans(tmp_path):
    path = tmp_path / "p.json"
    sample_plan().save(path)
    path.write_text(path.read_text()[:-20])
    with pytest.raises(CorruptFileError, match=r"p\.json"):
        Plan.load(path)
    with pytest.raises(StaleTableError, match="version 99"):
        Plan.load(edited(tmp_path, lambda d: d.update(version=99)))


def test_check_compares_the_tables_header():
    sample_plan().check(fingerprint={"a#0": (8, 16)}, target="h200")
    with pytest.raises(StaleTableError, match=r"the plan does not fit.*8, 17"):
        sample_plan().check(fingerprint={"a#0": (8, 17)})


def test_digest_is_about_kernels_alone():
    one = Plan([Decision("a#0", "forward", "torch", "rowwise", mere=0.1)])
    assert one.digest() == Plan([Decision("a#0", "forward", "torch", "rowwise", reason="hm")], max_mere=9).digest()
    assert one.digest() != Plan([Decision("a#0", "forward", "torch", "rowwise_fast")]).digest()
    assert one.digest() != Plan([Decision("a#0", "grad_input", "torch", "rowwise")]).digest()
    assert one.digest() != Plan([]).digest()


def test_diff_and_duplicates():
    old = Plan([Decision("a#0", r, "torch", "rowwise") for r in ("grad_weight", "forward")])
    new = Plan([Decision("a#0", "forward", "torch", "rowwise"), Decision("b#0", "forward", "torch", "rowwise")])
    assert [str(c) for c in old.diff(new)] == [
        "a#0 grad_weight: torch:rowwise -> absent", "b#0 forward: absent -> torch:rowwise"
    ]  # fmt: skip
    assert old.diff(old) == ()
    with pytest.raises(TableError, match="two decisions for a#0 forward"):
        Plan([*new.decisions, Decision("a#0", "forward", "x", "y")])
    with pytest.raises(UnknownNameError, match="sideways"):
        Decision("a#0", "sideways", "x", "y")


def test_plan_and_verdict_read_well():
    assert repr(sample_plan()) == "Plan(high_precision:native*1, torch:rowwise*1)"
    assert Verdict("torch", "rowwise").candidate == "torch:rowwise"


def test_planning_needs_no_torch():
    import subprocess
    import sys

    code = (
        "import sys\nfrom loka_compile import plan, table, costs, store, cli\n"
        "costs.CostTable.load('h200')\n"
        "assert not {'torch', 'triton', 'pandas'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
