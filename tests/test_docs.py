"""The documentation says what is so: options, passes, reasons, links, paths, commands, and the examples run."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import loka_compile
from loka_compile.config import LokaConfig
from loka_compile.passes import DEFAULT_PASSES
from loka_compile.passes.manager import run_passes
from loka_compile.passes.registry import snapshot
from loka_compile.report import Report

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
TREES = ("loka_compile/", "tests/", "examples/", "benchmarks/", "docs/", ".ci/")

pages = pytest.mark.parametrize("page", PAGES, ids=NAMES)


def rows(page: str, first: str) -> list[list[str]]:
    """The body of the table whose first head cell is ``first``."""
    text = (ROOT / page).read_text()
    match = re.search(rf"^\| {re.escape(first)} \|.*\n\|[-| ]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert match, f"{page} has no table that starts with {first!r}"
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in match[1].splitlines()]


def fences(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


# ------------------------------------------------------------------------------------------------ tables of facts
def test_options():
    def written(value: object) -> str:
        return f'"{value}"' if isinstance(value, str) else repr(value)

    documented = {name.strip("`"): default.strip("`") for name, default, *_ in rows("docs/options.md", "option")}
    fields = {f.name: written(f.default) for f in dataclasses.fields(LokaConfig)}
    assert documented == fields
    assert list(documented) == list(fields)


def test_passes():
    documented = [(name.strip("`"), tier) for name, tier, _ in rows("docs/passes.md", "pass")]
    assert documented == [(p.name, p.tier.value) for p in DEFAULT_PASSES]


def test_every_documented_refusal_is_one_of_the_code():
    source = " ".join(path.read_text() for path in (ROOT / "loka_compile/passes").glob("*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # texts that go on in the next line
    reasons = [reason.strip("`") for _, reason in rows("docs/passes.md", "what was found")]
    assert len(reasons) > 10
    assert [reason for reason in reasons if reason not in source] == []


def rewritten(graph: torch.fx.Graph | torch.fx.GraphModule) -> Report:
    """Run all passes over a captured graph."""
    gm = graph if isinstance(graph, torch.fx.GraphModule) else torch.fx.GraphModule({}, graph)
    report = Report()
    run_passes(gm, snapshot(LokaConfig()), LokaConfig(), report)
    return report


@pytest.mark.parametrize(
    ("kinds", "example"), [(kinds, example) for kinds, example, _ in rows("docs/passes.md", "chain")]
)
def test_every_documented_chain_is_found_and_called_so(kinds, example):
    first, *definition = re.findall(r"`([^`]+)`", example)
    assert definition in ([], ["y = linear(x)"])

    def model(x, r, w):
        scope = {
            "silu": F.silu,
            "sigmoid": torch.sigmoid,
            "layer_norm": lambda x: F.layer_norm(x, (8,)),
            "rms_norm": lambda x: F.rms_norm(x, (8,)),
            "linear": lambda x: F.linear(x, w),
        }
        y = {"y": F.linear(x, w)} if definition else {}
        return eval(first, {**scope, **y, "x": x, "r": r})

    report = rewritten(torch.fx.Tracer().trace(model))
    found = {match.kind for match in report.matches}
    assert found, report.refusals
    assert found <= set(re.findall(r"`([^`]+)`", kinds))


def test_extras():
    declared = re.findall(
        r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text().split("[project.entry-points")[0], re.MULTILINE
    )
    for page in PAGES:
        for extras in re.findall(r'pip install "?(?:loka-compile|\.)\[([\w,]+)\]', page.read_text()):
            assert set(extras.split(",")) <= set(declared), page


def test_measurements_in_the_readme_are_those_of_the_results():
    results = json.loads((ROOT / "benchmarks/results/chain_h200.json").read_text())
    measured = {case["case"]: case["us"] for case in results["cases"]}
    for what, width, *shown in rows("README.md", "what"):
        us = measured[f"{what} 4096x{width}"]
        a, b, loka = us["A"], us["B"], us["E all FP8"]
        assert shown == [f"{a:.0f}", f"{b:.0f}", f"{loka:.0f}", f"{a / loka:.2f}", f"{b / loka:.2f}"]


# ------------------------------------------------------------------------------------------------ what pages point to
@pages
def test_links(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert anchor in {slug(h) for h in headings}, f"{page.name} links to {target}"


@pages
def test_paths(page):
    """Files and tests named in code font."""
    for name in re.findall(r"`([^`\s]+)`", page.read_text()):
        if name.startswith(TREES) and not re.search(r"[<>*{]", name):
            path, _, test = name.partition("::")
            assert (ROOT / path).exists(), f"{page.name} names {name}"
            assert not test or f"def {test.split('::')[-1]}(" in (ROOT / path).read_text(), f"{page.name} names {name}"


@pages
def test_commands(page):
    """``make`` targets, modules to run, and scripts."""
    text = page.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for block in re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL) + re.findall(r"`([^`\n]+)`", text):
        for target in re.findall(r"\bmake ([a-z-]+)", block):
            assert target in targets, f"{page.name}: make {target}"
        for module in re.findall(r"python3? -m ((?:examples|benchmarks)[\w.]*)", block):
            assert importlib.util.find_spec(module), f"{page.name}: {module}"
        for script in re.findall(r"python3? ((?:examples|benchmarks)/[\w/]+\.py)", block):
            assert (ROOT / script).is_file(), f"{page.name}: {script}"


def test_readme_names_every_page():
    text = (ROOT / "README.md").read_text()
    assert [name for name in NAMES if name != "README.md" and f"({name})" not in text] == []


# ------------------------------------------------------------------------------------------------ examples
def test_the_example_of_the_readme_runs():
    """As it stands, but smaller."""
    (code, *_) = fences("README.md", "python")
    for large, small in (("4096", "64"), ("1024", "64"), ("512", "32"), ("range(25)", "range(22)")):
        assert large in code
        code = code.replace(large, small)
    scope: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), scope)
    report = loka_compile.reports()[-1]
    assert "torch:" not in str(report.plan), "nothing pays at this size"
    assert len(report.plan) == 8
    assert len(report.gemms) == 8
    assert report.chains == {"0#0": "linear-norm-swish", "3#0": "linear-norm-swish"}


def test_what_the_readme_does_with_a_report_exists():
    (_, code, *_) = fences("README.md", "python")
    for name in re.findall(r"report\.(\w+)", code):
        assert hasattr(loka_compile.Report(), name), name


def test_the_pass_of_the_docs_runs():
    (code,) = fences("docs/passes.md", "python")
    exec(compile(code, "passes.md", "exec"), {})
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)), torch.randn(2, 8)

    def backend(gm, example_inputs):
        report = rewritten(gm)
        assert report.count("relu6_to_hard_swish") == 1
        assert report.chains == {"0#0": "linear-norm-swish"}
        return gm

    try:
        y = torch.compile(lambda x: F.relu6(model(x)), backend=backend, fullgraph=True)(x)
    finally:
        loka_compile.unregister_pass("relu6_to_hard_swish")
    product = x @ model[0].weight.T
    expected = F.hardswish(product * torch.rsqrt(product.square().mean(-1, keepdim=True) + 1e-5))
    torch.testing.assert_close(y, expected)
