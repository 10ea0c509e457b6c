"""Files and passes that are wrong: each with an error of its own that says what, where, and what to do."""

import json
import sys

import pytest
import torch
from helpers_backend import Watch, close, plan_for
from models_backend import Plain, Tower, exact, mods_of

import loka_compile
from loka_compile import backend
from loka_compile._compat import versions
from loka_compile.errors import (
    ConfigError,
    CorruptFileError,
    DuplicateNameError,
    PassError,
    StaleTableError,
    UnknownNameError,
    UnsupportedTorchError,
)
from loka_compile.passes.base import Pass, Tier
from loka_compile.passes.manager import OUR_ORIGIN
from loka_compile.plan import Plan
from loka_compile.table import Header, Measurement, Table

X = torch.randn(8, 48)


def error_of(model, x=X, **options):
    compiled = torch.compile(model, backend="loka", options=options)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        compiled(x)
    return caught.value.inner_exception


def header(**changes):
    found = {"layers.0#0": (96, 48), "layers.1#0": (64, 96)}
    return Header(**{"target": "h200", "device": "cpu", "torch": torch.__version__, "fingerprint": found, **changes})


def table(**changes):
    rows = [
        Measurement(site, "forward", 8, 8, *shape, "float32", "emulated", "rowwise", 1.0, 1.0, 9.0, mere=0.01)
        for site, shape in (("layers.0#0", (96, 48)), ("layers.1#0", (64, 96)))
    ]
    return Table(header(**changes), rows)


# ------------------------------------------------------------------ table and plan files
def test_the_table_that_fits_is_used(no_codegen):
    """What the tests below damage works as it is."""
    watch = Watch()
    with torch.no_grad():
        torch.compile(Plain(), backend="loka", options={"table": table(), "target": "h200"})(X)
    assert watch.last.counts() == {"emulated:rowwise": 2}


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"fingerprint": {"layers.0#0": (96, 48)}}, ["layers.1#0", "[64, 96]", "not in it"]),
        ({"fingerprint": {"layers.0#0": (96, 32), "layers.1#0": (64, 96)}}, ["layers.0#0", "[96, 32]", "[96, 48]"]),
        ({"target": "b200"}, ["target", "b200", "h200"]),
        ({"target": ""}, ["target", "none", "h200"]),
    ],
    ids=["site missing", "other sizes", "other target", "no target"],
)
@pytest.mark.parametrize("what", ["table", "table file", "plan", "plan file"])
def test_table_or_plan_of_something_else(changes, parts, what, tmp_path):
    """The text lists what differs, and says what to do."""
    stale = table(**changes)
    given = stale if "table" in what else loka_compile.make_plan(stale)
    if "file" in what:
        given.save(tmp_path / "it.json")
        given = tmp_path / "it.json"
    error = error_of(Plain(), target="h200", **{what.split()[0]: given})
    assert type(error) is StaleTableError
    for part in (*parts, "Measure again"):
        assert part in str(error), str(error)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"torch": "2.0.1"}, ["torch", "2.0.1", torch.__version__]),
        ({"device": "NVIDIA H100"}, ["device", "NVIDIA H100", "cpu"]),
        ({"target": "h200"}, ["target", "h200", "none"]),
        ({"libraries": {"deepgemm": "sgl-deep-gemm 9.9"}}, ["library", "deepgemm", "9.9"]),
    ],
    ids=["other torch", "other device", "made for a target", "other library"],
)
@pytest.mark.parametrize("what", ["table", "plan"])
def test_table_or_plan_of_another_machine(changes, parts, what):
    """Where the plan is not for another device, it must have been made on one like this."""
    stale = table(**{"target": "", **changes})
    error = error_of(Plain(), **{what: stale if what == "table" else loka_compile.make_plan(stale)})
    assert type(error) is StaleTableError
    assert all(part in str(error) for part in parts), str(error)


