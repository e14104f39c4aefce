"""The C++ core through ctypes: where it is, whether it can be used, and the two calls that this package makes.

Without it (no compiler at installation) every function here is done by plain torch operations with the same results;
:func:`status` says which of the two it is, and why. ``ROOFTILE_NATIVE`` in the environment is a library's path, or
``0`` for none.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from rooftile.formats.carrier import FP32
from rooftile.formats.format import FloatFormat
from rooftile.formats.policy import InfInput, Overflow, Rounding

__all__ = ["ISA_NAMES", "NativeStatus", "available", "histogram_fields", "round_fp32", "status"]

_ABI = 1
ISA_NAMES = ("portable", "avx2", "avx512")
_MODES = {"nearest-even": 0, "toward-zero": 1, "up": 2, "down": 3}
_SOURCES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}


@dataclass(frozen=True, slots=True)
class NativeStatus:
    """Whether the C++ core serves this process; ``reason`` is a sentence, ``isa`` the instruction set it chose."""

    available: bool
    reason: str
    path: str = ""
    isa: str = ""


class _RoundPlan(ctypes.Structure):
    """``rooftile::RoundPlan``, field by field."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("normal_shift", "min_field", "flush_shift", "mode")),
        *((name, ctypes.c_uint32) for name in ("smallest_bits", "zero_bits", "largest_bits", "overflow_up")),
        *((name, ctypes.c_uint32) for name in ("overflow_down", "inf_bits", "sign_mask", "keeps_minus_zero")),
    )


class Special(ctypes.Structure):
    """``rooftile::Special``: what exponent fields alone do not tell."""

    _fields_ = (
        ("zeros", ctypes.c_int64 * 2),
        ("infs", ctypes.c_int64 * 2),
        ("nans", ctypes.c_int64),
        ("largest", ctypes.c_uint64),
        ("smallest", ctypes.c_uint64),
        ("subnormals", ctypes.c_int64 * 52 * 2),
        ("subnormal_powers", ctypes.c_int64 * 52),
    )


def status() -> NativeStatus:
    """Whether the C++ core is used, and why or why not."""
    return _open()[1]


def available() -> bool:
    """Whether the C++ core is used."""
    return _open()[0] is not None


def _library_path() -> Path | None:
    """The installed library, beside the package or in the editable install's own folder; None if there is none."""
    name = {"darwin": "librooftile_native.dylib", "win32": "rooftile_native.dll"}.get(
        sys.platform, "librooftile_native.so"
    )
    # An editable install keeps the sources where they are and the built library in site-packages. The package is asked
    # for by name: importing what lies above this layer is against the house's order.
    package = sys.modules[__name__.partition(".")[0]]
    folders = [*package.__path__, *(os.path.join(entry, "rooftile") for entry in sys.path)]
    return next((path for folder in folders if (path := Path(folder) / "_native" / name).is_file()), None)


@functools.cache
def _open() -> tuple[ctypes.CDLL | None, NativeStatus]:
    asked = os.environ.get("ROOFTILE_NATIVE", "")
    if asked == "0":
        return None, NativeStatus(False, "switched off by ROOFTILE_NATIVE=0; plain torch operations are used")
    path = Path(asked) if asked else _library_path()
    if path is None:
        return None, NativeStatus(
            False, "not built: no C++ compiler was found at installation; plain torch operations are used"
        )
    try:
        library = ctypes.CDLL(str(path))
        found = int(library.rooftile_formats_abi())
    except (OSError, AttributeError) as error:
        return None, NativeStatus(
            False, f"{path} can't be opened ({error}); plain torch operations are used", str(path)
        )
    if found != _ABI:
        return None, NativeStatus(
            False, f"{path} speaks ABI {found}, this package {_ABI}: reinstall rooftile", str(path)
        )
    library.rooftile_round_fp32.argtypes = (
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.POINTER(_RoundPlan), ctypes.c_int32, ctypes.c_int32,
    )  # fmt: skip
    library.rooftile_histogram.argtypes = (
        ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(Special),
        ctypes.c_int32, ctypes.c_int32,
    )  # fmt: skip
    isa = ISA_NAMES[int(library.rooftile_best_isa())]
    return library, NativeStatus(True, f"C++ core in use, instruction set {isa}", str(path), isa)


def _loaded() -> ctypes.CDLL:
    library, state = _open()
    if library is None:
        raise RuntimeError(f"the C++ core was called but is {state.reason}")
    return library


def can_round(fmt: FloatFormat) -> bool:
    """Whether :func:`round_fp32` takes the format: it must drop at least one fraction bit, so fp32 itself is left
    out.
    """
    return fmt.fraction_bits < FP32.fraction_bits


def _plan(fmt: FloatFormat, rounding: Rounding, overflow: Overflow, inf_input: InfInput) -> _RoundPlan:
    """The policy, resolved into the bits that each special case ends at."""
    largest = FP32.bits_of(fmt.max)
    infinity = FP32.inf_bits if fmt.infinities else FP32.nan_bits
    stays = overflow == "saturate" or rounding == "toward-zero"
    smallest = FP32.bits_of(fmt.smallest_subnormal)
    return _RoundPlan(
        normal_shift=FP32.fraction_bits - fmt.fraction_bits,
        min_field=fmt.min_exponent + FP32.bias,
        flush_shift=0 if fmt.subnormals else fmt.fraction_bits,
        mode=_MODES[rounding],
        smallest_bits=smallest,
        zero_bits=0 if fmt.zero else smallest,
        largest_bits=largest,
        overflow_up=largest if stays or rounding == "down" else infinity,
        overflow_down=largest if stays or rounding == "up" else infinity,
        inf_bits=largest if inf_input == "saturate" else infinity,
        sign_mask=0x80000000 if fmt.signed else 0,
        keeps_minus_zero=int(fmt.negative_zero),
    )


def round_fp32(
    source: torch.Tensor,
    fmt: FloatFormat,
    rounding: Rounding,
    overflow: Overflow,
    inf_input: InfInput,
    isa: int = -1,
) -> torch.Tensor:
    """A contiguous float32 CPU tensor rounded to ``fmt`` (see :func:`can_round`), on ``torch.get_num_threads()``
    threads.
    """
    out = torch.empty_like(source)
    plan = _plan(fmt, rounding, overflow, inf_input)
    failed = _loaded().rooftile_round_fp32(
        source.data_ptr(), out.data_ptr(), source.numel(), ctypes.byref(plan), torch.get_num_threads(), isa
    )
    if failed:
        raise RuntimeError(f"the C++ core refused round_to for {fmt.name}, isa {isa}")
    return out


@dataclass(frozen=True, slots=True)
class FieldCounts:
    """Normal numbers by (sign, exponent field), exact powers of two by exponent field, and what fields do not tell."""

    fields: list[int]
    powers: list[int]
    special: Special


def histogram_fields(x: torch.Tensor, isa: int = -1) -> FieldCounts:
    """Counts of a contiguous CPU tensor of fp64, fp32, fp16 or bf16; the 16-bit values as the fp32 that they are."""
    count = 4096 if x.dtype == torch.float64 else 512
    fields, powers, special = (ctypes.c_int64 * count)(), (ctypes.c_int64 * (count // 2))(), Special()
    failed = _loaded().rooftile_histogram(
        x.data_ptr(),
        x.numel(),
        _SOURCES[x.dtype],
        fields,
        powers,
        ctypes.byref(special),
        torch.get_num_threads(),
        isa,
    )
    if failed:
        raise RuntimeError(f"the C++ core refused a histogram of {x.dtype}, isa {isa}")
    return FieldCounts(list(fields), list(powers), special)
