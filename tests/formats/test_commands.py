"""The verbs ``formats`` and ``inspect``, run as a person runs them."""

from __future__ import annotations

import json
import math
import pickle
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rooftile.cli.main import run
from rooftile.errors import UsageError
from rooftile.formats import exponent_histogram, round_to
from rooftile.formats.casting import parse_number
from rooftile.formats.inspection import inspect_file
from rooftile.formats.tensor_files import open_tensors


def out(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert run(arguments) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


def one_sentence(text: str) -> bool:
    return text.startswith("rooftile: ") and text.count("\n") == 1 and "Traceback" not in text


# --- formats ---


def test_the_listing_names_every_format_within_100_columns(capsys: pytest.CaptureFixture[str]) -> None:
    text = out(capsys, "formats")
    for name in ("fp64", "tf32", "fp8_e4m3fnuz", "fp6_e3m2", "fp4_e2m1", "e8m0"):
        assert name in text
    assert "not a dtype" in text
    assert max(map(len, text.splitlines())) <= 100
    listed = json.loads(out(capsys, "formats", "--json", "-"))
    assert len(listed["formats"]) == 14
    assert listed["schema"] == "rooftile.formats/1"


@pytest.mark.parametrize("name", ["e4m3fn", "fp64", "tf32", "e8m0", "fp4_e2m1", "fp8_e5m2fnuz"])
def test_show_gives_one_format_in_full(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = out(capsys, "formats", "show", name)
    assert max(map(len, text.splitlines())) <= 100
    data = json.loads(out(capsys, "formats", "show", name, "--json", "-"))["format"]
    assert data["number_of_codes"] == 2 ** data["bits"]
    if name == "e4m3fn":
        assert "448" in text
        assert "0x80" in text
        assert data["overflow_threshold"] == 464


def test_70000_becomes_inf_70144_and_nan(capsys: pytest.CaptureFixture[str]) -> None:
    text = out(capsys, "formats", "cast", "70000", "--to", "fp16,bf16,e4m3fn")
    for part in ("inf", "0x7C00", "65504", "70144", "0x4789", "69632", "+0.2812", "nan", "448"):
        assert part in text
    casts = json.loads(out(capsys, "formats", "cast", "70000", "--to", "fp16,bf16,e4m3fn", "--json", "-"))["casts"]
    assert [c["value"] for c in casts] == ["inf", 70144.0, "nan"]
    assert [c["saturated"] for c in casts] == [65504.0, 70144.0, 448.0]
    saturating = out(capsys, "formats", "cast", "70000", "--to", "e4m3fn", "--overflow", "saturate", "--json", "-")
    assert json.loads(saturating)["casts"][0]["value"] == 448.0


@pytest.mark.parametrize(
    ("text", "fmt", "value", "code", "note"),
    [
        ("2^-26", "fp16", 0.0, 0, "flushed to zero"),
        ("2^-26", "bf16", 2.0**-26, 0x3280, "exact"),
        ("-0", "e4m3fn", -0.0, 0x80, "exact"),
        ("-0", "e4m3fnuz", 0.0, 0, "exact"),
        ("inf", "fp16", "inf", 0x7C00, "kept"),
        ("-inf", "fp4_e2m1", "nan", None, "no Inf here"),
        ("nan", "fp16", "nan", 0x7E00, "not finite"),
        ("-1", "e8m0", "nan", 0xFF, "no sign here"),
        ("0x1.8p3", "fp4_e2m1", 6.0, 7, "saturated"),
        ("464.0000000000000000001", "e4m3fn", 448.0, 0x7E, "saturated"),
        ("463.9999999999999999999", "e4m3fn", 448.0, 0x7E, "rounded"),
        ("1e-4000", "fp64", 0.0, 0, "flushed to zero"),
        ("1e-7", "fp16", 2.0**-23, 2, "subnormal"),
    ],
)
def test_a_cast_tells_value_code_and_what_happened(
    text: str, fmt: str, value: object, code: int | None, note: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("formats", "cast", "--to", fmt, "--overflow", "saturate", "--json", "-", "--", text)
    found = json.loads(out(capsys, *arguments))["casts"][0]
    assert (found["value"], found["code"], found["note"]) == (value, code, note)
    if value == 0.0:
        assert math.copysign(1, found["value"]) == math.copysign(1, float(str(value)))


def test_directed_roundings_go_to_the_neighbours(capsys: pytest.CaptureFixture[str]) -> None:
    up = json.loads(out(capsys, "formats", "cast", "0.1", "--to", "bf16", "--rounding", "up", "--json", "-"))["casts"][
        0
    ]
    down = json.loads(out(capsys, "formats", "cast", "0.1", "--to", "bf16", "--rounding", "down", "--json", "-"))[
        "casts"
    ][0]
    assert up["value"] == down["above"] > 0.1 > down["value"] == up["below"]
    several = out(capsys, "formats", "cast", "0.1", "3", "--to", "bf16")
    assert several.splitlines()[0].startswith("input")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("formats", "show", "e4m3"), "near matches: e4m3fn"),
        (("formats", "cast", "abc", "--to", "fp16"), "'abc' is no number"),
        (("formats", "cast", "2^x", "--to", "fp16"), "'2^x' is no number"),
        (("formats", "cast", "1e99999999", "--to", "fp16"), "is too large to be handled exactly"),
        (("formats", "cast", "1", "--to", ","), "names no format"),
        (("formats", "cast", "1", "--to", "fp17"), "no format is called 'fp17'"),
        (("formats", "cast", "1", "--to", "fp16", "--rounding", "stochastic"), "--rounding"),
        (("formats", "cast", "1", "--to", "fp16", "--overflow", "wrap"), "--overflow"),
        (("formats", "cast", "1"), "--to"),
        (("formats", "--json", "x.json", "show", "bf16"), "after the name"),
        (("formats", "--plot", "x.pdf"), ".svg or .png"),
        (("formats", "--plot", "/nonexistent/x.svg"), "can't be written"),
        (("inspect", "/nonexistent/x.pt"), "there is no file"),
        (("inspect", "/nonexistent/x.onnx"), "suffix '.onnx'"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    arguments: tuple[str, ...], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = out(capsys, *arguments, code=2)
    assert one_sentence(text), text
    assert part in text


def test_listing_showing_and_casting_need_no_torch() -> None:
    script = (
        "import sys; from rooftile.cli.main import run; run(['formats']); run(['formats', 'show', 'bf16']);"
        "run(['formats', 'cast', '1', '--to', 'fp16']); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, capture_output=True)


# --- inspect ---


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return {
        "layer.weight": torch.randn(40, 30, generator=generator) * 0.02,
        "layer.weight_bf16": torch.randn(64, generator=generator).bfloat16(),
        "half": torch.randn(5, 5, generator=generator).half(),
        "gradient": torch.randn(1000, generator=generator) * 1e-7,
        "fp8": torch.randn(16, generator=generator).to(torch.float8_e4m3fn),
        "bad": torch.tensor([1.0, math.inf, math.nan, 0.0, -0.0, 1e-40]),
        "double": torch.randn(7, generator=generator, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "ids": torch.arange(5),
    }


def check(found: dict[str, object], tensors: dict[str, torch.Tensor]) -> None:
    listed = found["tensors"]
    assert isinstance(listed, list)
    assert {t["name"] for t in listed} == set(tensors)
    for entry in listed:
        x = tensors[entry["name"]]
        assert entry["shape"] == list(x.shape)
        if x.is_floating_point():
            h = exponent_histogram(x).to_dict()
            assert entry["histogram"] == (h if x.numel() else entry["histogram"])
        else:
            assert "no floating dtype" in entry["unread"]


def test_a_safetensors_file_gives_every_tensors_own_histogram(
    tensors: dict[str, torch.Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "m.safetensors")
    save_file(tensors, path, metadata={"format": "pt"})
    check(json.loads(out(capsys, "inspect", path, "--json", "-")), tensors)
    text = out(capsys, "inspect", path)
    assert max(map(len, text.splitlines()[1:])) <= 100  # the first line bears the path
    assert "ids (i64): no floating dtype" in text
    assert "gradient" in text


@pytest.mark.parametrize("legacy", [False, True])
def test_a_torch_file_is_read_with_weights_only_and_its_nested_names(
    tensors: dict[str, torch.Tensor], tmp_path: Path, legacy: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "m.pt")
    if legacy:
        del tensors["fp8"]  # torch's own reader of the old format has no float8
    tensors["strided"] = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).t()[::2]
    nested = {"model": {k: v for k, v in tensors.items() if k != "ids"}, "others": [tensors["ids"]], "step": 3}
    torch.save(nested, path, _use_new_zipfile_serialization=not legacy)
    flat = {f"model.{k}": v for k, v in tensors.items() if k != "ids"} | {"others.0": tensors["ids"]}
    check(json.loads(out(capsys, "inspect", path, "--json", "-")), flat)


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f2", "<f8"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_an_npy_file_is_read_in_any_byte_order_and_layout(dtype: str, order: str, tmp_path: Path) -> None:
    array = np.asarray(np.random.default_rng(0).normal(size=(30, 20)), dtype=dtype, order=order)  # type: ignore[call-overload]
    np.save(tmp_path / "x.npy", array)
    native = torch.from_numpy(np.ascontiguousarray(array.astype(np.dtype(dtype).newbyteorder("="))))
    assert inspect_file(tmp_path / "x.npy").tensors[0].histogram == exponent_histogram(native)
    np.save(tmp_path / "i.npy", np.arange(3))
    assert "no floating dtype" in inspect_file(tmp_path / "i.npy").tensors[0].unread


def test_flush_overflow_and_recipe_of_a_file_are_those_of_rounding(tmp_path: Path) -> None:
    x = torch.randn(20_000, generator=torch.Generator().manual_seed(1)) * 1e-6
    np.save(tmp_path / "g.npy", x.numpy())
    found = inspect_file(tmp_path / "g.npy", ["fp16", "e4m3fn"])
    entry = found.to_dict()["tensors"][0]
    lost = int((round_to(x, "fp16") == 0).sum())
    assert entry["unscaled"]["fp16"]["flushed"]["low"] <= lost <= entry["unscaled"]["fp16"]["flushed"]["high"]
    best = entry["recipes"][0]
    assert best["format"] == "fp16"
    assert best["encode_scale"] > 1
    scaled = round_to(x.double() * best["encode_scale"], "fp16", overflow="ieee")
    assert scaled.isfinite().all()
    measured = ((scaled / best["encode_scale"] - x).abs() / x.abs()).mean().item()
    assert best["relative_error"] == pytest.approx(measured, rel=0.1)


def test_a_tensor_already_in_a_format_loses_nothing_there(tmp_path: Path) -> None:
    save_file({"w": torch.randn(50).bfloat16()}, tmp_path / "m.safetensors")
    recipe = inspect_file(tmp_path / "m.safetensors").tensors[0].recipes[0]
    assert (recipe.fmt, recipe.encode_scale, recipe.relative_error) == ("bf16", 1.0, 0.0)


class NotATensor:
    pass


def write_corrupt(tmp_path: Path, kind: str) -> Path:
    good = tmp_path / "good.safetensors"
    save_file({"w": torch.ones(100)}, good)
    data = good.read_bytes()
    path = tmp_path / f"{kind}.safetensors"
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    if kind == "truncated":
        path.write_bytes(data[:-10])
    elif kind == "short":
        path.write_bytes(b"abc")
    elif kind == "no_json":
        path.write_bytes(data[:8] + b"x" * length + data[8 + length :])
    else:
        header["w"] |= {"shape": {"shape": [99]}, "entry": {"dtype": None, "data_offsets": 3}}[kind]
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    return path


@pytest.mark.parametrize("kind", ["truncated", "short", "no_json", "shape", "entry"])
def test_a_corrupt_safetensors_file_is_refused_in_a_sentence(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_corrupt(tmp_path, kind)
    target = tmp_path / "out.json"
    text = out(capsys, "inspect", str(path), "--json", str(target), code=2)
    assert one_sentence(text), text
    assert not target.exists()


def test_a_pickle_with_code_a_broken_zip_and_object_arrays_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"x": NotATensor()}, tmp_path / "code.pt")
    (tmp_path / "garbage.pt").write_bytes(b"not a checkpoint")
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    (tmp_path / "garbage.npy").write_bytes(b"x")
    np.save(tmp_path / "cut.npy", np.ones(100))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "cut.npy").read_bytes()[:-8])
    for name in ("code.pt", "garbage.pt", "objects.npy", "garbage.npy", "cut.npy"):
        text = out(capsys, "inspect", str(tmp_path / name), code=2)
        assert one_sentence(text), text
        assert name in text


def test_scale_formats_are_refused_by_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "x.npy", np.ones(3, dtype=np.float32))
    assert "scales only" in out(capsys, "inspect", str(tmp_path / "x.npy"), "--formats", "e8m0", code=2)
    assert "names no format" in out(capsys, "inspect", str(tmp_path / "x.npy"), "--formats", ",", code=2)


RSS = """
import resource, sys
from rooftile.formats.casting import parse_number
from rooftile.formats.inspection import inspect_file
import torch
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = inspect_file(sys.argv[1])
print(found.total.total, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_a_file_of_a_gigabyte_is_read_in_under_300_megabytes(tmp_path: Path) -> None:
    """A sparse file: the bytes are zeros that take no room on the disk, but they are read all the same."""
    count = 2**28
    header = json.dumps({"w": {"dtype": "F32", "shape": [count], "data_offsets": [0, 4 * count]}}).encode()
    path = tmp_path / "big.safetensors"
    with open(path, "wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + 4 * count)
    done = subprocess.run([sys.executable, "-c", RSS, str(path)], check=True, capture_output=True, text=True)
    total, grown = map(int, done.stdout.split())
    assert total == count
    assert grown < 300


def test_a_mapped_torch_file_does_not_stay_resident(tmp_path: Path) -> None:
    path = tmp_path / "big.pt"
    torch.save({"w": torch.ones(2**26)}, path)  # 256 MiB
    done = subprocess.run([sys.executable, "-c", RSS, str(path)], check=True, capture_output=True, text=True)
    total, grown = map(int, done.stdout.split())
    assert total == 2**26
    assert grown < 160


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_pictures_are_written_whole(suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=500).astype(np.float32))
    start = {"svg": b"<?xml", "png": b"\x89PNG"}[suffix]
    for arguments in (("formats",), ("formats", "show", "e8m0"), ("inspect", str(tmp_path / "x.npy"))):
        target = tmp_path / f"{arguments[-1].rpartition('/')[2]}.{suffix}"
        out(capsys, *arguments, "--plot", str(target))
        assert target.read_bytes().startswith(start)
    assert not list(tmp_path.glob(".*"))


def test_without_matplotlib_the_sentence_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    text = out(capsys, "formats", "--plot", str(tmp_path / "x.svg"), code=2)
    assert "pip install 'rooftile[plot]'" in text


def test_progress_tells_the_share_and_the_tensor(tmp_path: Path) -> None:
    save_file({"a": torch.ones(100), "b": torch.ones(300)}, tmp_path / "m.safetensors")
    said: list[str] = []
    inspect_file(tmp_path / "m.safetensors", say=said.append)
    assert said == ["25% a", "100% b"]
    assert [t.unread for t in open_tensors(tmp_path / "m.safetensors")] == ["", ""]


# --- The input is kept, and what goes wrong is said ---


@pytest.mark.parametrize("name", ["m.safetensors", "m.npy", "m.pt"])
def test_an_output_that_is_the_input_is_refused_and_the_input_stays(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    if path.suffix == ".npy":
        np.save(path, np.ones(3, dtype=np.float32))
    elif path.suffix == ".pt":
        torch.save({"w": torch.ones(3)}, path)
    else:
        save_file({"w": torch.ones(3)}, path)
    before = path.read_bytes()
    link = tmp_path / "link.svg"
    link.symlink_to(path)
    other_spelling = str(tmp_path / "." / ".." / tmp_path.name / name)
    for option, target in (("--json", str(path)), ("--json", other_spelling), ("--json", str(link))):
        text = out(capsys, "inspect", str(path), option, target, code=2)
        assert one_sentence(text), text
        assert "is the input itself" in text
    assert "is the input itself" in out(capsys, "inspect", str(path), "--plot", str(link), code=2)
    assert path.read_bytes() == before


def test_json_and_plot_need_paths_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "x.npy", np.ones(3, dtype=np.float32))
    target = str(tmp_path / "out.svg")
    for verb in (("inspect", str(tmp_path / "x.npy")), ("formats",), ("formats", "show", "bf16")):
        text = out(capsys, *verb, "--json", target, "--plot", target, code=2)
        assert one_sentence(text), text
        assert "--json and --plot are both" in text
    assert not Path(target).exists()


@pytest.mark.parametrize("number", ["1e400", "-1e309", "2^2000", "1e5000", "0x1p2000"])
@pytest.mark.parametrize("overflow", ["ieee", "saturate"])
def test_a_number_beyond_every_float_is_cast_into_every_format(
    number: str, overflow: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [entry["name"] for entry in json.loads(out(capsys, "formats", "--json", "-"))["formats"]]
    arguments = ("formats", "cast", "--to", ",".join(names), "--overflow", overflow)
    casts = json.loads(out(capsys, *arguments, "--json", "-", "--", number))["casts"]
    out(capsys, *arguments, "--", number)
    sign = -1 if number.startswith("-") else 1
    for one in casts:
        if one["format"] == "e8m0" and sign < 0:
            assert one["note"] == "no sign here"
        elif overflow == "saturate":
            assert one["note"] == "saturated"
            assert one["value"] * sign > 0
        else:
            assert one["value"] in ("inf", "-inf", "nan")
            assert one["note"] == f"overflow (saturates at {one['saturated']:g})"


@pytest.mark.parametrize(
    "number", ["1e999999999", "1e-999999999", "2^99999999", "1e4000^4000", "1e999999999^1", "0x1p9999", "7" * 5000]
)
def test_a_number_too_large_for_exact_arithmetic_is_called_that(
    number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = out(capsys, "formats", "cast", number, "--to", "fp16", code=2)
    assert one_sentence(text), text
    assert "is too large to be handled exactly" in text
    assert len(text) < 300


def test_hexadecimal_numbers_are_read_exactly() -> None:
    assert parse_number("0x1p2000") == 2**2000
    assert parse_number("-0x1.8p3") == -12
    assert parse_number("0x1.00000000000000001p0") == 1 + Fraction(1, 16**17)
    assert math.copysign(1, parse_number("-0x0p0")) == -1
    for wrong in ("0x", "0xp3", "0x1.2.3", "0xg"):
        with pytest.raises(UsageError, match="is no number"):
            parse_number(wrong)


def test_an_unknown_format_lists_near_matches_only_if_there_are_any(capsys: pytest.CaptureFixture[str]) -> None:
    text = out(capsys, "formats", "show", "bogus", code=2)
    assert "near matches" not in text
    assert "names are fp64, fp32" in text


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
def test_a_full_standard_output_is_one_sentence(tmp_path: Path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "m.safetensors")
    for verb in (["inspect", str(tmp_path / "m.safetensors")], ["formats"], ["formats", "show", "bf16"]):
        for more in ([], ["--json", "-"]):
            with open("/dev/full", "w") as full:
                command = [sys.executable, "-m", "rooftile.cli", *verb, *more]
                done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
            assert done.returncode == 2
            assert one_sentence(done.stderr), done.stderr
            assert "standard output can't be written" in done.stderr


def test_control_characters_in_a_name_are_shown_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"a\nb\x1b[31m": torch.ones(3), "i\td": torch.arange(3)}, tmp_path / "m.pt")
    text = out(capsys, "inspect", str(tmp_path / "m.pt"))
    assert "a\\nb\\x1b[31m" in text
    assert "i\\td (int64)" in text
    assert "\x1b" not in text


def test_a_file_without_tensors_or_floating_tensors_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"step": 3}, tmp_path / "none.pt")
    torch.save({"ids": torch.arange(3)}, tmp_path / "ids.pt")
    none, ids = (out(capsys, "inspect", str(tmp_path / name)) for name in ("none.pt", "ids.pt"))
    assert "The file holds no tensors" in none
    assert "None of the file's 1 tensors is of a floating dtype" in ids
    assert "ids (int64)" in ids
    assert "flush" not in none + ids


@pytest.mark.filterwarnings("error")
def test_a_refused_torch_file_never_repeats_the_advice_to_load_without_care(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"x": NotATensor()}, tmp_path / "code.pt")
    (tmp_path / "pickle4.pt").write_bytes(pickle.dumps({"x": NotATensor()}, protocol=4))
    (tmp_path / "text.pt").write_text("hello, this is text\n")
    whole = (tmp_path / "code.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[:-30])
    said = {name: out(capsys, "inspect", str(tmp_path / name), code=2) for name in
            ("code.pt", "pickle4.pt", "text.pt", "cut.pt")}  # fmt: skip
    for text in said.values():
        assert one_sentence(text), text
        for advice in ("weights_only", "site-packages", "UserWarning"):
            assert advice not in text
    assert "NotATensor" in said["code.pt"]
    assert "is no torch checkpoint; " in said["text.pt"]
    assert "is damaged" in said["cut.pt"]


@pytest.mark.parametrize("kind", ["truncated", "short", "no_json", "shape", "entry"])
def test_the_error_of_a_damaged_safetensors_file_says_what_to_do(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "; copy or download it again" in out(capsys, "inspect", str(write_corrupt(tmp_path, kind)), code=2)


def test_the_error_of_a_damaged_npy_file_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "whole.npy", np.ones(100))
    data = (tmp_path / "whole.npy").read_bytes()
    for bad in (data[:-8], data[:20], b"x", data.replace(b"(100,)", b"(-99,)"), data.replace(b"(100,)", b"(100((")):
        (tmp_path / "bad.npy").write_bytes(bad)
        text = out(capsys, "inspect", str(tmp_path / "bad.npy"), code=2)
        assert one_sentence(text), text
        assert "; copy or download it again" in text


@pytest.mark.parametrize("suffix", ["safetensors", "npy", "pt"])
def test_an_empty_file_is_called_empty(suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / f"x.{suffix}").touch()
    assert "is empty; " in out(capsys, "inspect", str(tmp_path / f"x.{suffix}"), code=2)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_and_meta_tensors_of_a_file_are_listed_as_not_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    torch.save({"n": ragged, "m": torch.ones(3, device="meta")}, tmp_path / "m.pt")
    text = out(capsys, "inspect", str(tmp_path / "m.pt"))
    assert "n (float32): a nested tensor is not read" in text
    assert "m (float32): on the meta device, without data" in text
    assert "None of the file's 2 tensors could be counted" in text
