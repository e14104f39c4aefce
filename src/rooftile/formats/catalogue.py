"""The catalogue: the formats in use, as data. Add one by adding a row.

Sources: IEEE 754-2019 (fp16, fp32, fp64); Kalamkar et al. 2019 (bf16); NVIDIA's TF32 note; Micikevicius et al.
    2022 and the OCP 8-bit
specification (e4m3fn, e5m2); Noune et al. 2022 (the fnuz pair); OCP Microscaling 1.0 (fp6, fp4, e8m0); ml_dtypes
(e3m4).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType

from rooftile.errors import UsageError
from rooftile.formats.format import FloatFormat

__all__ = ["ALIASES", "FORMATS", "get_format"]

_ROWS = (
    FloatFormat("fp64", 11, 52, 1023),
    FloatFormat("fp32", 8, 23, 127),
    FloatFormat("tf32", 8, 10, 127, computes_over="fp32"),
    FloatFormat("fp16", 5, 10, 15),
    FloatFormat("bf16", 8, 7, 127),
    FloatFormat("fp8_e4m3fn", 4, 3, 7, infinities=False, nan_codes="all-ones"),
    FloatFormat("fp8_e4m3fnuz", 4, 3, 8, infinities=False, nan_codes="negative-zero"),
    FloatFormat("fp8_e5m2", 5, 2, 15),
    FloatFormat("fp8_e5m2fnuz", 5, 2, 16, infinities=False, nan_codes="negative-zero"),
    FloatFormat("fp8_e3m4", 3, 4, 3),
    FloatFormat("fp6_e2m3", 2, 3, 1, infinities=False, nan_codes="none"),
    FloatFormat("fp6_e3m2", 3, 2, 3, infinities=False, nan_codes="none"),
    FloatFormat("fp4_e2m1", 2, 1, 1, infinities=False, nan_codes="none"),
    FloatFormat("e8m0", 8, 0, 127, signed=False, infinities=False, nan_codes="all-ones", subnormals=False, zero=False),
)

#: Every format of the catalogue by name, widest first.
FORMATS: Mapping[str, FloatFormat] = MappingProxyType({row.name: row for row in _ROWS})

#: Other spellings: the short names, and the names of torch's dtypes.
ALIASES: Mapping[str, str] = MappingProxyType(
    {name.split("_", 1)[1]: name for name in FORMATS if "_" in name}
    | {
        "float64": "fp64",
        "float32": "fp32",
        "float16": "fp16",
        "bfloat16": "bf16",
        "float8_e4m3fn": "fp8_e4m3fn",
        "float8_e4m3fnuz": "fp8_e4m3fnuz",
        "float8_e5m2": "fp8_e5m2",
        "float8_e5m2fnuz": "fp8_e5m2fnuz",
        "float8_e8m0fnu": "e8m0",
    }
)


def get_format(fmt: FloatFormat | str) -> FloatFormat:
    """The format itself, or the catalogue's entry under that name or alias.

    Raises:
        UsageError: no such name; the message lists near matches, or else every name.
    """
    if isinstance(fmt, FloatFormat):
        return fmt
    if not isinstance(fmt, str):
        raise UsageError(f"a format is a FloatFormat or its name, not {fmt!r}; names are {', '.join(FORMATS)}")
    name = ALIASES.get(fmt.lower(), fmt.lower())
    if name in FORMATS:
        return FORMATS[name]
    near = difflib.get_close_matches(name, [*FORMATS, *ALIASES], n=4, cutoff=0.5)
    listed = f"near matches: {', '.join(near)}" if near else f"names are {', '.join(FORMATS)}"
    raise UsageError(f"no format is called {fmt!r}; {listed}")
