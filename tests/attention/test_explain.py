"""Every call says which kernel takes it, in which precision and tiles, and why the others do not."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

import rooftile
from rooftile import masks
from rooftile._attention.kernels import KERNELS
from rooftile.errors import UsageError

explain = rooftile.attention.explain


def operands(rows: int = 256, keys: int = 256, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    return torch.randn(2, 4, rows, 16, dtype=dtype), *(torch.randn(2, 2, keys, d, dtype=dtype) for d in (16, 8))


def test_the_square_of_a_causal_mask_is_half_visible_and_its_tiles_cover_it():
    said = explain(*operands(), mask=masks.causal(), kernel="tiled")
    assert said.visible_share == pytest.approx(257 / 512)
    assert said.visible_share <= said.visited_share < 1


@pytest.mark.parametrize("kernel", KERNELS)
def test_without_a_mask_all_is_visible_and_visited(kernel: str):
    q, k, _ = operands()
    said = explain(q, k, k, kernel=kernel)
    assert (said.visible_share, said.visited_share) == (1, 1)
    assert said.flops == said.dense_flops


def test_flops_and_bytes_follow_from_the_shapes():
    q, k, v = operands(3, 5)
    said = explain(q, k, v, kernel="reference")
    scores = 2 * 4 * 3 * 5
    assert said.flops == scores * (2 * 16 + 2 * 8 + 5) + 2 * 4 * 3 * 8
    assert said.bytes == 4 * (q.numel() + k.numel() + v.numel() + 2 * 4 * 3 * 8 + 2 * 4 * 3)


def test_hidden_pairs_of_every_kind_are_counted():
    q, k, v = operands(4, 4)
    dense = masks.dense(torch.eye(4, dtype=torch.bool))
    assert explain(q, k, v, mask=dense).visible_share == 1 / 4
    assert explain(q, k, v, mask=masks.padding([2, 4])).visible_share == 3 / 4
    bias = torch.zeros(1, 1, 4, 4)
    bias[..., 0] = -torch.inf
    assert explain(q, k, v, bias=bias).visible_share == 3 / 4
    assert explain(q, k, v, bias=bias, mask=masks.causal()).visible_share == 6 / 16


def test_reasons_of_a_refusal_name_what_is_missing():
    q, k, v = operands(dtype=torch.float64)
    said = explain(q, k, v)
    assert said.kernel == "tiled"
    assert any("float64" in reason for reason in said.refusals["native"])
    peers = explain(*operands(), softcap=3.0, sinks=torch.zeros(4), dropout_p=0.5).refusals["sdpa"]
    for word in ("softcap", "sinks", "dropout", "16 and 8"):
        assert any(word in reason for reason in peers), word


def test_a_call_that_no_named_kernel_takes_lists_every_reason():
    with pytest.raises(UsageError, match=r"sdpa: .*softcap.*native: .*float64"):
        rooftile.attention(*operands(dtype=torch.float64), softcap=1.0, kernel=("sdpa", "native"))


def test_reference_and_sdpa_never_run_unnamed():
    said = explain(*operands())
    assert said.asked == ("native", "tiled")
    assert explain(*operands(), kernel=("reference", "native")).kernel == "reference"


def test_explaining_changes_no_random_state():
    inputs = operands()
    before = torch.get_rng_state()
    explain(*inputs, dropout_p=0.5)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_report_is_text_and_plain_values():
    said = explain(*operands(), mask=masks.causal())
    assert json.loads(json.dumps(said.as_dict()))["kernel"] == said.kernel
    assert said.kernel in str(said)
    assert "tiled" in str(said)


def test_without_the_library_the_native_kernel_says_why_and_attention_goes_on():
    code = (
        "import torch, rooftile; q = torch.randn(1, 2, 8, 4); said = rooftile.attention.explain(q, q, q);"
        "print(said.kernel, said.refusals['native']); rooftile.attention(q, q, q)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "ROOFTILE_NATIVE": "0"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("tiled ('it is switched off by ROOFTILE_NATIVE=0',)")
