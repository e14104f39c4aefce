"""What every mask is: a check of lengths, a definition pair by pair, and intervals of keys row by row."""

from __future__ import annotations

import functools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import _pytree

from rooftile.errors import UsageError

__all__ = ["Both", "Interval", "Mask", "Visibility", "mask_of", "signed"]

#: ``lo`` and ``hi`` of every row, broadcastable to (B, Lq); not yet inside ``[0, Lk]``.
Interval = tuple[Tensor | int, Tensor | int]


@dataclass(frozen=True, slots=True)
class Visibility:
    """A mask as the kernels read it.

    ``lo`` and ``hi``: int32 (B or 1, Lq), inside ``[0, Lk]``, non-decreasing over the rows that see a key; both None:
    every row sees all keys. ``dense``: bool, broadcastable to (B, Hq, Lq, Lk), False hides the pair; None: none.
    """

    lo: Tensor | None = None
    hi: Tensor | None = None
    dense: Tensor | None = None


EVERYTHING = Visibility()


class Mask(ABC):
    """A set of visible (query, key) pairs; immutable, hashable, composed with ``&``."""

    __slots__ = ()

    def __and__(self, other: object) -> Mask:
        if not isinstance(other, Mask):
            if isinstance(other, Tensor):
                raise UsageError(f"{self} & a tensor: join it with masks.dense(...) of a bool tensor, or give a bias")
            return NotImplemented
        both = Both((*self.parts, *other.parts))
        both.check_composition()
        return both

    @property
    def parts(self) -> tuple[Mask, ...]:
        """The masks whose intersection this is."""
        return (self,)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that the mask holds."""
        return ()

    @property
    def batch(self) -> int | None:
        """Sequences that the mask speaks of one by one; None: it is the same for all."""
        return None

    def check_lengths(self, q_len: int, kv_len: int) -> None:  # noqa: B027
        """Refuse lengths that the mask doesn't fit, with a :class:`UsageError`; values of tensors come later."""

    @abstractmethod
    def sees(self, i: Tensor, j: Tensor, q_len: int, kv_len: int) -> Tensor:
        """The definition: whether row ``i`` sees key ``j`` (integer tensors that broadcast); bool."""

    @abstractmethod
    def interval(self, i: Tensor, q_len: int | Tensor, kv_len: int | Tensor) -> Interval | None:
        """The keys ``[lo, hi)`` that row ``i`` of its sequence sees, elementwise; None: the mask is no interval."""

    def check_values(self, q_len: int, kv_len: int) -> None:  # noqa: B027
        """Refuse tensors whose values don't fit the lengths."""

    def dense_part(self) -> Tensor | None:
        """What is no interval: bool, 4-d."""
        return None

    def materialize(self, q_len: int, kv_len: int) -> Tensor:
        """The mask as booleans (B or 1, H or 1, Lq, Lk), True where visible, from the definition of its parts."""
        self.check_lengths(q_len, kv_len)
        self.check_values(q_len, kv_len)
        device = self.tensors[0].device if self.tensors else torch.device("cpu")
        i = torch.arange(q_len, device=device).view(1, 1, q_len, 1)
        j = torch.arange(kv_len, device=device).view(1, 1, 1, kv_len)
        seen = self.sees(i, j, q_len, kv_len)
        return seen.expand(seen.shape[0], seen.shape[1], q_len, kv_len).contiguous()

    def visibility(self, q_len: int, kv_len: int, device: torch.device) -> Visibility:
        """What the kernels read, for ``q_len`` queries and ``kv_len`` keys; kept, so the layers of a model share it."""
        if torch.compiler.is_compiling():
            return _visibility(self, q_len, kv_len, device)
        if not _plain():
            return signed(lambda: self, _visibility(self, q_len, kv_len, device))
        if not self.tensors:
            return _static(self, q_len, kv_len, device)
        if any(t.is_inference() for t in self.tensors):  # no version to tell whether the values are still the same
            return _visibility(self, q_len, kv_len, device)
        kept = _OF_TENSORS.setdefault(self, {})
        key = (q_len, kv_len, device, tuple(t._version for t in self.tensors))
        found = kept.get(key)
        if found is None:
            kept.clear()  # one set of lengths at a time: a decoder that grows must not fill the memory
            found = kept[key] = _materialised_once(self, q_len, kv_len, device)
        return found


