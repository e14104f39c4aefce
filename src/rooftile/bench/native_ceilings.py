"""The loops of the C++ core that measure ceilings, through ctypes; :mod:`rooftile.formats.native` finds the library."""

from __future__ import annotations

import ctypes
import functools

from rooftile.errors import UsageError
from rooftile.formats import native as formats_native

__all__ = ["available", "exp2", "rates", "supported"]

_ABI = 1
_LOOPS = {"fma_fp32": 0, "dot_bf16": 1, "amx_bf16": 2, "exp2_fp32": 3, "read": 4, "copy": 5}


@functools.cache
def _library() -> ctypes.CDLL | None:
    state = formats_native.status()
    if not state.available:
        return None
    library = ctypes.CDLL(state.path)
    if not hasattr(library, "rooftile_ceilings_abi") or int(library.rooftile_ceilings_abi()) != _ABI:
        return None
    i32, i64, f64, pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
    library.rooftile_ceiling.argtypes = (i32, i64, f64, i32, i32, i32, pointer)
    library.rooftile_ceiling_exp2.argtypes = (pointer, pointer, i64, i32)
    return library


def available() -> bool:
    """Whether the C++ core has these loops."""
    return _library() is not None


def _loaded() -> ctypes.CDLL:
    library = _library()
    if library is None:
        raise RuntimeError(f"the C++ core was called but is {formats_native.status().reason}")
    return library


def supported(loop: str) -> bool:
    """Whether this processor, its system and this build have the instructions of ``loop``."""
    return bool(_loaded().rooftile_ceiling_supported(_LOOPS[loop]))


def rates(
    loop: str, *, threads: int, repeats: int, least_seconds: float, nbytes: int = 0, isa: int = -1
) -> tuple[float, ...]:
    """Work a second of all threads together, one rate a round: FLOPs, elements, or bytes (a copy moves each twice).

    ``nbytes`` is what each thread reads or copies. Raises UsageError where there are fewer threads than asked for, or
    not enough memory.
    """
    found = (ctypes.c_double * repeats)()
    team = int(_loaded().rooftile_ceiling(_LOOPS[loop], nbytes, least_seconds, repeats, threads, isa, found))
    if team == -2:
        raise UsageError(f"no memory for {threads} x {nbytes:,} bytes; ask for fewer --threads or free some memory")
    if team < 0:
        raise RuntimeError(f"the C++ core refused the ceiling {loop} of {nbytes} bytes, isa {isa}")
    if team != threads:
        raise UsageError(
            f"{threads} threads were asked for and the C++ core has {team}: it is built without OpenMP, runs in a "
            f"forked process, or the system limits it; ask for --threads {team}"
        )
    return tuple(found)


def exp2(source: int, target: int, count: int, isa: int = -1) -> None:
    """What the loop ``exp2_fp32`` computes, on fp32 memory at two addresses: for the test of its values."""
    if _loaded().rooftile_ceiling_exp2(source, target, count, isa):
        raise RuntimeError(f"the C++ core refused exp2 of {count} values, isa {isa}")
