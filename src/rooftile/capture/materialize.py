"""Put a Step's model, inputs and optimizer on meta, fake or real CPU tensors, in the dtypes of a precision.

The user's model is never written to: the copy shares its structure (tied weights stay tied, by the copy's memo) and its
code, and has tensors of its own.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from rooftile._attention.kv_cache import KVCache
from rooftile.capture.options import CaptureOptions
from rooftile.capture.step import Step
from rooftile.errors import UsageError
from rooftile.masks import Mask

__all__ = [
    "KV_CACHE_ARGUMENTS",
    "autocast_dtype",
    "compute_dtype",
    "copy_step",
    "held_tensors",
    "resolve_precision",
    "scale_linears",
    "state_dtype",
    "tensors_inside",
]

#: Input names that hold a KV cache.
KV_CACHE_ARGUMENTS = ("kv_cache", "cache", "past_key_values")

_STATE: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "bf16-master": torch.bfloat16,
    "fp16": torch.float16,
    "fp16-master": torch.float16,
}
_AUTOCAST: dict[str, torch.dtype] = {
    "bf16-mixed": torch.bfloat16,
    "fp16-mixed": torch.float16,
    "fp8-block": torch.bfloat16,
    "fp8-tensor": torch.bfloat16,
}
_SCALED = {"fp8-block": "deepseek-v3", "fp8-tensor": "fp8-tensor"}


def state_dtype(precision: str) -> torch.dtype | None:
    """The dtype that parameters are put in; None where they stay as they are."""
    return _STATE.get(precision)


def autocast_dtype(precision: str) -> torch.dtype | None:
    """The dtype of the autocast region; None where there is none."""
    return _AUTOCAST.get(precision)


def compute_dtype(precision: str, model: nn.Module) -> torch.dtype:
    """What matrix products read: the autocast dtype, the parameters' dtype otherwise."""
    known = _AUTOCAST.get(precision) or _STATE.get(precision)
    if known is not None:
        return known
    floating = [p.dtype for p in model.parameters() if p.is_floating_point()]
    return floating[0] if floating else torch.float32


def scale_linears(model: nn.Module, precision: str) -> str | None:
    """Exchange the linear layers for block-scaled ones where the precision says so; a note on what was exchanged."""
    if precision not in _SCALED:
        return None
    from rooftile.lowp.conversion import convert  # with its kernels, for FP8 alone

    done = convert(model, _SCALED[precision])
    kept = ", ".join(f"{path} ({reason})" for path, reason in done.kept[:3])
    more = f" and {len(done.kept) - 3} more" if len(done.kept) > 3 else ""
    return f"{len(done.converted)} linear layers in FP8, recipe {done.recipe}; kept: {kept or 'none'}{more}"


def resolve_precision(step: Step, options: CaptureOptions) -> tuple[str, str | None]:
    """The precision in force and a note: a mixed policy is for FP32 parameters, any other model stays as it is."""
    if options.precision is None:
        if any(p.is_floating_point() and p.dtype != torch.float32 for p in step.model.parameters()):
            return "as-is", None
        return "bf16-mixed" if step.phase == "train" else "bf16", None
    dtypes = {str(p.dtype).removeprefix("torch.") for p in step.model.parameters() if p.is_floating_point()}
    if options.precision in _AUTOCAST and dtypes - {"float32"}:
        found = ", ".join(sorted(dtypes))
        return "as-is", f"precision {options.precision} needs FP32 parameters; the model's are {found}: kept as-is"
    return options.precision, None


def _converted(dtype: torch.dtype | None, like: Tensor) -> torch.dtype:
    return dtype if dtype is not None and like.is_floating_point() else like.dtype


def _new_tensor(like: Tensor, dtype: torch.dtype | None, device: str) -> Tensor:
    """A tensor with the same shape and strides; on "cpu" outside of a fake mode it has the same values."""
    target = _converted(dtype, like)
    if device == "cpu" and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None:
        if like.is_meta:
            raise UsageError(
                "a live capture needs real tensors, and the Step has meta ones; build its model and inputs on the CPU."
            )
        return like.detach().to(target, copy=True)
    if like.layout is not torch.strided:
        return like.detach().to(device=device, dtype=target)
    return torch.empty_strided(like.shape, like.stride(), dtype=target, device=device)


