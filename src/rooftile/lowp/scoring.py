"""``score``: what every recipe would do to one tensor, and whether finer scales matter for it.

The relative error of a value is ``|rounded - scaled| / |scaled|``, scaled being the value times its encode scale; one
that is flushed to zero has error 1, and so has one that is lost: NaN with its block, where the format has no NaN.
Quantiles are read from counts with 256 bins a binade, so they are within 0.2 % of themselves; errors below 2^-24 count
as 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from rooftile.errors import UsageError
from rooftile.formats.carrier import check_float_tensor
from rooftile.formats.catalogue import get_format
from rooftile.formats.format import FloatFormat
from rooftile.formats.rounding import round_to
from rooftile.lowp import native
from rooftile.lowp.blocks import any_nonfinite, as_matrix, block_amax, grid_of, resolve_block, spread, times_scales
from rooftile.lowp.native import ERROR_BINS, NativeScore, ScoreTask
from rooftile.lowp.recipes import Recipe, recipe
from rooftile.lowp.scales import choice_of, scales_of_amax, tensor_scale_of

__all__ = ["DEFAULT_RECIPES", "RecipeScore", "ScoreTable", "score"]

DEFAULT_RECIPES = ("tensor", "row", "tile-1x128", "block-128x128", "mx-1x32-up", "nvfp4-1x16")

_ERROR_SHIFT, _ERROR_BASE = 15, (127 - 24) << 8
_FINEST = 16  # columns of the smallest block of the recipes: its maxima are read once, and make all larger blocks'
_PIECE_ROWS = 1 << 20  # elements at a time in plain torch operations

#: Finer scales matter where they bring the median error, or the flushed share, down by this factor.
_MATTERS = 1.5
_FLUSHED_MATTERS = 0.001


@dataclass(frozen=True, slots=True)
class RecipeScore:
    """One recipe's row. Counts are of elements; errors are relative, over the finite non-zero values.

    ``lost``: finite values, zeros included, that become NaN because their block holds a NaN or Inf and the format has
    no NaN, as in :meth:`ScaledTensor.dequantize`; they are neither flushed nor saturated.

    ``snr_db``: 10 log10 of the values' sum of squares over that of their errors; infinite where nothing is lost.
    """

    recipe: str
    format: str
    total: int
    zeros: int
    non_finite: int
    flushed: int
    saturated: int
    median_error: float
    p99_error: float
    max_error: float
    snr_db: float
    bytes_per_value: float
    lost: int = 0

    @property
    def nonzero(self) -> int:
        """Finite values other than zero: the denominator of every share."""
        return self.total - self.zeros - self.non_finite

    @property
    def flushed_share(self) -> float:
        """Of the finite non-zero values."""
        return self.flushed / self.nonzero if self.nonzero else 0.0

    @property
    def saturated_share(self) -> float:
        """Of the finite non-zero values."""
        return self.saturated / self.nonzero if self.nonzero else 0.0


@dataclass(frozen=True, slots=True)
class ScoreTable:
    """A row per recipe, in the order asked for."""

    shape: tuple[int, ...]
    rows: tuple[RecipeScore, ...]

    def __getitem__(self, name: str) -> RecipeScore:
        for row in self.rows:
            if row.recipe == name:
                return row
        raise UsageError(f"recipe {name!r} was not scored; scored are {', '.join(row.recipe for row in self.rows)}")

    @property
    def finer_scales_matter(self) -> bool | None:
        """Whether the best finer recipe clearly beats the coarsest of the same format; None without a pair."""
        pair = self._pair
        if isinstance(pair, str):
            return None
        coarse, fine = pair
        fewer = coarse.flushed_share - fine.flushed_share >= _FLUSHED_MATTERS
        kept = coarse.lost - fine.lost >= _FLUSHED_MATTERS * coarse.total
        return fewer or kept or coarse.median_error > _MATTERS * fine.median_error

    @property
    def _pair(self) -> tuple[RecipeScore, RecipeScore] | str:
        """A coarse row and the best finer one of its format, or why there is none."""
        coarse = next((row for row in self.rows if row.recipe in ("tensor", "row")), None)
        if coarse is None:
            return "neither tensor nor row is among the recipes, and a finer one is compared with these"
        if not coarse.total:
            return "the tensor is empty"
        if coarse.non_finite == coarse.total:
            return f"none of the {coarse.total:,} values is finite"
        if not coarse.nonzero:
            return "all finite values are zero, which every recipe keeps"
        finer = [
            row for row in self.rows if row.format == coarse.format and row.bytes_per_value > coarse.bytes_per_value
        ]
        if not finer:
            return f"no recipe is finer than {coarse.recipe} and in its format, {coarse.format}"
        return coarse, min(finer, key=lambda row: (row.flushed + row.saturated + row.lost, row.median_error))

    @property
    def not_finite(self) -> str:
        """``2 of 3 not finite``; empty where all values are finite."""
        row = self.rows[0]
        return f"{row.non_finite:,} of {row.total:,} not finite" if row.non_finite else ""

    @property
    def reading(self) -> str:
        """One line for a person."""
        pair = self._pair
        if isinstance(pair, str):
            return f"finer scales can't be judged: {pair}"
        coarse, fine = pair
        figures = (
            f"{coarse.recipe} flushes {coarse.flushed_share:.2%} with median error {coarse.median_error:.2%}, "
            f"{fine.recipe} {fine.flushed_share:.2%} with {fine.median_error:.2%}"
        )
        if self.not_finite:
            figures += f" ({self.not_finite})"
        if coarse.lost or fine.lost:
            figures += f", {coarse.recipe} loses {coarse.lost:,} finite values to NaN, {fine.recipe} {fine.lost:,}"
        if self.finer_scales_matter:
            return f"finer scales matter here: {figures}"
        return f"finer scales don't matter here, one scale serves the whole tensor: {figures}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; an infinite signal-to-noise ratio is None."""
        rows = [{**asdict(row), "snr_db": row.snr_db if math.isfinite(row.snr_db) else None} for row in self.rows]
        return {"shape": list(self.shape), "rows": rows, "finer_scales_matter": self.finer_scales_matter,
                "reading": self.reading}  # fmt: skip


