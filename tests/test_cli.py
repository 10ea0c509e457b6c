"""The command line: what it prints, and how it fails."""

import dataclasses
import json
import math
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from loka_compile.cli import app
from loka_compile.plan import Plan, make_plan
from loka_compile.table import Header, Measurement, Table

HEADER = Header(
    target="h200",
    device="cpu",
    torch="2.13.0",
    libraries={"fbgemm": "mslk-cuda 1.1.0"},
    fingerprint={"over.mlp.2#0": (384, 199), "[odd]#0": (1, 13)},
    dropped_rows={"over.mlp.2#0": 7},
)


def row(recipe="rowwise", site="over.mlp.2#0", role="forward", provider="torch", **values):
    defaults = dict(m_min=1, m_max=4096, n=384, k=199, dtype="bfloat16", mere=0.0955, mere_low=0.0951, mere_high=0.0959,
                    mere_drawn=0.0931, mere_raw=0.0955, remark="a [faulty] kernel?",
                    quantize_us=2.0, gemm_us=8.0, baseline_us=20.0, samples=4)  # fmt: skip
    return Measurement(site, role, provider=provider, recipe=recipe, **{**defaults, **values})


TABLE = Table(
    HEADER,
    [
        row("native", provider="high_precision", quantize_us=0.0, gemm_us=20.0, mere=0.001),
        row(),
        row("tensorwise", mere=0.3),
        row("blockwise", mere=math.nan, refused="K must be a multiple of 128"),
        row(role="grad_weight", gemm_us=20.0),
        row(site="[odd]#0"),
    ],
)


@pytest.fixture
def files(tmp_path):
    TABLE.save(tmp_path / "t.json")
    make_plan(TABLE).save(tmp_path / "p.json")
    return tmp_path


def loka(*args, code=0):
    result = CliRunner().invoke(app, [str(a) for a in args])
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def test_table_show(files):
    text = loka("table", "show", files / "t.json")
    assert "target h200" in text
    assert "fbgemm mslk-cuda 1.1.0" in text
    assert "over.mlp.2#0: 7 sampled rows with NaN or Inf left out" in text
    line = next(line for line in text.splitlines() if "torch:rowwise" in line and "over.mlp" in line)
    assert line.split() == ["over.mlp.2#0", "forward", "1..4096", "384", "199", "torch:rowwise", "0.0955",
                            "0.0951..0.0959", "0.0931", "0.0955", "2.0", "8.0", "20.0", "2.00",
                            "a", "[faulty]", "kernel?"]  # fmt: skip
    assert "[odd]#0" in text  # square brackets are no markup
    assert "blockwise" not in text
    assert "5 rows, 1 refused ones hidden" in text


def test_table_show_all_and_filter(files):
    text = loka("table", "show", files / "t.json", "--all", "--site", "over")
    assert "K must be a multiple of 128" in text
    assert "[odd]#0" not in text
    assert "5 rows" in text.splitlines()[-1]


def test_table_diff(files):
    changed = [dataclasses.replace(r, mere=0.2) if r.recipe == "rowwise" and r.role == "forward" else r
               for r in TABLE.rows if r.recipe != "tensorwise"]  # fmt: skip
    Table(dataclasses.replace(HEADER, torch="2.14.0"), changed).save(files / "u.json")
    text = loka("table", "diff", files / "t.json", files / "u.json", code=1)
    assert "header torch: '2.13.0' -> '2.14.0'" in text
    assert "0.0955 -> 0.2000" in text
    assert "removed" in text
    assert "3 of 6 and 5 rows differ" in text
    assert "0 of 6 and 6 rows differ" in loka("table", "diff", files / "t.json", files / "t.json")


def test_plan_show(files):
    text = loka("plan", "show", files / "p.json")
    assert "error <= 0.2, speed-up >= 1.05" in text
    assert "best is torch:rowwise: speed-up 0.9091 < 1.05" in text
    assert text.splitlines()[-1] == "torch:rowwise: 2, high_precision:native: 1"


def test_plan_show_from_a_table_with_other_thresholds(files):
    text = loka("plan", "show", files / "t.json", "--max-mere", "0.05")
    assert text.splitlines()[-1] == "high_precision:native: 3"
    assert "torch:rowwise: 3" in loka("plan", "show", files / "t.json", "--min-speedup", "0.9")


def test_plan_explain(files):
    text = loka("plan", "explain", "over.mlp.2#0", "--plan", files / "p.json")
    assert "over.mlp.2#0 forward: torch:rowwise" in text
    line = next(line for line in text.splitlines() if "torch:rowwise " in line)
    assert line.split()[-4:] == ["chosen", "a", "[faulty]", "kernel?"]  # the table's remark goes with it
    assert "error 0.3 > 0.2" in text
    assert "K must be a multiple of 128" in text
    assert "over.mlp.2#0 grad_weight: high_precision:native" in text
    assert loka("plan", "explain", "over.mlp.2", "-p", files / "t.json") == text


