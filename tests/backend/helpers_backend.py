"""What the tests of the backend share: compiling without code generation, comparing gradients, other processes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections import Counter
from typing import Any

import torch
from torch import Tensor, fx, nn

from loka_compile.plan import Decision, Plan
from loka_compile.report import Report, reports


class Interpreted:
    """In place of Inductor's code generation: runs our post-grad hook, then the graph operator by operator."""

    def __init__(self) -> None:
        #: The graphs as code generation would get them, forward and backward apart.
        self.graphs: list[fx.GraphModule] = []
        #: Inductor's configuration while each of them would be compiled.
        self.configs: list[dict[str, Any]] = []

    def install(self, monkeypatch: Any) -> None:
        """Let ``compile_fx`` use this for its inner compile."""
        import torch._inductor.compile_fx as module

        original = module.compile_fx

        def compile_fx(gm: Any, inputs: Any, *, config_patches: Any = None, **kwargs: Any) -> Any:
            if config_patches is not None or "inner_compile" not in kwargs:
                config_patches = {**(config_patches or {}), "force_disable_caches": True}
            kwargs.setdefault("inner_compile", self.inner_compile)
            return original(gm, inputs, config_patches=config_patches, **kwargs)

        monkeypatch.setattr(module, "compile_fx", compile_fx)

    def inner_compile(self, gm: fx.GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
        """See the class."""
        from torch._inductor import config

        self.configs.append(config.get_config_copy())
        hook = config.post_grad_custom_pre_pass
        if hook is not None:
            hook(gm.graph)
            gm.recompile()
        self.graphs.append(gm)

        def run(args: list[Any]) -> Any:
            given = list(args)
            args.clear()
            return gm.forward(*given)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def targets(self, *parts: int) -> Counter[str]:
        """How often each operator stands in the graphs (all, or those of the given indices)."""
        graphs = [self.graphs[i] for i in parts] if parts else self.graphs
        return Counter(str(n.target) for gm in graphs for n in gm.graph.nodes if n.op == "call_function")


class Watch:
    """The reports of the compiles made since."""

    def __init__(self) -> None:
        self._before = reports()  # held, so that no new report gets an old one's id

    @property
    def reports(self) -> list[Report]:
        return [r for r in reports() if all(r is not old for old in self._before)]

    @property
    def last(self) -> Report:
        return self.reports[-1]


def roles_of(report: Report) -> Counter[tuple[str, str]]:
    """(site, role) of every GEMM that the report lists."""
    return Counter((g.gemm.site, g.gemm.role.value) for g in report.gemms)


def role_counts(report: Report) -> dict[str, int]:
    """How many GEMMs each role has."""
    return dict(Counter(g.gemm.role.value for g in report.gemms))


def decision(gemm: str, candidate: str) -> Decision:
    """``decision("a.0#0 forward", "emulated:rowwise")``."""
    site, role = gemm.split(" ")
    provider, recipe = candidate.split(":")
    return Decision(site, role, provider, recipe, "written by hand")


def plan_for(choices: dict[str, str]) -> Plan:
    """A plan written by hand: ``{"site role": "provider:recipe"}``."""
    return Plan(decision(gemm, candidate) for gemm, candidate in choices.items())


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Gradients by parameter name, detached from the model."""
    return {n: None if p.grad is None else p.grad.detach().clone() for n, p in model.named_parameters()}


def train_step(run: Any, model: nn.Module, x: Tensor, weight: Tensor | None = None) -> tuple[Tensor, dict[str, Any]]:
    """One forward and backward of a fixed random loss; output and gradients (the input's under "x")."""
    model.zero_grad(set_to_none=True)
    x = x.detach().clone().requires_grad_(x.requires_grad)
    y = run(x)
    if weight is None:
        weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    (y.double() * weight).sum().backward()
    found = gradients(model)
    if x.requires_grad:
        found["x"] = None if x.grad is None else x.grad.clone()
    return y.detach(), found


def assert_same_step(got: Any, want: Any, tol: float, unused: Any = ()) -> None:
    """Output and every gradient agree within ``tol`` of the largest magnitude; gradients of ``unused`` are zeros."""
    close(got[0], want[0], tol, "output")
    assert got[1].keys() == want[1].keys()
    for name, grad in got[1].items():
        assert grad is not None, f"{name} has no gradient"
        reference = want[1][name]
        if name in unused:
            assert reference is None or not reference.any()
            assert not grad.any(), f"{name} is not read: its gradient must be zero"
            continue
        assert reference is not None, name
        close(grad, reference, tol, f"gradient of {name}")


def close(got: Tensor, want: Tensor, tol: float, what: str = "") -> None:
    """Largest difference, relative to the largest magnitude of ``want``."""
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)} instead of {tuple(want.shape)}"
    assert torch.isfinite(got).all(), f"{what} is not finite"
    if not want.numel():
        return
    scale = max(float(want.abs().max()), 1e-30)
    error = float((got.double() - want.double()).abs().max()) / scale
    assert error <= tol, f"{what}: error {error:.3g} > {tol:g}"


def python(code: str, *, env: dict[str, str] | None = None, args: tuple[str, ...] = (), check: bool = True) -> Any:
    """Run ``code`` in a process of its own (one thread) and return the finished process with its text output."""
    path = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])
    full = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **(env or {})}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *args], env=full, text=True, capture_output=True, timeout=300
    )
    if check and done.returncode:
        raise AssertionError(f"exit {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done
