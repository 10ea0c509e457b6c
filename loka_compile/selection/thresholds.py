"""What a kernel has to fulfil: largest error, smallest speed-up, provider; for the whole model and site by site.

No torch import.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from loka_compile.errors import ConfigError

#: What may be overridden for some sites.
KEYS = ("max_mere", "min_speedup", "providers")

PerSite = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Thresholds:
    """The limits of one site."""

    max_mere: float = 0.2
    min_speedup: float = 1.05
    #: Names of the providers that may be used; None is all of them.
    providers: frozenset[str] | None = None


@dataclass(frozen=True)
class Override:
    """Limits for the sites that match ``pattern``; None leaves a limit as it is."""

    pattern: str
    max_mere: float | None = None
    min_speedup: float | None = None
    providers: tuple[str, ...] | None = None

    def matches(self, site: str) -> bool:
        """Whether the shell pattern fits the site (``over.mlp.2#0``) or its module's name (``over.mlp.2``)."""
        return any(fnmatch.fnmatchcase(name, self.pattern) for name in (site, site.rpartition("#")[0]))


@dataclass(frozen=True)
class Limits:
    """The limits of a model: those of every site, and what is different at some.

    Every matching pattern counts, in the order given; the last one to set a limit wins.
    """

    default: Thresholds = Thresholds()
    overrides: tuple[Override, ...] = ()

    @classmethod
    def of(
        cls,
        max_mere: float = 0.2,
        min_speedup: float = 1.05,
        providers: Collection[str] | None = None,
        per_site: PerSite | tuple[Override, ...] | None = None,
    ) -> Limits:
        """Check the values.

        Raises:
            ConfigError: a limit is not in its range; the text names it and what is legal.
        """
        check_limit("max_mere", max_mere)
        check_limit("min_speedup", min_speedup)
        allowed = None if providers is None else frozenset(providers)
        return cls(Thresholds(max_mere, min_speedup, allowed), overrides(per_site))

    def at(self, site: str) -> Thresholds:
        """The limits of one site."""
        limits = self.default
        for override in self.overrides:
            if override.matches(site):
                changes = {key: getattr(override, key) for key in KEYS if getattr(override, key) is not None}
                if "providers" in changes:
                    changes["providers"] = frozenset(changes["providers"])
                limits = dataclasses.replace(limits, **changes)
        return limits

    def unmatched(self, sites: Collection[str]) -> list[str]:
        """Patterns that fit none of these sites."""
        return [o.pattern for o in self.overrides if not any(o.matches(site) for site in sites)]


def overrides(given: PerSite | tuple[Override, ...] | None) -> tuple[Override, ...]:
    """Overrides from ``{"over.*": {"max_mere": 0.1}}``, checked.

    Raises:
        ConfigError: not such a mapping, an unknown key, or a value out of its range.
    """
    if given is None:
        return ()
    if isinstance(given, tuple) and all(isinstance(o, Override) for o in given):
        return given
    legal = 'a mapping of site patterns to limits, such as {"over.*": {"max_mere": 0.1}}'
    if not isinstance(given, Mapping):
        raise ConfigError(f"option 'per_site' is {given!r}; legal: {legal}")
    found = []
    for pattern, limits in given.items():
        if not isinstance(pattern, str) or not pattern or not isinstance(limits, Mapping):
            raise ConfigError(f"option 'per_site' has the entry {pattern!r}: {limits!r}; legal: {legal}")
        place = f"per_site[{pattern!r}]"
        for key, value in limits.items():
            if key not in KEYS:
                raise ConfigError(f"option {place} has the key {key!r}; legal: {', '.join(KEYS)}")
            check_limit(key, value, place)
        values: dict[str, Any] = {k: tuple(sorted(v)) if k == "providers" else v for k, v in limits.items()}
        found.append(Override(pattern, **values))
    return tuple(found)


def parse_per_site(given: Collection[str]) -> dict[str, dict[str, Any]]:
    """Limits as they are written on a command line: ``"over.*:max_mere=0.1"``, ``"head:providers=torch,fbgemm"``.

    Raises:
        ConfigError: a text is not of that form.
    """
    found: dict[str, dict[str, Any]] = {}
    for text in given:
        pattern, colon, limit = text.rpartition(":")
        key, equals, value = limit.partition("=")
        if not (colon and equals):
            raise ConfigError(
                f"{text!r} is no limit of a site; write PATTERN:NAME=VALUE, with one of {', '.join(KEYS)}"
            )
        limits = found.setdefault(pattern, {})
        if key == "providers":
            limits[key] = tuple(filter(None, value.split(",")))
            continue
        try:
            limits[key] = float(value)
        except ValueError as error:
            raise ConfigError(f"{text!r}: {value!r} is no number") from error
    return found


def as_mapping(given: tuple[Override, ...]) -> dict[str, dict[str, Any]]:
    """The overrides as :func:`overrides` reads them; for files."""
    return {
        o.pattern: {key: getattr(o, key) for key in KEYS if getattr(o, key) is not None} for o in given
    }  # fmt: skip


def check_limit(name: str, value: object, place: str = "") -> None:
    """Raise ConfigError unless ``value`` is legal for the limit ``name``; ``place`` is what holds it."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    ok, legal = {
        "max_mere": (number and value >= 0, "a number >= 0"),  # type: ignore[operator]
        "min_speedup": (number and value > 0, "a number > 0"),  # type: ignore[operator]
        "providers": (
            isinstance(value, (tuple, list, set, frozenset)) and all(isinstance(v, str) for v in value),
            "a collection of names",
        ),
    }[name]
    if not ok:
        shown = f"{place}[{name!r}]" if place else repr(name)
        raise ConfigError(f"option {shown} is {value!r}; legal: {legal}")
