"""rooftile's attention inside other people's models: transformers, and code that calls torch's SDPA.

``rooftile.integrations.transformers.register()`` and ``with rooftile.integrations.route_sdpa() as routed:``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rooftile.integrations import sdpa, transformers
    from rooftile.integrations.sdpa import RoutedSdpa, route_sdpa

__all__ = ["RoutedSdpa", "route_sdpa", "sdpa", "transformers"]


def __getattr__(name: str) -> Any:
    if name in ("sdpa", "transformers"):
        return importlib.import_module(f"rooftile.integrations.{name}")
    if name in ("RoutedSdpa", "route_sdpa"):
        return getattr(importlib.import_module("rooftile.integrations.sdpa"), name)
    raise AttributeError(f"module 'rooftile.integrations' has no attribute {name!r}")
