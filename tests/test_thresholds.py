"""Limits for some sites, by pattern: which apply, what is refused, and that they reach the plan and its file."""

import pytest

from loka_compile.errors import ConfigError, CorruptFileError
from loka_compile.plan import Plan, make_plan
from loka_compile.selection.thresholds import Limits, overrides
from loka_compile.table import Header, Measurement, Table


def row(site, recipe="rowwise", provider="torch", mere=0.15, total=10.0, base=20.0):
    return Measurement(site, "forward", 64, 64, 8, 16, "bfloat16", provider, recipe, quantize_us=total / 4,
                       gemm_us=total * 3 / 4, baseline_us=base, mere=mere)  # fmt: skip


SITES = ["over.mlp.2#0", "over.mlp.2#1", "over.gate#0", "head#0"]


def kernels(per_site, **options):
    table = Table(Header(), [r for s in SITES for r in (row(s), row(s, provider="mslk", total=12.0, mere=0.05))])
    return [d.candidate.split(":")[0] for d in (make_plan(table, per_site=per_site, **options).lookup(s, "forward")
                                                for s in SITES)]  # fmt: skip


def test_a_stricter_error_for_some_sites():
    assert kernels({}) == ["torch"] * 4
    assert kernels({"over.*": {"max_mere": 0.1}}) == ["mslk"] * 3 + ["torch"]
    assert kernels({"over.*": {"max_mere": 0.01}}) == ["high_precision"] * 3 + ["torch"]
    assert kernels({"head": {"max_mere": 0.2}}, max_mere=0.01) == ["high_precision"] * 3 + ["torch"]


def test_a_pattern_fits_the_site_or_the_module():
    off = {"providers": ()}
    assert kernels({"over.mlp.2": off}) == ["high_precision"] * 2 + ["torch"] * 2
    assert kernels({"over.mlp.2#1": off}) == ["torch", "high_precision", "torch", "torch"]
    assert kernels({"over.mlp.?#0": off}) == ["high_precision", "torch", "torch", "torch"]
    assert kernels({"over.[g-h]*": off}) == ["torch", "torch", "high_precision", "torch"]
    assert kernels({"OVER.*": off}) == ["torch"] * 4


def test_the_last_pattern_to_set_a_limit_wins_limit_by_limit():
    limits = Limits.of(0.2, 1.05, None, {"*": {"max_mere": 0.3, "providers": ["a"]}, "over.*": {"max_mere": 0.1},
                                         "over.gate": {"min_speedup": 2}})  # fmt: skip
    assert limits.at("over.gate#0") == limits.at("over.gate")
    found = limits.at("over.gate#0")
    assert (found.max_mere, found.min_speedup, found.providers) == (0.1, 2, {"a"})
    assert (limits.at("head#0").max_mere, limits.at("head#0").min_speedup) == (0.3, 1.05)


def test_speed_and_provider_by_site():
    assert kernels({"head": {"min_speedup": 3.0}}) == ["torch"] * 3 + ["high_precision"]
    assert kernels({"head": {"providers": {"mslk"}}}) == ["torch"] * 3 + ["mslk"]
    assert kernels({"head": {"providers": ["torch"]}}, providers=["mslk"]) == ["mslk"] * 3 + ["torch"]


def test_the_reason_names_the_limit_of_the_site():
    table = Table(Header(), [row("a#0"), row("b#0")])
    plan = make_plan(table, per_site={"a": {"max_mere": 0.12}})
    assert plan.lookup("a#0", "forward").reason == "best is torch:rowwise: error 0.15 > 0.12"
    assert plan.lookup("b#0", "forward").candidate == "torch:rowwise"
    assert (plan.limits("a#0").max_mere, plan.limits("b#0").max_mere) == (0.12, 0.2)


def test_patterns_without_a_site_are_known():
    assert Limits.of(per_site={"over.*": {}, "tower.*": {}}).unmatched(SITES) == ["tower.*"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["over.*"], ["per_site", "mapping"]),
        ({"over.*": 0.1}, ["per_site", "'over.*': 0.1", "max_mere"]),
        ({"": {"max_mere": 0.1}}, ["per_site", "''"]),
        ({3: {"max_mere": 0.1}}, ["per_site", "3"]),
        ({"a": {"max_error": 0.1}}, ["per_site['a']", "'max_error'", "max_mere, min_speedup, providers"]),
        ({"a": {"max_mere": -1}}, ["per_site['a']['max_mere']", "-1", ">= 0"]),
        ({"a": {"max_mere": float("nan")}}, ["per_site['a']['max_mere']", "nan"]),
        ({"a": {"max_mere": True}}, ["per_site['a']['max_mere']", "True"]),
        ({"a": {"min_speedup": 0}}, ["per_site['a']['min_speedup']", "> 0"]),
        ({"a": {"providers": "torch"}}, ["per_site['a']['providers']", "'torch'", "collection"]),
        ({"a": {"providers": [1]}}, ["per_site['a']['providers']", "[1]"]),
    ],
)
def test_wrong_values_are_named(given, words):
    with pytest.raises(ConfigError) as caught:
        overrides(given)
    assert [word for word in words if word not in str(caught.value)] == []


def test_the_plan_file_keeps_them(tmp_path):
    per_site = {"over.*": {"max_mere": 0.1, "providers": ["torch"]}, "head": {"min_speedup": 2.0}}
    plan = make_plan(Table(Header(), [row("a#0")]), per_site=per_site)
    plan.save(tmp_path / "p.json")
    again = Plan.load(tmp_path / "p.json")
    assert again.per_site == plan.per_site
    assert again.limits("over.x#0") == plan.limits("over.x#0")
    text = (tmp_path / "p.json").read_text()
    (tmp_path / "p.json").write_text(text.replace('"max_mere": 0.1', '"max_mere": -0.1'))
    with pytest.raises(CorruptFileError, match=r"p.json.*per_site\['over.\*'\]\['max_mere'\]"):
        Plan.load(tmp_path / "p.json")
