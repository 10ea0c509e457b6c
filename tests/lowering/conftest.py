"""What tests of the fusion share."""

from __future__ import annotations

import pytest

from loka_compile.lowering import constants
from loka_compile.lowering.fused import gradients, grouped, inputs, joined, joint, product, turns


@pytest.fixture
def _emit_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emit the operators; on a CPU Inductor calls their twins instead of making templates of them."""
    monkeypatch.setattr(product, "on_this_device", lambda value: "")
    monkeypatch.setattr(joint, "on_this_device", lambda value: "")
    monkeypatch.setattr(gradients, "on_this_device", lambda value: "")
    monkeypatch.setattr(grouped, "on_this_device", lambda value: "")
    monkeypatch.setattr(inputs, "on_this_device", lambda value: "")
    monkeypatch.setattr(turns, "on_this_device", lambda value: "")
    monkeypatch.setattr(joined, "on_this_device", lambda value: "")
    monkeypatch.setattr(constants, "on_this_device", lambda value: "")
