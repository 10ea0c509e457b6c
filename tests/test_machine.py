"""What a measurement was taken on."""

from importlib import metadata

import torch

from loka_compile import machine


def test_versions_are_those_installed_and_absent_ones_are_left_out():
    found = machine.describe()
    assert found["torch"] == torch.__version__
    assert found["gpu"] == (torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")
    installed = {d.metadata["Name"].lower() for d in metadata.distributions()}
    for library in machine.LIBRARIES:
        assert (library in found) == (library in installed)
    assert all(found.values())


def test_a_driver_that_cannot_be_asked_is_no_error(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.driver() == ""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexit 9\n")
    tool.chmod(0o755)
    assert machine.driver() == ""
    tool.write_text("#!/bin/sh\necho 580.159.04\necho 580.159.04\n")
    assert machine.driver() == "580.159.04"