def score(x: torch.Tensor, recipes: Iterable[str | Recipe] = DEFAULT_RECIPES) -> ScoreTable:
    """Score ``x`` under every recipe, without keeping a quantised copy.

    Where the C++ core serves, ``x`` crosses the memory boundary twice whatever the number of recipes: once for the
    maxima of the smallest blocks, of which all others are made, and once for the errors.

    Args:
        x: floating, any shape and strides; its last dimension is the contraction.
        recipes: recipes or their names.

    Raises:
        UsageError: an integer tensor, no recipe, an unknown or a delayed one (its scale is not the tensor's own).
    """
    found = [recipe(each) for each in recipes]
    if not found:
        raise UsageError("no recipe was given; name at least one, such as 'tensor'")
    for each in found:
        if each.history:
            raise UsageError(f"recipe {each.name!r} takes its scale from earlier tensors; score 'tensor' instead")
    matrix = as_matrix(check_float_tensor(x))
    if matrix.dtype not in (torch.float32, torch.bfloat16, torch.float64):
        matrix = matrix.float()
    matrix = matrix.contiguous()
    tasks = _tasks(matrix, found)
    on_core = native.available(matrix) and matrix.numel() > 0
    results = native.score_blocks(matrix, tasks) if on_core else [_score_with_torch(matrix, task) for task in tasks]
    # The core knows nothing of blocks whose scale is NaN; formats without NaN have them, where a value is not finite.
    results = [
        _score_with_torch(matrix, task) if on_core and result.non_finite and task.format.nan_code is None else result
        for task, result in zip(tasks, results, strict=True)
    ]
    return ScoreTable(tuple(x.shape), tuple(_row(matrix, *pair) for pair in zip(tasks, results, strict=True)))


def _tasks(x: torch.Tensor, recipes: Sequence[Recipe]) -> list[ScoreTask]:
    amaxes = _Maxima(x)
    tasks = []
    for each in recipes:
        fmt, scale_format = get_format(each.format), get_format(each.scale_format)
        block = resolve_block(each.block, *x.shape)
        amax = amaxes.of(block)
        tensor_scale = tensor_scale_of(amax, fmt, scale_format) if each.tensor_scale else None
        scales = scales_of_amax(amax, choice_of(each.format, each.scale_format, each.scale_rule), tensor_scale)
        tasks.append(ScoreTask(each, fmt, block, scales.encode.contiguous(), scales.decode.contiguous()))
    return tasks


