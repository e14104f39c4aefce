"""The mask that a transformers model is given: row intervals where its mask is one, and a Boolean tensor when asked.

:func:`make_mask` is what transformers calls once a forward pass, in place of the function that would write the
(B, 1, Lq, Lk) tensor. What it returns, :class:`VisibleKeys`, goes through the model to every attention layer. A model
that does something else with its mask than hand it on (slice it, add to it, combine it) meets a tensor: every torch
operation and every method of a tensor works on the Boolean mask that it stands for.
"""

from __future__ import annotations

import functools
import operator
import sys
from typing import Any

import torch
from torch import Tensor

from rooftile.errors import UsageError
from rooftile.integrations.mask_functions import MaskFunction, Square, contiguous, evaluated, read
from rooftile.masks import Mask, dense

__all__ = ["VisibleKeys", "make_mask"]

#: Arguments that transformers gives to every mask function and that don't change which keys are visible: leave to skip
#: the mask, the number format of a float mask, the configuration, the window (the mask function has it).
_NEUTRAL = frozenset({
    "allow_is_causal_skip", "allow_is_bidirectional_skip", "allow_torch_fix", "config", "dtype", "local_size",
})  # fmt: skip


#: Operations that take a mask for something else than it is, whichever one they mean.
_ARITHMETIC = frozenset({"sub", "rsub", "isub", "mul", "rmul", "imul", "baddbmm", "addcmul"})


class VisibleKeys:
    """Stands for a Boolean (B, 1, Lq, Lk) tensor: which keys each query row may see.

    ``mask`` is the same as a rooftile mask, None where every key is visible.
    """

    __slots__ = ("_square", "device", "mask", "shape")
    dtype = torch.bool
    ndim = 4
    is_cuda = False

    def __init__(self, shape: tuple[int, int, int, int], device: torch.device, mask: Mask | None) -> None:
        self.shape, self.device, self.mask = torch.Size(shape), device, mask
        self._square: Tensor | None = None

    def materialize(self) -> Tensor:
        """Bool (B, 1, Lq, Lk): True where the query may see the key."""
        if self._square is None:
            if self.mask is None:
                visible = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=self.device)
            else:
                visible = self.mask.materialize(self.shape[2], self.shape[3]).to(self.device)
            self._square = visible.expand(self.shape)
        return self._square

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Itself where it is there already, the tensor otherwise."""
        target = args[0] if args else kwargs.get("device", kwargs.get("dtype"))
        if len(args) + len(kwargs) == 1 and (target == self.dtype or _same_device(target, self.device)):
            return self
        return self.materialize().to(*args, **kwargs)

    def dim(self) -> int:
        """Dimensions of the mask it stands for: 4."""
        return 4

    def size(self, dim: int | None = None) -> Any:
        """The shape, or one size of it, as of a tensor."""
        return self.shape if dim is None else self.shape[dim]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "").strip("_")
        if name in ("add", "radd", "iadd") and len(args) == 2 and not kwargs:
            return _added(*args)
        if name in _ARITHMETIC:
            raise UsageError(
                f"this model computes with its mask ({name}) as if it were numbers, so it doesn't leave attention to "
                'transformers\' interface; load it with attn_implementation="eager".'
            )
        return function(*_as_tensors(args), **_as_tensors(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.materialize(), name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.materialize()[index]

    def __and__(self, other: Any) -> Any:
        return self.materialize() & other

    __rand__ = __and__

    def __or__(self, other: Any) -> Any:
        return self.materialize() | other

    __ror__ = __or__

    def __invert__(self) -> Tensor:
        return ~self.materialize()

    def __repr__(self) -> str:
        return f"VisibleKeys({tuple(self.shape)}, {self.mask})"


def _added(a: Any, b: Any) -> Any:
    """A mask added to scores or a bias, as transformers' eager one: 0 where visible, the least number elsewhere."""
    mask, other = (a, b) if isinstance(a, VisibleKeys) else (b, a)
    if mask.mask is None:
        return other.expand(torch.broadcast_shapes(other.shape, mask.shape))
    least = torch.finfo(other.dtype).min
    return other + torch.where(mask.materialize(), other.new_zeros(()), least)


