"""Scaled low precision: score the recipes, then train with the one that holds.

Recipes are data and import without torch; everything that touches a tensor is loaded when it is first named.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rooftile.lowp.recipes import LAYER_RECIPES, RECIPES, LayerRecipe, Recipe, layer_recipe, recipe

if TYPE_CHECKING:
    from rooftile.lowp.accumulation import ACCUMULATORS, Accumulator, SimulatedProduct, simulate_matmul
    from rooftile.lowp.conversion import Conversion, convert
    from rooftile.lowp.delayed import AmaxHistory
    from rooftile.lowp.files import load
    from rooftile.lowp.linear import BlockScaledLinear, ProductPath, scaled_mm_path
    from rooftile.lowp.loss_scaling import GradientWatch, LossScaler, SkippedStep, initial_scale, watch_gradients
    from rooftile.lowp.masters import MasterWeights
    from rooftile.lowp.scaled_tensor import ScaledTensor, quantize
    from rooftile.lowp.scoring import RecipeScore, ScoreTable, score

_MODULES = {
    "accumulation": ("ACCUMULATORS", "Accumulator", "SimulatedProduct", "simulate_matmul"),
    "conversion": ("Conversion", "convert"),
    "delayed": ("AmaxHistory",),
    "files": ("load",),
    "linear": ("BlockScaledLinear", "ProductPath", "scaled_mm_path"),
    "loss_scaling": ("GradientWatch", "LossScaler", "SkippedStep", "initial_scale", "watch_gradients"),
    "masters": ("MasterWeights",),
    "scaled_tensor": ("ScaledTensor", "quantize"),
    "scoring": ("RecipeScore", "ScoreTable", "score"),
}
_LATE = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "ACCUMULATORS",
    "LAYER_RECIPES",
    "RECIPES",
    "Accumulator",
    "AmaxHistory",
    "BlockScaledLinear",
    "Conversion",
    "GradientWatch",
    "LayerRecipe",
    "LossScaler",
    "MasterWeights",
    "ProductPath",
    "Recipe",
    "RecipeScore",
    "ScaledTensor",
    "ScoreTable",
    "SimulatedProduct",
    "SkippedStep",
    "convert",
    "initial_scale",
    "layer_recipe",
    "load",
    "quantize",
    "recipe",
    "scaled_mm_path",
    "score",
    "simulate_matmul",
    "watch_gradients",
]


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATE[name]}"), name)