def copy_step(step: Step, precision: str, device: str) -> Step:
    """The Step with tensors of its own on ``device`` (``meta`` or ``cpu``; fake if a fake mode is active)."""
    dtype = state_dtype(precision)
    memo: dict[int, Any] = {}
    for parameter in step.model.parameters():
        new = nn.Parameter(_new_tensor(parameter, dtype, device), requires_grad=parameter.requires_grad)
        memo[id(parameter)] = new
    for module in step.model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                # Tables that are computed at construction (rotary angles) keep their precision.
                own = None if name in module._non_persistent_buffers_set else dtype
                memo.setdefault(id(buffer), _new_tensor(buffer, own, device))
        for held in vars(module).values():
            for tensor in held.tensors if isinstance(held, Mask) else ():
                memo.setdefault(id(tensor), _new_tensor(tensor, None, device))
            for tensor in tensors_inside([leaf for leaf in tree_leaves(held) if isinstance(leaf, KVCache)]):
                memo.setdefault(id(tensor), _new_tensor(tensor, compute_dtype(precision, step.model), device))
    try:
        model = copy.deepcopy(step.model, memo)
        optimizer = step.optimizer
        if isinstance(optimizer, torch.optim.Optimizer):
            optimizer = copy.deepcopy(optimizer, memo)
        for tensor in held_tensors(step.loss):
            memo.setdefault(id(tensor), _new_tensor(tensor, dtype, device))
        loss = _copy_callable(step.loss, memo)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise UsageError(
            f"the model can't be copied ({type(error).__name__}: {error}); a Step's model must support copy.deepcopy."
        ) from error
    inputs = _copy_inputs(step.inputs, precision, step.model, device)
    return Step(model, inputs, loss, optimizer, step.phase, step.name, step.batch, step.seq, step.config)


def held_tensors(function: Any) -> list[Tensor]:
    """Tensors that a loss callable carries: in a closure, a functools.partial, or an object's attributes."""
    owner = getattr(function, "__self__", function)
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    slots = [getattr(owner, name, None) for name in getattr(type(owner), "__slots__", ())]
    held = [cells, getattr(function, "args", ()), getattr(function, "keywords", {}), slots]
    held.append(list(getattr(owner, "__dict__", {}).values()))
    return [leaf for leaf in tree_leaves(held) if isinstance(leaf, Tensor)]


def tensors_inside(value: Any) -> list[Tensor]:
    """Tensors of a nested value; objects that torch's pytrees don't know are looked into two levels deep."""
    return _tensors_inside(value, 2)


def _tensors_inside(value: Any, levels: int) -> list[Tensor]:
    found: list[Tensor] = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif levels and hasattr(leaf, "__dict__") and not isinstance(leaf, nn.Module | type):
            found += _tensors_inside(list(vars(leaf).values()), levels - 1)
    return found


def _copy_callable(function: Any, memo: dict[int, Any]) -> Any:
    """The callable with its tensors (and the model, if it holds it) exchanged for those of the copy."""
    if isinstance(function, types.FunctionType) and function.__closure__:
        cells = tuple(types.CellType(copy.deepcopy(cell.cell_contents, memo)) for cell in function.__closure__)
        new = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
        )
        new.__kwdefaults__ = function.__kwdefaults__
        return new
    return copy.deepcopy(function, memo)


def _copy_inputs(inputs: Any, precision: str, model: nn.Module, device: str) -> Any:
    """Inputs follow the parameters' dtype; a KV cache follows the compute dtype."""
    own, cache = state_dtype(precision), compute_dtype(precision, model)

    def convert(dtype: torch.dtype | None) -> Callable[[Any], Any]:
        def one(value: Any) -> Any:
            if not isinstance(value, Tensor):
                # An object that torch's pytrees don't know, such as a cache: a copy of its own, or a step that
                # appends to it would change the next one.
                inside = {id(t): _new_tensor(t, dtype, device) for t in tensors_inside(value)}
                return copy.deepcopy(value, dict(inside)) if inside else value
            new = _new_tensor(value, dtype, device)
            return new.requires_grad_() if value.requires_grad else new

        return one

    if isinstance(inputs, dict):
        return {k: tree_map(convert(cache if k in KV_CACHE_ARGUMENTS else own), v) for k, v in inputs.items()}
    return tuple(tree_map(convert(own), v) for v in inputs)
