"""The verbs audit, show and explain, as a person types them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from rooftile.capture.trace_file import load_trace
from rooftile.cli.main import run
from rooftile.report import Report

GPT2 = ["audit", "gpt2", "--device", "h100-sxm", "--seq", "64"]


def output(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[str, str]:
    assert run(arguments) == code
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_a_report_is_printed_and_saved_and_shown_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(tmp_path / "report.json")
    printed, err = output(capsys, *GPT2, "--json", path)
    assert err == "", "progress is for terminals"
    shown, _ = output(capsys, "show", path)
    assert shown == printed
    assert "rooftile audit  gpt2" in printed


def test_json_on_standard_output_is_json_and_nothing_else(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    printed, _ = output(capsys, *GPT2, "--json", "-")
    assert json.loads(printed)["target"]["name"] == "gpt2"
    path = tmp_path / "report.json"
    path.write_text(printed, encoding="utf-8")
    again, _ = output(capsys, "show", str(path), "--json", "-")
    assert again == printed


def test_the_trace_is_saved_on_request(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "gpt2.trace"
    output(capsys, *GPT2, "--save-trace", str(path), "--json", str(tmp_path / "r.json"))
    assert len(load_trace(path).ops) == Report.load(tmp_path / "r.json").coverage.ops_total


@pytest.mark.parametrize(("word", "code"), [("GEM001", 1), ("gem", 1), ("any", 1), ("KER,GEM", 1), ("KER", 0)])
def test_fail_on_decides_the_exit_code(capsys: pytest.CaptureFixture[str], word: str, code: int) -> None:
    output(capsys, *GPT2, "--fail-on", word, code=code)


def test_findings_alone_are_no_failure_and_ignored_ones_are_gone(capsys: pytest.CaptureFixture[str]) -> None:
    printed, _ = output(capsys, *GPT2)
    assert "GEM001" in printed
    printed, _ = output(capsys, *GPT2, "--ignore", "GEM", "--fail-on", "any")
    assert "GEM001" not in printed


OPTIONS = ["--precision", "bf16", "--optimizer", "sgd", "--checkpoint", "blocks", "--micro-batches", "2",
           "--attention", "materialized", "--batch", "3", "--phase", "train"]  # fmt: skip


def test_every_option_reaches_the_capture(capsys: pytest.CaptureFixture[str]) -> None:
    printed, _ = output(capsys, *GPT2, *OPTIONS, "--json", "-")
    target = json.loads(printed)["target"]
    for name, value in zip(OPTIONS[::2], OPTIONS[1::2], strict=True):
        assert str(target[name.strip("-").replace("-", "_")]) == value, name


def test_the_cache_dtype_reaches_the_ledger(capsys: pytest.CaptureFixture[str]) -> None:
    printed, _ = output(capsys, *GPT2, "--kv-dtype", "fp8", "--json", "-")
    assert json.loads(printed)["kv_cache"]["bytes_per_token"] == 2 * 12 * 12 * 64


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["audit", "gpt9", "--device", "h100-sxm"], 2, "gpt2"),
        (["audit", "gpt2", "--device", "h100"], 2, "h100-sxm"),
        (["audit", "gpt2"], 2, "no device is named; add --device NAME"),
        ([*GPT2, "--json", "same", "--save-trace", "./same"], 2, "a file of its own"),
        ([*GPT2, "--select", "MEM", "--fail-on", "GEM"], 2, "--fail-on GEM can never fail"),
        ([*GPT2, "--ignore", "GEM", "--fail-on", "GEM001"], 2, "--fail-on GEM001 can never fail"),
        ([*GPT2, "--select", "MOV"], 2, "the family MOV (movement) has no rules"),
        ([*GPT2, "--fail-on", "com"], 2, "the family COM (communication) has no rules"),
        (["audit", "none.py:step", "--device", "h100-sxm"], 2, "none.py"),
        (["audit", "gpt2", "--device", "v100-sxm2-16gb"], 2, "has no bfloat16"),
        ([*GPT2, "--batch", "0"], 2, "at least 1"),
        (["audit", "gpt2", "--device", "h100-sxm", "--seq", "5000"], 2, "1024 positions"),
        ([*GPT2, "--json", "/nowhere/report.json"], 2, "can't be written"),
        ([*GPT2, "--save-trace", "/nowhere/t"], 2, "can't be written"),
        ([*GPT2, "--fail-on", "MEM9"], 2, "unknown rule"),
        ([*GPT2, "--select", "MEM9"], 2, "unknown rule"),
        ([*GPT2, "--kv-dtype", "fp7"], 2, "fp7"),
        ([*GPT2, "--phase", "sleep"], 2, "sleep"),
        (["show", "none.json"], 2, "can't be read"),
        (["explain", "MEM9"], 2, "near matches"),
    ],
)
def test_bad_input_is_one_sentence_and_the_right_code(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, said: str
) -> None:
    printed, err = output(capsys, *arguments, code=code)
    assert printed == ""
    assert said in err
    assert len(err.strip().splitlines()) == 1
    assert "Traceback" not in err


def test_an_interrupted_audit_leaves_nothing_behind(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rooftile.report import Report

    def interrupt(self: Report) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(Report, "to_json", interrupt)
    printed, err = output(capsys, *GPT2, "--json", str(tmp_path / "r.json"), code=130)
    assert printed == ""
    assert len(err.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_explain_lists_the_rules_and_explains_each(capsys: pytest.CaptureFixture[str]) -> None:
    printed, _ = output(capsys, "explain", "--json", "-")
    rules = json.loads(printed)["rules"]
    listed, _ = output(capsys, "explain")
    for rule in rules:
        assert rule["code"] in listed
        told, _ = output(capsys, "explain", rule["code"].lower())
        assert told.startswith(f"{rule['code']}: ")
        assert max(map(len, told.splitlines())) <= 100


def test_the_next_command_works_as_it_is_printed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "my cards.toml"
    own.write_text(
        '[my-card]\ntitle = "Mine"\nvendor = "me"\ndevice_class = "cuda"\nnominal_bytes = 24e9\n'
        "memory_bandwidth = 1e12\ncompute_capability = 9.0\n"
        'peaks = [{ input = "bfloat16", accumulate = "float32", flops_per_s = 100e12 }]\n'
        'provenance = { peaks = "a", capacity = "b", bandwidth = "c" }\n'
    )
    options = [
        "--device-file",
        str(own),
        "--phase",
        "decode",
        "--kv-dtype",
        "fp8",
        "--select",
        "MEM",
        "--select",
        "KER",
    ]
    printed, _ = output(capsys, "audit", "gpt2", "--seq", "64", *options)
    command = shlex.split(printed.strip().splitlines()[-1].removeprefix("Next: "))
    assert command[0] == "rooftile"
    saved, _ = output(capsys, *command[1:])
    assert saved.splitlines()[:-1] == printed.splitlines()[:-1], "the same audit"
    following = shlex.split(saved.strip().splitlines()[-1].removeprefix("Next: "))
    shown, _ = output(capsys, *following[1:])
    assert shown.splitlines()[:-1] == printed.splitlines()[:-1]
    assert not shown.strip().splitlines()[-1].startswith("Next: rooftile show"), "show does not suggest itself"
    trace = str(tmp_path / "own.trace")
    output(capsys, "audit", "gpt2", "--seq", "64", *options, "--save-trace", trace)
    read, _ = output(capsys, "show", trace, "--device-file", str(own))
    assert "on my-card" in read


def test_a_saved_trace_is_shown_as_the_report_it_gives(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(tmp_path / "gpt2.trace")
    printed, _ = output(capsys, *GPT2, "--save-trace", path)
    shown, _ = output(capsys, "show", path)
    assert shown == printed
    other, _ = output(capsys, "show", path, "--device", "a100-sxm-80gb")
    assert "on a100-sxm-80gb" in other


def test_a_report_has_its_device_already(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(tmp_path / "report.json")
    output(capsys, *GPT2, "--json", path)
    _, err = output(capsys, "show", path, "--device", "l4", code=2)
    assert "--device and --device-file are for a trace" in err


def test_a_damaged_trace_is_one_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "t.trace"
    path.write_bytes(b"\x1f\x8b and then nothing of the kind")
    _, err = output(capsys, "show", str(path), code=2)
    assert "is not a rooftile trace" in err
