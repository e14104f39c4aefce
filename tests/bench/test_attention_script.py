"""benchmarks/attention.py runs, asks for what it says, and its memory section sees a matrix that is materialised."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rooftile.bench import load_records

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(FOLDER))
from attention_rows import Row  # noqa: E402

sys.path.remove(str(FOLDER))


def script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, FOLDER / name, *arguments], capture_output=True, text=True, env=environment, timeout=300
    )


def test_the_kernel_sections_run_and_write_rows_and_records(tmp_path: Path) -> None:
    path = tmp_path / "attention.json"
    names = ["forward", "backward", "small", "decode", "masks"]
    answer = script(
        "attention.py", *names, "--tiny", "--repeats", "3", "--threads", "1", "--budget", "0.5", "--json", str(path)
    )
    assert answer.returncode == 0, answer.stderr
    document = json.loads(path.read_text())
    sections = document["sections"]
    assert list(sections) == names
    assert [len(section["rows"]) for section in sections.values()] == [18, 18, 24, 2, 16]
    rows = [row for section in sections.values() for row in section["rows"]]
    assert all(row["ratio"] > 0 and row["low"] <= row["ratio"] <= row["high"] and row["verdict"] for row in rows)
    assert all(row["path"] not in ("", "-") for row in rows)
    asked = {(row["dtype"], row["minimum"], row["aim"]) for row in sections["forward"]["rows"]}
    assert asked == {
        ("bf16", 2.0, 3.0),
        ("bf16", 2.5, 4.0),
        ("fp16", 2.0, 3.0),
        ("fp32", 1.15, 1.5),
        ("fp32", 1.4, 2.2),
    }
    records = load_records(path)
    assert {record.task for record in records} == {"attention forward", "attention backward", "read DRAM"}
    assert {record.contender for record in records} == {"native", "torch SDPA"}


def test_an_unknown_section_is_refused_with_the_known_ones() -> None:
    answer = script("attention.py", "sideways")
    assert answer.returncode == 2
    assert "unknown section sideways; choose from forward, backward, small" in answer.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self")
def test_memory_sees_the_scores_where_they_are_materialised_and_only_there() -> None:
    """2 heads of 2048 x 2048 fp32 scores are 32 MiB."""
    scores = 2 * 2048 * 2048 * 4
    materialised, tiled = (
        int(script("attention_memory.py", kernel, "float32", "forward", "2", "2048", "1").stdout)
        for kernel in ("reference", "native")
    )
    assert materialised > scores
    assert tiled < scores / 16


@pytest.mark.parametrize(
    ("ratio", "minimum", "aim", "at_most", "verdict"),
    [
        (1.9, 2.0, 3.0, False, "MISSED"), (2.0, 2.0, 3.0, False, "ok"), (3.0, 2.0, 3.0, False, "aim"),
        (1.31, 1.3, None, True, "MISSED"), (1.3, 1.3, None, True, "ok"), (None, 2.0, None, False, "did not run"),
        (5.0, None, None, False, ""),
    ],
)  # fmt: skip
def test_a_verdict_is_what_was_asked(
    ratio: float | None, minimum: float | None, aim: float | None, at_most: bool, verdict: str
) -> None:
    assert Row("", "", 1, ratio=ratio, minimum=minimum, aim=aim, at_most=at_most).verdict == verdict
