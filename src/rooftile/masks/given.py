"""Masks that data decide: lengths of padded sequences, document ids, a boolean tensor.

They compare and hash by the tensors that they hold, not by the values in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.utils import _pytree

from rooftile.errors import UsageError
from rooftile.masks.base import Interval, Mask

__all__ = ["Dense", "Documents", "Padding", "dense", "documents", "padding"]

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class _Given(Mask):
    """A mask that holds tensors."""

    __slots__ = ()

    def _identity(self) -> tuple[object, ...]:
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and isinstance(other, _Given) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash((type(self), self._identity()))


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Padding(_Given):
    """Only the first ("right" padding) or the last ("left") ``lengths[b]`` keys of sequence b are real."""

    lengths: Tensor
    side: Literal["right", "left"] = "right"

    def _identity(self) -> tuple[object, ...]:
        return id(self.lengths), self.side

    def __str__(self) -> str:
        return f"padding({_shown(self.lengths)}, side={self.side!r})"

    __repr__ = __str__

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The lengths."""
        return (self.lengths,)

    @property
    def batch(self) -> int:
        """One length a sequence."""
        return self.lengths.shape[0]

    def check_values(self, q_len: int, kv_len: int) -> None:
        """Every length lies inside the keys."""
        fits = (self.lengths >= 0) & (self.lengths <= kv_len)
        _require(
            fits.all(), lambda: f"padding of {kv_len} keys: lengths {self._beyond(kv_len)} must be from 0 to {kv_len}"
        )

    def _beyond(self, kv_len: int) -> str:
        lengths = _unwrapped(self.lengths)
        wrong = lengths[(lengths < 0) | (lengths > kv_len)].tolist()
        return ", ".join(map(str, wrong[:4])) + (", ..." if len(wrong) > 4 else "")

    def sees(self, i: Tensor, j: Tensor, q_len: int, kv_len: int) -> Tensor:
        """Key ``j`` is real."""
        lengths = self.lengths.view(-1, 1, 1, 1)
        return j < lengths if self.side == "right" else j >= kv_len - lengths

    def interval(self, i: Tensor, q_len: int | Tensor, kv_len: int | Tensor) -> Interval:
        """``[0, length)``, or ``[Lk - length, Lk)``."""
        lengths = self.lengths.to(torch.int64).unsqueeze(1)
        return (0, lengths) if self.side == "right" else (kv_len - lengths, _whole(kv_len))


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Documents(_Given):
    """A query sees the keys that bear its own document id."""

    q_ids: Tensor
    kv_ids: Tensor | None = None

    def _identity(self) -> tuple[object, ...]:
        return id(self.q_ids), id(self.kv_ids)

    def __str__(self) -> str:
        return f"documents({_shown(self.q_ids)}{'' if self.kv_ids is None else f', {_shown(self.kv_ids)}'})"

    __repr__ = __str__

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The ids."""
        return (self.q_ids,) if self.kv_ids is None else (self.q_ids, self.kv_ids)

    @property
    def batch(self) -> int | None:
        """Sequences whose ids are given apart."""
        return next((t.shape[0] for t in self.tensors if t.dim() == 2), None)

    def _ids(self) -> tuple[Tensor, Tensor]:
        q_ids = self.q_ids if self.q_ids.dim() == 2 else self.q_ids.unsqueeze(0)
        if self.kv_ids is None:
            return q_ids, q_ids
        return q_ids, self.kv_ids if self.kv_ids.dim() == 2 else self.kv_ids.unsqueeze(0)

    def check_lengths(self, q_len: int, kv_len: int) -> None:
        """One id a query and one a key."""
        q_ids, kv_ids = self._ids()
        if q_ids.shape[1] != q_len or kv_ids.shape[1] != kv_len:
            hint = "; give kv_ids too where queries and keys differ" if self.kv_ids is None else ""
            raise UsageError(
                f"documents of {q_ids.shape[1]} query ids and {kv_ids.shape[1]} key ids for {q_len} queries and "
                f"{kv_len} keys: there must be one id each{hint}"
            )

    def check_values(self, q_len: int, kv_len: int) -> None:
        """The keys of a document lie together, and the queries meet the documents in the order of the keys."""
        q_ids, kv_ids = self._ids()
        way_out = "sort the tokens by document, or use masks.dense(q_ids[:, None] == kv_ids[None, :])"
        runs, documents = _runs(kv_ids), _runs(kv_ids.sort(-1).values)
        _require(
            (runs == documents).all(),
            lambda: f"{self}: the keys of a document are not contiguous, so they are no interval; {way_out}",
        )
        lo, hi = self._run_of(q_ids, kv_ids)
        latest = torch.where(lo < hi, lo, -1).cummax(-1).values if q_len else lo
        _require(
            ((lo >= hi) | (lo == latest)).all(),
            lambda: f"{self}: the queries do not meet the documents in the order of the keys; {way_out}",
        )

    def sees(self, i: Tensor, j: Tensor, q_len: int, kv_len: int) -> Tensor:
        """Both ids are the same."""
        q_ids, kv_ids = self._ids()
        return q_ids[:, None, :, None] == kv_ids[:, None, None, :]

    def interval(self, i: Tensor, q_len: int | Tensor, kv_len: int | Tensor) -> Interval:
        """The run of keys with the row's id; rows are those of the whole sequence."""
        return self._run_of(*self._ids())

    @staticmethod
    def _run_of(q_ids: Tensor, kv_ids: Tensor) -> tuple[Tensor, Tensor]:
        batch = max(q_ids.shape[0], kv_ids.shape[0])
        q_ids = q_ids.expand(batch, -1).contiguous()
        ordered, where = kv_ids.expand(batch, -1).sort(dim=-1, stable=True)
        ordered = ordered.contiguous()
        first = torch.searchsorted(ordered, q_ids, right=False)
        count = torch.searchsorted(ordered, q_ids, right=True) - first
        if not kv_ids.shape[1]:
            return first, first
        start = where.gather(-1, first.clamp(max=kv_ids.shape[1] - 1))  # stable sort: a document's first key is first
        start = torch.where(count > 0, start, 0)
        return start, start + count


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Dense(_Given):
    """Any pairs: ``visible`` is bool, (Lq, Lk) or (B or 1, Hq or 1, Lq or 1, Lk or 1)."""

    visible: Tensor

    def _identity(self) -> tuple[object, ...]:
        return (id(self.visible),)

    def __str__(self) -> str:
        return f"dense({_shown(self.visible)})"

    __repr__ = __str__

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The booleans."""
        return (self.visible,)

    @property
    def batch(self) -> int | None:
        """Sequences whose pairs are given apart."""
        return self.visible.shape[0] if self.visible.dim() == 4 and self.visible.shape[0] != 1 else None

    def check_lengths(self, q_len: int, kv_len: int) -> None:
        """The tensor spans the square, or says 1."""
        rows, keys = self.visible.shape[-2:]
        spread = (1,) if self.visible.dim() == 4 else ()
        if rows not in (q_len, *spread) or keys not in (kv_len, *spread):
            raise UsageError(
                f"{self} for {q_len} queries and {kv_len} keys: the last two dims must be ({q_len}, {kv_len}), "
                "or 1 in a 4-d mask"
            )

    def sees(self, i: Tensor, j: Tensor, q_len: int, kv_len: int) -> Tensor:
        """The pair's own entry."""
        return self.dense_part()

    def interval(self, i: Tensor, q_len: int | Tensor, kv_len: int | Tensor) -> None:
        """No interval."""
        return

    def dense_part(self) -> Tensor:
        """The booleans, 4-d."""
        return self.visible if self.visible.dim() == 4 else self.visible[None, None]


