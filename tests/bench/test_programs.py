"""Programs that only a GPU runs call what is there: names and arguments of the package, as benchmarks/ uses them.

A parameter that was renamed broke a sweep there, and another went on setting a name that was gone, so that all of its
configurations were the same one; nobody noticed until the next run on a GPU.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = sorted((Path(__file__).parents[2] / "benchmarks").glob("*.py"))


def imported(tree: ast.Module) -> dict[str, Any]:
    """What a program imports from the package by name, wherever it does."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("loka_compile"):
            for alias in node.names:
                try:
                    value = getattr(importlib.import_module(node.module or ""), alias.name)
                except AttributeError:
                    value = importlib.import_module(f"{node.module}.{alias.name}")
                found[alias.asname or alias.name] = value
    return found


def calls(tree: ast.Module, names: dict[str, Any]) -> Iterator[tuple[ast.Call, Any]]:
    """Calls of what was imported, and of attributes of imported modules."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Name) and called.id in names:
            yield node, names[called.id]
        elif isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
            owner = names.get(called.value.id)
            if inspect.ismodule(owner) and hasattr(owner, called.attr):
                yield node, getattr(owner, called.attr)


def missing(tree: ast.Module, names: dict[str, Any]) -> Iterator[str]:
    """Attributes of imported modules that are read or set and not there: setting one that is gone changes nothing."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = names.get(node.value.id)
            if inspect.ismodule(owner) and not hasattr(owner, node.attr):
                yield f"line {node.lineno}: {owner.__name__} has no {node.attr}"


def wrong(node: ast.Call, function: Any) -> str:
    """What a call has that the function does not take, or ""."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return ""
    kinds = [p.kind for p in signature.parameters.values()]
    named = {k.arg for k in node.keywords if k.arg is not None}
    if inspect.Parameter.VAR_KEYWORD not in kinds and named - signature.parameters.keys():
        return f"no parameter {sorted(named - signature.parameters.keys())}"
    given = [a for a in node.args if not isinstance(a, ast.Starred)]
    positional = [k for k in kinds if k in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    if inspect.Parameter.VAR_POSITIONAL not in kinds and len(given) > len(positional):
        return f"takes {len(positional)} arguments by position"
    return ""


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_calls_what_is_there(program: Path) -> None:
    pytest.importorskip("triton")
    tree = ast.parse(program.read_text())
    names = imported(tree)
    assert list(missing(tree, names)) == []
    found = [
        f"line {node.lineno}: {reason}" for node, function in calls(tree, names) if (reason := wrong(node, function))
    ]
    assert found == []


def test_a_setting_that_is_gone_is_found() -> None:
    tree = ast.parse("from loka_compile.kernels import turn\nturn.BLOCK_OF_OLD = 3\nturn.turn(1, 2)\n")
    assert list(missing(tree, imported(tree))) == ["line 2: loka_compile.kernels.turn has no BLOCK_OF_OLD"]


def test_a_renamed_parameter_is_found() -> None:
    tree = ast.parse(
        "from loka_compile.kernels.cast import cast_transpose\n"
        "from loka_compile.kernels import turn\n"
        "cast_transpose(x, parts, dtype, with_both=True)\n"
        "cast_transpose(x, parts, dtype, with_qt=True)\n"
        "turn.turn(1, 2, 3, 4, 5, 6)\n"
    )
    found = [(node.lineno, wrong(node, function)) for node, function in calls(tree, imported(tree))]
    assert [line for line, reason in sorted(found) if reason] == [3, 5]
