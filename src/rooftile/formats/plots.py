"""Two pictures: the number line of formats, and a tensor's exponents with the formats' ranges laid over them.

matplotlib is the optional extra ``plot``; it is imported here, when a picture is asked for, and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rooftile.errors import UsageError
from rooftile.files import check_writable, replaced
from rooftile.formats.catalogue import get_format
from rooftile.formats.format import FloatFormat
from rooftile.formats.histogram import ExponentHistogram

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["check_plot", "number_line", "save_plot", "tensor_exponents"]


def check_plot(path: str | None) -> None:
    """Refuse a picture that could not be made, before the long work starts.

    Raises:
        UsageError: a suffix other than .svg or .png, a path that can't be written, or no matplotlib.
    """
    if path is None:
        return
    if Path(path).suffix not in (".svg", ".png"):
        raise UsageError(f"--plot {path}: the suffix says the format; give a .svg or .png path")
    check_writable(path)
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise UsageError("--plot needs matplotlib, which is not installed; pip install 'rooftile[plot]'") from None


def save_plot(figure: Figure, path: str) -> None:
    """Write the picture whole or not at all."""
    with replaced(path) as temporary:
        figure.savefig(temporary, format=Path(path).suffix[1:])


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", dpi=150)


def number_line(formats: Sequence[FloatFormat | str]) -> Figure:
    """Range against resolution: for each format the relative spacing over the magnitudes that it reaches.

    Formats of more than 8 bits and the others have a panel each; fp64's range is cut off at fp32's.
    """
    chosen = [get_format(item) for item in formats]
    groups = {
        "more than 8 bits, and scales (fp64 goes on to 2^-1074 and 2^1024)": [
            f for f in chosen if f.bits > 8 or not f.zero
        ],
        "8 bits and fewer": [f for f in chosen if f.bits <= 8 and f.zero],
    }
    groups = {title: group for title, group in groups.items() if group}
    figure = _figure(9, 2 + 2.6 * len(groups))
    panels = figure.subplots(len(groups), 1, squeeze=False)[:, 0]
    for axes, (title, group) in zip(panels, groups.items(), strict=True):
        for index, fmt in enumerate(group):
            exponents = range(math.frexp(fmt.smallest_subnormal)[1] - 1, fmt.max_exponent + 2)
            bits = [fmt.fraction_bits - max(0, fmt.min_exponent - e) for e in exponents]
            spacings = [math.ldexp(1.0, -b) for b in bits]
            style = ("-", "--", "-.", ":")[index % 4]
            axes.step(exponents, spacings, where="post", label=fmt.name, linestyle=style)
        wide = [fmt for fmt in group if fmt.exponent_bits <= 8] or group
        lowest = min(fmt.min_exponent - fmt.fraction_bits for fmt in wide)
        axes.set_xlim(lowest - 3, max(fmt.max_exponent for fmt in wide) + 4)
        axes.set_yscale("log", base=2)
        axes.set_title(title, fontsize=10)
        axes.grid(True, alpha=0.3)
        axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.suptitle("Range against resolution; the rising left ends are the subnormals")
    figure.supylabel("spacing / magnitude (the lower, the finer)", fontsize=10)
    figure.supxlabel("magnitude, as a power of two", fontsize=10)
    return figure


def tensor_exponents(h: ExponentHistogram, formats: Sequence[FloatFormat | str], title: str) -> Figure:
    """Counts per binade; below them one bar per format, pale where it has only subnormals left."""
    figure = _figure(9, 6)
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    counts = h.counts
    top.bar(list(counts), list(counts.values()), width=1.0, align="edge", color="#232d4b")
    if counts:
        top.set_yscale("log")
    top.set_ylabel("values in the binade")
    top.set_title(
        f"{title}\n{h.nonzero:,} non-zero finite, {h.zeros:,} zeros, {h.infs:,} Inf, {h.nans:,} NaN", fontsize=10
    )
    chosen = [get_format(item) for item in formats]
    for row, fmt in enumerate(chosen):
        lowest = math.frexp(fmt.smallest_subnormal)[1] - 1
        below.barh(row, fmt.min_exponent - lowest, left=lowest, color="#e57200", alpha=0.35)
        below.barh(row, fmt.max_exponent + 1 - fmt.min_exponent, left=fmt.min_exponent, color="#e57200")
    below.set_yticks(range(len(chosen)), [fmt.name for fmt in chosen])
    below.invert_yaxis()
    below.set_xlabel("magnitude, as a power of two (pale: subnormals)")
    if counts:
        margin = 12
        top.set_xlim(min(counts) - margin, max(counts) + 1 + margin)
    return figure