def padding(lengths: Tensor | Sequence[int], side: Literal["right", "left"] = "right") -> Padding:
    """Keys beyond the real ones of each sequence are hidden: ``lengths`` (B,), integers from 0 to Lk.

    ``side`` is where the padding stands: "right" keeps the first ``lengths[b]`` keys, "left" the last.
    """
    if side not in ("right", "left"):
        raise UsageError(f"padding(side={side!r}): side is 'right' or 'left', where the padding stands")
    if not isinstance(lengths, Tensor):
        lengths = torch.tensor([_length(n) for n in lengths], dtype=torch.int64)
    _check_integers(lengths, "padding", "lengths", (1,), "(B,)")
    return Padding(lengths, side)


def documents(q_ids: Tensor, kv_ids: Tensor | None = None) -> Documents:
    """Each query sees the keys of its own document: integer ids (L,), or (B, L) for a batch of packed sequences.

    ``kv_ids`` are the keys' ids where queries and keys differ. The keys of a document lie together; ids that do not
    are an error that names :func:`dense`.
    """
    _check_integers(q_ids, "documents", "q_ids", (1, 2), "(L,) or (B, L)")
    if kv_ids is not None:
        _check_integers(kv_ids, "documents", "kv_ids", (1, 2), "(L,) or (B, L)")
        if q_ids.device != kv_ids.device:
            raise UsageError(f"documents: q_ids are on {q_ids.device} and kv_ids on {kv_ids.device}; move one of them")
        if q_ids.dim() == kv_ids.dim() == 2 and q_ids.shape[0] != kv_ids.shape[0]:
            raise UsageError(
                f"documents: q_ids {tuple(q_ids.shape)} and kv_ids {tuple(kv_ids.shape)} differ in sequences"
            )
    return Documents(q_ids, kv_ids)