def _as_tensors(value: Any) -> Any:
    if isinstance(value, VisibleKeys):
        return value.materialize()
    if isinstance(value, dict):
        return {key: _as_tensors(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_as_tensors(item) for item in value)
    return value


def _same_device(target: Any, device: torch.device) -> bool:
    return isinstance(target, str | torch.device) and torch.device(target) == device


def make_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor = 0, kv_offset: int = 0,
    mask_function: MaskFunction | None = None, attention_mask: Any = None, use_vmap: bool = False,
    device: torch.device | str = "cpu", **rest: Any,
) -> VisibleKeys | Tensor:  # fmt: skip
    """The mask of one forward pass; the arguments are those of transformers' mask interface.

    ``attention_mask`` is bool (B, length), True where a token is no padding, or a mask that this function made before.
    Always returns a mask, also where every key is visible: no mask then means that the model made none.
    """
    unknown = sorted(rest.keys() - _NEUTRAL)
    if unknown:
        raise UsageError(
            f"transformers gave the mask {', '.join(unknown)}, which rooftile doesn't know and which may change what "
            'is visible; use attn_implementation="sdpa" with this release, or a newer rooftile.'
        )
    if isinstance(attention_mask, VisibleKeys):
        return attention_mask
    _require_interface(rest.get("config"))
    square = Square(batch_size, q_length, kv_length, q_offset, kv_offset, torch.device(device))
    function = mask_function if mask_function is not None else _causal()
    parts = None if use_vmap else read(function, square)
    if parts is None:
        parts = _from_function(square, function, attention_mask, use_vmap)
    elif attention_mask is not None:
        parts += _padding(attention_mask, square)
    mask = functools.reduce(operator.and_, parts) if parts else None
    return VisibleKeys((batch_size, 1, q_length, kv_length), square.device, mask)


def _require_interface(config: Any) -> None:
    """Refuse a model that writes attention out by itself: it would take this mask for another kind."""
    if config is None:
        return
    parts = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))]
    names = [type(part).__module__.replace(".configuration_", ".modeling_") for part in parts if part is not None]
    models = [sys.modules[name] for name in names if name in sys.modules]
    if models and not any(hasattr(model, "ALL_ATTENTION_FUNCTIONS") for model in models):
        raise UsageError(
            f"the model of {type(config).__name__} doesn't call transformers' attention interface, so no "
            'attn_implementation can serve it; load it with attn_implementation="eager".'
        )


def _causal() -> MaskFunction:
    from transformers.masking_utils import causal_mask_function

    function: MaskFunction = causal_mask_function
    return function


def _padding(attention_mask: Tensor, square: Square) -> tuple[Mask, ...]:
    """What hides padding: nothing, an interval a sequence, or the keys as booleans where padding stands between tokens.

    Tokens beyond the mask's end are not there yet, so not visible. Under a tracer the values can't be looked at.
    """
    keys = attention_mask.to(device=square.device, dtype=torch.bool)
    missing = square.kv_offset + square.kv_len - keys.shape[-1]
    if missing > 0:
        keys = torch.nn.functional.pad(keys, (0, missing))
    keys = keys[:, square.kv_offset : square.kv_offset + square.kv_len]
    if not _tracing(keys):
        if bool(keys.all()):
            return ()
        rows = contiguous(keys)
        if rows is not None:
            return (rows,)
    return (dense(keys[:, None, None, :]),)


def _tracing(tensor: Tensor) -> bool:
    """Whether the values can't be looked at: a compilation, an export, tensors without data."""
    from transformers.utils.import_utils import is_tracing

    return tensor.is_meta or bool(is_tracing(tensor))


def _from_function(
    square: Square, function: MaskFunction, attention_mask: Tensor | None, use_vmap: bool
) -> tuple[Mask, ...]:
    """A mask function that isn't read: evaluated by transformers itself, padding included."""
    from transformers.masking_utils import sdpa_mask

    def block(start: int, rows: int) -> Tensor:
        part = square.shifted(rows, start)
        mask: Tensor = sdpa_mask(
            batch_size=part.batch, q_length=part.q_len, kv_length=part.kv_len, q_offset=part.q_offset,
            kv_offset=part.kv_offset, mask_function=function, attention_mask=attention_mask,
            allow_is_causal_skip=False, allow_is_bidirectional_skip=False, use_vmap=use_vmap, device=part.device,
        )  # fmt: skip
        return mask

    known = torch.empty(0, device=square.device) if attention_mask is None else attention_mask
    rows = None if _tracing(known) else evaluated(block, square.q_len, square.kv_len)
    return (dense(block(0, square.q_len)) if rows is None else rows,)
