"""Names of modules, grouped so that the equal layers of a model are one line."""

from __future__ import annotations

from functools import lru_cache

__all__ = ["module_group"]


@lru_cache(maxsize=65536)  # a few hundred distinct paths, asked for once per op and storage
def module_group(path: str) -> str:
    """The line of a report that a module path belongs to.

    Layer numbers become ``*``; the path is cut one name after the first ``*`` (``model.layers.3.mlp.up_proj`` is
    ``model.layers.*.mlp``), or after two names where it has no number (``model.norm``).
    """
    if not path:
        return "(top level)"
    parts = ["*" if part.isdigit() else part for part in path.split(".")]
    kept = parts.index("*") + 2 if "*" in parts else 2
    return ".".join(parts[:kept])
