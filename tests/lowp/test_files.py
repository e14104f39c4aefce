"""A ScaledTensor on disk: the same bits back, readable by the safetensors library, whole or not there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rooftile import lowp
from rooftile.errors import UsageError

safetensors = pytest.importorskip("safetensors")


@pytest.mark.parametrize("name", [name for name in lowp.RECIPES if name != "delayed"])
@pytest.mark.parametrize("fmt", ["fp8_e4m3fn", "fp8_e5m2", "fp4_e2m1"])
def test_a_scaled_tensor_comes_back_bit_for_bit(name: str, fmt: str, tmp_path: Path) -> None:
    x = torch.randn(3, 70, 130, generator=torch.Generator().manual_seed(2))
    scaled = lowp.quantize(x, lowp.recipe(name, fmt))
    scaled.save(tmp_path / "x.safetensors")
    back = lowp.load(tmp_path / "x.safetensors")
    assert back.recipe == scaled.recipe
    assert back.shape == (3, 70, 130)
    assert torch.equal(back.codes.view(torch.uint8), scaled.codes.view(torch.uint8))
    assert torch.equal(back.block_scale, scaled.block_scale)
    assert torch.equal(back.dequantize(), scaled.dequantize())


def test_the_safetensors_library_reads_the_file(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    scaled = lowp.quantize(torch.randn(64, 256), "mx-1x32")
    scaled.save(tmp_path / "x.safetensors")
    tensors = load_file(tmp_path / "x.safetensors")
    assert tensors["codes"].dtype == torch.float8_e4m3fn
    assert torch.equal(tensors["codes"].float(), scaled.codes.float())
    assert torch.equal(tensors["scales"].float(), scaled.block_scale)


def test_empty_and_scalar_tensors_round_trip(tmp_path: Path) -> None:
    for x in (torch.empty(0, 8), torch.tensor(2.5), torch.empty(3, 0)):
        lowp.quantize(x, "tensor").save(tmp_path / "x.safetensors")
        assert torch.equal(lowp.load(tmp_path / "x.safetensors").dequantize(), lowp.quantize(x, "tensor").dequantize())


def test_a_file_that_is_none_of_ours_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="can't be read"):
        lowp.load(tmp_path / "missing.safetensors")
    (tmp_path / "junk.safetensors").write_bytes(b"abc")
    with pytest.raises(UsageError, match="holds no ScaledTensor"):
        lowp.load(tmp_path / "junk.safetensors")
    lowp.quantize(torch.ones(8, 128), "tile-1x128").save(tmp_path / "x.safetensors")
    whole = (tmp_path / "x.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:-5])
    with pytest.raises(UsageError, match="holds no ScaledTensor"):
        lowp.load(tmp_path / "cut.safetensors")


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file or directory"):
        lowp.quantize(torch.ones(4), "tensor").save(tmp_path / "missing" / "x.safetensors")
    assert list(tmp_path.iterdir()) == []
