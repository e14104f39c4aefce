"""BlockScaledLinear against its own definition written with quantize and dequantize, in fp64."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from rooftile import lowp
from rooftile.errors import UsageError

RECIPES = ["deepseek-v3", "fp8-tensor", "fp8-row", "mxfp8"]


def made(
    recipe: str, dtype: torch.dtype, shape: tuple[int, ...] = (3, 50)
) -> tuple[lowp.BlockScaledLinear, torch.Tensor]:
    torch.manual_seed(0)
    layer = lowp.BlockScaledLinear(200, 150, recipe=recipe, dtype=dtype)
    x = torch.randn(*shape, 200, dtype=dtype) * torch.exp(torch.randn(200, dtype=dtype))
    return layer, x.requires_grad_()


def defined(layer: lowp.BlockScaledLinear, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Y, dX, dW of the definition, in fp64: quantise along the contraction, decode, multiply."""
    recipe = layer.recipe

    def q(t: torch.Tensor, role: str) -> torch.Tensor:
        return lowp.quantize(t, getattr(recipe, role)).dequantize(torch.float64)

    rows, grad, w = x.detach().reshape(-1, 200), dy.reshape(-1, 150), layer.weight.detach()
    kept = lowp.quantize(rows, recipe.input).dequantize(w.dtype) if recipe.saved_input == "codes" else rows
    y = q(rows, "input") @ q(w, "weight").t() + layer.bias.detach().double()
    return y, q(grad, "gradient") @ q(w.t(), "weight").t(), q(grad.t(), "gradient") @ q(kept.t(), "input").t()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_output_and_both_gradients_are_the_dequantised_definition(recipe: str, dtype: torch.dtype, path: str) -> None:
    layer, x = made(recipe, dtype)
    y = layer(x)
    dy = torch.randn_like(y) * 1e-6
    y.backward(dy)
    want_y, want_dx, want_dw = defined(layer, x, dy)
    assert x.grad is not None
    assert layer.weight.grad is not None
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6  # of fp32 sums over 200 terms, relative to the norm
    for got, want in ((y, want_y), (x.grad, want_dx), (layer.weight.grad, want_dw)):
        difference = got.detach().double().reshape(want.shape) - want
        assert float(difference.norm() / want.norm()) < tolerance
    assert torch.allclose(layer.bias.grad.double(), dy.double().sum((0, 1)), rtol=1e-5)


@pytest.mark.parametrize("recipe", [*RECIPES, "fp8-delayed"])
def test_the_products_are_close_to_a_plain_linear_layer(recipe: str) -> None:
    layer, x = made(recipe, torch.float32)
    plain = nn.functional.linear(x.detach(), layer.weight.detach(), layer.bias.detach())
    error = float((layer(x).detach() - plain).norm() / plain.norm())
    assert 1e-3 < error < 0.06  # two e4m3 roundings: 2.6 % each at random; zero would mean that nothing was quantised


@pytest.mark.parametrize("shape", [(), (7,), (2, 3, 4), (0,), (1, 1)])
@pytest.mark.parametrize("bias", [True, False])
def test_any_leading_dimensions_and_no_bias(shape: tuple[int, ...], bias: bool) -> None:
    layer = lowp.BlockScaledLinear(5, 3, bias=bias)
    x = torch.randn(*shape, 5, requires_grad=True)
    y = layer(x)
    assert y.shape == (*shape, 3)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert (layer.bias is not None) == bias


def test_a_bf16_input_gives_a_bf16_output_and_fp32_master_gradients() -> None:
    layer, x = made("deepseek-v3", torch.float32)
    half = x.detach().bfloat16().requires_grad_()
    y = layer(half)
    y.sum().backward()
    assert (y.dtype, half.grad.dtype) == (torch.bfloat16, torch.bfloat16)
    assert (layer.weight.dtype, layer.weight.grad.dtype) == (torch.float32, torch.float32)


def test_autocast_sets_the_output_dtype_and_leaves_the_fp32_accumulation_alone() -> None:
    layer, x = made("deepseek-v3", torch.float32)
    wide = (layer(x) - layer.bias).detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = layer(x)
    assert narrow.dtype == torch.bfloat16
    assert torch.equal(narrow.detach(), wide.bfloat16() + layer.bias.detach().bfloat16()) or torch.allclose(
        narrow.float(), wide + layer.bias, rtol=2**-7, atol=2**-7
    )


