"""Inductor's and AOTAutograd's caches: hits where nothing changed, misses where anything did, never a stale kernel."""

import dataclasses
import importlib.util
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers_backend import Watch, plan_for, python
from models_backend import Plain, Tower
from torch import nn
from torch._dynamo.utils import counters

import loka_compile
from loka_compile.config import LokaConfig
from loka_compile.lowering import hooks
from loka_compile.report import Report
from loka_compile.table import Header, Table


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("compile_cache")


@pytest.fixture
def compile_cache(compile_cache, folder, monkeypatch):
    """One folder for all tests here, which compile different models: headers are compiled once."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))


def compile_anew(model, x, **options):
    """Forget everything in memory, compile, run forward and backward; returns the output and (hits, misses)."""
    torch._dynamo.reset()
    counters.clear()
    y = torch.compile(model, backend="loka", options=options)(x)
    y.sum().backward()
    inductor, autograd = counters["inductor"], counters["aot_autograd"]
    assert not inductor["fxgraph_cache_bypass"]
    assert not autograd["autograd_cache_bypass"]
    hits = inductor["fxgraph_cache_hit"] + autograd["autograd_cache_hit"]
    return y.detach(), (hits, inductor["fxgraph_cache_miss"] + autograd["autograd_cache_miss"])


class EmbeddingAndNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(100, 32), nn.LayerNorm(32)

    def forward(self, index):
        return F.silu(self.norm(self.table(index)))


HIT, MISS = (3, 0), (0, 3)  # forward and backward graph, and AOTAutograd's entry for both


def test_hits_and_misses(compile_cache):
    """The same again hits; another plan, another block size, another pass of the user's misses, and then hits too."""
    model, x, watch = Tower((16, 256)), torch.randn(40, 16), Watch()
    plans = [plan_for({"linears.0#0 forward": f"emulated:{recipe}"}) for recipe in ("rowwise", "tensorwise")]
    first, found = compile_anew(model, x, plan=plans[0])
    assert found == MISS
    assert watch.last.from_cache is False
    assert watch.last.counts()["emulated:rowwise"] == 1

    again, found = compile_anew(model, x, plan=plans[0])
    assert found == HIT
    assert torch.equal(again, first)
    assert watch.last.from_cache is True
    assert "served from the compile cache" in str(watch.last)
    assert watch.last.plan is plans[0]
    assert watch.last.chains, "what the passes did is known all the same"

    other, found = compile_anew(model, x, plan=plans[1])
    assert found == MISS
    assert not torch.equal(other, first), "the kernel of the other plan was served"
    back, found = compile_anew(model, x, plan=plans[0])
    assert found == HIT
    assert torch.equal(back, first)

    smaller, found = compile_anew(model, x, plan=plans[0], block_size=128)
    assert found == MISS
    assert not torch.equal(smaller, first)


PASS = """
from loka_compile import Changes

def users_pass(gm, ctx):
    return Changes()  # {comment}
"""


def load(path, comment):
    path.write_text(PASS.format(comment=comment))
    spec = importlib.util.spec_from_file_location("users_module", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.users_pass


def test_the_source_of_a_users_pass_is_in_the_key(compile_cache, tmp_path):
    """It is read when compiling: editing the file is enough, whatever the pass does to this graph."""
    model, x = Tower((17, 256)), torch.randn(40, 17)
    found = []
    for comment in ("one", "one", "two", "one"):
        loka_compile.register_pass(load(tmp_path / "users_module.py", comment), name="users_pass")
        try:
            found.append(compile_anew(model, x, table="off")[1])
        finally:
            loka_compile.unregister_pass("users_pass")
    assert found == [MISS, HIT, MISS, HIT]


def test_a_second_process_gets_hits(compile_cache):
    """Nothing in the key depends on the process; the code that is served computes the same."""
    code = """
        import os
        import torch, torch._inductor.compile_fx
        from helpers_backend import Watch, plan_for
        from models_backend import Plain
        from torch._dynamo.utils import counters

        def compile():
            torch.manual_seed(0)
            watch = Watch()
            options = {"plan": plan_for({"layers.0#0 forward": "emulated:rowwise"})}
            y = torch.compile(Plain((18, 48)), backend="loka", options=options)(torch.randn(40, 18))
            y.sum().backward()
            print(counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"],
                  counters["aot_autograd"]["autograd_cache_hit"], watch.last.from_cache, float(y.double().sum()),
                  flush=True)

        for _ in range(2):
            if os.fork() == 0:
                compile()
                os._exit(0)
            assert os.wait()[1] == 0
    """
    first, second = (line.split() for line in python(code).stdout.splitlines())
    assert first[:4] == ["0", "2", "0", "False"]
    assert second[:4] == ["2", "0", "1", "True"]
    assert first[4] == second[4]


def test_sampling_is_never_cached(compile_cache):
    """The sampled version holds taps of one session: serving it to another would sample into nothing."""
    model, x = Plain((48, 96, 64)), torch.randn(32, 48)
    torch._dynamo.reset()
    counters.clear()
    options = {"target": "h200", "auto_calls": 5}
    for _ in range(2):
        torch._dynamo.reset()
        torch.compile(model, backend="loka", options=options)(x).sum().backward()
    assert counters["inductor"]["fxgraph_cache_hit"] == 0
    assert counters["aot_autograd"]["autograd_cache_hit"] == 0


def test_without_a_linear_layer_inductors_entries_serve(compile_cache):
    """What Inductor has compiled and cached serves loka, in forward and backward."""
    model = EmbeddingAndNorm()
    index = torch.randint(0, 100, (3, 8))
    want = torch.compile(model, backend="inductor")(index)
    want.sum().backward()
    torch._dynamo.reset()
    counters.clear()
    got = torch.compile(model, backend="loka")(index)
    got.sum().backward()
    assert torch.equal(got, want)
    assert counters["inductor"]["fxgraph_cache_miss"] == 0
    assert counters["inductor"]["fxgraph_cache_hit"] == 2
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1


# ------------------------------------------------------------------ the key itself
def key(config=None, **changes):
    return hooks.Lowering(config or LokaConfig(), Report(), **changes).key


OTHER_VALUES = {
    "mods": "none", "block_size": 128, "remove_final_bias": True, "target": "h200", "max_mere": 0.1, "min_speedup": 2.0,
    "providers": ("torch",), "disable_passes": ("sites",), "fuse": False, "auto_calls": 3, "inspect": True,
    "freeze_weights": True, "save_fp8": True, "residual_dtype": "autocast",
    "mode": "max-autotune", "per_site": {"a.*": {"max_mere": 0.1}},
}  # fmt: skip


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(LokaConfig) if f.name not in ("table", "plan")])
def test_every_option_is_in_the_key(name):
    assert key(LokaConfig(**{name: OTHER_VALUES[name]})) != key()