def dense(visible: Tensor) -> Dense:
    """Any mask as booleans, True where visible: (Lq, Lk), or 4-d with 1 where it is the same for all."""
    if not isinstance(visible, Tensor) or visible.dtype != torch.bool:
        what = visible.dtype if isinstance(visible, Tensor) else type(visible).__name__
        raise UsageError(f"dense(visible) needs a bool tensor, not {what}; an additive mask goes into bias=")
    if visible.dim() not in (2, 4):
        raise UsageError(f"dense of shape {tuple(visible.shape)}: give (Lq, Lk), or 4-d (B or 1, H or 1, Lq, Lk)")
    return Dense(visible)


def _length(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"padding(lengths) needs integers, not {value!r}")
    return value


def _check_integers(ids: object, name: str, argument: str, dims: tuple[int, ...], shape: str) -> None:
    if not isinstance(ids, Tensor) or ids.dtype not in _INTEGERS:
        what = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise UsageError(f"{name}({argument}) needs an integer tensor {shape}, not {what}")
    if ids.dim() not in dims:
        raise UsageError(f"{name}({argument}) of shape {tuple(ids.shape)}: give {shape}")


def _require(holds: Tensor, sentence: Callable[[], str]) -> None:
    """Refuse values of tensors: at once, or, in a graph that is only being recorded, when it runs."""
    if torch.compiler.is_compiling():
        torch._assert_async(holds, "a mask's values don't fit its lengths; run without torch.compile for the details")
        return
    holds = _unwrapped(holds)
    if holds.device.type != "meta" and not torch._C._len_torch_dispatch_stack() and not bool(holds.all()):
        raise UsageError(sentence())


def _unwrapped(t: Tensor) -> Tensor:
    """Under vmap the values of every example at once."""
    while torch._C._functorch.is_functorch_wrapped_tensor(t):
        t = torch._C._functorch.get_unwrapped(t)
    return t


def _runs(ids: Tensor) -> Tensor:
    """How many runs of equal ids each sequence has."""
    return (ids[:, 1:] != ids[:, :-1]).sum(-1)


def _whole(kv_len: int | Tensor) -> int | Tensor:
    return kv_len


def _shown(t: Tensor) -> str:
    return f"<{'x'.join(map(str, t.shape))} {str(t.dtype).removeprefix('torch.')}>"


for _mask in (Padding, Documents, Dense):  # an argument of an exported module: its tensors are inputs of the graph
    _pytree.register_dataclass(_mask)
