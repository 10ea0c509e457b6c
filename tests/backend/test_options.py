"""``mode=`` and ``options=``: what is accepted, where it arrives, and what each wrong value is told."""

import dataclasses
import pathlib
import warnings
from pathlib import Path

import pytest
import torch
from helpers_backend import Watch, plan_for
from models_backend import Plain, Tower
from torch import nn

from loka_compile.config import LokaConfig
from loka_compile.errors import ConfigError, UnknownNameError, UnknownOptionError
from loka_compile.table import Header, Table

MODES = sorted(torch._inductor.list_mode_options())


def error_of(options=None, mode=None):
    """What a user gets from a compile with these options."""
    compiled = torch.compile(nn.Linear(4, 4), backend="loka", options=options, mode=mode)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        compiled(torch.ones(2, 4))
    return caught.value.inner_exception


WRONG = [
    ("mods", "some", ConfigError, ["'mods'", "'some'", "all", "none", "block_norm"]),
    ("mods", ("block_norm", "blocknorm"), UnknownNameError, ["Mod", "'blocknorm'", "block_norm", "hard_swish"]),
    ("mods", 3, ConfigError, ["'mods'", "3", "bias_removal"]),
    ("block_size", 100, ConfigError, ["'block_size'", "100", "power of two", "4096"]),
    ("block_size", 8, ConfigError, ["'block_size'", "8", "16"]),
    ("block_size", 8192, ConfigError, ["'block_size'", "8192", "4096"]),
    ("block_size", 256.0, ConfigError, ["'block_size'", "256.0"]),
    ("block_size", True, ConfigError, ["'block_size'", "True"]),
    ("remove_final_bias", 1, ConfigError, ["'remove_final_bias'", "1", "True or False"]),
    ("fuse", "no", ConfigError, ["'fuse'", "'no'", "True or False"]),
    ("residual_dtype", "bfloat16", ConfigError, ["'residual_dtype'", "'bfloat16'", '"model"', '"autocast"']),
    ("residual_dtype", None, ConfigError, ["'residual_dtype'", "None"]),
    ("table", "/nowhere/table.json", ConfigError, ["'table'", "/nowhere/table.json", "no such file", '"auto"']),
    ("table", None, ConfigError, ["'table'", "None", '"auto"']),
    ("table", 7, ConfigError, ["'table'", "7"]),
    ("plan", "/nowhere/plan.json", ConfigError, ["'plan'", "/nowhere/plan.json", "no such file"]),
    ("plan", {}, ConfigError, ["'plan'", "{}", "Plan"]),
    ("target", "h300", UnknownNameError, ["target", "'h300'", "h200"]),
    ("target", 200, ConfigError, ["'target'", "200", "h200"]),
    ("max_mere", -0.1, ConfigError, ["'max_mere'", "-0.1", ">= 0"]),
    ("max_mere", "0.2", ConfigError, ["'max_mere'", "'0.2'", "number"]),
    ("max_mere", float("nan"), ConfigError, ["'max_mere'", "nan"]),
    ("max_mere", True, ConfigError, ["'max_mere'", "True"]),
    ("min_speedup", 0, ConfigError, ["'min_speedup'", "0", "> 0"]),
    ("min_speedup", None, ConfigError, ["'min_speedup'", "None"]),
    ("providers", ("torch", "cutlass"), UnknownNameError, ["provider", "'cutlass'", "torch", "deepgemm", "emulated"]),
    ("providers", "torch", ConfigError, ["'providers'", "'torch'", "collection"]),
    ("providers", (1,), ConfigError, ["'providers'", "(1,)"]),
    ("per_site", {"a.*": {"max_mere": -1}}, ConfigError, ["per_site['a.*']['max_mere']", "-1", ">= 0"]),
    ("per_site", {"a.*": {"speed": 2}}, ConfigError, ["per_site['a.*']", "'speed'", "min_speedup"]),
    ("per_site", {"a.*": {"providers": ("cutlass",)}}, UnknownNameError, ["per_site['a.*']", "'cutlass'", "torch"]),
    ("disable_passes", ("no_pass",), UnknownNameError, ["pass", "'no_pass'", "disable_passes", "hard_swish"]),
    ("disable_passes", "hard_swish", ConfigError, ["'disable_passes'", "'hard_swish'", "collection"]),
    ("disable_passes", None, ConfigError, ["'disable_passes'", "None"]),
    ("auto_calls", 0, ConfigError, ["'auto_calls'", "0", ">= 1"]),
    ("auto_calls", 2.5, ConfigError, ["'auto_calls'", "2.5", "integer"]),
    ("auto_calls", True, ConfigError, ["'auto_calls'", "True"]),
    ("save_fp8", 1, ConfigError, ["'save_fp8'", "1", "True or False"]),
    ("freeze_weights", 1, ConfigError, ["'freeze_weights'", "1", "True or False"]),
    ("inspect", "yes", ConfigError, ["'inspect'", "'yes'", "True or False"]),
    ("mode", 1, ConfigError, ["'mode'", "1"]),
    ("mode", "fastest", ConfigError, ["'mode'", "'fastest'", "max-autotune", "reduce-overhead"]),
    # Neither ours nor Inductor's, or Inductor's with another type.
    ("blocksize", 256, UnknownOptionError, ["'blocksize'", "block_size", "torch._inductor.config"]),
    ("loka.blocksize", 256, UnknownOptionError, ["'loka.blocksize'", "block_size"]),
    ("triton.no_such", True, UnknownOptionError, ["'triton.no_such'"]),
    ("max_autotune", "yes", ConfigError, ["'max_autotune'", "bool", "str", "'yes'"]),
    ("max_autotune", lambda: True, ConfigError, ["'max_autotune'", "bool"]),
]


