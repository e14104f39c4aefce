"""The C++ core for these tests, and records to compare."""

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

from rooftile.bench import Cache, Hardware, Record, TensorError, Versions, threads_set  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """On a busy machine two threads wait for each other: what is tested here does not depend on their number."""
    with threads_set(1):
        yield


@pytest.fixture
def record() -> Record:
    """A made-up measurement of a made-up machine."""
    return Record(
        task="attention forward",
        contender="native",
        samples=(0.010, 0.011, 0.012, 0.013),
        unit="s",
        statistic="median",
        threads=2,
        warm_up=2,
        calls=1,
        hardware=Hardware("Some CPU", 2, 2, ("avx2", "fma"), (Cache(1, 32768, 1),), 23.5, "madvise", "Linux 6 x86_64"),
        versions=Versions("3.11.7", "2.13.0", "0.1.0", "avx2, sha256 0123456789ab"),
        taken_at="2025-01-01T00:00:00+00:00",
        others_busy=0.1,
        dtype="bfloat16",
        shape=(1, 8, 2048, 64),
        options=(("kv_heads", 8), ("kv_len", 2048), ("mask", "causal")),
        kernel="native",
        path="avx2",
        work=(("visible FLOPs", 4.3e9), ("dense FLOPs", 8.6e9)),
        errors=(TensorError("out", 1e-3, 1e-5, 1048576),),
    )
