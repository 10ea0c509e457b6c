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
                    mere_by_row=0.096,
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
                            "0.0951..0.0959", "0.0960", "2.0", "8.0", "20.0", "2.00"]  # fmt: skip
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
    assert next(line.split()[-1] for line in text.splitlines() if "torch:rowwise " in line) == "chosen"
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


def test_plan_explain_of_an_unknown_site_names_the_known_ones(files):
    text = loka("plan", "explain", "over.mlp.3", "-p", files / "p.json", code=2)
    assert "no site 'over.mlp.3'" in text
    assert "over.mlp.2#0" in text


def test_plan_diff(files):
    make_plan(TABLE, max_mere=0.05).save(files / "q.json")
    text = loka("plan", "diff", files / "p.json", files / "q.json", code=1)
    assert "2 of 3 GEMMs differ" in text
    line = next(line for line in text.splitlines() if "over" in line)
    assert line.split() == ["over.mlp.2#0", "forward", "torch:rowwise", "high_precision:native"]
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