def test_a_frozen_weight_and_a_frozen_input_get_no_gradient() -> None:
    layer, x = made("deepseek-v3", torch.float32)
    layer.weight.requires_grad_(False)
    layer(x).sum().backward()
    assert layer.weight.grad is None
    assert x.grad is not None
    layer.weight.requires_grad_(True)
    layer(x.detach()).sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's compiler does so itself
@pytest.mark.parametrize("recipe", RECIPES)
def test_it_compiles_whole_and_gives_the_same_bits(recipe: str) -> None:
    layer, x = made(recipe, torch.float32)
    eager = layer(x)
    eager.square().sum().backward()
    want, layer.weight.grad = layer.weight.grad, None
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    compiled.square().sum().backward()
    assert torch.equal(compiled, eager)
    assert torch.equal(layer.weight.grad, want)


def test_the_operators_pass_torchs_own_check() -> None:
    from rooftile.lowp.operators import quantize_matrix, scaled_mm

    x = torch.randn(40, 200)
    # The schema check itself multiplies what an operator returns, which float8 does not implement.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(quantize_matrix, (x, 1, 128, "fp8_e4m3fn", "fp32", "exact"), test_utils=checks[:2])
    torch.library.opcheck(quantize_matrix, (x, 0, 0, "fp4_e2m1", "fp32", "exact"))
    codes, scale = quantize_matrix(x, 1, 128, "fp8_e4m3fn", "fp32", "exact")
    arguments = (codes, scale, [1, 128], "fp8_e4m3fn", codes, scale, [1, 128], "fp8_e4m3fn", torch.float32)
    torch.library.opcheck(scaled_mm, arguments, test_utils=checks)


@pytest.mark.parametrize("recipe", ["deepseek-v3", "fp8-delayed"])
def test_a_checkpoint_round_trip_continues_with_the_same_bits(recipe: str) -> None:
    layer, x = made(recipe, torch.float32)
    layer(x).sum().backward()
    other = lowp.BlockScaledLinear(200, 150, recipe=recipe)
    other.load_state_dict(copy.deepcopy(layer.state_dict()))
    assert torch.equal(other(x * 3), layer(x * 3))
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))


def test_the_state_dict_is_that_of_a_linear_layer() -> None:
    plain, layer = nn.Linear(4, 3), lowp.BlockScaledLinear(4, 3)
    layer.load_state_dict(plain.state_dict())
    assert torch.equal(layer.weight, plain.weight)


def test_activation_checkpointing_gives_the_same_gradients() -> None:
    from torch.utils.checkpoint import checkpoint

    layer, x = made("deepseek-v3", torch.float32)
    layer(x).square().sum().backward()
    want, layer.weight.grad = layer.weight.grad, None
    checkpoint(layer, x, use_reentrant=False).square().sum().backward()
    assert torch.equal(layer.weight.grad, want)


def test_what_is_kept_for_backward_is_one_byte_a_value_under_deepseek_v3() -> None:
    layer, x = made("deepseek-v3", torch.float32)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x)
    assert [t.dtype for t in kept if t.shape == (150, 200)] == [torch.float8_e4m3fn] * 2  # input (3*50 rows), weight


def test_nan_in_a_token_stays_in_its_row() -> None:
    layer, x = made("deepseek-v3", torch.float32)
    dirty = x.detach().clone()
    dirty[0, 3, 7] = math.nan
    y = layer(dirty)
    assert y[0, 3].isnan().all()
    y[0, 3] = layer(x)[0, 3]
    assert torch.equal(y, layer(x))


def test_the_path_that_ran_says_why_it_was_not_the_devices() -> None:
    layer, x = made("deepseek-v3", torch.float32)
    paths = lowp.scaled_mm_path(layer, x)
    assert [p.product for p in paths] == ["output", "grad_input", "grad_weight"]
    assert all(p.path == "decode" and "cuda" in p.reasons[0] for p in paths)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.norm = nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.gate = nn.Linear(16, 4)
        self.gate_proj = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)
        self.lm_head = nn.Linear(16, 50, bias=False)
        self.tied = nn.Linear(16, 50, bias=False)
        self.tied.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embedding(ids))
        x = x + self.attention(x, x, x)[0]
        return self.lm_head(x + self.down(self.gate_proj(x)) * self.gate(x).sum(-1, keepdim=True))


