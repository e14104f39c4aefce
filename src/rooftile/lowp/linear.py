"""``BlockScaledLinear``: a linear layer's three products, each on operands quantised by their role's recipe.

X (tokens M, in K), W (out N, in K), dY (M, N). Q is the role's quantisation; the contraction is the last dimension
of what it is given:

    Y  = Q(X)    Q(W)^T        contraction over K
    dX = Q(dY)   Q(W^T)^T      contraction over N
    dW = Q(dY^T) Q(X^T)^T      contraction over the tokens M

Every product is accumulated in fp32 (fp64 for an fp64 layer). Where a scale serves a square, a matrix is quantised
once: its transpose has the same codes and the transposed scales. The weight itself stays an fp32 parameter, the master
that the optimizer updates.
Source: DeepSeek-AI 2024, section 3.3, for the recipe ``deepseek-v3``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rooftile.errors import UsageError
from rooftile.formats.catalogue import get_format
from rooftile.lowp.blocks import block_amax, largest, resolve_block
from rooftile.lowp.delayed import AmaxHistory, Pass, forward_amaxes, pass_of
from rooftile.lowp.operators import block_arguments, quantize_matrix, requantize_transposed, scaled_mm
from rooftile.lowp.recipes import LayerRecipe, Recipe, Role, layer_recipe
from rooftile.lowp.scales import tensor_scale_of

__all__ = ["BlockScaledLinear", "ProductPath", "scaled_mm_path"]


class _Operand(NamedTuple):
    """One quantised matrix, contraction last; ``scale`` is its grid of decode scales."""

    codes: Tensor
    scale: Tensor


def _quantize(x: Tensor, recipe: Recipe, amax: Tensor | None, role: Role) -> _Operand:
    tensor_scale = None
    if recipe.history and amax is None:
        raise UsageError(f"recipe {recipe.name!r} needs an amax history; use BlockScaledLinear, which keeps one")
    if recipe.tensor_scale:
        fmt, scale_format = get_format(recipe.format), get_format(recipe.scale_format)
        tensor_scale = tensor_scale_of(_amax(x), fmt, scale_format)
    codes, scale = quantize_matrix(
        x, *block_arguments(recipe), recipe.format, recipe.scale_format, recipe.scale_rule, amax, tensor_scale, role
    )
    return _Operand(codes, scale if tensor_scale is None else scale * tensor_scale)


def _amax(x: Tensor) -> Tensor:
    return largest(block_amax(x, resolve_block((None, None), *x.shape)))


def _multiply(a: _Operand, a_recipe: Recipe, b: _Operand, b_recipe: Recipe, dtype: torch.dtype) -> Tensor:
    product: Tensor = scaled_mm(
        a.codes, a.scale, list(block_arguments(a_recipe)), a_recipe.format,
        b.codes, b.scale, list(block_arguments(b_recipe)), b_recipe.format, dtype,
    )  # fmt: skip
    return product


class _Histories(NamedTuple):
    """One history per role, where its recipe is delayed, and what this pass does to them."""

    input: AmaxHistory | None
    weight: AmaxHistory | None
    gradient: AmaxHistory | None
    which: Pass

    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The amaxes to scale both operands by, None where they are their own."""
        if self.input is None and self.weight is None:
            return None, None
        return forward_amaxes((self.input, self.weight), (_amax(x), _amax(weight)), self.which)

    def backward(self, dy: Tensor) -> Tensor | None:
        """The same for the output's gradient."""
        if self.gradient is None:
            return None
        return self.gradient.peek(_amax(dy)) if self.which == "peek" else self.gradient.advance(_amax(dy))


