"""``convert``: exchange a model's linear layers for block-scaled ones, and leave alone what is better left alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from rooftile.errors import UsageError
from rooftile.lowp.linear import BlockScaledLinear
from rooftile.lowp.recipes import LayerRecipe, layer_recipe

__all__ = ["Conversion", "convert", "keeps_high_precision"]

#: Last parts of a module's path. ``gate`` is a mixture's router; Llama's ``gate_proj`` is an ordinary projection.
_HEADS = re.compile(r"(lm_)?head|output|classifier|score|logits|unembed(ding)?|qa_outputs|cls")
_GATES = re.compile(r"gate|gating|router|wg")

Filter = Callable[[str, nn.Linear], bool]


@dataclass(frozen=True, slots=True)
class Conversion:
    """What :func:`convert` did: paths of exchanged layers, and of linear layers that were kept with the reason."""

    recipe: str
    converted: tuple[str, ...]
    kept: tuple[tuple[str, str], ...]


def keeps_high_precision(path: str, linear: nn.Linear, model: nn.Module) -> str:
    """Why a linear layer is kept by default; empty where it isn't.

    Embeddings, norms and the attention operator are no ``nn.Linear`` and are never touched (the projections around
    attention are converted, as in DeepSeek-V3). Kept: heads and routers by name, a weight that is tied to an
    embedding, and the inside of ``nn.MultiheadAttention``, which reads weights without calling the layer.
    """
    if type(linear) is not nn.Linear:
        return f"it is a {type(linear).__name__}, whose owner may read its weight directly"
    name = path.rpartition(".")[2]
    if any(linear.weight is m.weight for m in model.modules() if isinstance(m, nn.Embedding)):
        return "its weight is an embedding's"
    if _HEADS.fullmatch(name):
        return "it is a head"
    if _GATES.fullmatch(name):
        return "it is a gate"
    return ""


def convert(model: nn.Module, recipe: str | LayerRecipe = "deepseek-v3", filter: Filter | None = None) -> Conversion:
    """Exchange linear layers in place; the parameters stay the same objects, so an optimizer keeps working.

    Args:
        model: changed in place.
        recipe: a layer's recipe or its name.
        filter: ``filter(path, linear) -> bool`` says which plain ``nn.Linear`` to convert, instead of the default of
            :func:`keeps_high_precision`.

    Raises:
        UsageError: nothing to convert, one module at two paths, or a chosen layer whose weight is an embedding's.
    """
    found = layer_recipe(recipe)
    chosen: list[tuple[str, nn.Linear]] = []
    kept: list[tuple[str, str]] = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        reason = keeps_high_precision(path, module, model)
        if filter is not None and type(module) is nn.Linear:
            wanted = bool(filter(path, module))
            if wanted and reason == "its weight is an embedding's":
                raise UsageError(f"{path!r} shares its weight with an embedding, which is looked up; leave it out")
            reason = "" if wanted else "the filter leaves it out"
        if reason:
            kept.append((path, reason))
        else:
            chosen.append((path, module))
    done = sum(isinstance(module, BlockScaledLinear) for module in model.modules())
    if not chosen and done:
        raise UsageError(f"nothing is left to convert: {done:,} layers of the model are block-scaled already")
    if not chosen:
        raise UsageError("the model has no linear layer to convert; pass a filter that chooses some")
    _refuse_shared(model, {id(module) for _, module in chosen})
    for path, module in chosen:
        parent, _, name = path.rpartition(".")
        if not path:
            raise UsageError("the model is itself a linear layer; use BlockScaledLinear.from_linear")
        setattr(model.get_submodule(parent), name, BlockScaledLinear.from_linear(module, found))
    return Conversion(found.name, tuple(path for path, _ in chosen), tuple(kept))


def _refuse_shared(model: nn.Module, chosen: set[int]) -> None:
    seen: dict[int, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if id(module) not in chosen:
            continue
        if id(module) in seen:
            raise UsageError(
                f"{seen[id(module)]!r} and {path!r} are one module; its two uses would need two scales, so give each a "
                "layer of its own, or leave it out with a filter"
            )
        seen[id(module)] = path