NAMES = [f"{name}={getattr(value, '__name__', repr(value)):.30}" for name, value, *_ in WRONG]


@pytest.mark.parametrize(("name", "value", "error", "parts"), WRONG, ids=NAMES)
def test_wrong_value_is_told_what_is_legal(name, value, error, parts):
    found = error_of({name: value})
    assert type(found) is error
    for part in parts:
        assert part in str(found), f"{part!r} is not in: {found}"


def test_every_option_has_a_wrong_value_above():
    assert {f.name for f in dataclasses.fields(LokaConfig)} <= {name for name, *_ in WRONG}


@pytest.mark.parametrize("table", ["off", Table(Header(), [])], ids=["off", "a table"])
def test_plan_and_table_contradict(table):
    found = error_of({"plan": plan_for({}), "table": table})
    assert type(found) is ConfigError
    assert "plan=" in str(found)
    assert "table=" in str(found)


def test_unknown_mode_of_torch_compile():
    found = error_of(mode="fastest")
    assert type(found) is ConfigError
    assert all(part in str(found) for part in ("'fastest'", "max-autotune", "reduce-overhead"))


@pytest.mark.parametrize("mode", MODES)
def test_mode_reaches_inductor_forward_and_backward(mode, no_codegen):
    """As for backend="inductor", in both compiles, though the backward is compiled when nothing is patched any more."""
    model = Plain()
    torch.compile(model, backend="loka", mode=mode)(torch.randn(4, 48)).sum().backward()
    wanted = torch._inductor.list_mode_options(mode)
    assert len(no_codegen.configs) == 2
    for config in no_codegen.configs:
        assert {name: config[name] for name in wanted} == wanted


def test_mode_as_an_option_and_inductors_own(no_codegen):
    """mode= and options= exclude each other in torch.compile, so mode is also an option; an explicit option wins."""
    options = {
        "mode": "max-autotune", "coordinate-descent-tuning": False, "loka.block_size": 128, "epilogue_fusion": False
    }  # fmt: skip
    model, watch = Tower((13, 384)), Watch()
    torch.compile(model, backend="loka", options=options)(torch.randn(4, 13)).sum().backward()
    for config in no_codegen.configs:
        assert config["max_autotune"] is True
        assert config["coordinate_descent_tuning"] is False
        assert config["epilogue_fusion"] is False
    sizes = [n.args[1] for n in no_codegen.graphs[0].graph.nodes if "block_norm" in str(n.target)]
    assert watch.last.count("block_norm") == 1
    assert sizes in ([128], [])  # decomposed by then, unless something keeps it whole