def test_convert_keeps_embeddings_heads_norms_gates_and_attention() -> None:
    model = Block()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = model.down.weight
    done = lowp.convert(model)
    assert done.converted == ("gate_proj", "down")
    assert dict(done.kept).keys() == {"attention.out_proj", "gate", "lm_head", "tied"}
    assert isinstance(model.down, lowp.BlockScaledLinear)
    assert model.down.weight is weight
    before = weight.detach().clone()
    model(torch.randint(0, 50, (2, 9))).square().mean().backward()
    optimizer.step()
    assert not torch.equal(before, model.down.weight)


def test_a_filter_decides_otherwise() -> None:
    model = Block()
    assert lowp.convert(model, "fp8-tensor", lambda path, _: path == "lm_head").converted == ("lm_head",)
    with pytest.raises(UsageError, match="shares its weight with an embedding"):
        lowp.convert(Block(), filter=lambda path, _: path == "tied")


def test_a_module_shared_twice_is_refused_in_one_sentence_and_left_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model.append(model[0])
    with pytest.raises(UsageError, match="'0' and '2' are one module"):
        lowp.convert(model)
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: lowp.BlockScaledLinear(4, 3)(torch.ones(2, 5)), "last dimension is 4"),
        (lambda: lowp.BlockScaledLinear(4, 3)(torch.ones(2, 4, dtype=torch.int64)), "int64"),
        (lambda: lowp.BlockScaledLinear(0, 3), "at least 1"),
        (lambda: lowp.BlockScaledLinear(4, 3, recipe="deepseek"), "near matches: deepseek-v3"),
        (lambda: lowp.convert(nn.Sequential(nn.ReLU())), "no linear layer"),
        (lambda: lowp.convert(nn.Linear(4, 4)), "from_linear"),
    ],
)
def test_bad_input_gets_one_sentence(make: object, words: str) -> None:
    with pytest.raises(UsageError) as raised:
        make()  # type: ignore[operator]
    assert words in str(raised.value)


def delayed_run(checkpointed: bool, reentrant: bool = False, micro: int = 1) -> list[torch.Tensor]:
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    layer = lowp.BlockScaledLinear(32, 32, recipe="fp8-delayed")
    seen = []
    for step in range(3):
        losses = []
        for part in range(micro):
            x = torch.randn(8, 32) * (1 + 3 * step + part)
            x.requires_grad_()
            y = checkpoint(layer, x, use_reentrant=reentrant) if checkpointed else layer(x)
            losses.append(y.square().sum())
            seen += [y.detach(), x]
        sum(losses).backward()
        with torch.no_grad():
            layer.weight.mul_(1.5)
    return [*(t.grad if t.requires_grad else t for t in seen), layer.weight.grad, *layer.buffers()]


@pytest.mark.parametrize(("reentrant", "micro"), [(False, 1), (False, 3), (True, 1)])
def test_checkpointing_a_delayed_layer_changes_no_bit(reentrant: bool, micro: int) -> None:
    plain, recomputed = delayed_run(False, micro=micro), delayed_run(True, reentrant, micro)
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


@pytest.mark.parametrize("how", ["eval", "no_grad", "no tokens"])
def test_what_is_no_training_leaves_the_histories_alone(how: str) -> None:
    layer = lowp.BlockScaledLinear(8, 8, recipe="fp8-delayed")
    layer(torch.randn(4, 8)).sum().backward()
    before = [b.clone() for b in layer.buffers()]
    assert int((layer.amax_input.amaxes != 0).sum()) == 1
    if how == "eval":
        layer.eval()
        layer(torch.randn(4, 8) * 9).sum().backward()
    elif how == "no_grad":
        with torch.no_grad():
            layer(torch.randn(4, 8) * 9)
    else:
        assert layer(torch.randn(0, 8, requires_grad=True)).shape == (0, 8)
        layer(torch.randn(0, 8, requires_grad=True)).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(before, layer.buffers(), strict=True))


def test_a_second_derivative_and_recipes_by_string_are_refused() -> None:
    layer = lowp.BlockScaledLinear(4, 4)
    x = torch.randn(2, 4, requires_grad=True)
    with pytest.raises(UsageError, match="no second derivative"):
        torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(UsageError, match="input is 'tensor'; give a Recipe"):
        lowp.LayerRecipe("mine", "tensor", "tensor", "tensor")  # type: ignore[arg-type]


def test_converting_twice_is_told() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    lowp.convert(model)
    with pytest.raises(UsageError, match="2 layers of the model are block-scaled already"):
        lowp.convert(model)
