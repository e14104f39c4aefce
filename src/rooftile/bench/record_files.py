"""Records as a file: JSON with a schema version, written whole or not at all, read without torch."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rooftile.bench.machine import Cache, Hardware, Versions
from rooftile.bench.record import STATISTICS, Record, TensorError
from rooftile.errors import UsageError
from rooftile.files import replaced

__all__ = ["SCHEMA", "document", "load_records", "save_records"]

_FAMILY, _VERSION = "rooftile.bench", 1
SCHEMA = f"{_FAMILY}/{_VERSION}"


def document(records: Sequence[Record]) -> dict[str, Any]:
    """What is written: each record whole, with the figures that follow from its samples beside them."""
    return {"schema": SCHEMA, "records": [_encoded(record) for record in records]}


def save_records(records: Sequence[Record], path: str | Path, option: str = "") -> None:
    """Write ``records`` to ``path``; UsageError, which calls it ``option``, if that can't be done."""
    text = json.dumps(document(records), indent=1, allow_nan=False) + "\n"
    with replaced(path, option) as temporary:
        temporary.write_text(text, encoding="utf-8")


def load_records(path: str | Path) -> tuple[Record, ...]:
    """The records in ``path``; UsageError for a file that holds none, or of a later schema."""
    try:
        read = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror}; give a file that --json wrote") from None
    except ValueError:
        raise UsageError(f"{path} is not JSON; give a file that `rooftile bench` wrote with --json") from None
    _check_schema(read, path)
    try:
        return tuple(_decoded(fields) for fields in read["records"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"{path} is not a whole file of measurements ({type(error).__name__}: {error}); measure again with --json"
        ) from None


def _check_schema(read: Any, path: str | Path) -> None:
    schema = read.get("schema") if isinstance(read, dict) else None
    found = re.fullmatch(rf"{re.escape(_FAMILY)}/(\d+)", schema) if isinstance(schema, str) else None
    if found is None:
        raise UsageError(f"{path} holds no measurements (its schema is {schema!r}); give a file of `rooftile bench`")
    if int(found[1]) > _VERSION:
        raise UsageError(f"{path} has schema {schema}, newer than {SCHEMA}, which this rooftile reads; update rooftile")


def _encoded(record: Record) -> dict[str, Any]:
    fields = dataclasses.asdict(record)
    for name in ("options", "work"):
        fields[name] = dict(getattr(record, name))
    fields["errors"] = [_without_nan(dataclasses.asdict(error)) for error in record.errors]
    derived = ("repeats", "value", "median", "iqr", "best", "spread", "wide", "disturbed")
    return fields | {name: getattr(record, name) for name in derived}


def _without_nan(fields: dict[str, Any]) -> dict[str, Any]:
    """JSON has no Inf and no NaN: they are written as strings."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}


def _decoded(fields: dict[str, Any]) -> Record:
    known = {field.name for field in dataclasses.fields(Record)}
    kept = {name: value for name, value in fields.items() if name in known}
    machine = dict(fields["hardware"])
    machine["isa"] = tuple(machine["isa"])
    machine["caches"] = tuple(Cache(**cache) for cache in machine["caches"])
    samples = tuple(float(sample) for sample in fields["samples"])
    if not samples or not all(sample > 0 for sample in samples) or fields["statistic"] not in STATISTICS:
        raise ValueError("samples are above zero, the statistic is one of " + ", ".join(STATISTICS))
    return Record(
        **kept
        | {
            "samples": samples,
            "hardware": Hardware(**machine),
            "versions": Versions(**fields["versions"]),
            "shape": tuple(fields["shape"]),
            "options": tuple(fields["options"].items()),
            "work": tuple(fields["work"].items()),
            "errors": tuple(
                TensorError(error["tensor"], float(error["largest"]), float(error["mean"]), int(error["elements"]))
                for error in fields["errors"]
            ),
        }
    )
