"""A read-only JSON object whose keys are attributes too: ``report.memory.peak_bytes``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["Section", "plain", "section"]


class Section(Mapping[str, Any]):
    """One object of a report. Nested objects are Sections, lists are tuples, the rest is plain JSON."""

    __slots__ = ("_values",)
    _values: dict[str, Any]

    def __init__(self, values: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_values", {str(key): _wrapped(value) for key, value in values.items()})

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __getattr__(self, name: str) -> Any:
        try:
            return object.__getattribute__(self, "_values")[name]
        except KeyError:
            raise AttributeError(f"this section has no {name!r}; it has {', '.join(self._values)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a report is read-only; {name!r} can't be set")

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._values]

    def __repr__(self) -> str:
        return f"Section({self._values!r})"

    def __reduce__(self) -> tuple[type[Section], tuple[dict[str, Any]]]:
        return Section, (plain(self),)


def section(values: Mapping[str, Any]) -> Section:
    """``values`` as a Section."""
    return Section(values)


def plain(value: Any) -> Any:
    """Sections and tuples back as dictionaries and lists, ready for :func:`json.dumps`."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value


def _wrapped(value: Any) -> Any:
    if isinstance(value, Mapping):
        return value if isinstance(value, Section) else Section(value)
    if isinstance(value, tuple | list):
        return tuple(_wrapped(item) for item in value)
    return value
