"""Standard output as it really is: of any encoding, full, closed, or a pipe whose reader has left."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rooftile import _audit

COMMAND = [sys.executable, "-m", "rooftile.cli"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("saved") / "report.json"
    path.write_text(_audit.audit("gpt2", "h100-sxm", seq=1024).to_json(), encoding="utf-8")
    return str(path)


def shown(*arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, env=os.environ | environment, timeout=60)


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "latin-1"},
        {"PYTHONIOENCODING": "cp437"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
    ids=str,
)
def test_an_encoding_without_our_signs_shows_the_report_in_those_it_has(
    saved: str, environment: dict[str, str]
) -> None:
    answer = shown("show", saved, **environment)
    assert (answer.returncode, answer.stderr) == (0, b"")
    text = answer.stdout.decode(environment.get("PYTHONIOENCODING", "ascii"))
    assert len(text.splitlines()) == len(shown("show", saved).stdout.decode().splitlines())
    assert "\\u" not in text, "every sign of ours has an equivalent"


def test_in_ascii_arrows_dots_and_bars_have_equivalents(saved: str) -> None:
    text = shown("show", saved, PYTHONIOENCODING="ascii").stdout.decode("ascii")
    assert "train | batch 1 x seq 1,024" in text
    assert "\n       -> " in text
    assert "0 B |####" in text


def test_json_in_ascii_is_the_same_document(saved: str) -> None:
    document = json.loads(Path(saved).read_text(encoding="utf-8"))
    document["target"]["name"] = "naïve → 😀"
    Path(saved + "2").write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")
    assert json.loads(shown("show", saved + "2", "--json", "-", PYTHONIOENCODING="ascii").stdout) == document


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has /dev/full")
@pytest.mark.parametrize(
    "arguments", [["show"], ["show", "--json", "-"], ["devices"], ["explain"], ["formats"], ["--help"]], ids=str
)
def test_a_full_disk_is_one_sentence(saved: str, arguments: list[str]) -> None:
    if arguments[0] == "show":
        arguments = ["show", saved, *arguments[1:]]
    with open("/dev/full", "w") as full:
        answer = subprocess.run([*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert answer.returncode == 2
    assert answer.stderr.startswith("rooftile: standard output can't be written: No space left")
    assert answer.stderr.count("\n") == 1


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGPIPE")
def test_a_reader_that_leaves_ends_the_process_quietly_and_not_as_a_finding(saved: str) -> None:
    script = f'"{sys.executable}" -m rooftile.cli show "{saved}" | true; exit "${{PIPESTATUS[0]}}"'
    answer = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert (answer.returncode, answer.stderr) == (141, "")


@pytest.mark.skipif(sys.platform == "win32", reason="a POSIX shell closes it")
@pytest.mark.parametrize(("more", "code"), [("", 0), ("--json -", 2)])
def test_a_closed_standard_output_is_no_traceback(saved: str, more: str, code: int) -> None:
    script = f'"{sys.executable}" -m rooftile.cli show "{saved}" {more} >&-'
    answer = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert answer.returncode == code
    assert "Traceback" not in answer.stderr