def test_default_mode_changes_nothing(no_codegen):
    torch.compile(Plain(), backend="loka", mode="default")(torch.randn(4, 48))
    assert no_codegen.configs[0]["max_autotune"] is False


def test_options_of_inductor_that_have_no_type(no_codegen):
    """An option whose default is None takes what it is given; a pass of the user's own runs before ours."""
    seen = []

    class Mine(torch._inductor.custom_graph_pass.CustomGraphPass):
        def __call__(self, graph):
            seen.append([str(n.target) for n in graph.nodes if "anchor" in str(n.target)])

        def uuid(self):
            return "mine"

    options = {"joint_custom_pre_pass": Mine(), "table": "off"}
    torch.compile(Tower((13, 256)), backend="loka", options=options)(torch.randn(4, 13))
    assert len(seen) == 1
    assert seen[0], "it ran after our pass had removed the anchors"


def test_options_of_inductor_give_no_warnings(no_codegen):
    """Nothing deprecated is used to validate them."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LokaConfig.from_options({"max_autotune": False, "triton.cudagraphs": False})


def test_the_callers_dict_is_left_alone(no_codegen):
    options = {"mods": ["block_norm"], "table": "off", "max_autotune": False}
    copy = dict(options)
    torch.compile(Tower((13, 256)), backend="loka", options=options)(torch.randn(4, 13))
    assert options == copy


def test_config_is_frozen_and_normalised():
    config = LokaConfig(mods={"hard_swish", "block_norm"}, providers=["torch"], disable_passes=[])
    assert config.active_mods == ("block_norm", "hard_swish")
    assert config == LokaConfig(mods=("block_norm", "hard_swish"), providers=("torch",))
    assert hash(config) == hash(LokaConfig(mods=("block_norm", "hard_swish"), providers=("torch",)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.block_size = 128


def test_a_pathlib_path_is_a_path(tmp_path, no_codegen):
    path = tmp_path / "plan.json"
    plan_for({"layers.0#0 forward": "emulated:rowwise"}).save(path)
    watch = Watch()
    with torch.no_grad():
        torch.compile(Plain(), backend="loka", options={"plan": Path(path)})(torch.randn(4, 48))
    assert watch.last.counts() == {"emulated:rowwise": 1, "high_precision:native": 1}


def test_defaults_are_those_of_the_issue():
    config = LokaConfig()
    assert (config.mods, config.block_size, config.table, config.plan) == ("all", 256, "auto", None)
    assert (config.max_mere, config.min_speedup, config.auto_calls) == (0.2, 1.05, 20)
    assert (config.target, config.providers, config.disable_passes, config.inspect) == (None, None, (), False)


def test_every_option_is_in_the_table_of_options():
    """One documented table: each field of the config has its comment in the source, and no two share one."""
    source = pathlib.Path(__import__("loka_compile.config", fromlist=["x"]).__file__).read_text().splitlines()
    for field in dataclasses.fields(LokaConfig):
        line = next(i for i, text in enumerate(source) if text.startswith(f"    {field.name}: "))
        assert source[line - 1].strip().startswith("#:"), field.name


def test_sums_of_a_residual_stream_are_read_by_what_reads_them():
    """Inductor writes a value to memory that is made of more tensors than this; a user's own number is kept."""
    import torch._inductor.config as inductor_config

    from loka_compile.lowering.hooks import Lowering, config_patches
    from loka_compile.report import Report

    lowering = Lowering(LokaConfig(), Report())
    assert config_patches(lowering, {})["realize_reads_threshold"] == 8
    assert "realize_reads_threshold" not in config_patches(lowering, {"realize_reads_threshold": 3})
    with inductor_config.patch(realize_reads_threshold=30):
        assert config_patches(lowering, {})["realize_reads_threshold"] == 30
