"""FP8 for recommendation models: ``torch.compile(model, backend="loka")``.

Importing this package imports neither torch nor a kernel library: the names below load what they need when they are
first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from loka_compile._compat.registration import register_uninstalled

if TYPE_CHECKING:
    from loka_compile import probe as probe
    from loka_compile.backend import loka
    from loka_compile.config import LokaConfig
    from loka_compile.drift.guard import Guard, guard
    from loka_compile.eager_mods import apply_mods
    from loka_compile.explanation import explain
    from loka_compile.frozen import thaw
    from loka_compile.loss import loss_of_plan, loss_sensitivity, plan_by_loss
    from loka_compile.mods_warning import ModsWarning
    from loka_compile.nn import BlockNorm, HardSwish
    from loka_compile.passes.base import Changes, Match, PassContext, Refusal, Tier
    from loka_compile.passes.registry import register_pass, unregister_pass
    from loka_compile.plan import Plan, make_plan
    from loka_compile.report import Report, reports
    from loka_compile.table import Table

__version__ = "0.1.0"

_HOME = {
    "BlockNorm": "nn",
    "Changes": "passes.base",
    "Guard": "drift.guard",
    "HardSwish": "nn",
    "LokaConfig": "config",
    "Match": "passes.base",
    "ModsWarning": "mods_warning",
    "PassContext": "passes.base",
    "Plan": "plan",
    "Refusal": "passes.base",
    "Report": "report",
    "Table": "table",
    "Tier": "passes.base",
    "apply_mods": "eager_mods",
    "explain": "explanation",
    "guard": "drift.guard",
    "loka": "backend",
    "loss_of_plan": "loss",
    "loss_sensitivity": "loss",
    "make_plan": "plan",
    "plan_by_loss": "loss",
    "register_pass": "passes.registry",
    "reports": "report",
    "thaw": "frozen",
    "unregister_pass": "passes.registry",
}

__all__ = [
    "BlockNorm",
    "Changes",
    "Guard",
    "HardSwish",
    "LokaConfig",
    "Match",
    "ModsWarning",
    "PassContext",
    "Plan",
    "Refusal",
    "Report",
    "Table",
    "Tier",
    "__version__",
    "apply_mods",
    "explain",
    "guard",
    "loka",
    "loss_of_plan",
    "loss_sensitivity",
    "make_plan",
    "plan_by_loss",
    "probe",
    "register_pass",
    "reports",
    "thaw",
    "unregister_pass",
]


def __getattr__(name: str) -> Any:
    if name == "probe":  # a package that can be called
        return importlib.import_module(f"{__name__}.probe")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


register_uninstalled()
