"""Python processes that end with the one that started them, with what they print in a file."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def start(
    module: str, arguments: Sequence[str], log: Path, *, at_once: int, gpu: str | None = None, commands: bool = False
) -> subprocess.Popen[str]:
    """Start ``python -m module arguments...``; its output goes to ``log``.

    Args:
        at_once: how many run side by side: the cores are shared out for compiling.
        gpu: the only GPU that it sees; None: those that this process sees.
        commands: its standard output is a pipe, for answers to lines written to its standard input.
    """
    env: Mapping[str, str] = {
        "TORCHINDUCTOR_COMPILE_THREADS": str(max(1, cores() // at_once)), "PYTHONUNBUFFERED": "1", **os.environ,
        **({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}),
    }  # fmt: skip
    with log.open("a") as file:
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments], stdin=subprocess.PIPE, text=True, env=env,
            stdout=subprocess.PIPE if commands else file, stderr=file,
        )  # fmt: skip


def end(child: subprocess.Popen[str], patience: float = 10.0) -> None:
    """Let a child end: close its standard input, then, if that does not help, stop it."""
    if child.poll() is None:
        if child.stdin is not None:
            child.stdin.close()
        try:
            child.wait(patience)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def end_with_parent() -> None:
    """In a child: stop at once when the parent closes our standard input, which its own end does as well."""

    def wait() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def last_line(log: Path) -> str:
    """What a child said last; "" if nothing."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.exists() else []
    return lines[-1].strip() if lines else ""