def test_everything_else_that_is_in_the_key(monkeypatch):
    """Plan, emulation, the user's passes; our own source, library versions, the device. Equal inputs, equal keys."""
    plan = plan_for({"a#0 forward": "emulated:rowwise"})
    same = plan_for({"a#0 forward": "emulated:rowwise"})
    other = plan_for({"a#0 forward": "emulated:tensorwise"})
    keys = [key(), key(plan=plan), key(plan=other), key(plan=plan, emulate=True), key(salt="users_pass:source")]
    assert len(set(keys)) == len(keys)
    assert key(plan=plan) == key(plan=same)
    assert key() == key()
    for name in ("source_digest", "_versions", "_device"):
        with monkeypatch.context() as patch:
            patch.setattr(hooks, name, lambda: "something else")
            assert key() != keys[0], name


def test_table_objects_do_not_leak_into_the_key():
    """Two tables that lead to the same plan share code; the option itself has no stable text."""
    one, two = (Table(Header(created=when), []) for when in ("2026-01-01", "2026-01-02"))
    assert key(LokaConfig(table=one)) == key(LokaConfig(table=two))


def test_versions_of_the_libraries_are_in_it(monkeypatch):
    hooks._versions.cache_clear()
    assert torch.__version__ in hooks._versions()
    assert "triton" in hooks._versions()


def test_source_digest_covers_every_file(tmp_path):
    """A changed line anywhere in the package, or in its shipped data, is another digest."""
    package = Path(loka_compile.__file__).parent
    copy = tmp_path / "copy"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    hooks.source_digest.cache_clear()
    before = hooks.source_digest()
    assert hooks._digest(copy) == before, "of its content, wherever it stands"
    (copy / "lowering" / "new.jinja").write_text("")
    assert hooks._digest(copy) != before
    (copy / "lowering" / "new.jinja").unlink()
    for name in ("kernels/quantize.py", "data/h200.csv", "data/fused_h200.json", "lowering/joint.py"):
        was = (copy / name).read_bytes()
        (copy / name).write_bytes(was + b"#")
        assert hooks._digest(copy) != before, name
        (copy / name).write_bytes(was)
    (copy / "gemm.py").rename(copy / "mmeg.py")
    assert hooks._digest(copy) != before
    (copy / "mmeg.py").rename(copy / "gemm.py")
    assert hooks._digest(copy) == before


def test_source_digest_knows_nothing_of_what_python_writes_beside_it(tmp_path):
    """Else a first import would be the end of every cache entry."""
    (tmp_path / "a.py").write_text("a = 1")
    before = hooks._digest(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.cpython-311.pyc").write_bytes(b"compiled")
    (tmp_path / "notes.txt").write_text("")
    assert hooks._digest(tmp_path) == before


def test_a_users_inductor_pass_without_an_identity_bypasses_the_cache(compile_cache):
    """As in Inductor: a plain function as a pass cannot be told from its next version, so nothing is cached."""
    torch._dynamo.reset()
    counters.clear()
    options = {"table": "off", "post_grad_custom_pre_pass": lambda graph: None}
    torch.compile(Tower((16, 256)), backend="loka", options=options)(torch.randn(4, 16))
    assert counters["inductor"]["fxgraph_cache_miss"] == 0
    assert counters["inductor"]["fxgraph_cache_bypass"] + counters["aot_autograd"]["autograd_cache_bypass"] > 0