class _Maxima:
    """Largest magnitudes of blocks of any size: from those of 1 x 16 where the size is a multiple of it."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x
        self.finest: torch.Tensor | None = None

    def of(self, block: tuple[int, int]) -> torch.Tensor:
        if block[1] % _FINEST and block[1] < self.x.shape[1]:
            return self._read(block)
        if self.finest is None:
            self.finest = self._read((1, _FINEST))
        return block_amax(self.finest, (block[0], max(1, -(-block[1] // _FINEST))))

    def _read(self, block: tuple[int, int]) -> torch.Tensor:
        return native.block_amax(self.x, block) if native.available(self.x) else block_amax(self.x, block)


def _score_with_torch(x: torch.Tensor, task: ScoreTask) -> NativeScore:
    """The kernel's twin: the same counts, bins and (to rounding of sums) squares."""
    result = NativeScore()
    counts = torch.zeros(ERROR_BINS, dtype=torch.int64)
    # Pieces of whole rows of blocks: each has its own rows of scales.
    step = max(1, _PIECE_ROWS // max(1, x.shape[1] * task.block[0])) * task.block[0]
    for start in range(0, x.shape[0], step):
        rows = slice(start // task.block[0], -(-(start + step) // task.block[0]))
        _add_piece(x[start : start + step], task.encode_scale[rows], task.decode_scale[rows], task, result, counts)
    result.errors[:] = counts.tolist()
    return result


def _add_piece(
    x: torch.Tensor, encode: torch.Tensor, decode: torch.Tensor, task: ScoreTask, result: NativeScore,
    counts: torch.Tensor,
) -> None:  # fmt: skip
    wide = x if x.dtype == torch.float64 else x.float()
    counted = wide.isfinite() & (wide != 0)
    scaled = times_scales(torch.where(wide.isfinite(), wide, 0.0), encode, task.block).abs()
    lost = torch.zeros_like(counted)
    if task.format.nan_code is None:
        lost = spread(any_nonfinite(x, task.block), task.block, *x.shape)
    rounded = torch.where(lost, 0.0, round_to(scaled, task.format))
    error = (rounded - scaled).abs()
    relative = torch.where(scaled == 0, 1.0, error / torch.where(scaled == 0, 1.0, scaled)).float()
    squares = torch.ones_like(wide, dtype=torch.float64)
    squares = times_scales(squares, decode.double().square(), task.block)
    result.zeros += int((wide == 0).sum())
    result.non_finite += int((~wide.isfinite()).sum())
    result.flushed += int((counted & ~lost & (rounded == 0)).sum())
    result.lost += int((lost & wide.isfinite()).sum())
    result.saturated += int((counted & ~lost & _beyond(scaled, task.format)).sum())
    result.signal += float((scaled.double().square() * squares)[counted].sum())
    result.noise += float((error.double().square() * squares)[counted].sum())
    errors = relative[counted]
    if errors.numel():
        result.largest_error = max(result.largest_error, float(errors.max()))
        bins = ((errors.view(torch.int32) >> _ERROR_SHIFT) - _ERROR_BASE).clamp(0, ERROR_BINS - 1)
        counts += torch.bincount(bins, minlength=ERROR_BINS).cpu()


def _beyond(scaled: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """Whether the nearest value, had the format no largest one, lies above the largest."""
    wider = FloatFormat("wider", fmt.exponent_bits + 1, fmt.fraction_bits, fmt.bias)
    return round_to(scaled, wider) > fmt.max


def _row(x: torch.Tensor, task: ScoreTask, result: NativeScore) -> RecipeScore:
    nonzero = x.numel() - result.zeros - result.non_finite
    codes = math.ceil(x.numel() * task.format.bits / 8)
    grid = grid_of(x.shape, task.block)
    scales = math.ceil((grid[0] * grid[1] * task.recipe.bits_per_block_scale + 32 * task.recipe.tensor_scale) / 8)
    snr = 10 * math.log10(result.signal / result.noise) if result.noise and result.signal else math.inf
    counts = list(result.errors)
    return RecipeScore(
        recipe=task.recipe.name,
        format=task.recipe.format,
        total=x.numel(),
        zeros=result.zeros,
        non_finite=result.non_finite,
        flushed=result.flushed,
        saturated=result.saturated,
        median_error=_quantile(counts, nonzero, 0.5),
        p99_error=_quantile(counts, nonzero, 0.99),
        max_error=result.largest_error,
        snr_db=snr,
        bytes_per_value=(codes + scales) / x.numel() if x.numel() else 0.0,
        lost=result.lost,
    )


def _quantile(counts: list[int], total: int, q: float) -> float:
    """The middle of the bin that holds the value of rank ceil(q * total)."""
    if not total:
        return 0.0
    rank = math.ceil(q * total)
    index = next(i for i, below in enumerate(itertools.accumulate(counts)) if below >= rank)
    if index == 0:
        return 0.0
    exponent, step = divmod(index, 256)
    return math.ldexp(1 + step / 256, exponent - 24) * (1 if index == ERROR_BINS - 1 else 1 + 0.5 / (256 + step))
