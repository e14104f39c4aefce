"""The report: what an audit found, as one read-only record that is its own JSON document."""

from __future__ import annotations

import builtins
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rooftile.capture.trace import Trace
from rooftile.errors import UsageError
from rooftile.report.section import Section, plain
from rooftile.report.shape import check_shape

__all__ = ["SCHEMA", "SECTIONS", "Report"]

SCHEMA = "rooftile.audit/1"
_FAMILY, _VERSION = SCHEMA.split("/")

#: Top-level keys of the JSON document, in its order; each is an attribute of the report.
SECTIONS = (
    "target", "device", "conventions", "coverage", "params", "flops", "bytes", "roofline", "memory", "kv_cache",
    "precision", "findings",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Report:
    """One audit. Every section's keys are attributes (``report.memory.peak_bytes``) and JSON keys alike.

    Units are in the names (``_bytes``, ``_s``) or in ``conventions``. ``findings`` is a tuple of sections, the gravest
    first. ``trace`` is None for a report that was loaded from a file.
    """

    target: Section
    device: Section
    conventions: Section
    coverage: Section
    params: Section
    flops: Section
    bytes: Section
    roofline: Section
    memory: Section
    kv_cache: Section
    precision: Section
    findings: tuple[Section, ...]
    trace: Trace | None = field(default=None, compare=False, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, lists, numbers and strings, the schema's name first."""
        return {"schema": SCHEMA, **{name: plain(getattr(self, name)) for name in SECTIONS}}

    def to_json(self, indent: int | None = 2) -> str:
        """The JSON document, schema ``rooftile.audit/1``. Strict JSON: it holds no NaN and no Infinity."""
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | builtins.bytes, source: str = "the report") -> Report:
        """The report of a JSON document. UsageError, which names ``source``, where it is not one that can be read."""
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:  # a number of thousands of digits is a ValueError too
            raise UsageError(
                f"{source} is not JSON ({error}); give a file written by `rooftile audit --json`"
            ) from None
        return cls.from_dict(document, source)

    @classmethod
    def from_dict(cls, document: Any, source: str = "the report", trace: Trace | None = None) -> Report:
        """The report of a decoded JSON document; UsageError as for :meth:`from_json`."""
        _check_schema(document, source)
        missing = [name for name in SECTIONS if name not in document]
        if missing:
            raise UsageError(f"{source} lacks the key {missing[0]!r}; write it again with `rooftile audit --json`")
        for name in SECTIONS:
            wanted = (list, tuple) if name == "findings" else Mapping
            if not isinstance(document[name], wanted):
                found = type(document[name]).__name__
                raise UsageError(f"{source}: {name!r} is a {found}; write it again with `rooftile audit --json`")
        check_shape(document, source)
        sections = {name: Section(document[name]) for name in SECTIONS if name != "findings"}
        return cls(**sections, findings=tuple(Section(f) for f in document["findings"]), trace=trace)

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """The report in a file. UsageError where it can't be read or is no report of this schema."""
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise UsageError(f"{path} can't be read ({error.strerror}); give a saved report") from None
        return cls.from_json(text, str(path))

    @property
    def lower_bound(self) -> bool:
        """Whether the bound leaves out operators without a formula, as FLOPs and bytes then do, or roofs."""
        return bool(self.coverage["unknown_ops"]) or bool(self.roofline["lower_bound"])


def _check_schema(document: Any, source: str) -> None:
    """Today's schema, or one sentence that tells a newer one from something else."""
    schema = document.get("schema") if isinstance(document, Mapping) else None
    if schema == SCHEMA:
        return
    family, _, version = str(schema).partition("/")
    if family == _FAMILY and version.isdecimal() and float(version) > float(_VERSION):
        raise UsageError(
            f"{source} has schema {schema}, newer than {SCHEMA}, the newest this release reads; upgrade it"
        )
    said = f"its schema is {schema!r}" if schema is not None else "it names no schema"
    raise UsageError(f"{source} is no rooftile audit ({said}); give a file written by `rooftile audit --json`")
