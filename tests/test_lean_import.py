"""What an import costs, and that ``backend="loka"`` is known however the package got here. Each in a fresh process."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
INSTALLED = any(
    "loka" in dist.read_text("entry_points.txt")
    for dist in importlib.metadata.distributions(name="loka-compile")
    if dist.read_text("entry_points.txt")
)

needs_install = pytest.mark.skipif(not INSTALLED, reason="the package is not installed here")

#: Compiles a chain and runs it; prints what BlockNorm-HardSwish in fp64 gives, and what came out.
COMPILE = """
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(13, 32), torch.nn.LayerNorm(32), torch.nn.SiLU())
x = torch.randn(5, 13)
with torch.no_grad():
    y = torch.compile(model, backend="loka")(x)
    z = x.double() @ model[0].weight.double().T
    z = z / (z.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    z = z * (z + 3).clamp(0, 6) / 6
assert torch.allclose(y.double(), z, rtol=1e-4, atol=1e-5), (y, z)
"""

#: Reaches our backend, runs the passes and stops before any code is generated.
ASK = """
from loka_compile.errors import UnknownNameError
model = torch.nn.Sequential(torch.nn.Linear(13, 32), torch.nn.LayerNorm(32), torch.nn.SiLU())
try:
    torch.compile(model, backend="loka", options={"target": "nowhere"})(torch.randn(5, 13))
except Exception as error:
    assert isinstance(getattr(error, "inner_exception", error), UnknownNameError), error
else:
    raise SystemExit("another backend compiled this")
"""


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd="/", env={**os.environ, **env}, capture_output=True, text=True, timeout=300
    )  # fmt: skip
    assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def bare_site(tmp_path_factory) -> str:
    """A PYTHONPATH with torch and all else that is installed, and the package as a checkout nobody installed."""
    folder = tmp_path_factory.mktemp("site")
    for entry in Path(torch.__file__).parents[1].iterdir():
        if "loka" not in entry.name:
            (folder / entry.name).symlink_to(entry)
    (folder / "loka_compile").symlink_to(ROOT / "loka_compile")
    return str(folder)


def run_bare(code: str, bare_site: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Without ``site``: no .pth file brings an editable install back."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd="/", env={**os.environ, "PYTHONPATH": bare_site, **env}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
    return done


def test_importing_the_package_imports_no_library(bare_site):
    code = (
        "import sys; before = set(sys.modules); import loka_compile; dir(loka_compile)\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(*sorted(new - set(sys.stdlib_module_names)))"
    )
    assert run_bare(code, bare_site).stdout.split() == ["loka_compile"]


def test_planning_needs_no_torch(bare_site):
    """A plan is made from a table, and a cost table is read, in a process that cannot import torch."""
    code = """
import sys
sys.modules["torch"] = None
import loka_compile
from loka_compile.costs import CostTable
from loka_compile.gemm import Gemm, Role
from loka_compile.table import BASELINE, Header, Measurement
assert CostTable.load("h200").baseline(Gemm("a#0", Role.FORWARD, 4096, 1024, 1024)) > 0
assert loka_compile.LokaConfig().max_mere == 0.2
row = dict(site="a#0", role="forward", m_min=1, m_max=64, n=8, k=8, dtype="bfloat16", quantize_us=0.0, baseline_us=9.0)
rows = [Measurement(**row, provider=BASELINE[0], recipe=BASELINE[1], gemm_us=9.0, mere=0.0),
        Measurement(**row, provider="torch", recipe="rowwise", gemm_us=3.0, mere=0.1)]
plan = loka_compile.make_plan(loka_compile.Table(Header(), rows))
print(plan.lookup("a#0", "forward").candidate)
"""
    assert run_bare(code, bare_site).stdout.strip() == "torch:rowwise"


def test_no_module_touches_cuda_when_imported(bare_site):
    """As if a GPU were there: any module that asked for its properties would initialise CUDA."""
    code = """
import importlib, pkgutil, torch
def touched(*args, **kwargs):
    raise SystemExit("CUDA was initialised by an import")
torch.cuda._lazy_init = touched
torch.cuda.is_available = lambda: True
torch.cuda.get_device_properties = torch.cuda.get_device_capability = torch.cuda.get_device_name = touched
import loka_compile
count = 0
for module in pkgutil.walk_packages(loka_compile.__path__, "loka_compile."):
    importlib.import_module(module.name)
    count += 1
print(count)
"""
    assert int(run_bare(code, bare_site).stdout) > 30


def test_a_checkout_that_nobody_installed(bare_site):
    """Imported before Dynamo has looked for backends. A CPU compile leaves CUDA alone as far as Inductor does."""
    code = f"import loka_compile, torch\n{COMPILE}\nprint(torch.cuda.is_initialized())"
    # Its torch lies in a folder of this run, whose headers nobody would use again: precompiled, they take longest.
    initialised = run_bare(code, bare_site, TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS="0").stdout.strip()
    assert initialised == "False" or torch.cuda.is_available()


@needs_install
def test_installed_it_is_known_without_importing_it():
    code = (
        "import sys, torch, torch._dynamo\n"
        "assert 'loka' in torch._dynamo.list_backends()\n"
        "assert 'loka_compile.backend' not in sys.modules\n" + COMPILE
    )
    done = run(code, TORCH_LOGS="+loka_compile")
    assert "pass block_norm: 1 matched" in done.stderr
    assert "inference graph: 3 rewrites" in done.stderr


@needs_install
def test_installed_and_on_the_path_do_not_clash():
    code = f"import loka_compile, torch\nassert torch._dynamo.list_backends().count('loka') == 1\n{ASK}"
    done = run(code, PYTHONPATH=str(ROOT), TORCH_LOGS="+loka_compile.passes")
    logged = re.findall(r"^[VDIWE]\d{4} .*[ /]loka_compile/(\S+?)\.py:\d+\]", done.stderr, re.MULTILINE)
    assert set(logged) == {"passes/manager"}
    assert "pass hard_swish: 1 matched" in done.stderr
