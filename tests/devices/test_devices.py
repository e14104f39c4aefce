"""The device table against published figures, and the traps that such tables fall into."""

import dataclasses
import json
import subprocess
import sys

import pytest

from rooftile import devices
from rooftile.errors import UsageError

GIB = 2**30

# name: bf16 (or fp16), fp8, tf32, fp32 in TFLOP/s; bandwidth in GB/s; SMs. None: not there or not published.
PUBLISHED = {
    "v100-sxm2-16gb": (125, None, None, 15.7, 900, 80),
    "v100-sxm2-32gb": (125, None, None, 15.7, 900, 80),
    "a100-sxm-40gb": (312, None, 156, 19.5, 1555, 108),
    "a100-sxm-80gb": (312, None, 156, 19.5, 2039, 108),
    "a100-pcie-80gb": (312, None, 156, 19.5, 1935, 108),
    "h100-sxm": (989.4, 1978.9, 494.7, 66.9, 3350, 132),
    "h100-pcie": (756.5, 1513, 378, 51.2, 2000, 114),
    "h100-nvl": (835.5, 1671, 417, 60, 3900, 132),
    "h200": (989.4, 1978.9, 494.7, 66.9, 4800, 132),
    "b200": (2250, 4500, 1125, 80, 8000, 148),
    "gb200": (2500, 5000, 1250, 80, 8000, 152),
    "l4": (121, 242.5, 60, 30.3, 300, 58),
    "l40s": (362, 733, 183, 91.6, 864, 142),
    "rtx-4090": (165.2, 330.3, 82.6, 82.6, 1008, 128),
    "rtx-5090": (209.5, 419, 104.8, 104.8, 1792, 170),
    "mi250x": (383, None, None, 47.9, 3277, None),
    "mi300x": (1307.4, 2614.9, 653.7, 163.4, 5300, 304),
    "mi325x": (1307.4, 2614.9, 653.7, 163.4, 6000, 304),
    "tpu-v4": (275, None, None, None, 1200, None),
    "tpu-v5e": (197, None, None, None, 819, None),
    "tpu-v5p": (459, None, None, None, 2765, None),
    "tpu-v6e": (918, None, None, None, 1638, None),
}

# What each is sold with, in GB as the seller says it.
SOLD = {
    "v100-sxm2-16gb": 16, "v100-sxm2-32gb": 32, "a100-sxm-40gb": 40, "a100-sxm-80gb": 80, "a100-pcie-80gb": 80,
    "h100-sxm": 80, "h100-pcie": 80, "h100-nvl": 94, "h200": 141, "b200": 180, "gb200": 186, "l4": 24, "l40s": 48,
    "rtx-4090": 24, "rtx-5090": 32, "mi250x": 128, "mi300x": 192, "mi325x": 256, "tpu-v4": 32, "tpu-v5e": 16,
    "tpu-v5p": 95, "tpu-v6e": 32,
}  # fmt: skip


def teraflops(device, *inputs):
    for dtype in inputs:
        if device.supports(dtype):
            return device.peak(dtype).flops_per_s / 1e12
    return None


