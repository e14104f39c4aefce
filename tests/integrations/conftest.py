"""The C++ core for these tests: what runs is what a user's installation runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

# The formats' tests know how to build the library from the sources; loading their conftest sets ROOFTILE_NATIVE.
_spec = importlib.util.spec_from_file_location(
    "formats_conftest", Path(__file__).resolve().parents[1] / "formats" / "conftest.py"
)
assert _spec is not None
assert _spec.loader is not None
_spec.loader.exec_module(importlib.util.module_from_spec(_spec))
