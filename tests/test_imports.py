"""Who may import whom: kernels <- lowering <- backend; passes know neither. Read from the source, nothing is run."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "loka_compile"
#: Where the environment may be read, and why. Everything else is an option.
READS_ENVIRONMENT = {
    "store.py",  # LOKA_CACHE_DIR: where tables are cached between runs
    "_compat/kernel_cache.py",  # Triton's own variables, handed on to the processes that build kernels
}

#: Modules that put the rooms together; no room may know them.
SPINE = {
    "auto",
    "backend",
    "cli",
    "compile_fx",
    "drift",
    "eager_mods",
    "explanation",
    "frozen",
    "planning",
}


def modules(under: str = "") -> list[Path]:
    found = sorted((PACKAGE / under).rglob("*.py"))
    assert found, f"no source in loka_compile/{under}"
    return found


def imported(path: Path, *, lazily: bool = True) -> set[str]:
    """Dotted names that a file imports at run time. ``lazily``: within functions as well."""
    tree = ast.parse(path.read_text())
    names: set[str] = set()
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            stack.extend(node.orelse)
            continue
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not lazily:
            continue
        stack.extend(ast.iter_child_nodes(node))
    return names


def rooms(path: Path, **kwargs: bool) -> set[str]:
    """First names below ``loka_compile`` that a file imports: "passes", "plan", ..."""
    return {name.split(".")[1] for name in imported(path, **kwargs) if name.startswith("loka_compile.")}


def outside(path: Path, **kwargs: bool) -> set[str]:
    """Top-level packages other than ours and the standard library."""
    tops = {name.split(".")[0] for name in imported(path, **kwargs)}
    return tops - sys.stdlib_module_names - {"loka_compile"}


def violations(under: str, forbidden: set[str]) -> dict[str, set[str]]:
    found = {str(path.relative_to(ROOT)): rooms(path) & forbidden for path in modules(under)}
    return {path: names for path, names in found.items() if names}


def test_kernels_import_torch_triton_and_kernels_only():
    for path in modules("kernels"):
        assert outside(path) <= {"torch", "triton"}, path
        assert rooms(path) <= {"kernels"}, path


def test_passes_know_no_kernel_no_library_and_no_plan():
    assert (
        violations("passes", SPINE | {"lowering", "kernels", "plan", "table", "costs", "probe", "sampling", "store"})
        == {}
    )


def test_passes_never_ask_for_the_device():
    for path in modules("passes"):
        assert "torch.cuda" not in path.read_text(), f"{path} reads the device"


def test_lowering_knows_nothing_of_what_calls_it():
    assert violations("lowering", SPINE | {"probe", "sampling", "store"}) == {}


def test_probe_knows_nothing_of_what_calls_it():
    assert violations("probe", SPINE) == {}


@pytest.mark.parametrize(
    "name",
    ["__init__", "config", "errors", "gemm", "jsonio", "plan", "store", "table",
     *(f"{room}/{path.stem}" for room in ("costs", "selection") for path in sorted((PACKAGE / room).glob("*.py")))],
)  # fmt: skip
def test_torch_free(name):
    """Importing them imports no library but numpy, which the cost surfaces are fitted with."""
    path = PACKAGE / f"{name}.py"
    assert outside(path, lazily=False) <= {"numpy"}
    # And what it imports of ours is torch-free as well.
    for module in imported(path, lazily=False):
        if module.startswith("loka_compile."):
            parts = module.split(".")[1:]
            candidates = [PACKAGE.joinpath(*parts[:n]).with_suffix(".py") for n in (1, 2)]
            for file in filter(Path.is_file, candidates):
                assert "torch" not in outside(file, lazily=False), f"{name} imports {file}"


def test_torch_free_modules_import_no_torch_later_either():
    """Of the planning modules, so that a plan can be computed where no torch is installed."""
    names = ("errors", "gemm", "jsonio", "plan", "store", "table")
    for path in [*(PACKAGE / f"{name}.py" for name in names), *modules("costs"), *modules("selection")]:
        assert "torch" not in outside(path), path


def test_the_environment_is_read_in_one_place():
    readers = set()
    for path in modules():
        nodes = ast.walk(ast.parse(path.read_text()))
        used = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
        if used & {"os.environ", "os.getenv", "os.environb"}:
            readers.add(str(path.relative_to(PACKAGE)))
    assert readers == READS_ENVIRONMENT


def test_kernel_libraries_are_imported_when_needed_only():
    """A broken wheel must not break ``import loka_compile``: their imports stand in functions, by name."""
    libraries = {"torchao", "mslk", "fbgemm_gpu", "deep_gemm", "tvm_ffi"}
    for path in modules():
        assert not outside(path, lazily=False) & libraries, path


def test_no_star_imports():
    for path in modules():
        assert not any(name.endswith(".*") for name in imported(path)), path


def test_no_public_name_is_that_of_a_module():
    """Importing a submodule puts it into the package under its name, where a function of that name would be hidden."""
    import loka_compile

    names = set(loka_compile.__all__) - {"__version__"}
    entries = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert names & entries == {"probe"}  # a package that can be called
