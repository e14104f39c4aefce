"""Operators whose CPU kernel returns other dtypes than the target device's: run, then correct what came out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["run_as_device"]

aten = torch.ops.aten

#: Positions of the statistics among the outputs; CUDA keeps them in fp32 for 16-bit inputs.
_STATISTICS = {aten.native_layer_norm.default: (1, 2), aten.native_group_norm.default: (1, 2)}

#: Positions of the same statistics among the arguments of the backward operators.
_STATISTICS_IN = {aten.native_layer_norm_backward.default: (3, 4), aten.native_group_norm_backward.default: (2, 3)}


def run_as_device(device_class: str) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]:
    """``run(func, args, kwargs)`` for the device class."""
    return _run_fp32_statistics if device_class in ("cuda", "rocm") else _run


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func is aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
        result = _grouped_mm_without_values(*args, **kwargs)
        if result is not None:
            return result
    return func(*args, **kwargs)


def _grouped_mm_without_values(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor | None:
    """The result's shape for meta and fake tensors, whose kernel knows bf16 only; None for real ones, which know more.

    Groups split the rows (2d by 3d), the columns (3d by 2d), the inner dimension (2d by 2d) or none (3d by 3d).
    """
    if bias is not None:  # torch's own kernel refuses it
        return None
    from torch._subclasses.fake_tensor import FakeTensor

    if not (a.is_meta or isinstance(a, FakeTensor)):
        return None
    groups = 0 if offs is None else offs.shape[0]
    shape = {
        (2, 3): (a.shape[0], b.shape[-1]),
        (3, 2): (a.shape[-2], b.shape[-1]),
        (2, 2): (groups, a.shape[0], b.shape[-1]),
        (3, 3): (a.shape[0], a.shape[-2], b.shape[-1]),
    }[a.dim(), b.dim()]
    return a.new_empty(shape, dtype=out_dtype or a.dtype)


def _run_fp32_statistics(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    positions = _STATISTICS_IN.get(func)
    if positions is not None and isinstance(args[1], Tensor) and not args[1].is_meta:
        # The CPU kernel wants the statistics as it made them: in the input's dtype unless the weights are wider.
        weight = next((a for a in args[5:] if isinstance(a, Tensor) and a.is_floating_point()), None)
        if args[1].dtype in (torch.float16, torch.bfloat16) and (weight is None or weight.dtype == args[1].dtype):
            listed = list(args)
            for i in positions:
                listed[i] = listed[i].to(args[1].dtype)
            args = tuple(listed)
        return func(*args, **kwargs)
    result = _run(func, args, kwargs)
    positions = _STATISTICS.get(func)
    if positions is None:
        return result
    wide = list(result)
    for i in positions:
        if wide[i].dtype in (torch.float16, torch.bfloat16):
            wide[i] = wide[i].float()
    return tuple(wide)
