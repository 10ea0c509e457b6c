"""One class per mistake. Each text says what is wrong, where, and what to do next."""

from __future__ import annotations

from collections.abc import Iterable


class LokaError(Exception):
    """Base of every error that loka_compile raises on purpose."""


class ConfigError(LokaError, ValueError):
    """An option has an illegal value, or two options contradict each other."""


class UnknownOptionError(ConfigError):
    """``options=`` holds a key that neither loka nor Inductor knows."""


class UnknownNameError(ConfigError):
    """A pass, Mod, provider, target or recipe of that name does not exist."""

    def __init__(self, kind: str, name: object, legal: Iterable[str]) -> None:
        super().__init__(f"unknown {kind} {name!r}; known are: {', '.join(sorted(legal)) or 'none'}")


class DuplicateNameError(LokaError, ValueError):
    """A pass or provider of that name is registered already."""


class UnsupportedTorchError(LokaError, ImportError):
    """The installed torch is outside the supported range."""


class PassError(LokaError, RuntimeError):
    """A pass raised, or left an invalid graph behind. Names the pass and, where known, the node."""


class LoweringError(LokaError, RuntimeError):
    """A ``loka::`` op is left in the graph without a lowering."""


class ApplyModsError(LokaError, RuntimeError):
    """``apply_mods`` cannot capture the model's forward as one graph."""


class TableError(LokaError, ValueError):
    """A table cannot be used."""


class CorruptFileError(TableError):
    """A table or plan file is damaged or is not one of ours."""


class StaleTableError(TableError):
    """A table or plan belongs to another model, device, target or version."""


class ProbeError(LokaError, RuntimeError):
    """The probe is misused or cannot go on."""