DAMAGE = {
    "cut short": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "not JSON": lambda text: "# a table\n",
    "another document": lambda text: '{"hello": "world"}',
    "a list": lambda text: "[]",
    "binary": lambda text: "\0\x01\x02",
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("what", ["table", "plan"])
def test_corrupt_files(what, damage, tmp_path):
    path = tmp_path / f"{what}.json"
    (table() if what == "table" else loka_compile.make_plan(table())).save(path)
    path.write_text(DAMAGE[damage](path.read_text()))
    error = error_of(Plain(), target="h200", **{what: str(path)})
    assert type(error) is CorruptFileError
    assert str(path) in str(error)


@pytest.mark.parametrize("what", ["table", "plan"])
def test_files_of_another_format_version(what, tmp_path):
    path = tmp_path / "it.json"
    (table() if what == "table" else loka_compile.make_plan(table())).save(path)
    document = json.loads(path.read_text())
    document["version"] = 99
    path.write_text(json.dumps(document))
    error = error_of(Plain(), target="h200", **{what: path})
    assert type(error) is StaleTableError
    assert "99" in str(error)


def test_plan_file_with_an_unknown_role(tmp_path):
    path = tmp_path / "plan.json"
    plan_for({"layers.0#0 forward": "emulated:rowwise"}).save(path)
    path.write_text(path.read_text().replace('"forward"', '"sideways"'))
    error = error_of(Plain(), plan=path)
    assert type(error) is CorruptFileError
    assert "sideways" in str(error)
    assert "layers.0#0" in str(error)


def test_plan_and_table_swapped(tmp_path):
    table().save(tmp_path / "table.json")
    loka_compile.make_plan(table()).save(tmp_path / "plan.json")
    for options in ({"plan": tmp_path / "table.json"}, {"table": tmp_path / "plan.json"}):
        error = error_of(Plain(), target="h200", **options)
        assert type(error) is CorruptFileError
        assert "loka_compile" in str(error)


# ------------------------------------------------------------------ a user's own pass
@pytest.fixture
def register():
    names = []

    def add(fn, name="mine", **where):
        loka_compile.register_pass(fn, name=name, **where)
        names.append(name)

    yield add
    for name in names:
        loka_compile.unregister_pass(name)


def raises(gm, ctx):
    raise KeyError("lost")


def deletes_what_is_used(gm, ctx):
    linear = next(n for n in gm.graph.nodes if "linear" in str(n.target))
    with gm.graph.inserting_before(linear):
        late = gm.graph.call_function(torch.relu, (linear,))  # reads the linear before it is computed
    linear.args = (late, *linear.args[1:])
    return loka_compile.Changes([loka_compile.Match("x", "x")])


def calls_nonsense(gm, ctx):
    next(n for n in gm.graph.nodes if "linear" in str(n.target)).target = "no function"
    return loka_compile.Changes([loka_compile.Match("x", "x")])


def returns_nothing(gm, ctx):
    return None


def drops_an_output(gm, ctx):
    output = next(n for n in gm.graph.nodes if n.op == "output")
    output.args = ((*output.args[0], output.args[0][0]),)
    return loka_compile.Changes([loka_compile.Match("x", "x")])


def changes_dtype(gm, ctx):
    output = next(n for n in gm.graph.nodes if n.op == "output")
    (value,) = output.args[0]
    with gm.graph.inserting_before(output):
        half = gm.graph.call_method("half", (value,))
    output.args = ((half,),)
    return loka_compile.Changes([loka_compile.Match("x", "x")])


def changes_shape(gm, ctx):
    output = next(n for n in gm.graph.nodes if n.op == "output")
    (value,) = output.args[0]
    with gm.graph.inserting_before(output):
        flat = gm.graph.call_method("unsqueeze", (value, 0))
    output.args = ((flat,),)
    return loka_compile.Changes([loka_compile.Match("x", "x")])


def changes_the_width(gm, ctx):
    output = next(n for n in gm.graph.nodes if n.op == "output")
    (value,) = output.args[0]
    with gm.graph.inserting_before(output):
        twice = gm.graph.call_function(torch.cat, ([value, value], -1))
    output.args = ((twice,),)
    return loka_compile.Changes([loka_compile.Match("x", "x")])


def breaks_the_shapes(gm, ctx):
    linear = next(n for n in gm.graph.nodes if "linear" in str(n.target))
    with gm.graph.inserting_after(linear):
        wrong = gm.graph.call_function(torch.matmul, (linear, linear))
    linear.replace_all_uses_with(wrong, delete_user_cb=lambda user: user is not wrong)
    return loka_compile.Changes([loka_compile.Match("x", "x")])


def leaves_an_op_without_a_kernel(gm, ctx):
    node = next(n for n in gm.graph.nodes if "relu" in str(n.target))
    with gm.graph.inserting_after(node):
        new = gm.graph.call_function(torch.ops.loka.no_kernel.default, (node.args[0],))
    node.replace_all_uses_with(new)
    gm.graph.erase_node(node)
    return loka_compile.Changes([loka_compile.Match("x", "x")])


WRONG_PASSES = [
    (raises, ["KeyError", "lost", "test_bad_input.py:"]),
    (deletes_what_is_used, ["invalid graph", "linear"]),
    (calls_nonsense, ["invalid graph", "Node x", "no function"]),
    (returns_nothing, ["must return Changes", "NoneType"]),
    (drops_an_output, ["outputs"]),
    (changes_dtype, ["output 0", "float32", "float16"]),
    (changes_shape, ["output 0", "(8, 64)", "(1, 8, 64)"]),
    (changes_the_width, ["output 0", "(8, 64)", "(8, 128)"]),
    (breaks_the_shapes, ["no longer runs"]),
]


@pytest.mark.parametrize(("fn", "parts"), WRONG_PASSES, ids=[fn.__name__ for fn, _ in WRONG_PASSES])
def test_a_pass_that_goes_wrong_is_named(fn, parts, register):
    """With the pass's name, and the node where that is known; the next compile without it works."""
    register(fn, name="users_pass")
    error = error_of(Plain(), table="off")
    assert type(error) is PassError, repr(error)
    for part in ("users_pass", *parts):
        assert part in str(error), str(error)


@pytest.mark.parametrize("options", [{"table": "off"}, {"table": "auto"}, {"plan": Plan([]), "freeze_weights": True}])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("fn", "parts"), WRONG_PASSES[5:], ids=[fn.__name__ for fn, _ in WRONG_PASSES[5:]])
def test_a_pass_of_ours_that_goes_wrong_is_found_too(fn, parts, training, options, monkeypatch):
    """Ours are checked together, before anything is compiled."""
    ours = Pass("ours", Tier.EXACT, fn, OUR_ORIGIN)
    monkeypatch.setattr(backend, "snapshot", lambda config: [ours])
    with torch.set_grad_enabled(training):
        error = error_of(Plain(), **options)
    assert type(error) is PassError, repr(error)
    for part in ("ours", *parts):
        assert part in str(error), str(error)


