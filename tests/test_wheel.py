"""The wheel, by way of the source distribution, in an environment that holds nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built as ``python -m build`` does, from a copy, so that the checkout stays clean."""
    pytest.importorskip("build", reason="needs the extra 'dev'")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*cache")
    for name in ("loka_compile", "tests", "examples"):
        shutil.copytree(ROOT / name, source / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for name in ("passes", "lowering", "kernels"):
        (source / name).symlink_to(f"loka_compile/{name}")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory) -> Path:
    """An empty environment with the wheel alone; returns its site-packages."""
    folder = tmp_path_factory.mktemp("env")
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    install = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--no-compile", "--no-index"]
    done = subprocess.run([*install, "--target", str(site), str(wheel)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return site


def test_one_top_level_package(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert len(tops) == 2
    assert "loka_compile" in tops
    assert {top for top in tops if top.endswith(".dist-info")}


def test_holds_every_file_of_the_package(wheel):
    """Modules, shipped data and the marker of the types."""
    names = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("loka_compile/")}
    wanted = {
        str(p.relative_to(ROOT))
        for p in (ROOT / "loka_compile").rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    }
    assert names == wanted
    assert "loka_compile/py.typed" in names
    assert "loka_compile/data/h200.csv" in names


def test_metadata(wheel):
    archive = zipfile.ZipFile(wheel)
    (info,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
    assert "loka = loka_compile.backend:loka" in archive.read(f"{info}/entry_points.txt").decode()
    metadata = archive.read(f"{info}/METADATA").decode()
    for line in (
        "Name: loka-compile",
        "Requires-Python: >=3.10",
        "Requires-Dist: torch<2.15,>=2.11",
        "License-Expression: BSD-3-Clause",
    ):
        assert line in metadata
    for extra in ("torchao", "fbgemm", "deepgemm", "models", "dev"):
        assert f"Provides-Extra: {extra}" in metadata


def test_imports_from_anywhere(environment):
    """From ``/``, in the empty environment: no torch there, and none is needed for what needs none."""
    python = environment.parents[2] / "bin" / "python"
    code = "import loka_compile, loka_compile.table; print(loka_compile.__file__, loka_compile.LokaConfig().block_size)"
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run([python, "-c", code], cwd="/", env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(environment / "loka_compile" / "__init__.py"), "256"]


def test_dynamo_finds_the_backend(environment):
    """With this environment's torch behind it on the path; the package's own source is out of sight."""
    code = (
        "import sys, torch._dynamo; assert 'loka' in torch._dynamo.list_backends()\n"
        "assert 'loka_compile' not in sys.modules\n"
        "from torch._dynamo.backends.registry import lookup_backend; lookup_backend('loka')\n"
        "print(sys.modules['loka_compile'].__file__)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(environment), str(Path(torch.__file__).parents[1])))}
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd="/", env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(environment / "loka_compile" / "__init__.py")
