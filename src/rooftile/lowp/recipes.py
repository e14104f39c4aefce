"""Scaling recipes as data: which format, how many numbers share a scale, and what a scale may be. Needs no torch.

A recipe speaks of a matrix whose rows run along the *contraction* of the product it enters: a tile of 1x128 is 128
consecutive numbers of one row. A one-dimensional tensor is one row; leading dimensions are rows.

Sources: Micikevicius et al. 2022 (per tensor, delayed); DeepSeek-AI 2024, section 3.3 (1x128 tiles, 128x128 blocks);
OCP Microscaling 1.0, section 6.3 (mx); NVIDIA's NVFP4 note (1x16 with a second scale per tensor).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, get_args

from rooftile._names import unknown_name
from rooftile.errors import UsageError
from rooftile.formats.catalogue import get_format

__all__ = ["LAYER_RECIPES", "RECIPES", "LayerRecipe", "Recipe", "Role", "ScaleRule", "layer_recipe", "recipe"]

#: How a decode scale is made of a block's largest magnitude ``amax``. ``exact``: ``amax / max``, rounded to the scale
#: format. ``power-of-two-up``: the least power of two that saturates nothing. ``power-of-two-floor``: the OCP rule
#: ``2^(floor(log2 amax) - emax)``, under which a maximum beyond ``max`` saturates.
ScaleRule = Literal["exact", "power-of-two-up", "power-of-two-floor"]

Role = Literal["input", "weight", "gradient"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one tensor is scaled and stored.

    ``block``: (rows, columns) that share a scale, None where the whole extent does. ``scale_format``: what a decode
    scale is stored in. ``tensor_scale``: a second fp32 scale for the whole tensor, under which the block scales fit
    their narrow format. ``history``: with 1 or more, the scale comes from the largest amax of that many *earlier*
    tensors (delayed scaling) and :func:`~rooftile.lowp.quantize` needs an ``AmaxHistory``.

    Raises:
        UsageError: fields that contradict each other, such as an e8m0 scale that is not a power of two.
    """

    name: str
    format: str = "fp8_e4m3fn"
    block: tuple[int | None, int | None] = (None, None)
    scale_format: str = "fp32"
    scale_rule: ScaleRule = "exact"
    tensor_scale: bool = False
    history: int = 0

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem:
            raise UsageError(f"recipe {self.name!r}: {problem}")

    def _problem(self) -> str:
        fmt, scale = get_format(self.format), get_format(self.scale_format)
        if fmt.bits > 8 or not (fmt.signed and fmt.zero):
            return f"format {fmt.name} holds no signed values in 8 bits or fewer; choose an fp8, fp6 or fp4 format"
        if self.scale_rule not in get_args(ScaleRule):
            return f"scale_rule is {self.scale_rule!r}; choose one of {', '.join(get_args(ScaleRule))}"
        if scale.fraction_bits == 0 and self.scale_rule == "exact":
            return f"{scale.name} scales are powers of two; set scale_rule to power-of-two-up or power-of-two-floor"
        if scale.bits < 16 and scale.zero and not self.tensor_scale:
            return f"{scale.name} scales reach {scale.max:g} at most; set tensor_scale=True, or scale_format fp32"
        if any(size is not None and size < 1 for size in self.block) or len(self.block) != 2:
            return f"block is {self.block}; give two sizes of at least 1, or None for the whole extent"
        if self.history < 0 or (self.history and (self.block != (None, None) or self.tensor_scale)):
            return f"history is {self.history}; delayed scaling keeps 1 or more amaxes of whole tensors"
        return ""

    @property
    def bits_per_block_scale(self) -> int:
        """Bits of one decode scale."""
        return get_format(self.scale_format).bits

    @property
    def square(self) -> bool:
        """Whether the transposed matrix has the transposed scales, so that one quantisation serves both products."""
        return self.block[0] == self.block[1]

    def with_format(self, fmt: str) -> Recipe:
        """The same scaling for another format."""
        return replace(self, format=get_format(fmt).name)