def test_plan_explain_of_a_decision_made_by_hand(files):
    document = json.loads((files / "p.json").read_text())
    entry = next(d for d in document["decisions"] if d["role"] == "forward" and "over" in d["site"])
    entry["recipe"] = "tensorwise"
    (files / "p.json").write_text(json.dumps(document))
    text = loka("plan", "explain", "over.mlp.2#0", "-p", files / "p.json")
    assert "chosen by hand, although: error 0.3 > 0.2" in text
    assert "eligible, not chosen" in text


def test_an_edited_plan_says_so_and_has_the_numbers_of_the_new_kernel(files):
    document = json.loads((files / "p.json").read_text())
    for entry in document["decisions"]:
        if "over" in entry["site"] and entry["role"] == "forward":
            entry["recipe"] = "tensorwise"
        elif "odd" in entry["site"]:
            entry.update(provider="high_precision", recipe="native")
    (files / "p.json").write_text(json.dumps(document))
    line = {c: n for n in loka("plan", "show", files / "p.json").splitlines() for c in ("over.mlp.2#0 forward", "[odd]")
            if c.split()[0] in n and "forward" in n}  # fmt: skip
    assert line["over.mlp.2#0 forward"].split()[2:6] == ["torch:tensorwise", "0.3000", "2.00", "-"]
    assert "by hand; planned was torch:rowwise: the only eligible one" in line["over.mlp.2#0 forward"]
    assert line["[odd]"].split()[2:6] == ["high_precision:native", "-", "1.00", "20.0"]
    plan = Plan.load(files / "p.json")
    assert [d.by_hand for d in plan.decisions] == [True, True, False]
    plan.save(files / "q.json")
    assert repr(Plan.load(files / "q.json").decisions) == repr(plan.decisions), "the reason does not grow"
    assert "2 of 3 GEMMs differ" in loka("plan", "diff", files / "p.json", files / "t.json", code=1)


def with_ranges():
    """High precision below 100 rows, from there on FP8."""
    rows = []
    for m in (16, 64, 512):
        base, fp8 = 4 + 0.1 * m, 10 + 0.04 * m
        rows += [row("native", provider="high_precision", m_min=m, m_max=m, quantize_us=0.0, gemm_us=base, mere=0.0,
                     baseline_us=base),
                 row(m_min=m, m_max=m, quantize_us=0.0, gemm_us=fp8, baseline_us=base)]  # fmt: skip
    return Table(HEADER, rows)


def test_ranges_of_batch_size_are_shown(tmp_path):
    with_ranges().save(tmp_path / "t.json")
    text = loka("plan", "show", tmp_path / "t.json", "--min-speedup", "1")
    assert "high_precision:native, from M = 100 torch:rowwise" in text
    text = loka("plan", "explain", "over.mlp.2", "-p", tmp_path / "t.json", "--min-speedup", "1")
    assert "over.mlp.2#0 forward: high_precision:native, from M = 100 torch:rowwise" in text
    assert "chosen for M >= 100" in text
    make_plan(with_ranges(), min_speedup=1.0).save(tmp_path / "a.json")
    make_plan(with_ranges(), min_speedup=1.01).save(tmp_path / "b.json")
    text = loka("plan", "diff", tmp_path / "a.json", tmp_path / "b.json", code=1)
    assert "from M = 100 torch:rowwise" in text
    assert "from M = 103 torch:rowwise" in text


def test_an_edit_that_contradicts_the_ranges_is_refused(tmp_path):
    make_plan(with_ranges(), min_speedup=1.0).save(tmp_path / "p.json")
    document = json.loads((tmp_path / "p.json").read_text())
    document["decisions"][0].update(provider="torch", recipe="tensorwise")
    (tmp_path / "p.json").write_text(json.dumps(document))
    assert "torch:tensorwise is in none of its ranges" in loka("plan", "show", tmp_path / "p.json", code=2)
    document["decisions"][0]["ranges"] = []
    (tmp_path / "p.json").write_text(json.dumps(document))
    assert "by hand; planned was high_precision:native, from M" in loka("plan", "show", tmp_path / "p.json")
    document["decisions"][0].update(ranges=[{"m_from": 9, "provider": "a", "recipe": "b"}] * 2)
    (tmp_path / "p.json").write_text(json.dumps(document))
    assert "must rise" in loka("plan", "show", tmp_path / "p.json", code=2)


