"""Plan and rewritten graphs in the structured trace log (``TORCH_TRACE``), so that tlparse shows them."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable

from torch._logging import trace_structured

from loka_compile.report import Report

logger = logging.getLogger(__name__)


def emit(report: Report) -> None:
    """Write the report, and the graphs if they were kept, as artifacts of the current compile."""
    logger.info(
        "%s graph: %d rewrites, %d refusals, GEMMs %s%s",
        "training" if report.is_training else "inference", len(report.matches), len(report.refusals), report.counts(),
        " (from the compile cache)" if report.from_cache else "",
    )  # fmt: skip
    _artifact("loka_report", "json", lambda: json.dumps(report.to_dict(), default=str))
    for name in report.stage_names():
        _artifact(f"loka_graph_{name}", "string", functools.partial(report.graph, name))


def _artifact(name: str, encoding: str, payload: Callable[[], str]) -> None:
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": encoding}, payload_fn=payload)
