"""The verb ``bench``, run as a person runs it."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from rooftile.bench import Ceilings, load_records
from rooftile.bench.attention_case import parse_shape
from rooftile.bench.attention_run import Outcome
from rooftile.cli.bench import _progress
from rooftile.cli.bench_report import attention_report
from rooftile.cli.main import run

TINY = ["bench", "attention", "--shape", "1,2,32,16", "--repeats", "3", "--threads", "1"]


def out(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert run(arguments) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


def fits(text: str) -> bool:
    return max(map(len, text.splitlines())) <= 100 and "\x1b" not in text and "None" not in text


def test_attention_prints_one_table_a_case_and_pass_and_the_next_command(capsys: pytest.CaptureFixture[str]) -> None:
    text = out(
        capsys, *TINY, "--shape", "1,4/2,1/40,16", "--dtype", "fp32", "--dtype", "bf16", "--causal", "--backward"
    )
    lines = text.splitlines()
    assert fits("\n".join(lines[:-1]))
    assert lines[0] == "rooftile bench attention  1 thread"
    assert [line for line in lines if line.startswith(("1 x 2 x 32 x 16  float32  causal", "1 x 4/2 x 1/40 x 16  bf"))]
    assert (
        sum(line.startswith("forward ") for line in lines) == sum(line.startswith("backward ") for line in lines) == 4
    )
    assert sum(line.startswith("torch SDPA ") for line in lines) == 8
    assert all(line.endswith(" 1.00") for line in lines if line.startswith("torch SDPA "))
    assert lines[-1].startswith("next: rooftile bench attention --shape 1,2,32,16 --shape 1,4/2,1/40,16 ")
    assert "--json attention.json" in lines[-1]


def test_only_the_kernels_asked_for_run_beside_torchs_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "attention.json"
    out(capsys, *TINY, "--kernel", "tiled", "--json", str(path))
    measured = {record.contender for record in load_records(path) if record.task == "attention forward"}
    assert measured == {"tiled", "torch SDPA"}


def test_attention_writes_every_condition_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "attention.json"
    text = out(capsys, *TINY, "--json", str(path))
    assert text.splitlines()[-1].startswith(f"next: rooftile bench compare {path} AFTER.json")
    records = load_records(path)
    measured = [record for record in records if record.task == "attention forward"]
    assert {record.contender for record in measured} >= {"tiled", "reference", "torch SDPA"}
    assert all(len(record.samples) == 3 and record.threads == 1 and record.errors for record in measured)
    assert any(record.unit == "FLOP/s" for record in records), "the ceilings are in the file too"
    document = json.loads(out(capsys, *TINY, "--json", "-"))
    assert document["schema"] == "rooftile.bench/1"


def test_ceilings_are_a_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ceilings.json"
    text = out(capsys, "bench", "ceilings", "--threads", "1", "--json", str(path))
    assert fits(text)
    assert "fp32 FMA" in text
    assert text.splitlines()[-1].startswith("next: rooftile bench attention ")
    assert {record.statistic for record in load_records(path)} == {"best"}


def test_compare_tells_what_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    out(capsys, *TINY, "--json", str(before))
    document = json.loads(before.read_text())
    for record in document["records"]:
        if record["contender"] == "tiled":
            record["samples"] = [sample / 2 for sample in record["samples"]]
    after.write_text(json.dumps(document))
    text = out(capsys, "bench", "compare", str(before), str(after))
    assert fits(text)
    (tiled,) = (line for line in text.splitlines() if line.startswith("tiled 1x2x32x16 bf16 1t"))
    assert "  2.00 (" in tiled
    compared = json.loads(out(capsys, "bench", "compare", str(before), str(after), "--json", "-"))["compared"]
    assert [c["faster"] for c in compared if c["contender"] == "tiled"] == [pytest.approx(2)]


def test_compare_refuses_other_conditions_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    out(capsys, *TINY, "--json", str(before))
    document = json.loads(before.read_text())
    for record in document["records"]:
        record["hardware"]["huge_pages"] = "never mind"
    after.write_text(json.dumps(document))
    sentence = out(capsys, "bench", "compare", str(before), str(after), code=2)
    assert "hardware.huge_pages is" in sentence
    assert sentence.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["attention", "--shape", "1,8,64"], "shape '1,8,64' is not B,H,L,D"),
        (["attention", "--dtype", "int8"], "--dtype is 'int8'; choose fp32, bf16, fp16, fp64"),
        (["attention", "--repeats", "1"], "give at least 3 repeats"),
        (["attention", "--kernel", "flash"], "--kernel flash: give native, tiled or reference"),
        (["attention", "--threads", "0"], "0 threads on "),
        (["attention", "--json", "/nowhere/x.json"], "--json /nowhere/x.json can't be written"),
        (["ceilings", "--threads", "1000000"], "1000000 threads on "),
        (["ceilings", "--threads", "two"], "Invalid value for '--threads'"),
        (["compare", "/nowhere.json", "/nowhere.json"], "/nowhere.json can't be read"),
        (["compare", "x.json"], "Missing argument 'AFTER'"),
        (["speed"], "No such command 'speed'"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_2(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told = out(capsys, "bench", *arguments, code=2)
    assert sentence in told
    assert told.startswith("rooftile: ")
    assert told.count("\n") == 1


def test_files_with_nothing_in_common_are_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.json"
    empty.write_text('{"schema": "rooftile.bench/1", "records": []}')
    assert "have no measurement in common" in out(capsys, "bench", "compare", str(empty), str(empty), code=2)


def test_a_comparison_never_overwrites_what_it_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"schema": "rooftile.bench/1", "records": []}')
    told = out(capsys, "bench", "compare", str(path), str(path), "--json", str(path), code=2)
    assert "is the input itself" in told


def test_help_needs_neither_torch_nor_rich() -> None:
    code = (
        "import sys; from rooftile.cli.main import run\n"
        "for more in ([], ['attention'], ['ceilings'], ['compare']): run(['bench', *more, '--help'])\n"
        "print(sorted({'torch', 'numpy', 'rich'} & set(sys.modules)), file=sys.stderr)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stderr.strip() == "[]"


def test_in_a_pipe_nothing_but_the_report_is_written() -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "rooftile.cli", *TINY],
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert (answer.returncode, answer.stderr) == (0, b"")
    assert answer.stdout.decode("ascii").startswith("rooftile bench attention  1 thread")


def test_on_a_terminal_what_runs_is_shown_by_no_thread_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that draws would run inside what is timed."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    before = threading.active_count()
    with _progress() as say:
        say("round 1 of 3: native")
        assert threading.active_count() == before
    assert "round 1 of 3: native" in capsys.readouterr().err


def test_figures_of_any_size_fit_the_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A busy machine, a kernel a thousand times slower than torch, and figures that hardly have a digit."""
    path = tmp_path / "measured.json"
    out(capsys, *TINY, "--json", str(path))
    records = load_records(path)
    wild = [
        dataclasses.replace(record, samples=samples, path="torch operations, 256 keys a split", contender=name)
        for record, name, samples in zip(
            [r for r in records if r.task == "attention forward"][:3],
            ("torch SDPA", "reference", "tiled"),
            ((9.99e-7, 1e-6, 4e-5), (9e-3, 0.999, 12.0), (1234.5, 1234.6, 1234.7)),
            strict=True,
        )
    ]
    case = parse_shape("128,128/64,16384/16384,128", torch.float64, False)
    outcome = Outcome(case, True, tuple(wild), (("native", "it has no fp64 " * 20),), 1)
    assert fits(attention_report([outcome], Ceilings((), (), ""), 128))
