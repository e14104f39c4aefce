"""A file of tensors, read once: every tensor's exponent histogram, what each format would lose of it, the best
recipe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rooftile.errors import UsageError
from rooftile.formats.catalogue import get_format
from rooftile.formats.format import FloatFormat
from rooftile.formats.histogram import ExponentHistogram, exponent_histogram, merge_all
from rooftile.formats.reach import CountBound, flushed, overflowed, subnormal
from rooftile.formats.recipes import DEFAULT_FORMATS, Recipe, rank_recipes
from rooftile.formats.tensor_files import StoredTensor, open_tensors

__all__ = ["FileInspection", "TensorInspection", "inspect_file"]


@dataclass(frozen=True, slots=True)
class TensorInspection:
    """One tensor. ``histogram`` is None where the tensor was not counted, and ``unread`` says why."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    histogram: ExponentHistogram | None
    recipes: tuple[Recipe, ...]
    unread: str = ""

    def best(self, most_bits: int) -> Recipe | None:
        """The recipe of at most ``most_bits`` bits a value that loses least; None without a finite non-zero value."""
        if self.histogram is None or not self.histogram.nonzero:
            return None
        return next((recipe for recipe in self.recipes if recipe.bits <= most_bits), None)


@dataclass(frozen=True, slots=True)
class FileInspection:
    """All tensors of a file; ``total`` is the merged histogram of those that were counted."""

    path: str
    nbytes: int
    tensors: tuple[TensorInspection, ...]
    total: ExponentHistogram
    formats: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, schema ``rooftile.inspect/1``."""
        return {
            "schema": "rooftile.inspect/1",
            "path": self.path,
            "bytes": self.nbytes,
            "formats": list(self.formats),
            "total": _histogram_dict(self.total, self.formats),
            "tensors": [_tensor_dict(tensor, self.formats) for tensor in self.tensors],
        }


def inspect_file(
    path: str | Path,
    formats: Sequence[FloatFormat | str] = DEFAULT_FORMATS,
    say: Callable[[str], None] = lambda _: None,
) -> FileInspection:
    """Read the file once, in pieces of bounded size.

    Args:
        path: a .safetensors, .npy or .pt file.
        formats: what the tensors might be stored in; the recipes are ranked among them.
        say: told about the progress now and then.

    Raises:
        UsageError: a file that can't be read as its suffix says, an unknown format, or one that holds scales only.
    """
    chosen = [get_format(fmt) for fmt in formats]
    for fmt in chosen:
        if not (fmt.signed and fmt.zero):
            raise UsageError(f"{fmt.name} holds scales only; choose formats with a sign and a zero")
    stored = open_tensors(path)
    whole = sum(tensor.nbytes for tensor in stored if not tensor.unread) or 1
    done = 0
    found = []
    for tensor in stored:
        histogram = None
        if not tensor.unread:
            parts = []
            for piece in tensor.pieces():
                parts.append(exponent_histogram(piece))
                done += piece.numel() * piece.element_size()
                say(f"{done / whole:.0%} {tensor.name}")
            histogram = merge_all(parts)
        found.append(_inspect(tensor, histogram, chosen))
    total = merge_all(tensor.histogram for tensor in found if tensor.histogram is not None)
    return FileInspection(str(path), Path(path).stat().st_size, tuple(found), total, tuple(fmt.name for fmt in chosen))


def _inspect(tensor: StoredTensor, histogram: ExponentHistogram | None, formats: list[FloatFormat]) -> TensorInspection:
    recipes = rank_recipes(histogram, formats) if histogram is not None else ()
    return TensorInspection(tensor.name, tensor.dtype, tensor.shape, tensor.nbytes, histogram, recipes, tensor.unread)


def _tensor_dict(tensor: TensorInspection, formats: tuple[str, ...]) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "bytes": tensor.nbytes,
    }
    if tensor.histogram is None:
        return plain | {"unread": tensor.unread}
    return plain | _histogram_dict(tensor.histogram, formats) | {"recipes": [_recipe(r) for r in tensor.recipes]}


def _histogram_dict(h: ExponentHistogram, formats: tuple[str, ...]) -> dict[str, Any]:
    unscaled = {
        name: {
            "flushed": _bound(flushed(h, name)),
            "subnormal": _bound(subnormal(h, name)),
            "overflowed": _bound(overflowed(h, name)),
        }
        for name in formats
    }
    return {"histogram": h.to_dict(), "dynamic_range": h.dynamic_range, "unscaled": unscaled}


def _bound(bound: CountBound) -> dict[str, Any]:
    return {"low": bound.low, "high": bound.high, "of": bound.of, "exact": bound.exact}


def _recipe(recipe: Recipe) -> dict[str, Any]:
    return {
        "format": recipe.fmt,
        "encode_scale": recipe.encode_scale,
        "encode_scale_exponent": math.frexp(recipe.encode_scale)[1] - 1,
        "flushed": _bound(recipe.flushed),
        "overflowed": _bound(recipe.overflowed),
        "relative_error": recipe.relative_error,
        "evidence": "derived",
    }
