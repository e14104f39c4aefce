"""The C++ core for these tests, and both ways of computing as a fixture."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

# The formats' tests know how to build the library from the sources; loading their conftest sets ROOFTILE_NATIVE.
_spec = importlib.util.spec_from_file_location(
    "formats_conftest", Path(__file__).resolve().parents[1] / "formats" / "conftest.py"
)
assert _spec is not None
assert _spec.loader is not None
_spec.loader.exec_module(importlib.util.module_from_spec(_spec))

from rooftile.lowp import native  # noqa: E402


@pytest.fixture(params=["native", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of computing, one after the other: their results must be the same."""
    if request.param == "torch":
        monkeypatch.setattr(native, "available", lambda x: False)
    else:
        assert native._library() is not None
    return str(request.param)