@dataclass(frozen=True)
class Both(Mask):
    """The pairs that every one of ``masks`` shows."""

    masks: tuple[Mask, ...]

    @property
    def parts(self) -> tuple[Mask, ...]:
        """The masks whose intersection this is."""
        return self.masks

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that the masks hold."""
        return tuple(t for mask in self.masks for t in mask.tensors)

    @property
    def batch(self) -> int | None:
        """Sequences that the masks speak of one by one."""
        counts = [mask.batch for mask in self.masks if mask.batch is not None]
        return counts[0] if counts else None

    def check_composition(self) -> None:
        """Refuse masks that contradict each other."""
        counts = {mask.batch for mask in self.masks if mask.batch is not None}
        if len(counts) > 1:
            raise UsageError(f"masks of {sorted(counts)} sequences were joined by &: give all of them the same batch")
        for mask in self.masks:
            for other in self.masks:
                reason = contradiction(mask, other)
                if reason:
                    raise UsageError(reason)

    def check_lengths(self, q_len: int, kv_len: int) -> None:
        """Every part's check."""
        for mask in self.masks:
            mask.check_lengths(q_len, kv_len)

    def check_values(self, q_len: int, kv_len: int) -> None:
        """Every part's check."""
        for mask in self.masks:
            mask.check_values(q_len, kv_len)

    def sees(self, i: Tensor, j: Tensor, q_len: int, kv_len: int) -> Tensor:
        """Every part sees the pair."""
        seen = self.masks[0].sees(i, j, q_len, kv_len)
        for mask in self.masks[1:]:
            seen = seen & mask.sees(i, j, q_len, kv_len)
        return seen

    def interval(self, i: Tensor, q_len: int | Tensor, kv_len: int | Tensor) -> Interval | None:
        """The intersection of the parts' intervals."""
        pairs = [mask.interval(i, q_len, kv_len) for mask in self.masks]
        found = [pair for pair in pairs if pair is not None]
        if not found:
            return None
        lo, hi = found[0]
        for other_lo, other_hi in found[1:]:
            lo, hi = _larger(lo, other_lo), _smaller(hi, other_hi)
        return lo, hi

    def dense_part(self) -> Tensor | None:
        """The dense parts' intersection."""
        given = [mask.dense_part() for mask in self.masks]
        found = [part for part in given if part is not None]
        return functools.reduce(torch.logical_and, found) if found else None


_pytree.register_dataclass(Both)


def contradiction(mask: Mask, other: Mask) -> str:
    """Why the two can't be meant together, or nothing."""
    align, other_align = getattr(mask, "align", None), getattr(other, "align", None)
    if align and other_align and align != other_align:
        return (
            f"{mask} and {other} place the queries differently: give both align={align!r} or both align={other_align!r}"
        )
    if getattr(mask, "widens", False) and getattr(other, "ends_at_query", False):
        return (
            f"{mask} & {other} is {other} alone: a prefix mask is the union of a prefix with causal(); "
            f"use {mask} without {other}"
        )
    return ""


def _larger(a: Tensor | int, b: Tensor | int) -> Tensor | int:
    if isinstance(a, int):
        return max(a, b) if isinstance(b, int) else b.clamp(min=a)
    return a.clamp(min=b) if isinstance(b, int) else torch.maximum(a, b)


def _smaller(a: Tensor | int, b: Tensor | int) -> Tensor | int:
    if isinstance(a, int):
        return min(a, b) if isinstance(b, int) else b.clamp(max=a)
    return a.clamp(max=b) if isinstance(b, int) else torch.minimum(a, b)


# ---------------------------------------------------------------------------------------------------------- visibility
#: Of masks that hold tensors: kept for as long as the mask is.
_OF_TENSORS: weakref.WeakKeyDictionary[Mask, dict[object, Visibility]] = weakref.WeakKeyDictionary()


def _visibility(mask: Mask, q_len: int, kv_len: int, device: torch.device) -> Visibility:
    mask.check_lengths(q_len, kv_len)
    mask.check_values(q_len, kv_len)
    i = torch.arange(q_len, device=device).unsqueeze(0)
    pair = mask.interval(i, q_len, kv_len)
    if pair is None:
        return Visibility(dense=mask.dense_part())
    lo, hi = (_rows(end, i).clamp(0, kv_len).to(torch.int32) for end in pair)
    lo, hi = torch.broadcast_tensors(lo, hi)
    return Visibility(lo.contiguous(), hi.contiguous(), mask.dense_part())


_SIGNATURE = "rooftile_mask"


def signed(mask: Callable[[], Mask], see: Visibility) -> Visibility:
    """Who watches operators gets tensors, perhaps without values; an audit asks their mask what they say."""
    if see.lo is not None and not _plain():
        setattr(see.lo, _SIGNATURE, mask())
    return see


def mask_of(lo: Tensor) -> Mask | None:
    """The mask that ``lo`` was made from while operators were watched; None for any other tensor."""
    return getattr(lo, _SIGNATURE, None)


def _rows(end: Tensor | int, i: Tensor) -> Tensor:
    return torch.full_like(i, end) if isinstance(end, int) else end.expand(end.shape[0], i.shape[1])


def _materialised_once(mask: Mask, q_len: int, kv_len: int, device: torch.device) -> Visibility:
    """Outside of inference mode: what is kept may be saved for a backward pass later."""
    with torch.inference_mode(False):
        return _visibility(mask, q_len, kv_len, device)


_static = functools.lru_cache(maxsize=64)(_materialised_once)


def _plain() -> bool:
    """Whether operations run as themselves: no fake tensors, no function transform whose tensors must not be kept."""
    return torch._C._len_torch_dispatch_stack() == 0 and not torch._C._are_functorch_transforms_active()
