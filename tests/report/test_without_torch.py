from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rooftile import _audit
from rooftile.capture.trace_file import save_trace


@pytest.mark.parametrize("room", ["ledgers", "rules", "report"])
def test_every_module_that_only_reads_imports_without_torch(room: str) -> None:
    code = f"""
import sys
sys.modules["torch"] = None  # importing it now raises
import importlib, pkgutil
package = importlib.import_module("rooftile.{room}")
names = [m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
assert names
for name in names:
    importlib.import_module(name)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_saved_trace_gives_its_report_without_torch(tmp_path: Path) -> None:
    report = _audit.audit("gpt2", "h100-sxm", seq=64)
    assert report.trace is not None
    save_trace(report.trace, tmp_path / "gpt2.trace")
    code = f"""
import sys
sys.modules["torch"] = None
from rooftile import devices
from rooftile.capture.trace_file import load_trace
from rooftile.report.read import read_trace
sys.stdout.write(read_trace(load_trace({str(tmp_path / "gpt2.trace")!r}), devices.load("h100-sxm")).to_json())
"""
    read = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert read.stdout == report.to_json()
