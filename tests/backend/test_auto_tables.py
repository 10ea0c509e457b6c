"""The table that ``table="auto"`` leaves behind, and tables that are given: what is reused, and by whom."""

import torch
from helpers_backend import Watch, plan_for, python
from models_backend import Plain

#: Thresholds at which every small GEMM goes to FP8.
ANY = {"target": "h200", "max_mere": 1e3, "min_speedup": 1e-3}
AUTO = {**ANY, "auto_calls": 3}


def fp8_sites(report):
    return {(d.site, d.role) for d in report.decisions if d.provider != "high_precision"}


def run_until_planned(model, x, **options):
    watch = Watch()
    run = torch.compile(model, backend="loka", options={**AUTO, **options})
    calls = 0
    while not watch.reports or watch.last.plan is None:
        run(x).sum().backward()
        calls += 1
        assert calls < 10
    return watch, calls


def test_cached_table_is_used_by_the_next_compile(no_codegen):
    """Same model: no sampling. Another option that matters, or other sizes: sampling anew."""
    x = torch.randn(32, 48)
    first, calls = run_until_planned(Plain((48, 80)), x)
    assert calls == 4
    torch._dynamo.reset()
    second, calls = run_until_planned(Plain((48, 80)), x)
    assert calls == 1
    assert second.last.plan.digest() == first.last.plan.digest()
    # The same table, stricter thresholds: no new sampling, another plan.
    torch._dynamo.reset()
    strict, calls = run_until_planned(Plain((48, 80)), x, min_speedup=1e6)
    assert calls == 1
    assert not fp8_sites(strict.last)
    torch._dynamo.reset()
    assert run_until_planned(Plain((48, 96)), x)[1] == 4
    torch._dynamo.reset()
    assert run_until_planned(Plain((48, 80)), x.bfloat16().float(), block_size=128)[1] == 4


def test_cached_table_of_another_batch_size_or_dtype(no_codegen):
    """What pays for 4096 rows may not pay for 32, and the error is that of the dtype: such a table does not fit."""
    model = Plain((48, 80))

    def calls(rows, **kwargs):
        torch._dynamo.reset()
        return run_until_planned(model, torch.randn(rows, 48), **kwargs)[1]

    assert [calls(rows) for rows in (32, 32, 50, 17)] == [4, 1, 1, 1]
    assert [calls(rows) for rows in (4096, 4096, 32)] == [4, 1, 1]
    torch._dynamo.reset()
    watch, _ = run_until_planned(model, torch.randn(4096, 48))
    assert {row.m_max for row in watch.last.table.rows} == {4096}, "rows of both batch sizes decide"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert [calls(32), calls(32)] == [4, 1]
    model.bfloat16()
    torch._dynamo.reset()
    assert run_until_planned(model, torch.randn(32, 48, dtype=torch.bfloat16))[1] == 4


def test_inference_after_training_and_the_other_way_round(no_codegen):
    """A training table covers inference; a table from inference lacks the gradients, so that training samples."""
    model, x = Plain((48, 80)), torch.randn(32, 48)
    run_until_planned(model, x)
    torch._dynamo.reset()
    watch = Watch()
    with torch.no_grad():
        torch.compile(model, backend="loka", options=AUTO)(x)
    assert watch.last.plan is not None
    assert {role for _, role in fp8_sites(watch.last)} == {"forward"}

    other = Plain((48, 112))
    watch = Watch()
    run = torch.compile(other, backend="loka", options=AUTO)
    with torch.no_grad():
        for _ in range(4):
            run(x)
    assert watch.last.plan is not None
    torch._dynamo.reset()
    watch, calls = run_until_planned(other, x)
    assert calls == 4
    assert {role for _, role in fp8_sites(watch.last)} == {"forward", "grad_weight"}


def test_cached_table_is_used_by_another_process(tmp_path, no_codegen):
    x = torch.randn(32, 48)
    watch, _ = run_until_planned(Plain((48, 80)), x)
    code = """
        import pytest, torch
        from helpers_backend import Interpreted, Watch
        from models_backend import Plain
        Interpreted().install(pytest.MonkeyPatch())
        watch = Watch()
        options = {"target": "h200", "max_mere": 1e3, "min_speedup": 1e-3, "auto_calls": 3}
        torch.compile(Plain((48, 80)), backend="loka", options=options)(torch.randn(32, 48)).sum().backward()
        print(watch.last.plan.digest())
    """
    done = python(code)
    assert done.stdout.split() == [watch.last.plan.digest()]
    assert done.stderr == "", "nothing is logged that was not asked for"


