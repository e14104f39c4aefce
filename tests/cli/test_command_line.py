"""The command line as a user meets it: fast help, one sentence for every mistake, files that are whole or not there."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import rooftile as package
from rooftile import devices
from rooftile.cli import output
from rooftile.cli.main import app, run
from rooftile.errors import CaptureError, UsageError

COMMAND = [sys.executable, "-m", "rooftile.cli"]


def rooftile(*arguments, **options):
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60, **options)


def fastest(*arguments, runs=5, **options):
    best = float("inf")
    for _ in range(runs):
        start = time.perf_counter()
        assert rooftile(*arguments, **options).returncode == 0
        best = min(best, time.perf_counter() - start)
    return best


def test_help_answers_in_under_0_3_seconds():
    assert fastest("--help") < 0.3


def test_help_answers_in_under_0_3_seconds_when_our_files_are_not_compiled(tmp_path):
    source = Path(package.__file__).parent
    shutil.copytree(source, tmp_path / "rooftile", ignore=shutil.ignore_patterns("__pycache__"))
    fresh = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    assert fastest("--help", env=fresh) < 0.3
    assert not list(tmp_path.rglob("*.pyc"))


def test_help_imports_neither_torch_nor_numpy_nor_rich():
    code = (
        "import sys; from rooftile.cli.main import run; run(['--help']); run(['devices', '--help']);"
        "print(sorted({'torch', 'numpy', 'rich'} & set(sys.modules)), file=sys.stderr)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stderr.strip() == "[]"


def test_without_a_verb_the_help_is_shown():
    answer = rooftile()
    assert answer.returncode == 0
    assert "devices" in answer.stdout
    assert "--install-completion" in answer.stdout


def test_version_is_one_line():
    answer = rooftile("--version")
    assert answer.returncode == 0
    assert answer.stdout.startswith("rooftile ")
    assert answer.stdout.count("\n") == 1


def test_the_device_list_fits_100_columns_has_no_colour_and_ends_with_the_next_command():
    answer = rooftile("devices")
    lines = answer.stdout.splitlines()
    assert answer.returncode == 0
    assert answer.stderr == ""
    assert max(map(len, lines)) <= 100
    assert "\x1b" not in answer.stdout
    assert lines[-1].startswith("next: rooftile devices show ")
    assert [line.split()[0] for line in lines[3:25]] == devices.names()


@pytest.mark.parametrize("name", devices.names())
def test_every_device_shows_its_figures_in_100_columns(name):
    shown = CliRunner().invoke(app, ["devices", "show", name])
    lines = shown.stdout.splitlines()
    assert shown.exit_code == 0
    assert max(map(len, lines)) <= 100
    assert lines[0].startswith(f"{name}: ")
    assert lines[-1].startswith(f"next: rooftile audit llama-3.1-8b --device {name}")
    assert "None" not in shown.stdout


def test_show_prints_ridge_ceiling_and_both_spellings_of_bytes():
    shown = CliRunner().invoke(app, ["devices", "show", "a100-sxm-80gb"]).stdout
    assert "153.0" in shown
    assert "271.2  86.9%" in shown
    assert "84.99 GB (79.15 GiB)" in shown
    assert "300 GB/s each way" in shown


def test_json_on_standard_output_is_all_there_is_on_it():
    listed = json.loads(rooftile("devices", "--json", "-").stdout)
    assert listed["schema"] == "rooftile.devices/1"
    assert [device["name"] for device in listed["devices"]] == devices.names()
    shown = json.loads(rooftile("devices", "show", "h100-sxm", "--json", "-").stdout)
    assert shown["device"]["memory_bandwidth"] == 3350e9
    assert shown["ridge"]["bfloat16"] == pytest.approx(989.4 / 3.35)


def test_json_to_a_file_keeps_the_report_on_standard_output(tmp_path):
    path = tmp_path / "devices.json"
    answer = rooftile("devices", "--json", str(path))
    assert "h100-sxm" in answer.stdout
    assert len(json.loads(path.read_text())["devices"]) == len(devices.names())
    assert os.listdir(tmp_path) == ["devices.json"]


def test_a_device_file_is_listed_first_and_shown(tmp_path):
    path = tmp_path / "my.toml"
    path.write_text(
        '[my-card]\ntitle = "Mine"\nvendor = "me"\ndevice_class = "cuda"\nnominal_bytes = 24e9\n'
        "memory_bandwidth = 1e12\n"
        'peaks = [{ input = "bfloat16", accumulate = "float32", flops_per_s = 100e12 }]\n'
        'provenance = { peaks = "a", capacity = "b", bandwidth = "c" }\n'
    )
    listed = rooftile("devices", "--device-file", str(path)).stdout.splitlines()
    assert listed[3].startswith("my-card")
    assert listed[-1].startswith(f"next: rooftile devices show my-card --device-file {path} ")
    shown = rooftile("devices", "show", "my-card", "--device-file", str(path)).stdout
    assert "100.0" in shown
    assert f"--device my-card --device-file {path}" in shown.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["devices", "show", "h100"], "unknown device 'h100'; near matches: h100-sxm, h100-pcie, h100-nvl"),
        (["devices", "shaw"], "No such command 'shaw'"),
        (["devices", "show"], "Missing argument 'NAME'; see `rooftile devices show --help`"),
        (["--nonsense"], "No such option: --nonsense"),
        (["devices", "--device-file", "/nowhere.toml"], "device file /nowhere.toml can't be read: No such file"),
        (["devices", "--json", "/nowhere/x.json"], "--json /nowhere/x.json can't be written: No such file"),
        (["devices", "--json", "/"], "--json / can't be written: it is a directory"),
        (["devices", "--json", "/dev/null/x.json"], "can't be written: Not a directory"),
        (["devices", "--json", "x.json", "show", "l4"], "--json and --device-file belong after the name"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_2(arguments, sentence):
    answer = rooftile(*arguments)
    assert answer.returncode == 2
    assert answer.stdout == ""
    assert answer.stderr.startswith("rooftile: ")
    assert answer.stderr.count("\n") == 1
    assert sentence in answer.stderr


def test_errors_of_the_family_end_with_their_own_exit_code(monkeypatch, capsys):
    def fail(*_):
        raise CaptureError("the model branches on a value\n  at user.py:3")

    monkeypatch.setattr(devices, "load", fail)
    assert run(["devices", "show", "l4"]) == 3
    assert capsys.readouterr().err == "rooftile: the model branches on a value at user.py:3\n"


def test_a_fault_of_our_own_is_not_hidden(monkeypatch):
    def fail(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(devices, "load", fail)
    with pytest.raises(ZeroDivisionError):
        run(["devices", "show", "l4"])


def test_ctrl_c_is_one_line_exit_130_and_no_file(tmp_path):
    code = (
        "import time, typer\nfrom rooftile.cli import main, output\n"
        "@main.app.command()\ndef slow(path: str):\n"
        "    output.check_writable(path)\n    print('started', flush=True)\n    time.sleep(60)\n"
        "main.main()"
    )
    arguments = [sys.executable, "-c", code, "slow", str(tmp_path / "out.json")]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == "rooftile: interrupted; nothing was written\n"
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("reason", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, reason):
    path = tmp_path / "result.json"
    path.write_text("old")

    def fail(*_):
        raise reason

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(UsageError if isinstance(reason, OSError) else KeyboardInterrupt):
        output.write_json(str(path), {"new": 1})
    assert os.listdir(tmp_path) == ["result.json"]
    assert path.read_text() == "old"


def test_the_check_leaves_an_existing_file_and_its_folder_alone(tmp_path):
    path = tmp_path / "result.json"
    path.write_text("old")
    output.check_writable(str(path))
    output.check_writable("-")
    output.check_writable(None)
    assert os.listdir(tmp_path) == ["result.json"]
    assert path.read_text() == "old"


def test_a_link_is_followed_and_a_device_is_written_through(tmp_path):
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    output.write_json(str(link), [1])
    assert link.is_symlink()
    assert json.loads(target.read_text()) == [1]
    output.check_writable("/dev/null")
    output.write_json("/dev/null", [1])
    assert not os.path.isfile("/dev/null")


def test_json_has_no_nan():
    with pytest.raises(ValueError, match="not JSON compliant"):
        output.write_json("-", float("nan"))


def test_progress_says_nothing_unless_stderr_is_a_terminal(capsys, monkeypatch):
    with output.progress() as say:
        say("capturing")
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with output.progress() as say:
        say("capturing")
    assert capsys.readouterr().err == "\r\x1b[2Kcapturing\r\x1b[2K"


def test_names_complete_in_the_shell():
    from rooftile.cli.options import complete_device, complete_target

    assert complete_device("h100") == ["h100-sxm", "h100-pcie", "h100-nvl"]
    assert complete_target("llama") == ["llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b"]
    completing = os.environ | {
        "_ROOFTILE_COMPLETE": "complete_bash",
        "COMP_WORDS": "rooftile devices show h2",
        "COMP_CWORD": "3",
    }
    assert rooftile(env=completing).stdout.split() == ["h200"]