def test_every_promised_device_is_there():
    assert devices.names() == list(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_figures_are_the_published_dense_ones(name):
    device = devices.load(name)
    half, fp8, tf32, fp32, bandwidth, sms = PUBLISHED[name]
    assert teraflops(device, "bfloat16", "float16") == pytest.approx(half)
    assert teraflops(device, "float8_e4m3fn", "float8_e4m3fnuz") == (fp8 and pytest.approx(fp8))
    assert teraflops(device, "tf32") == (tf32 and pytest.approx(tf32))
    assert (device.vector_peak.flops_per_s / 1e12 if device.vector_peak else None) == (fp32 and pytest.approx(fp32))
    assert device.memory_bandwidth == bandwidth * 1e9, "bandwidth is decimal"
    assert device.sm_count == sms


@pytest.mark.parametrize("name", PUBLISHED)
def test_capacity_lies_between_its_decimal_and_binary_readings(name):
    device = devices.load(name)
    assert SOLD[name] * 1e9 <= device.nominal_bytes <= SOLD[name] * GIB
    assert 0.9 * device.nominal_bytes < device.visible_bytes <= device.nominal_bytes


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_number_says_where_it_comes_from(name):
    device = devices.load(name)
    told = [device.provenance.capacity, device.provenance.visible, device.provenance.bandwidth]
    told += [entry.provenance for entry in (*device.peaks, *device.measured, *device.links)]
    if device.sm_count or device.on_chip_bytes:
        told.append(device.provenance.chip)
    assert all(len(text) > 5 for text in told)


def test_80_gb_is_80_gib_of_which_the_driver_shows_79():
    for name in ("a100-sxm-80gb", "a100-pcie-80gb", "h100-sxm", "h100-pcie"):
        device = devices.load(name)
        assert device.nominal_bytes == 80 * GIB
        assert round(device.nominal_bytes / 1e9, 1) == 85.9
        assert 79.15 <= round(device.visible_bytes / GIB, 2) <= 79.21
        assert device.visible_evidence == "declared"


def test_b200_shows_178_35_gib():
    device = devices.load("b200")
    assert device.visible_bytes / GIB == pytest.approx(178.35, abs=0.001)
    assert device.visible_bytes == pytest.approx(191.5e9, rel=1e-4)


def test_an_unknown_visible_capacity_is_0_985_of_the_nominal_and_says_so():
    device = devices.load("a100-sxm-40gb")
    assert device.visible_evidence == "assumed"
    assert device.visible_bytes == int(0.985 * 40 * GIB)
    assert "0.985" in device.provenance.visible


def test_geforce_multiplies_at_half_rate_when_it_accumulates_in_fp32():
    device = devices.load("rtx-4090")
    assert device.peak("float16").flops_per_s == 165.2e12
    assert device.peak("float16", accumulate="float16").flops_per_s == 330.3e12
    assert device.peak("float8_e4m3fn").flops_per_s == 330.3e12
    assert device.peak("float8_e4m3fn", accumulate="float16").flops_per_s == 660.6e12
    with pytest.raises(UsageError, match="bfloat16 products with float16 accumulation"):
        device.peak("bfloat16", accumulate="float16")


def test_tf32_is_used_only_where_it_is_allowed():
    device = devices.load("a100-sxm-80gb")
    assert device.peak("float32").flops_per_s == 19.5e12
    assert device.peak("float32", tf32=True).flops_per_s == 156e12
    assert devices.load("v100-sxm2-16gb").peak("float32", tf32=True).flops_per_s == 15.7e12


def test_v100_has_no_bf16_and_the_error_says_what_to_do():
    with pytest.raises(UsageError, match=r"v100-sxm2-16gb has no peak for bfloat16 .*float16.*another device"):
        devices.load("v100-sxm2-16gb").peak("bfloat16")


def test_amd_fp8_is_the_fnuz_kind():
    device = devices.load("mi300x")
    assert device.supports("float8_e4m3fnuz")
    assert not device.supports("float8_e4m3fn")


@pytest.mark.parametrize(
    ("name", "ceiling", "share"),
    [("a100-sxm-80gb", 271.2, 86.9), ("h100-sxm", 794.5, 80.3), ("b200", 1745, 77.6), ("mi300x", 668.4, 51.1)],
)
def test_measured_ceilings_stand_beside_the_peak(name, ceiling, share):
    device = devices.load(name)
    measured = device.ceiling("bfloat16").flops_per_s
    assert measured == ceiling * 1e12
    assert round(100 * measured / device.peak("bfloat16").flops_per_s, 1) == share
    assert device.ceiling("float16") is None


def test_a_collective_sees_one_direction_of_a_link():
    assert devices.load("a100-sxm-80gb").links[0].both_directions == 600e9
    assert devices.link("nvlink4").one_direction == 450e9
    assert devices.link("pcie4-x16").one_direction == 31e9
    assert devices.link("pcie5-x16").one_direction == 63e9
    assert devices.link("infiniband-ndr").one_direction == 50e9
    with pytest.raises(UsageError, match=r"unknown link 'nvlink9'.*nvlink"):
        devices.link("nvlink9")


@pytest.mark.parametrize(
    ("name", "total", "usable"), [("a100-sxm-80gb", 192, 164), ("h100-sxm", 256, 228), ("v100-sxm2-16gb", 128, 96)]
)
def test_on_chip_memory_is_binary_and_per_sm(name, total, usable):
    device = devices.load(name)
    assert (device.on_chip_bytes, device.on_chip_usable_bytes) == (total * 1024, usable * 1024)


def test_mi250x_says_that_a_process_sees_half_of_it():
    device = devices.load("mi250x")
    assert device.logical_devices == 2
    assert device.peak("bfloat16").flops_per_s / device.logical_devices == 191.5e12
    assert "half" in device.notes[0]


@pytest.mark.parametrize(
    ("name", "near"), [("a100", "a100-sxm-80gb"), ("h100", "h100-nvl"), ("H100-SXM", "h100-sxm"), ("mi300", "mi300x")]
)
def test_an_unknown_name_lists_near_matches_and_is_never_another_device(name, near):
    with pytest.raises(UsageError, match=f"unknown device '{name}'; near matches: .*{near}"):
        devices.load(name)


def test_an_unknown_name_that_is_near_nothing_lists_all():
    with pytest.raises(UsageError, match=r"known: v100-sxm2-16gb, .*tpu-v6e; `rooftile devices` lists all"):
        devices.load("zzzz")


def test_a_device_is_frozen_and_becomes_json():
    device = devices.load("h100-sxm")
    with pytest.raises(dataclasses.FrozenInstanceError):
        device.sm_count = 1
    assert json.loads(json.dumps(device.to_dict()))["peaks"][0]["flops_per_s"] == 1978.9e12


def test_devices_need_no_torch():
    code = "import sys; from rooftile import devices; devices.load('b200'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
