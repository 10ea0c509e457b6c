"""How the backend is found, the one warning, and what the log and the structured trace show."""

import json
import warnings
from pathlib import Path

import torch
from helpers_backend import python
from models_backend import Plain, Tower
from torch import nn

import loka_compile.mods_warning
from loka_compile import ModsWarning

OFF = {"table": "off"}
ROOT = Path(loka_compile.__file__).parents[1]

FOUND = """
import os, sys, traceback
import torch, torch._dynamo, torch._inductor.compile_fx
import importlib.metadata as metadata
from torch import nn

class Stop(Exception): pass

def stop(*args, **kwargs): raise Stop

def hide_installed():
    found = metadata.MetadataPathFinder.find_distributions
    metadata.MetadataPathFinder.find_distributions = lambda *a: (
        d for d in found(*a) if (d.metadata["Name"] or "").replace("_", "-") != "loka-compile")
    assert not metadata.entry_points(group="torch_dynamo_backends", name="loka")

def compile():
    assert torch._dynamo.list_backends(exclude_tags=()).count("loka") == 1
    import torch._inductor.compile_fx as module
    module.compile_fx = stop
    try:
        torch.compile(nn.Linear(4, 4), backend="loka")(torch.ones(2, 4))
    except Exception as error:
        assert type(getattr(error, "inner_exception", error)) is Stop, repr(error)
    else:
        raise AssertionError("Inductor was not reached")
    assert "loka_compile.backend" in sys.modules

def installed():
    assert not [m for m in sys.modules if m.startswith("loka_compile")]
    assert "loka" in torch._dynamo.list_backends(exclude_tags=())
    assert not [m for m in sys.modules if m.startswith("loka_compile")], "looking imports nothing of ours"
    compile()

def installed_and_imported():
    import loka_compile
    compile()

def checkout():
    hide_installed()
    import loka_compile
    compile()

def checkout_after_dynamo_looked():
    hide_installed()
    assert "loka" not in torch._dynamo.list_backends(exclude_tags=())
    import importlib
    import loka_compile
    importlib.reload(loka_compile)
    compile()

for case in (installed, installed_and_imported, checkout, checkout_after_dynamo_looked):
    child = os.fork()
    if child == 0:
        try:
            case()
            print(case.__name__, "ok", flush=True)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status == 0, case.__name__
"""


def test_the_backend_is_found():
    """Through its entry point without an import of ours; in a checkout by importing the package; both do not clash."""
    done = python(FOUND, env={"PYTHONPATH": str(ROOT)})
    names = ("installed", "installed_and_imported", "checkout", "checkout_after_dynamo_looked")
    assert done.stdout.splitlines() == [f"{name} ok" for name in names]


def test_the_installed_package_says_the_same():
    """The entry point that a wheel carries names the function that a checkout registers."""
    text = (ROOT / "pyproject.toml").read_text()
    assert 'loka = "loka_compile.backend:loka"' in text
    from importlib import metadata

    (entry,) = metadata.entry_points(group="torch_dynamo_backends", name="loka")
    assert entry.load() is loka_compile.loka


# ------------------------------------------------------------------ the one warning
def caught(monkeypatch, *steps):
    """ModsWarnings of these steps in what looks like a new process."""
    monkeypatch.setattr(loka_compile.mods_warning, "_warned", False)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for step in steps:
            step()
    return [w for w in found if issubclass(w.category, ModsWarning)]


def test_one_warning_per_process_says_everything(monkeypatch, no_codegen):
    """How many chains, which Mods, how many parameters are no longer used, that eager differs, and the way out."""
    x = torch.randn(4, 13)
    run = torch.compile(Tower(), backend="loka", options=OFF)
    (warning,) = caught(
        monkeypatch,
        lambda: run(x).sum().backward(),
        lambda: run(torch.randn(7, 13)),  # a second graph of the same model
        lambda: torch.no_grad()(run)(x),
        lambda: torch.compile(Tower((13, 256)), backend="loka", options=OFF)(x),  # another model
    )
    assert warning.filename == __file__  # the user's line, not one of ours or torch's
    text = str(warning.message)
    for part in ("2 chains", "bias_removal, block_norm, hard_swish", "2 biases", "4 norm parameters",
                 "no longer used", "differ from those of the eager model", 'options={"mods": "none"}'):  # fmt: skip
        assert part in text, text


def test_the_warning_names_only_the_mods_that_did_something(monkeypatch, no_codegen):
    x = torch.randn(4, 13)
    options = {"mods": ("hard_swish",), **OFF}
    (warning,) = caught(monkeypatch, lambda: torch.compile(Tower(), backend="loka", options=options)(x))
    text = str(warning.message)
    assert "Mods hard_swish:" in text
    assert "bias_removal" not in text
    assert "0 biases" in text


def test_no_warning_where_nothing_changes(monkeypatch, no_codegen):
    """Mods off, or nothing for them to do."""
    x = torch.randn(4, 48)
    assert not caught(
        monkeypatch,
        lambda: torch.compile(Tower((48, 256)), backend="loka", options={"mods": "none", **OFF})(x),
        lambda: torch.compile(Plain(), backend="loka", options=OFF)(x),
        lambda: torch.compile(nn.Linear(48, 1), backend="loka", options=OFF)(x),
    )


# ------------------------------------------------------------------ logs
def test_structured_trace_and_torch_logs(tmp_path):
    """TORCH_TRACE holds the report with the plan and each graph; TORCH_LOGS="+loka_compile" shows what is done."""
    code = """
        import pytest, torch
        from helpers_backend import Interpreted, plan_for
        from models_backend import Tower
        Interpreted().install(pytest.MonkeyPatch())
        options = {"plan": plan_for({"linears.0#0 forward": "emulated:rowwise"}), "inspect": True}
        torch.compile(Tower((16, 256)), backend="loka", options=options)(torch.randn(40, 16)).sum().backward()
    """
    done = python(code, env={"TORCH_TRACE": str(tmp_path), "TORCH_LOGS": "+loka_compile"})
    (log,) = tmp_path.glob("*.log")
    artifacts = {}
    name = None
    for line in log.read_text().splitlines():
        if line.startswith("\t"):
            if name is not None:
                artifacts[name].append(line[1:])
            continue
        start = line.find("{")
        entry = json.loads(line[start:]) if start >= 0 else {}
        name = entry.get("artifact", {}).get("name")
        if name is not None:
            artifacts.setdefault(name, [])
    report = json.loads("\n".join(artifacts["loka_report"]))
    assert report["counts"] == {"emulated:rowwise": 1, "high_precision:native": 4}
    assert report["gemms"][0]["decision"]["reason"] == "written by hand"
    assert {"loka_graph_before", "loka_graph_hard_swish", "loka_graph_joint"} <= set(artifacts)
    assert "layer_norm" in "\n".join(artifacts["loka_graph_before"])
    assert "loka.block_norm" in "\n".join(artifacts["loka_graph_hard_swish"])
    assert "pass block_norm: 1 matched" in done.stderr
    assert "lowered 1 of 5 GEMMs" in done.stderr
