"""Tiles and waves of a captured step's products."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rooftile
from rooftile.roofline import gemm_quantisation


def captured(rows: int, n_in: int, n_out: int, device: str) -> rooftile.roofline.GemmQuantisation:
    with torch.device("meta"):
        step = rooftile.Step(nn.Linear(n_in, n_out, bias=False), (torch.empty(rows, n_in),), phase="prefill")
    chosen = rooftile.devices.load(device)
    trace = rooftile.capture.capture(step, chosen, rooftile.CaptureOptions())
    return gemm_quantisation(trace, chosen)


def test_the_guides_example_is_six_tiles_of_which_two_thirds_are_output():
    found = captured(256, 64, 257, "a100-sxm-80gb")
    assert found.products == 1
    assert found.tiles == pytest.approx(0.669, abs=5e-4)
    assert found.waves == pytest.approx(6 / 108)


def test_a_product_of_whole_tiles_and_whole_waves_loses_nothing():
    found = captured(128 * 11, 64, 128 * 12, "h100-sxm")  # 132 tiles on 132 SMs
    assert (found.tiles, found.waves) == (1, 1)


def test_a_device_without_a_count_of_sms_has_no_waves():
    assert captured(128, 64, 128, "tpu-v4").waves is None


def test_the_report_says_that_the_tile_is_assumed():
    report = rooftile.audit("gpt2", "h100-sxm", seq=64, phase="prefill")
    assert report.roofline.gemm.evidence == "assumed"
    assert 0 < report.roofline.gemm.tiles < 1  # 50,257 columns are no whole tiles