#: Every recipe for one tensor by name.
RECIPES: Mapping[str, Recipe] = MappingProxyType({
    r.name: r
    for r in (
        Recipe("tensor"),
        Recipe("row", block=(1, None)),
        Recipe("tile-1x128", block=(1, 128)),
        Recipe("block-128x128", block=(128, 128)),
        Recipe("tile-1x128-pow2", block=(1, 128), scale_rule="power-of-two-up"),
        Recipe("block-128x128-pow2", block=(128, 128), scale_rule="power-of-two-up"),
        Recipe("mx-1x32", block=(1, 32), scale_format="e8m0", scale_rule="power-of-two-floor"),
        Recipe("mx-1x32-up", block=(1, 32), scale_format="e8m0", scale_rule="power-of-two-up"),
        Recipe("nvfp4-1x16", "fp4_e2m1", block=(1, 16), scale_format="fp8_e4m3fn", tensor_scale=True),
        Recipe("delayed", history=16),
    )
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class LayerRecipe:
    """A recipe per role of a linear layer; ``saved_input`` is what the backward pass keeps of the input.

    ``codes``: the quantised input, decoded and quantised again along the tokens for the weight's gradient (1 byte a
    value, two roundings). ``input``: the input as it came (one rounding, and as many bytes as its dtype has). Where a
    scale serves a square, both are the same and the codes are kept.
    """

    name: str
    input: Recipe
    weight: Recipe
    gradient: Recipe
    saved_input: Literal["codes", "input"] = "input"

    def __post_init__(self) -> None:
        for role in get_args(Role):
            given = getattr(self, role)
            if not isinstance(given, Recipe):
                raise UsageError(f"recipe {self.name!r}: {role} is {given!r}; give a Recipe: lowp.recipe('tensor')")
        if self.saved_input not in ("codes", "input"):
            raise UsageError(f"recipe {self.name!r}: saved_input is {self.saved_input!r}; choose codes or input")
        if self.saved_input == "codes" and self.input.tensor_scale:
            raise UsageError(f"recipe {self.name!r}: codes under two scales are not kept; set saved_input='input'")


#: Every recipe for a layer by name.
LAYER_RECIPES: Mapping[str, LayerRecipe] = MappingProxyType({
    r.name: r
    for r in (
        LayerRecipe("deepseek-v3", RECIPES["tile-1x128"], RECIPES["block-128x128"], RECIPES["tile-1x128"], "codes"),
        LayerRecipe("fp8-tensor", RECIPES["tensor"], RECIPES["tensor"], RECIPES["tensor"].with_format("fp8_e5m2")),
        LayerRecipe("fp8-delayed", RECIPES["delayed"], RECIPES["delayed"], RECIPES["delayed"].with_format("fp8_e5m2")),
        LayerRecipe("fp8-row", RECIPES["row"], RECIPES["row"], RECIPES["row"]),
        LayerRecipe("mxfp8", RECIPES["mx-1x32-up"], RECIPES["mx-1x32-up"], RECIPES["mx-1x32-up"]),
    )
})  # fmt: skip


def recipe(name: str | Recipe, format: str | None = None) -> Recipe:
    """A tensor's recipe by name, in another ``format`` where one is given.

    Raises:
        UsageError: an unknown name (a layer's recipe is pointed out), or a format that a recipe can't have.
    """
    if isinstance(name, Recipe):
        found = name
    elif name in RECIPES:
        found = RECIPES[name]
    else:
        see = "it is a layer's recipe: use lowp.layer_recipe" if name in LAYER_RECIPES else ""
        raise unknown_name("recipe", str(name), list(RECIPES), see=see)
    return found if format is None else found.with_format(format)


def layer_recipe(name: str | LayerRecipe) -> LayerRecipe:
    """A layer's recipe by name.

    Raises:
        UsageError: an unknown name (a tensor's recipe is pointed out).
    """
    if isinstance(name, LayerRecipe):
        return name
    if name in LAYER_RECIPES:
        return LAYER_RECIPES[name]
    see = "it is a recipe for one tensor: use lowp.recipe" if name in RECIPES else ""
    raise unknown_name("layer recipe", str(name), list(LAYER_RECIPES), see=see)
