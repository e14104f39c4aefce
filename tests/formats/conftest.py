"""The C++ core for the tests: the installed one, or one built here where the package is run from its sources."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

from rooftile.formats import native

ROOT = Path(__file__).resolve().parents[2]


def build_native_library() -> Path:
    """Configure and build in a scratch folder, then move the library into build/ under the name of its sources'
    digest.
    """
    sources = sorted(path for path in (ROOT / "native").iterdir() if path.is_file())
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    library = ROOT / "build" / "tests" / f"librooftile_native-{digest}.so"
    if not library.is_file():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            for command in (["cmake", "-S", str(ROOT), "-B", scratch], ["cmake", "--build", scratch]):
                subprocess.run(command, check=True, capture_output=True)
            os.replace(Path(scratch) / "native" / "librooftile_native.so", library)
    return library


if "ROOFTILE_NATIVE" not in os.environ and native._library_path() is None and shutil.which("cmake"):
    os.environ["ROOFTILE_NATIVE"] = str(build_native_library())


@pytest.fixture(params=["native", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of computing, one after the other: their results must be the same."""
    if request.param == "torch":
        monkeypatch.setattr(native, "available", lambda: False)
    else:
        assert native.available(), native.status().reason
    return str(request.param)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(20240607)
