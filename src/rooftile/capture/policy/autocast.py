"""The target device's autocast policy, applied to meta, fake and real CPU tensors.

Meta tensors never autocast, and CPU tensors autocast by the CPU's own lists. So for the length of a capture the
kernels at the ``AutocastCPU`` dispatch key are replaced by Python ones that follow the *target's* lists
(``autocast.toml``), and that key is included for every tensor. ``torch.autocast("cpu")`` then switches them on and off,
nested contexts and recomputation under checkpointing included, and ``torch.autocast("cuda")`` in the user's code is
sent there too.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["AutocastPolicy", "emulated", "load_policy"]

_KEY = torch._C.DispatchKey.AutocastCPU
_KEYSET = torch._C.DispatchKeySet(_KEY)


@dataclass(frozen=True, slots=True)
class AutocastPolicy:
    """Which operators run in which dtype under autocast, by operator name, and where the lists are from."""

    name: str
    release: str
    source: str
    rules: dict[
        str, str
    ]  # operator name -> lower_precision | fp32 | fp32_set_dtype | fp32_append_dtype | promote | ...


@functools.cache
def load_policy(device_class: str) -> AutocastPolicy:
    """The lists of ``cuda`` (ROCm builds register the same ones) or ``cpu``."""
    data = tomllib.loads((Path(__file__).parent / "autocast.toml").read_text(encoding="utf-8"))
    name = {"rocm": "cuda", "tpu": "cuda"}.get(device_class, device_class)
    rules = {op: rule for rule, ops in data[name].items() if rule != "source" for op in ops}
    return AutocastPolicy(name, data["release"], data[name]["source"], rules)


class _WeightCache:
    """Low-precision copies of leaf fp32 parameters, kept until the outermost autocast context exits (as in C++)."""

    def __init__(self, on_cached: Callable[[Tensor], None]) -> None:
        self.copies: dict[int, tuple[Tensor, Tensor]] = {}
        self.on_cached = on_cached

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """``cached_cast``: floating tensors other than fp64 to ``dtype``; lists element by element."""
        if isinstance(value, list | tuple):
            return [self.cast(item, dtype) for item in value]
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        if value.dtype == dtype or value.dtype == torch.float64:
            return value
        cacheable = (
            dtype == torch.get_autocast_dtype("cpu")
            and value.dtype == torch.float32
            and value.requires_grad
            and value.is_leaf
            and not value._is_view()
            and torch.is_autocast_cache_enabled()
        )
        if not cacheable:
            return value.to(dtype)
        held = self.copies.get(id(value))
        if held is None:
            # The original is held too: its id must not be reused while the entry lives.
            held = self.copies[id(value)] = (value, value.to(dtype))
            self.on_cached(held[1])
        return held[1]


def _widest(values: Any) -> torch.dtype | None:
    widest: torch.dtype | None = None
    for value in values:
        if isinstance(value, list | tuple):
            found = _widest(value)
        elif isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64:
            found = value.dtype
        else:
            continue
        if found is not None:
            widest = found if widest is None else torch.promote_types(widest, found)
    return widest


def _first_is_eligible(args: tuple[Any, ...]) -> bool:
    first = args[0] if args else None
    return isinstance(first, Tensor) and first.is_floating_point() and first.dtype != torch.float64


def _kernel(op: Any, rule: str, cache: _WeightCache) -> Callable[..., Any]:
    """One autocast kernel; it redispatches below the autocast key."""

    def cast_all(args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> Any:
        return op(*[cache.cast(a, dtype) for a in args], **{k: cache.cast(v, dtype) for k, v in kwargs.items()})

    def lower_precision(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEYSET):
            return cast_all(args, kwargs, torch.get_autocast_dtype("cpu"))

    def fp32(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEYSET):
            return cast_all(args, kwargs, torch.float32)

    position = next((i for i, a in enumerate(op._schema.arguments) if a.name == "dtype"), None)

    def fp32_set_dtype(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEYSET):
            given = args[position] if position is not None and position < len(args) else kwargs.get("dtype")
            if not _first_is_eligible(args) or given is not None:
                return op(*args, **kwargs)
            if position is not None and position < len(args):
                args = (*args[:position], torch.float32, *args[position + 1 :])
                return op(*args, **kwargs)
            return op(*args, **{**kwargs, "dtype": torch.float32})

    def fp32_append_dtype(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEYSET):
            if _first_is_eligible(args):
                return torch.ops.aten.norm(*args, **kwargs, dtype=torch.float32)
            return op(*args, **kwargs)

    def promote(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEYSET):
            widest = _widest((*args, *kwargs.values()))
            return op(*args, **kwargs) if widest is None else cast_all(args, kwargs, widest)

    def banned(*args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError(f"{op} is not allowed under the target's autocast; torch raises there as well.")
        with torch._C._ExcludeDispatchKeyGuard(_KEYSET):
            return op(*args, **kwargs)

    kernels: dict[str, Callable[..., Any]] = {
        "lower_precision": lower_precision,
        "fp32": fp32,
        "fp32_set_dtype": fp32_set_dtype,
        "fp32_append_dtype": fp32_append_dtype,
        "promote": promote,
        "banned": banned,
    }
    return kernels[rule]


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


@contextlib.contextmanager
def emulated(
    policy: AutocastPolicy, on_cached: Callable[[Tensor], None], on_entered: Callable[[str, torch.dtype], None]
) -> Iterator[None]:
    """Make autocast contexts follow ``policy`` until the block is left.

    ``on_cached`` sees each cached weight copy, ``on_entered`` the device type and dtype of each enabled context that
    is made meanwhile (checkpointing's own, which restore what was there, apart).
    """
    cache = _WeightCache(on_cached)
    library = torch.library.Library("aten", "IMPL")
    names = set(policy.rules) | set(load_policy("cpu").rules)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "overriding a previously registered kernel" is the point
        for name in names:
            rule = policy.rules.get(name)
            # An operator that only the CPU's own lists cast is one that the target's autocast does not know.
            kernel = _kernel(_overload(name), rule, cache) if rule else torch.library.fallthrough_kernel
            library.impl(name, kernel, "AutocastCPU")
    was_included = torch._C._dispatch_tls_is_dispatch_key_included(_KEY)
    torch._C._dispatch_tls_set_dispatch_key_included(_KEY, True)
    try:
        with _redirected_contexts(cache, on_entered):
            yield
    finally:
        cache.copies.clear()
        torch._C._dispatch_tls_set_dispatch_key_included(_KEY, was_included)
        library._destroy()


@contextlib.contextmanager
def _redirected_contexts(cache: _WeightCache, on_entered: Callable[[str, torch.dtype], None]) -> Iterator[None]:
    """Send ``torch.autocast`` of any device to the emulated key, and clear our cache when torch clears its own."""
    autocast = torch.amp.autocast_mode.autocast
    init, clear, leave = autocast.__init__, torch.clear_autocast_cache, torch.autocast_decrement_nesting
    around = torch.autocast_increment_nesting() - 1  # contexts that the caller is in
    torch.autocast_decrement_nesting()

    def redirected_init(
        self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None
    ) -> None:
        if dtype is None:
            dtype = torch.get_autocast_dtype(device_type if device_type != "meta" else "cuda")
        if enabled and sys._getframe(1).f_globals.get("__name__") != "torch.utils.checkpoint":
            on_entered(device_type, dtype)
        init(self, "cpu", dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)

    def clear_both() -> None:
        cache.copies.clear()
        clear()

    autocast.__init__ = redirected_init  # type: ignore[method-assign]
    torch.clear_autocast_cache = clear_both
    torch.autocast_decrement_nesting = lambda: leave() - around
    try:
        yield
    finally:
        autocast.__init__ = init  # type: ignore[method-assign]
        torch.clear_autocast_cache = clear
        torch.autocast_decrement_nesting = leave
