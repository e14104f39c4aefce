"""A ScaledTensor in a safetensors file: length, JSON header, plain data. Written whole or not at all."""

from __future__ import annotations

import json
import struct
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from rooftile.errors import UsageError
from rooftile.files import replaced
from rooftile.formats.codec import decode, encode
from rooftile.lowp.operators import code_dtype
from rooftile.lowp.recipes import Recipe
from rooftile.lowp.scaled_tensor import ScaledTensor

__all__ = ["load", "save"]

_SCHEMA = "rooftile.scaled_tensor/1"
_NAMES = {"fp8_e4m3fn": "F8_E4M3", "fp8_e5m2": "F8_E5M2", "fp8_e4m3fnuz": "F8_E4M3FNUZ", "fp8_e5m2fnuz": "F8_E5M2FNUZ",
          "e8m0": "F8_E8M0", "fp32": "F32"}  # fmt: skip


def save(path: str | Path, tensor: ScaledTensor) -> None:
    """Write ``tensor``: ``codes``, ``scales`` in the recipe's scale format, ``tensor_scale`` where there is one.

    fp4 and fp6 codes are U8, one code a byte: the format has no name for them.
    """
    recipe = tensor.recipe
    parts = [
        ("codes", _NAMES.get(recipe.format, "U8"), tensor.shape, tensor.codes.view(torch.uint8)),
        ("scales", _NAMES[recipe.scale_format], tuple(tensor.block_scale.shape), _stored(tensor)),
    ]
    if tensor.tensor_scale is not None:
        parts.append(("tensor_scale", "F32", (), tensor.tensor_scale.reshape(1).view(torch.uint8)))
    header: dict[str, Any] = {"__metadata__": {"schema": _SCHEMA, "recipe": json.dumps(asdict(recipe))}}
    data = bytearray()
    for name, dtype, shape, raw in parts:
        start = len(data)
        data += raw.contiguous().cpu().numpy().tobytes()
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, len(data)]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with replaced(path) as temporary:
        temporary.write_bytes(struct.pack("<Q", len(text)) + text + data)


def _stored(tensor: ScaledTensor) -> torch.Tensor:
    if tensor.recipe.scale_format == "fp32":
        return tensor.block_scale.contiguous().view(torch.uint8)
    return encode(tensor.block_scale, tensor.recipe.scale_format)


def load(path: str | Path) -> ScaledTensor:
    """The tensor that :meth:`ScaledTensor.save` wrote.

    Raises:
        UsageError: no such file, or contents that are none of ours.
    """
    path = Path(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror}; give a file that ScaledTensor.save wrote") from None
    try:
        length = struct.unpack_from("<Q", raw)[0]
        header = json.loads(raw[8 : 8 + length])
        if header["__metadata__"]["schema"] != _SCHEMA:
            raise KeyError("schema")
        fields = json.loads(header["__metadata__"]["recipe"])
        recipe = Recipe(**{**fields, "block": tuple(fields["block"])})
        codes = _part(raw, 8 + length, header["codes"])
        scales = _part(raw, 8 + length, header["scales"])
        shape, grid = header["codes"]["shape"], header["scales"]["shape"]
        tensor_scale = None
        if "tensor_scale" in header:
            tensor_scale = _part(raw, 8 + length, header["tensor_scale"]).view(torch.float32).reshape(())
        wide = recipe.scale_format == "fp32"
        scales = scales.view(torch.float32) if wide else decode(scales, recipe.scale_format)
        return ScaledTensor(
            codes.view(code_dtype(recipe.format)).reshape(shape), scales.reshape(grid), recipe, tensor_scale
        )
    except (struct.error, ValueError, KeyError, TypeError, RuntimeError, UnicodeDecodeError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{path} holds no ScaledTensor ({type(error).__name__}: {error}); save it again") from None


def _part(raw: bytes, start: int, entry: dict[str, Any]) -> torch.Tensor:
    first, last = entry["data_offsets"]
    if start + last > len(raw):
        raise ValueError("the file ends in the middle of a tensor")
    return torch.frombuffer(bytearray(raw[start + first : start + last]) or bytearray(1), dtype=torch.uint8)[
        : last - first
    ]
