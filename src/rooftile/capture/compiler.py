"""Keep torch from importing its compiler, which an audit on meta tensors has no use for.

Optimizers and the meta kernels that are decompositions call ``torch._dynamo.disable`` or ``graph_break`` at their first
use: guards that do nothing outside of a compilation, at the price of an import that takes longer than a capture. While
:func:`without_compiler` runs something, a stand-in answers those two. Whatever asks for more gets the real thing: the
stand-in goes, the compiler is imported, and the work starts again.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

__all__ = ["compiler_is_imported", "without_compiler"]

_NAME = "torch._dynamo"
_T = TypeVar("_T")

#: The table of modules belongs to the process; threads take turns.
_LOCK = threading.RLock()


class _CompilerNeededError(BaseException):
    """Not an Exception: a library that tries an import and goes on without must not catch this."""


class _StandIn(types.ModuleType):
    """``disable`` and ``graph_break`` as they are outside of a compilation."""

    def __init__(self) -> None:
        super().__init__(_NAME)
        self.disabled: list[Any] = []

    def disable(self, fn: Any = None, recursive: bool = True, **options: Any) -> Any:  # noqa: ARG002
        if fn is None:
            return self.disable
        self.disabled.append(fn)
        return fn

    def graph_break(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is being compiled."""

    def __getattr__(self, name: str) -> Any:
        # `__path__` is asked for to import a submodule; other special names by whoever walks over all modules.
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        raise _CompilerNeededError(name)


@contextlib.contextmanager
def _stand_in() -> Iterator[None]:
    import torch

    module = _StandIn()
    sys.modules[_NAME] = module
    try:
        yield
    finally:
        if sys.modules.get(_NAME) is module:
            del sys.modules[_NAME]
        if vars(torch).get("_dynamo") is module:
            del torch._dynamo
        for function in module.disabled:
            # Torch keeps what `disable` gave it; a later compilation in this process needs the real one.
            if getattr(function, "__dynamo_disable", None) is function:
                delattr(function, "__dynamo_disable")


def compiler_is_imported() -> bool:
    """Whether the real one is there."""
    return isinstance(sys.modules.get(_NAME), types.ModuleType) and not isinstance(sys.modules[_NAME], _StandIn)


def without_compiler(work: Callable[[], _T]) -> _T:
    """``work()``, with the stand-in if the compiler is not imported anyway; twice if the first time asked for it."""
    with _LOCK:
        if _NAME in sys.modules:
            return work()
        try:
            with _stand_in():
                return work()
        except _CompilerNeededError:
            importlib.import_module(_NAME)
            return work()