class _ScaledProducts(torch.autograd.Function):
    """Forward and the two backward products; see the module's docstring."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, recipe: LayerRecipe, histories: _Histories, dtype: torch.dtype
    ) -> Tensor:
        amax_x, amax_weight = histories.forward(x, weight)
        a = _quantize(x, recipe.input, amax_x, "input")
        b = _quantize(weight, recipe.weight, amax_weight, "weight")
        kept_input = a if _keeps_codes(recipe) else (x,)
        kept_weight = b if recipe.weight.square else (weight,)
        ctx.save_for_backward(*kept_input, *kept_weight)
        ctx.recipe, ctx.histories = recipe, histories
        ctx.input_dtype, ctx.weight_dtype = x.dtype, weight.dtype
        return _multiply(a, recipe.input, b, recipe.weight, dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        recipe: LayerRecipe = ctx.recipe
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise UsageError(
                "a scaled layer has no second derivative; call backward without create_graph=True, or leave the layer "
                "out of the conversion with a filter"
            )
        tensors = ctx.saved_tensors
        at = 2 if _keeps_codes(recipe) else 1
        dx = dw = None
        grad = _quantize(dy, recipe.gradient, ctx.histories.backward(dy), "gradient")
        if ctx.needs_input_grad[0]:
            weight_t = _weight_transposed(tensors[at:], recipe)
            dx = _multiply(grad, recipe.gradient, weight_t, recipe.weight, ctx.input_dtype)
        if ctx.needs_input_grad[1]:
            # A scale that serves a square serves its transpose; finer ones are made again along the tokens.
            grad_t = (
                _transposed(grad) if recipe.gradient.square else _quantize(dy.t(), recipe.gradient, None, "gradient")
            )
            input_t = _input_transposed(tensors[:at], recipe, ctx.input_dtype)
            dw = _multiply(grad_t, recipe.gradient, input_t, recipe.input, ctx.weight_dtype)
        return dx, dw, None, None, None


def _keeps_codes(recipe: LayerRecipe) -> bool:
    return recipe.saved_input == "codes" or recipe.input.square


def _transposed(operand: _Operand) -> _Operand:
    return _Operand(operand.codes.t(), operand.scale.t())


def _weight_transposed(kept: tuple[Tensor, ...], recipe: LayerRecipe) -> _Operand:
    if recipe.weight.square:
        return _transposed(_Operand(*kept))
    return _quantize(kept[0].t(), recipe.weight, None, "weight")


def _input_transposed(kept: tuple[Tensor, ...], recipe: LayerRecipe, dtype: torch.dtype) -> _Operand:
    if recipe.input.square:
        return _transposed(_Operand(*kept))
    if recipe.saved_input == "input":
        return _quantize(kept[0].t(), recipe.input, None, "input")
    codes, scale = requantize_transposed(
        kept[0], kept[1], *block_arguments(recipe.input), recipe.input.format, recipe.input.scale_format,
        recipe.input.scale_rule, dtype == torch.float64, "input",
    )  # fmt: skip
    return _Operand(codes, scale)


class BlockScaledLinear(nn.Module):
    """``y = x W^T + b`` with scaled low-precision products.

    ``weight`` (out_features, in_features) and ``bias`` are fp32 (or ``dtype``) parameters; the state dict is that of
    ``nn.Linear``, plus ``amax_*`` histories under a delayed recipe. These only grow in training with gradients on; a
    pass that checkpointing computes again takes the scales of its first time. Input: any leading dimensions, last
    dimension ``in_features``; output in the input's dtype, or autocast's where that is on. The bias is added after the
    product.

    Raises:
        UsageError: an unknown recipe, sizes below 1, an input that is not floating or of another width, a backward pass
            with ``create_graph=True`` (there is no second derivative).
    """

    weight: Tensor
    bias: Tensor | None
    amax_input: AmaxHistory | None
    amax_weight: AmaxHistory | None
    amax_gradient: AmaxHistory | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        recipe: str | LayerRecipe = "deepseek-v3",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if min(in_features, out_features) < 1:
            raise UsageError(f"a layer of {in_features} inputs and {out_features} outputs; give at least 1 of each")
        self.in_features, self.out_features = in_features, out_features
        template = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)  # for its initialisation
        self.weight, self.bias = template.weight, template.bias
        self._set_recipe(layer_recipe(recipe))

    def _set_recipe(self, recipe: LayerRecipe) -> None:
        self.recipe = recipe
        device = self.weight.device
        for role in ("input", "weight", "gradient"):
            length = getattr(recipe, role).history
            setattr(self, f"amax_{role}", AmaxHistory(length).to(device) if length else None)

    @classmethod
    def from_linear(cls, linear: nn.Linear, recipe: str | LayerRecipe = "deepseek-v3") -> BlockScaledLinear:
        """The same layer on the *same* parameters: nothing is copied, an optimizer keeps working."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.in_features, made.out_features = linear.in_features, linear.out_features
        made.weight, made.bias = linear.weight, linear.bias
        made._set_recipe(layer_recipe(recipe))
        made.train(linear.training)
        return made

    def forward(self, x: Tensor) -> Tensor:
        """``x`` (..., in_features) to (..., out_features)."""
        if not x.is_floating_point() or x.shape[-1:] != (self.in_features,):
            raise UsageError(
                f"the input is {x.dtype} of shape {tuple(x.shape)}; give a floating tensor whose last dimension is "
                f"{self.in_features}"
            )
        dtype = x.dtype
        kind = x.device.type if x.device.type != "meta" else "cpu"  # on meta tensors an audit emulates the CPU's key
        if torch.is_autocast_enabled(kind) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(kind)
        matrix = x.reshape(-1, self.in_features)
        # No tokens, no maximum: nothing enters a history.
        delayed = (self.amax_input, self.amax_weight, self.amax_gradient)
        which = pass_of(self.training and matrix.shape[0] > 0) if any(delayed) else "peek"
        histories = _Histories(*delayed, which)
        y: Tensor = _ScaledProducts.apply(matrix, self.weight, self.recipe, histories, dtype)  # type: ignore[no-untyped-call]
        if self.bias is not None:
            y = y + self.bias.to(dtype)
        return y.reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Sizes and recipe, as the module prints itself."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"recipe={self.recipe.name!r}"
        )


