"""The options of the backend: one frozen dataclass, each default written once, each value validated."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loka_compile.errors import ConfigError, UnknownNameError, UnknownOptionError
from loka_compile.selection.thresholds import check_limit, overrides

if TYPE_CHECKING:
    from loka_compile.plan import Plan
    from loka_compile.selection.thresholds import Override, PerSite
    from loka_compile.table import Table

#: The Mods of the paper's section III-B, in the order in which they run.
MODS = ("bias_removal", "block_norm", "hard_swish")


@dataclass(frozen=True)
class LokaConfig:
    """What ``torch.compile(model, backend="loka", options={...})`` understands besides Inductor's own options.

    Raises:
        ConfigError: a value is illegal; the text names the option, the value and what is legal.
    """

    #: Which Mods rewrite the model: "all", "none", or a collection of their names.
    mods: str | tuple[str, ...] = "all"
    #: Features that BlockNorm normalises together; a power of two from 16 to 4096.
    block_size: int = 256
    #: Also drop the bias of the final prediction layers (they keep it by default, paper section III-B.1).
    remove_final_bias: bool = False
    #: What a norm's result travels in under autocast: "model" (fp32, as autocast leaves it) or "autocast" (16 bits).
    residual_dtype: str = "model"
    #: Measurements that the plan is made from: "auto", "off", a file, or a Table.
    table: str | os.PathLike[str] | Table = "auto"
    #: A finished plan (file or Plan); makes ``table`` superfluous.
    plan: str | os.PathLike[str] | Plan | None = None
    #: Device to plan for, e.g. "h200"; None is the device the model runs on.
    target: str | None = None
    #: Largest error (floored MERE, 0 to inf) that a kernel may have.
    max_mere: float = 0.2
    #: Smallest speed-up over high precision, quantisation included, that makes FP8 worth it.
    min_speedup: float = 1.05
    #: Kernel libraries that may be used; None is every one that works here.
    providers: tuple[str, ...] | None = None
    #: Other values of max_mere, min_speedup and providers for some sites, by shell pattern.
    per_site: PerSite | tuple[Override, ...] = ()
    #: Passes to leave out, by name.
    disable_passes: tuple[str, ...] = ()
    #: Put normalisation, activation and quantisation into the GEMM kernels where that was measured to be faster.
    fuse: bool = True
    #: In training, keep BlockNorm's outputs for the backward in FP8: less memory, gradients less exact.
    save_fp8: bool = False
    #: In inference, quantise weights when compiling and compile again when one changes (docs say what is seen).
    freeze_weights: bool = False
    #: How many calls ``table="auto"`` samples before it plans.
    auto_calls: int = 20
    #: Keep every stage's graph for ``report.graph`` and ``report.diff``; bypasses the compile caches.
    inspect: bool = False
    #: What ``mode=`` means to torch.compile, for use together with other options.
    mode: str | None = None

    def __post_init__(self) -> None:
        for name in ("mods", "providers", "disable_passes"):
            value = getattr(self, name)
            if isinstance(value, (list, set, frozenset)):
                # Normalised in place so that equal options compare and hash equal.
                object.__setattr__(self, name, tuple(sorted(value) if isinstance(value, (set, frozenset)) else value))
        self._check_mods()
        _require(
            isinstance(self.block_size, int) and 16 <= self.block_size <= 4096 and self.block_size.bit_count() == 1,
            "block_size", self.block_size, "a power of two from 16 to 4096",
        )  # fmt: skip
        for name in ("remove_final_bias", "fuse", "save_fp8", "freeze_weights", "inspect"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        _require(
            self.residual_dtype in ("model", "autocast"),
            "residual_dtype", self.residual_dtype, '"model" or "autocast"',
        )  # fmt: skip
        check_limit("max_mere", self.max_mere)
        check_limit("min_speedup", self.min_speedup)
        object.__setattr__(self, "per_site", overrides(self.per_site))  # hashable, like the rest
        _require(
            isinstance(self.auto_calls, int) and not isinstance(self.auto_calls, bool) and self.auto_calls >= 1,
            "auto_calls", self.auto_calls, "an integer >= 1",
        )  # fmt: skip
        for name in ("providers", "disable_passes"):
            value = getattr(self, name)
            ok = (value is None and name == "providers") or (
                isinstance(value, tuple) and all(isinstance(v, str) for v in value)
            )
            _require(ok, name, value, "a collection of names")
        _require(self.target is None or isinstance(self.target, str), "target", self.target, 'a name such as "h200"')
        _require(self.mode is None or isinstance(self.mode, str), "mode", self.mode, "a mode of torch.compile")
        self._check_table()

    def _check_mods(self) -> None:
        if isinstance(self.mods, str):
            _require(self.mods in ("all", "none"), "mods", self.mods, f'"all", "none" or names out of {MODS}')
            return
        _require(isinstance(self.mods, tuple), "mods", self.mods, f'"all", "none" or names out of {MODS}')
        for mod in self.mods:
            if mod not in MODS:
                raise UnknownNameError("Mod", mod, MODS)

    def _check_table(self) -> None:
        from loka_compile.plan import Plan
        from loka_compile.table import Table

        legal = '"auto", "off", the path of a table file, or a Table'
        if isinstance(self.table, (str, os.PathLike)):
            if self.table not in ("auto", "off"):
                _require(Path(self.table).is_file(), "table", str(self.table), f"{legal}; there is no such file")
        else:
            _require(isinstance(self.table, Table), "table", self.table, legal)
        if self.plan is None:
            return
        legal = "the path of a plan file, or a Plan"
        if isinstance(self.plan, (str, os.PathLike)):
            _require(Path(self.plan).is_file(), "plan", str(self.plan), f"{legal}; there is no such file")
        else:
            _require(isinstance(self.plan, Plan), "plan", self.plan, legal)
        if self.table == "off" or not isinstance(self.table, str) or self.table != "auto":
            raise ConfigError(
                "options plan= and table= contradict each other: a plan is already made from a table. "
                "Give one of them (table is ignored only when it is left at its default)."
            )

    @property
    def least_speedup(self) -> float:
        """What a kernel alone must reach to be measured: 1, or 0 (all are) where less than that suffices for a site."""
        own = [o.min_speedup for o in overrides(self.per_site) if o.min_speedup is not None]
        return 1.0 if min([self.min_speedup, *own]) >= 1.0 else 0.0

    @property
    def active_mods(self) -> tuple[str, ...]:
        """The Mods that run, in their fixed order."""
        if self.mods == "all":
            return MODS
        if self.mods == "none":
            return ()
        return tuple(mod for mod in MODS if mod in self.mods)

    @classmethod
    def from_options(cls, options: Mapping[str, Any] | None) -> tuple[LokaConfig, dict[str, Any]]:
        """Split ``options=`` of torch.compile into ours and Inductor's.

        Keys of ours may carry a ``loka.`` prefix. Returns the config and Inductor's config patches.

        Raises:
            UnknownOptionError: a key is neither ours nor Inductor's.
            ConfigError: a value is illegal.
        """
        ours: dict[str, Any] = {}
        inductor: dict[str, Any] = {}
        fields = {f.name for f in dataclasses.fields(cls)}
        for key, value in (options or {}).items():
            name = key.removeprefix("loka.")
            if name in fields:
                ours[name] = value
            elif key.startswith("loka."):
                raise UnknownOptionError(_unknown(key, fields))
            else:
                inductor[key] = value
        config = cls(**ours)
        return config, _check_inductor(inductor, fields)


def _check_inductor(patches: dict[str, Any], ours: Iterable[str]) -> dict[str, Any]:
    """Validate Inductor's own options the way torch.compile does for backend="inductor"."""
    if not patches:
        return {}
    import torch._inductor.config as inductor_config

    known = inductor_config.get_config_copy()
    out = {}
    for key, value in patches.items():
        name = key.replace("-", "_")
        if name not in known:
            raise UnknownOptionError(_unknown(key, ours))
        expected = type(known[name])
        # A default of None says nothing about the type.
        fits = known[name] is None or value is None or isinstance(value, expected)
        if not (fits or (expected in (int, float) and _is_number(value))):
            raise ConfigError(
                f"option {key!r} of Inductor must be of type {expected.__name__}, "
                f"not {type(value).__name__} ({value!r})"
            )
        out[name] = value
    return out


def _unknown(key: str, ours: Iterable[str]) -> str:
    return (
        f"unknown option {key!r}. Options of loka: {', '.join(sorted(ours))}; "
        "and every option of torch._inductor.config (see torch._inductor.list_options())."
    )


def _require(ok: bool, name: str, value: object, legal: str) -> None:
    if not ok:
        raise ConfigError(f"option {name!r} is {value!r}; legal: {legal}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
