"""The passes of this process: ours in their fixed order, a user's own between them."""

from __future__ import annotations

import inspect
import threading
from pathlib import Path
from typing import Any

from loka_compile.config import MODS, LokaConfig
from loka_compile.errors import ConfigError, DuplicateNameError, UnknownNameError
from loka_compile.passes import DEFAULT_PASSES, Pass, PassFn, Tier

_lock = threading.Lock()
_passes: list[Pass] = list(DEFAULT_PASSES)


def register_pass(
    fn: PassFn,
    *,
    name: str,
    tier: Tier | str = Tier.MODEL,
    before: str | None = None,
    after: str | None = None,
) -> Pass:
    """Let a rewrite pass of your own run in every later compile with ``backend="loka"``.

    Args:
        fn: ``(gm, ctx) -> Changes``; edits the torch-level ``torch.fx.GraphModule`` in place. Its source code, and that
            of the file it stands in, is part of the compile cache's key.
        name: unique; shows in reports, and in ``options={"disable_passes": (name,)}``.
        tier: what it may do to the numbers: "exact", "numerics" or "model".
        before: name of the pass to run before.
        after: name of the pass to run after. Without either it runs after all Mods.

    Raises:
        DuplicateNameError: a pass of that name exists.
        UnknownNameError: ``before`` or ``after`` names no pass, or ``tier`` no tier.
        ConfigError: both ``before`` and ``after`` are given, or ``fn`` is not callable.
    """
    if not callable(fn):
        raise ConfigError(f"register_pass needs a function (gm, ctx) -> Changes, not {type(fn).__name__}")
    if before is not None and after is not None:
        raise ConfigError("register_pass takes before= or after=, not both")
    try:
        tier = Tier(tier)
    except ValueError:
        raise UnknownNameError("tier", tier, [t.value for t in Tier]) from None
    new = Pass(name, tier, fn, _origin(fn))
    with _lock:
        names = [p.name for p in _passes]
        if name in names:
            raise DuplicateNameError(
                f"a pass named {name!r} exists already (defined at {_passes[names.index(name)].origin}); "
                "choose another name or call unregister_pass first"
            )
        anchor = before or after or "hard_swish"
        if anchor not in names:
            raise UnknownNameError("pass", anchor, names)
        position = names.index(anchor)
        if before is None:
            position += 1
            # Passes registered after the same one keep the order in which they were registered.
            while position < len(_passes) and _passes[position] not in DEFAULT_PASSES:
                position += 1
        _passes.insert(position, new)
    return new


def unregister_pass(name: str) -> None:
    """Take a pass of your own out again.

    Raises:
        UnknownNameError: it is not registered, or is one of ours.
    """
    with _lock:
        own = [p for p in _passes if p not in DEFAULT_PASSES]
        for p in own:
            if p.name == name:
                _passes.remove(p)
                return
    raise UnknownNameError("registered pass", name, [p.name for p in own])


def snapshot(config: LokaConfig) -> tuple[Pass, ...]:
    """The passes that one compile runs: everything registered now, less what the options leave out.

    Raises:
        UnknownNameError: ``disable_passes`` names a pass that does not exist.
    """
    with _lock:
        passes = tuple(_passes)
    names = {p.name for p in passes}
    for name in config.disable_passes:
        if name not in names:
            raise UnknownNameError("pass in option 'disable_passes'", name, names)
    off = set(config.disable_passes) | (set(MODS) - set(config.active_mods))
    if config.residual_dtype == "model":
        off.add("residual_dtype")
    return tuple(p for p in passes if p.name not in off)


def source_of(fn: Any) -> bytes:
    """What identifies a user's pass to the compile cache: the text of the file that defines it.

    A function without a source file (typed in at a prompt) is identified by its bytecode.
    """
    fn = inspect.unwrap(fn)
    target = fn if inspect.isroutine(fn) or inspect.isclass(fn) else type(fn)
    try:
        path = inspect.getsourcefile(target)
        if path and Path(path).is_file():
            return Path(path).read_bytes() + getattr(target, "__qualname__", "").encode()
    except TypeError:
        pass
    code = getattr(target, "__code__", None)
    return repr((code.co_code, code.co_consts, code.co_names) if code else target).encode()


def _origin(fn: Any) -> str:
    code = getattr(inspect.unwrap(fn), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(fn)
