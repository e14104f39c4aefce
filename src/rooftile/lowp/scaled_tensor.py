"""``quantize`` and what it makes: a :class:`ScaledTensor`, codes with their scales and the recipe they follow."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rooftile.errors import UsageError
from rooftile.formats.carrier import check_float_tensor
from rooftile.formats.catalogue import get_format
from rooftile.lowp.blocks import as_matrix, block_amax, grid_of, largest, resolve_block
from rooftile.lowp.operators import block_arguments, code_dtype, decode_blocks, quantize_matrix
from rooftile.lowp.recipes import Recipe, recipe
from rooftile.lowp.scales import check_power_of_two, tensor_scale_of

if TYPE_CHECKING:
    from pathlib import Path

    from rooftile.lowp.delayed import AmaxHistory

__all__ = ["ScaledTensor", "quantize"]


@dataclass(frozen=True, slots=True)
class ScaledTensor:
    """A tensor as codes and scales.

    ``codes``: the tensor's shape; torch's float8 dtype where there is one, else uint8, one code a byte.
    ``block_scale``: an fp32 grid (blocks down, blocks across) of values of the recipe's scale format. ``tensor_scale``:
    a 0-dim fp32 tensor, None where the recipe has none.

    Raises:
        UsageError: codes and scales that don't fit the recipe (shapes, or a scale that is no power of two).
    """

    codes: torch.Tensor
    block_scale: torch.Tensor
    recipe: Recipe
    tensor_scale: torch.Tensor | None = None

    def __post_init__(self) -> None:
        name = self.recipe.name
        matrix = as_matrix(self.codes)
        block = resolve_block(self.recipe.block, *matrix.shape)
        grid = grid_of(matrix.shape, block)
        if tuple(self.block_scale.shape) != grid:
            raise UsageError(
                f"codes of shape {tuple(self.codes.shape)} need a {grid[0]} x {grid[1]} grid of scales under recipe "
                f"{name!r}, not {tuple(self.block_scale.shape)}"
            )
        if self.codes.dtype != code_dtype(self.recipe.format):
            raise UsageError(f"codes are {self.codes.dtype}; {self.recipe.format} has {code_dtype(self.recipe.format)}")
        if (self.tensor_scale is not None) != self.recipe.tensor_scale:
            raise UsageError(f"recipe {name!r} has {'a' if self.recipe.tensor_scale else 'no'} tensor scale")
        if self.recipe.scale_rule != "exact":
            check_power_of_two(self.block_scale, f"recipe {name!r}")

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor that it stands for."""
        return tuple(self.codes.shape)

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns that share a scale, of the tensor seen as a matrix."""
        return resolve_block(self.recipe.block, *as_matrix(self.codes).shape)

    @property
    def decode_scale(self) -> torch.Tensor:
        """What the codes' values are multiplied by: the fp32 grid, with the tensor's scale in it."""
        return self.block_scale if self.tensor_scale is None else self.block_scale * self.tensor_scale

    @property
    def nbytes(self) -> int:
        """Bytes of densely packed codes and scales in their own formats."""
        code_bits = self.codes.numel() * get_format(self.recipe.format).bits
        scale_bits = self.block_scale.numel() * self.recipe.bits_per_block_scale + 32 * self.recipe.tensor_scale
        return math.ceil(code_bits / 8) + math.ceil(scale_bits / 8)

    @property
    def bytes_per_value(self) -> float:
        """``nbytes`` over the number of values; 0.0 for an empty tensor."""
        return self.nbytes / self.codes.numel() if self.codes.numel() else 0.0

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values, of the tensor's shape: decoded and multiplied in fp32 (fp64 for fp64), then cast."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        matrix = decode_blocks(as_matrix(self.codes), self.decode_scale, self.block, self.recipe.format, wide)
        return matrix.reshape(self.codes.shape).to(dtype)

    def save(self, path: str | Path) -> None:
        """Write a safetensors file, whole or not at all; :func:`rooftile.lowp.load` reads it."""
        from rooftile.lowp.files import save

        save(path, self)


def quantize(x: torch.Tensor, recipe_: str | Recipe, *, history: AmaxHistory | None = None) -> ScaledTensor:
    """``x`` under a recipe: each value times its block's encode scale in fp32, rounded once to the nearest code.

    Args:
        x: floating, any shape, strides and device (fp64 is multiplied in fp64). Its last dimension is the contraction.
        recipe_: a :class:`Recipe` or its name.
        history: for a delayed recipe; the scale comes from it, and this tensor's amax enters it afterwards (nothing of
            an empty tensor).

    Raises:
        UsageError: an integer, complex or sparse tensor, an unknown recipe, a delayed recipe without history.
    """
    found = recipe(recipe_)
    x = check_float_tensor(x)
    if (history is not None) != bool(found.history):
        need = "needs an AmaxHistory: pass history=" if found.history else "takes no history"
        raise UsageError(f"recipe {found.name!r} {need}")
    matrix = as_matrix(x)
    amax = tensor_scale = None
    if history is not None:
        own = largest(block_amax(matrix, resolve_block((None, None), *matrix.shape)))
        amax = history.advance(own) if matrix.numel() else history.peek(own)
    if found.tensor_scale:
        amaxes = block_amax(matrix, resolve_block((None, None), *matrix.shape))
        tensor_scale = tensor_scale_of(amaxes, get_format(found.format), get_format(found.scale_format))
    codes, scales = quantize_matrix(
        matrix, *block_arguments(found), found.format, found.scale_format, found.scale_rule, amax, tensor_scale
    )
    return ScaledTensor(codes.reshape(x.shape), scales, found, tensor_scale)