def shared():
    """Each GEMM alone is slower than high precision; together they pay."""
    parts = {"forward": ("x", "w"), "grad_input": ("dy", "w"), "grad_weight": ("dy", "x")}
    rows = [row("native", provider="high_precision", role=role, quantize_us=0.0, gemm_us=17.0, baseline_us=17.0)
            for role in parts]  # fmt: skip
    rows += [row(role=role, quantize_us=8.0, gemm_us=10.0, baseline_us=17.0, a_form=a, a_once_us=4.0, b_form=b,
                 b_once_us=4.0) for role, (a, b) in parts.items()]  # fmt: skip
    return Table(HEADER, rows)


def test_combinations_and_the_prediction_are_shown(tmp_path):
    shared().save(tmp_path / "t.json")
    text = loka("plan", "show", tmp_path / "t.json")
    assert "pays in combination; input quantised once with grad_weight" in text
    assert "predicted: 51.0 us in high precision, 42.0 us by the plan (1.21x)" in text
    text = loka("plan", "explain", "over.mlp.2", "-p", tmp_path / "t.json")
    assert "weight quantised once with forward" in text
    assert "14.0 us in the plan, 17.0 us in high precision" in text
    line = next(line for line in text.splitlines() if line.startswith("torch:rowwise"))
    assert line.split()[:4] == ["torch:rowwise", "0.0955", "0.94", "chosen"]


def test_limits_of_some_sites(files):
    text = loka(
        "plan", "show", files / "t.json", "--per-site", "over.*:max_mere=0.01", "--per-site", "over.*:providers=a,b"
    )
    assert "per site: over.*: max_mere 0.01, providers ('a', 'b')" in text
    assert text.splitlines()[-1] == "high_precision:native: 2, torch:rowwise: 1"
    text = loka("plan", "explain", "over.mlp.2", "-p", files / "t.json", "--per-site", "over.mlp.2:max_mere=0.01")
    assert "limits of this site: error <= 0.01, speed-up >= 1.05" in text
    for wrong, words in (("over", "PATTERN:NAME=VALUE"), ("a:max_mere=x", "'x' is no number"), ("a:b=1", "'b'")):
        assert words in loka("plan", "show", files / "t.json", "--per-site", wrong, code=2)


def test_plan_explain_of_an_unknown_site_names_the_known_ones(files):
    text = loka("plan", "explain", "over.mlp.3", "-p", files / "p.json", code=2)
    assert "no site 'over.mlp.3'" in text
    assert "over.mlp.2#0" in text


def test_plan_diff(files):
    make_plan(TABLE, max_mere=0.05).save(files / "q.json")
    text = loka("plan", "diff", files / "p.json", files / "q.json", code=1)
    assert "2 of 3 GEMMs differ" in text
    line = next(line for line in text.splitlines() if "over" in line)
    assert line.split()[:4] == ["over.mlp.2#0", "forward", "torch:rowwise", "high_precision:native"]
    assert "error 0.0955 > 0.05" in line
    assert "thresholds: error <= 0.2, speed-up >= 1.05 -> thresholds: error <= 0.05, speed-up >= 1.05" in text
    assert "0 of 3 GEMMs differ" in loka("plan", "diff", files / "p.json", files / "t.json")


@pytest.mark.parametrize("command", [("table", "show"), ("plan", "show")])
@pytest.mark.parametrize("content", ["{", "[]", '{"format": "else"}', '{"version": 1}'])
def test_damaged_files_are_one_line_and_status_2(tmp_path, command, content):
    (tmp_path / "bad.json").write_text(content)
    text = loka(*command, tmp_path / "bad.json", code=2)
    assert text.startswith("error: ")
    assert "bad.json" in text
    assert "Traceback" not in text


def test_wrong_kind_missing_file_and_bad_threshold(files):
    assert 'no "loka_compile table" file' in loka("table", "show", files / "p.json", code=2)
    assert "does not exist" in loka("table", "show", files / "none.json", code=2)
    assert "max_mere" in loka("plan", "show", files / "t.json", "--max-mere", "-1", code=2)


def test_help_lists_the_commands():
    text = loka("--help")
    assert "table" in text
    assert "plan" in text


def test_empty_plan_shows(tmp_path):
    Plan([]).save(tmp_path / "p.json")
    assert "empty plan" in loka("plan", "show", tmp_path / "p.json")


def test_piped_output_is_not_cut(files):
    """A pipe has no width: long lines must come whole. In a process of its own, as users run it."""
    command = [sys.executable, "-c", "from loka_compile.cli import app; app()", "table", "show", "--all"]
    done = subprocess.run([*command, str(files / "t.json")], capture_output=True, text=True, check=True)
    assert "K must be a multiple of 128" in done.stdout
    assert "\x1b[" not in done.stdout
