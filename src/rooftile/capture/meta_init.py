"""Build modules on meta: torch's default device, and no initialisation, which has nothing to write to there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["on_meta"]

_FILLS = {Tensor.normal_, Tensor.uniform_}


class _NoInitialisation(TorchFunctionMode):
    """``nn.init`` and the random fills behind it leave meta tensors alone.

    Their meta kernels are decompositions that import torch's compiler, more than a second for nothing.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FILLS or getattr(func, "__module__", None) == "torch.nn.init":
            tensor = args[0] if args else kwargs.get("tensor")
            if isinstance(tensor, Tensor) and tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """New tensors are meta tensors, and are not initialised."""
    with torch.device("meta"), _NoInitialisation():
        yield
