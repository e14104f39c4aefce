"""``rooftile score`` end to end on small files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from rooftile import lowp
from rooftile.cli.main import run


@pytest.fixture
def file(tmp_path: Path) -> Path:
    g = torch.Generator().manual_seed(0)
    outlier = torch.cat([torch.randn(1024, generator=g) * 0.001, torch.tensor([100.0])])
    path = tmp_path / "x.pt"
    torch.save({"outlier": outlier, "plain": torch.randn(64, 256, generator=g), "ids": torch.arange(3)}, path)
    return path


def test_the_table_says_where_finer_scales_matter(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["score", str(file)]) == 0
    out = capsys.readouterr().out
    assert "finer scales matter here" in out
    assert "finer scales don't matter here" in out
    assert "tile-1x128" in out
    assert "not scored: ids" in out
    assert max(map(len, out.splitlines())) <= 140


def test_json_is_what_the_library_says(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["score", str(file), "--tensor", "outlier", "--recipes", "tensor,tile-1x128", "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [t["name"] for t in data["tensors"]] == ["outlier"]
    expected = lowp.score(torch.load(file)["outlier"], ["tensor", "tile-1x128"]).to_dict()
    assert data["tensors"][0]["rows"] == expected["rows"]


def test_npy_and_safetensors_files_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "x.npy", np.ones((4, 32), dtype=np.float32))
    lowp.quantize(torch.ones(4, 32), "tensor").save(tmp_path / "q.safetensors")
    assert run(["score", str(tmp_path / "x.npy"), "--format", "e5m2"]) == 0
    assert "e5m2" in capsys.readouterr().out
    assert run(["score", str(tmp_path / "q.safetensors")]) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing.npy"], "no file missing.npy"),
        (["FILE", "--recipes", "tile"], "near matches"),
        (["FILE", "--recipes", "delayed"], "earlier tensors"),
        (["FILE", "--tensor", "nothing"], "no tensor whose name contains"),
        (["FILE", "--format", "fp16"], "8 bits or fewer"),
        (["FILE", "--json", "/no/such/folder/x"], "can't be written"),
    ],
)
def test_bad_input_gets_one_sentence_and_exit_code_2(
    arguments: list[str], words: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["score", *[str(file) if a == "FILE" else a for a in arguments]]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("link", [False, True])
def test_the_input_is_never_overwritten(link: bool, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, target = file.read_bytes(), file
    if link:
        target = file.with_name("link.pt")
        target.symlink_to(file)
    assert run(["score", str(file), "--json", str(target)]) == 2
    assert "is the input itself" in capsys.readouterr().err
    assert file.read_bytes() == before


def test_values_that_are_not_finite_are_told_and_a_tensor_of_nan_does_not_look_lossless(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nan = float("nan")
    torch.save({"some": torch.tensor([nan, float("inf"), 1.0]), "all": torch.full((4,), nan)}, tmp_path / "x.pt")
    assert run(["score", str(tmp_path / "x.pt")]) == 0
    some, rest = capsys.readouterr().out.split("all  ")
    assert "2 of 3 not finite" in some
    assert "nvfp4-1x16: 1 finite value becomes NaN" in some
    assert "4 of 4 not finite" in rest
    rows = [line.split() for line in rest.splitlines() if line.startswith("  tensor")]
    assert rows[0][2:8] == ["-"] * 6
    assert "none of the 4 values is finite" in rest


def test_a_name_with_control_characters_does_not_break_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "names.pt"
    torch.save({"weird\nname": torch.randn(64, 64), "odd\tids": torch.arange(3)}, path)
    assert run(["score", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert not any(line.startswith("name") for line in lines)
    assert any("weird\\nname" in line for line in lines)