class ProductPath(NamedTuple):
    """How one product is carried out, and why not otherwise."""

    product: str
    path: str
    reasons: tuple[str, ...]


def scaled_mm_path(layer: BlockScaledLinear, x: Tensor) -> tuple[ProductPath, ...]:
    """Which path each of the layer's three products takes for this input: ``scaled_mm`` (torch's, on the device) or
    ``decode`` (decoded operands, an fp32 product). The former follows torch's documentation, not yet run on hardware.
    """
    from rooftile.lowp.device_mm import product_refusals
    from rooftile.lowp.operators import code_dtype

    recipe, rows = layer.recipe, x.numel() // max(1, layer.in_features)
    sizes = {
        "output": (recipe.input, (rows, layer.in_features), recipe.weight, (layer.out_features, layer.in_features)),
        "grad_input": (
            recipe.gradient,
            (rows, layer.out_features),
            recipe.weight,
            (layer.in_features, layer.out_features),
        ),
        "grad_weight": (recipe.gradient, (layer.out_features, rows), recipe.input, (layer.in_features, rows)),
    }
    found = []
    for product, (a, a_shape, b, b_shape) in sizes.items():
        left = torch.empty(a_shape, dtype=code_dtype(a.format), device="meta" if x.device.type != "cuda" else x.device)
        right = torch.empty(b_shape, dtype=code_dtype(b.format), device=left.device)
        dtype = layer.weight.dtype if product == "grad_weight" else x.dtype
        reasons = product_refusals(left, block_arguments(a), right, block_arguments(b), dtype)
        if x.device.type != "cuda":
            reasons = [f"the operands are on {x.device.type}, scaled matmul needs cuda"]
        found.append(ProductPath(product, "decode" if reasons else "scaled_mm", tuple(reasons)))
    return tuple(found)
