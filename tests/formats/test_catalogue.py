from __future__ import annotations

import math

import ml_dtypes
import pytest
import torch

from rooftile.errors import UsageError
from rooftile.formats.catalogue import FORMATS, get_format
from rooftile.formats.codec import next_up
from rooftile.formats.format import FloatFormat
from rooftile.formats.reference import decode_code

TORCH = {
    "fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
    "fp8_e4m3fn": torch.float8_e4m3fn, "fp8_e4m3fnuz": torch.float8_e4m3fnuz,
    "fp8_e5m2": torch.float8_e5m2, "fp8_e5m2fnuz": torch.float8_e5m2fnuz,
}  # fmt: skip


@pytest.mark.parametrize("name", TORCH)
def test_derived_properties_are_those_of_torch_finfo(name: str) -> None:
    fmt, info = FORMATS[name], torch.finfo(TORCH[name])
    if name == "fp8_e5m2fnuz":  # torch 2.13 says 0.125, but no value of its own lies between 1 and 1.25
        assert info.eps == 0.125
        assert next_up(torch.tensor([1.0], dtype=TORCH[name]), fmt).item() == 1 + fmt.eps == 1.25
        return
    for field in ("bits", "eps", "max", "min", "tiny", "smallest_normal"):
        assert getattr(fmt, field) == getattr(info, field), field
    if fmt.bits >= 16:
        assert fmt.resolution == info.resolution


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("fp8_e3m4", "float8_e3m4"),
        ("fp6_e2m3", "float6_e2m3fn"),
        ("fp6_e3m2", "float6_e3m2fn"),
        ("fp4_e2m1", "float4_e2m1fn"),
    ],
)
def test_derived_properties_are_those_of_ml_dtypes_finfo(name: str, theirs: str) -> None:
    fmt, info = FORMATS[name], ml_dtypes.finfo(getattr(ml_dtypes, theirs))
    assert fmt.max == float(info.max)
    assert fmt.tiny == float(info.smallest_normal)
    assert fmt.smallest_subnormal == float(info.smallest_subnormal)
    assert fmt.eps == float(info.eps)


@pytest.mark.parametrize(
    ("name", "eps", "tiny", "largest"),
    [
        ("fp16", "9.765625e-04", "6.10351562e-05", "6.55040000e+04"),
        ("bf16", "7.8125e-03", "1.17549435e-38", "3.38953139e+38"),
        ("fp32", "1.1920929e-07", "1.17549435e-38", "3.40282347e+38"),
        ("fp64", "2.22044605e-16", "2.22507386e-308", "1.79769313e+308"),
    ],
)
def test_the_published_eps_smallest_normal_and_max(name: str, eps: str, tiny: str, largest: str) -> None:
    fmt = FORMATS[name]
    digits = len(eps.split("e")[0]) - 2
    assert f"{fmt.eps:.{digits}e}" == eps
    assert f"{fmt.tiny:.8e}" == tiny
    assert f"{fmt.max:.8e}" == largest


def test_fp8_maxima_and_spacings_above_one() -> None:
    assert [FORMATS[f"fp8_{n}"].max for n in ("e4m3fn", "e4m3fnuz", "e5m2")] == [448, 240, 57344]
    assert [FORMATS[f"fp8_{n}"].eps for n in ("e4m3fn", "e4m3fnuz", "e5m2")] == [0.125, 0.125, 0.25]


def test_fp16_flushes_2_to_minus_25_and_below() -> None:
    assert FORMATS["fp16"].flush_threshold == 2.0**-25
    assert FORMATS["fp16"].unit_roundoff == 2.0**-11
    assert FORMATS["e8m0"].flush_threshold == 0.0


def test_tf32_says_that_it_is_a_mode_over_fp32_storage() -> None:
    tf32 = FORMATS["tf32"]
    assert (tf32.computes_over, tf32.storage_bits, tf32.bits) == ("fp32", 32, 19)
    assert FORMATS["fp32"].computes_over == ""


@pytest.mark.parametrize("fmt", [f for f in FORMATS.values() if f.bits <= 16], ids=lambda f: f.name)
def test_special_codes_are_exactly_the_codes_that_decode_to_zero_inf_or_nan(fmt: FloatFormat) -> None:
    listed = {code for special in fmt.special_codes for code in range(special.first, special.last + 1)}
    for code in range(fmt.number_of_codes):
        value = decode_code(code, fmt)
        assert (value == 0 or not math.isfinite(value)) == (code in listed)


def test_code_0x80_is_minus_zero_in_fn_and_nan_in_fnuz() -> None:
    assert math.copysign(1, decode_code(0x80, "e4m3fn")) == -1
    assert decode_code(0x80, "e4m3fn") == 0
    assert math.isnan(decode_code(0x80, "e4m3fnuz"))
    assert math.isnan(decode_code(0x80, "fp8_e5m2fnuz"))


def test_aliases_and_torch_names_lead_to_the_same_format() -> None:
    for alias in ("e4m3fn", "fp8_e4m3fn", "float8_e4m3fn", "E4M3FN"):
        assert get_format(alias) is FORMATS["fp8_e4m3fn"]
    assert get_format("bfloat16") is FORMATS["bf16"]
    assert get_format("e2m1") is FORMATS["fp4_e2m1"]
    assert get_format(FORMATS["bf16"]) is FORMATS["bf16"]


def test_an_ambiguous_or_unknown_name_lists_near_matches() -> None:
    with pytest.raises(UsageError, match=r"e4m3fnuz.*") as caught:
        get_format("e4m3")
    assert "e4m3fn" in str(caught.value)
    with pytest.raises(UsageError, match="FloatFormat or its name"):
        get_format(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"exponent_bits": 0}, "exponent_bits is 0"),
        ({"fraction_bits": 53}, "fraction_bits is 53"),
        ({"nan_codes": "some"}, "nan_codes is 'some'"),
        ({"bias": 2000}, "another bias"),
        ({"zero": False}, "subnormals=False"),
        ({"fraction_bits": 0}, "tell NaN from Inf"),
        ({"signed": False, "nan_codes": "negative-zero"}, "needs a signed format"),
        ({"exponent_bits": 1, "fraction_bits": 1, "bias": 0}, "no code is left"),
    ],
)
def test_a_combination_that_is_no_format_is_refused_in_a_sentence(fields: dict[str, object], part: str) -> None:
    with pytest.raises(UsageError, match=part):
        FloatFormat(**({"name": "mine", "exponent_bits": 4, "fraction_bits": 3, "bias": 7} | fields))  # type: ignore[arg-type]


def test_the_catalogue_imports_without_torch() -> None:
    import subprocess
    import sys

    script = (
        "import sys; from rooftile.formats import FORMATS; assert len(FORMATS) == 14; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
