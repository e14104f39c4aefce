"""The C++ core for these tests, and the kernel under test as a fixture."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

# The formats' tests know how to build the library from the sources; loading their conftest sets ROOFTILE_NATIVE.
_spec = importlib.util.spec_from_file_location(
    "formats_conftest", Path(__file__).resolve().parents[1] / "formats" / "conftest.py"
)
assert _spec is not None
assert _spec.loader is not None
_spec.loader.exec_module(importlib.util.module_from_spec(_spec))

from .support import registered  # noqa: E402


@pytest.fixture
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """A kernel's name, which ``rooftile.attention`` knows for as long as the test runs."""
    with registered(request.param):
        yield request.param
