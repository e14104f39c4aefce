from __future__ import annotations

import subprocess
import sys

import pytest


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