def test_corrupt_cache_is_put_aside(no_codegen, tmp_path):
    x = torch.randn(32, 48)
    run_until_planned(Plain((48, 80)), x)
    (file,) = (tmp_path / "loka_cache").glob("*.json")
    file.write_text(file.read_text()[:200])
    torch._dynamo.reset()
    assert run_until_planned(Plain((48, 80)), x)[1] == 4
    assert list((tmp_path / "loka_cache").glob("*.corrupt"))


def test_given_table_and_default_thresholds(no_codegen, tmp_path):
    """A table object and its file give the same plan; at the default thresholds small GEMMs stay as they are."""
    x = torch.randn(32, 48)
    watch, _ = run_until_planned(Plain((48, 80)), x)
    table = watch.last.table
    table.save(tmp_path / "t.json")
    digests = set()
    for given in (table, str(tmp_path / "t.json"), tmp_path / "t.json"):
        torch._dynamo.reset()
        watch = Watch()
        torch.compile(Plain((48, 80)), backend="loka", options={**ANY, "table": given})(x).sum().backward()
        digests.add(watch.last.plan.digest())
    assert len(digests) == 1
    torch._dynamo.reset()
    watch = Watch()
    torch.compile(Plain((48, 80)), backend="loka", options={"table": table, "target": "h200"})(x)
    assert not fp8_sites(watch.last)
    assert all("speed-up" in d.reason or "<" in d.reason or ">" in d.reason for d in watch.last.decisions)


def test_plan_for_another_model_is_allowed_only_without_a_header(no_codegen):
    watch = Watch()
    torch.compile(Plain(), backend="loka", options={"plan": plan_for({"x#0 forward": "emulated:rowwise"})})(
        torch.randn(4, 48)
    )
    assert not fp8_sites(watch.last)


def test_limits_for_some_sites(no_codegen):
    """``per_site`` reaches the plan of the backend; a pattern that fits nothing is named, and is no error."""
    x = torch.randn(32, 48)
    everywhere, _ = run_until_planned(Plain((48, 80, 64)), x)
    assert {site for site, _ in fp8_sites(everywhere.last)} == {"layers.0#0", "layers.1#0"}
    torch._dynamo.reset()
    per_site = {"layers.1": {"providers": ()}, "tower.*": {"max_mere": 0.1}}
    some, calls = run_until_planned(Plain((48, 80, 64)), x, per_site=per_site)
    assert calls == 1, "the same table serves other limits"
    assert {site for site, _ in fp8_sites(some.last)} == {"layers.0#0"}
    verdicts = some.last.plan.lookup("layers.1#0", "forward").verdicts
    assert any("not among the enabled ones" in v.reason for v in verdicts)
    assert "option 'per_site': no site of this graph matches 'tower.*'" in some.last.notes


def test_a_norm_behind_a_gemm_counts_for_kernels_that_cannot_take_it(no_codegen):
    """Dear for MSLK, whose result a norm has to read again; free for torch's GEMM, which a fused kernel replaces."""
    from torch import nn

    from loka_compile.costs import CostTable
    from loka_compile.gemm import Gemm, Role

    torch.manual_seed(0)
    layers = [nn.Linear(256, 512), nn.LayerNorm(512), nn.SiLU(), nn.Linear(512, 256)]
    watch, _ = run_until_planned(nn.Sequential(*layers).bfloat16(), torch.randn(2048, 256).bfloat16())
    costs = CostTable.load("h200")
    rows = {
        (r.site, r.role, r.provider, r.recipe): r for r in watch.last.table.rows if not r.refused and r.gemm_us > 0
    }  # fmt: skip
    seen = set()
    for (site, role, provider, recipe), row in rows.items():
        if role != "forward" or site not in ("0#0", "3#0") or provider == "high_precision":
            continue
        bare = costs.latency(Gemm(site, Role.FORWARD, 2048, row.n, row.k), provider, recipe).gemm_us
        apart = site == "0#0" and not (provider == "torch" and recipe.startswith(("tensorwise", "rowwise")))
        extra = costs.moving_us(2 * 2048 * 512 * 2) if apart else 0.0
        assert abs(row.gemm_us - bare - extra) < 1e-6, (site, provider, recipe)
        seen.add((site, apart))
    assert seen == {("0#0", True), ("0#0", False), ("3#0", False)}


def test_a_table_of_another_version_of_the_package_is_not_used(no_codegen, monkeypatch):
    """Its speeds come from cost tables and rules that have changed since."""
    from loka_compile import planning

    x = torch.randn(32, 48)
    assert run_until_planned(Plain((48, 80)), x)[1] == 4
    torch._dynamo.reset()
    assert run_until_planned(Plain((48, 80)), x)[1] == 1
    torch._dynamo.reset()
    monkeypatch.setattr(planning, "source_digest", lambda: "another")
    assert run_until_planned(Plain((48, 80)), x)[1] == 4
