"""A Trace as a file: gzipped JSON with a schema version, written whole or not at all, read without torch.

Tensors and calls are stored once each and referred to by number, as they are shared in memory.
"""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

from rooftile.capture.trace import Call, Op, Storage, TensorMeta, Trace
from rooftile.errors import UsageError
from rooftile.files import replaced

__all__ = ["SCHEMA", "load_trace", "save_trace"]

SCHEMA = "rooftile.trace/1"


def save_trace(trace: Trace, path: str | Path) -> None:
    """Write ``trace`` to ``path``."""
    tensors: dict[TensorMeta, int] = {}
    calls: dict[int, int] = {}
    table: list[Call] = []
    for op in trace.ops:
        if id(op.call) not in calls:
            calls[id(op.call)] = len(table)
            table.append(op.call)

    def encode(value: Any) -> Any:
        if isinstance(value, TensorMeta):
            return {"t": tensors.setdefault(value, len(tensors))}
        if isinstance(value, tuple):
            return [encode(item) for item in value]
        if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
            return {"f": repr(value)}  # JSON has no infinities
        return value

    coded = [
        [c.operator, encode(c.args), [[k, encode(v)] for k, v in c.kwargs], encode(c.outputs), c.repeated]
        for c in table
    ]  # fmt: skip
    document = {
        "schema": SCHEMA,
        "settings": trace.settings,
        "notes": list(trace.notes),
        "tensors": [list(t) for t in tensors],
        "calls": coded,
        "ops": [[calls[id(o.call)], o.module, o.phase, o.inputs, o.outputs, o.micro_batch] for o in trace.ops],
        "storages": [list(s) for s in trace.storages],
    }
    text = json.dumps(document, separators=(",", ":"))
    with replaced(path) as temporary:  # without name and time in the header, equal traces are equal files
        temporary.write_bytes(gzip.compress(text.encode(), compresslevel=5, mtime=0))


def load_trace(path: str | Path) -> Trace:
    """The Trace in ``path``; UsageError for a file that is none, or of a later schema."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            document = json.load(file)
    except FileNotFoundError as error:
        raise UsageError(f"there is no file {str(path)!r}.") from error
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise UsageError(f"{str(path)!r} is not a rooftile trace ({error}); write one with --save-trace.") from error
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        raise UsageError(
            f"{str(path)!r} has schema {schema!r}, this rooftile reads {SCHEMA!r}; use the rooftile that wrote it."
        )
    try:
        return _decoded(document)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise UsageError(
            f"{str(path)!r} is not a whole rooftile trace ({type(error).__name__}: {error}); write it again with "
            "--save-trace."
        ) from error


def _decoded(document: dict[str, Any]) -> Trace:
    tensors = [TensorMeta(tuple(s), tuple(st), dtype, layout, nnz) for s, st, dtype, layout, nnz in document["tensors"]]

    def decode(value: Any) -> Any:
        if isinstance(value, dict):
            return tensors[value["t"]] if "t" in value else float(value["f"])
        return tuple(decode(item) for item in value) if isinstance(value, list) else value

    calls = [
        Call(name, decode(args), tuple((k, decode(v)) for k, v in kwargs), decode(outputs), tuple(repeated))
        for name, args, kwargs, outputs, repeated in document["calls"]
    ]
    ops = tuple(
        Op(calls[call], module, phase, tuple(inputs), tuple(outputs), micro_batch)
        for call, module, phase, inputs, outputs, micro_batch in document["ops"]
    )
    storages = tuple(Storage._make([*fields[:-1], tuple(fields[-1])]) for fields in document["storages"])
    return Trace(ops, storages, document["settings"], tuple(document["notes"]))
