"""The root shows the architecture by links, and nothing depends on them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINKS = ("passes", "lowering", "kernels")
#: Lines that a file of the package may have; the rule of thumb is 100 to 300.
LIMIT = 400


@pytest.mark.parametrize("name", LINKS)
def test_root_entry_is_a_relative_link_into_the_package(name):
    link = ROOT / name
    assert link.is_symlink()
    assert os.readlink(link) == f"loka_compile/{name}"
    assert (link / "__init__.py").samefile(ROOT / "loka_compile" / name / "__init__.py")


@pytest.mark.parametrize("name", LINKS)
def test_git_stores_a_link_and_no_copy(name):
    listed = subprocess.run(
        ["git", "ls-files", "--stage", "--", name, f"{name}/"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert [line.split()[0] for line in listed] == ["120000"]


def test_nothing_imports_through_the_links():
    pattern = re.compile(rf"^\s*(?:from|import) (?:{'|'.join(LINKS)})\b", re.MULTILINE)
    offenders = [
        path for path in sources("loka_compile", "tests", "examples", "benchmarks") if pattern.search(path.read_text())
    ]
    assert offenders == []


def test_works_without_the_links(tmp_path):
    """A copy without them imports, and finds every module of the three rooms."""
    (tmp_path / "loka_compile").symlink_to(ROOT / "loka_compile")
    code = (
        "import importlib, pkgutil, loka_compile.passes, loka_compile.lowering\n"
        "for room in (loka_compile.passes, loka_compile.lowering):\n"
        "    for module in pkgutil.iter_modules(room.__path__, room.__name__ + '.'):\n"
        "        importlib.import_module(module.name)\n"
        "print(loka_compile.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "loka_compile" / "__init__.py")


def test_every_package_folder_is_a_package():
    """setuptools finds packages by their ``__init__.py``; a folder without one would be missing from the wheel."""
    folders = {path.parent for path in sources("loka_compile")}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


def test_files_are_short():
    long = {path.name: n for path in sources("loka_compile") if (n := len(path.read_text().splitlines())) > LIMIT}
    assert long == {}, f"split these, or move a second idea out: {long}"


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