def test_after_a_failed_pass_everything_works(register, no_codegen):
    tower = Tower((13, 256))
    register(raises, name="users_pass")
    error_of(tower, torch.randn(4, 13), table="off")
    loka_compile.unregister_pass("users_pass")
    loka_compile.register_pass(lambda gm, ctx: loka_compile.Changes(), name="users_pass")
    x = torch.randn(4, 13)
    close(torch.compile(tower, backend="loka", options={"table": "off"})(x), mods_of(exact(tower))(x), 1e-5)


def test_an_operator_without_a_kernel_is_an_error(register):
    """No loka:: operator may be left without a lowering after the last pass."""
    library = torch.library.Library("loka", "FRAGMENT")
    library.define("no_kernel(Tensor x) -> Tensor")
    library.impl("no_kernel", lambda x: torch.empty_like(x), "Meta")
    try:
        register(leaves_an_op_without_a_kernel, name="users_pass")
        error = error_of(Plain(), table="off", mods="none")
        while error.__cause__ is not None and "no_kernel" not in str(error):
            error = error.__cause__
        assert "loka.no_kernel" in str(error)
        assert "without a kernel" in str(error)
    finally:
        library._destroy()


def test_duplicate_and_misplaced_passes(register):
    register(lambda gm, ctx: loka_compile.Changes(), name="users_pass")
    for name in ("users_pass", "block_norm"):
        with pytest.raises(DuplicateNameError, match=name):
            loka_compile.register_pass(lambda gm, ctx: loka_compile.Changes(), name=name)
    with pytest.raises(UnknownNameError, match=r"'nowhere'.*block_norm"):
        loka_compile.register_pass(raises, name="other", after="nowhere")
    with pytest.raises(ConfigError, match="before= or after="):
        loka_compile.register_pass(raises, name="other", before="sites", after="block_norm")
    with pytest.raises(UnknownNameError, match="tier 'fast'"):
        loka_compile.register_pass(raises, name="other", tier="fast")


# ------------------------------------------------------------------ the machine
def test_a_kernel_library_that_fails_to_import_is_skipped(monkeypatch, no_codegen):
    """Whatever its import raises: other providers work, and the reason is in the report."""
    from loka_compile.lowering.providers import available_providers

    for name in ("torchao", "deep_gemm", "mslk", "fbgemm_gpu"):
        monkeypatch.setitem(sys.modules, name, None)  # its import raises ModuleNotFoundError
    reasons = available_providers()
    assert reasons["emulated"] is None
    assert reasons["high_precision"] is None
    for name in ("torchao", "deepgemm", "fbgemm"):
        assert reasons[name], name
    watch = Watch()
    choices = {"layers.0#0 forward": "deepgemm:blockwise", "layers.1#0 forward": "emulated:rowwise"}
    with torch.no_grad():
        torch.compile(Plain((128, 256, 128)), backend="loka", options={"plan": plan_for(choices)})(torch.randn(64, 128))
    fallbacks = {g.gemm.site: g.fallback for g in watch.last.gemms}
    assert "deepgemm:blockwise was planned, but" in fallbacks["layers.0#0"]
    assert fallbacks["layers.1#0"] == ""
    assert fallbacks["layers.0#0"] in str(watch.last).replace("\n", " ") or "deepgemm" in str(watch.last)


@pytest.mark.parametrize("version", ["2.10.1", "2.15.0", "3.0", "nonsense"])
def test_unsupported_torch(version, monkeypatch):
    with pytest.raises(UnsupportedTorchError, match=r"2\.11.*2\.15"):
        versions.check_torch(version)
    monkeypatch.setattr("loka_compile.backend.check_torch", lambda: versions.check_torch(version))
    error = error_of(Plain())
    assert type(error) is UnsupportedTorchError
    assert version in str(error)


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.14.1a0+git123"])
def test_supported_torch(version):
    versions.check_torch(version)


def test_errors_are_loka_errors():
    """One base class to catch them by; each also is what Python would call it."""
    from loka_compile import errors

    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, Exception)]
    assert all(issubclass(c, errors.LokaError) for c in classes)
    assert issubclass(ConfigError, ValueError)
    assert issubclass(UnsupportedTorchError, ImportError)
