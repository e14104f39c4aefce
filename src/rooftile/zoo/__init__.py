"""GPT-2 and Llama families in plain torch: a step of a real model with nothing to download.

``names()`` and the configurations need no torch; the models load when they are first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rooftile.zoo.configs import GPT2Config, LlamaConfig, RopeScaling, config, gpt2_config, llama_config, names

if TYPE_CHECKING:
    from rooftile.zoo.gpt2 import GPT2
    from rooftile.zoo.llama import Llama
    from rooftile.zoo.steps import NextTokenLoss, ZooStep, build

__all__ = [
    "GPT2",
    "GPT2Config",
    "Llama",
    "LlamaConfig",
    "NextTokenLoss",
    "RopeScaling",
    "ZooStep",
    "build",
    "config",
    "gpt2_config",
    "llama_config",
    "names",
]


#: Names that need torch, and the module that has them.
_NEEDS_TORCH = {"GPT2": "gpt2", "Llama": "llama", "NextTokenLoss": "steps", "ZooStep": "steps", "build": "steps"}


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_NEEDS_TORCH[name]}"), name)
