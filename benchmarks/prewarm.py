"""Fills the compile caches in parallel processes, so that a program that measures spends its time on the device.

Not for programs that measure compilation, nor for autotuned code, which would be chosen while others use the device.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence


def prewarm(commands: Sequence[Sequence[str]], processes: int, seconds: float) -> int:
    """Run every command, ``processes`` at a time, for ``seconds`` at most; returns how many ended well.

    What they print is dropped: a command that fails will fail again, and say why, where it is measured.
    """
    env = {**os.environ, "TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    waiting, running, done, end = list(commands), [], 0, time.monotonic() + seconds
    while (waiting or running) and time.monotonic() < end:
        while waiting and len(running) < processes:
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            running.append(subprocess.Popen(waiting.pop(0), env=env, **quiet))
        for process in [p for p in running if p.poll() is not None]:
            running.remove(process)
            done += process.returncode == 0
        time.sleep(0.05)
    for process in running:
        process.kill()
        process.wait()
    return done
