"""Attention as a part of torch programs: compiled, exported, vectorised, autocast, checkpointed, without grad."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rooftile
from rooftile import masks
from rooftile.errors import UsageError

from .support import PLAIN_KERNELS

KERNELS = ("native", *PLAIN_KERNELS)
EACH_KERNEL = pytest.mark.parametrize("kernel", KERNELS)


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((2, 4, 12, 8), (2, 2, 12, 8), (2, 2, 12, 8))
    q, k, v = (torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes)
    return q, k, v


def with_gradients(function: Any, *tensors: Tensor) -> list[Tensor]:
    out = function(*tensors)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), tensors)]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for value, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-5)


MASKS: dict[str, Any] = {
    "none": lambda: None,
    "causal": masks.causal,
    "causal & window": lambda: masks.causal() & masks.window(4),
    "padding": lambda: masks.padding(torch.tensor([12, 5])),
    "dense": lambda: masks.dense(torch.ones(12, 12, dtype=torch.bool).tril()),
}


@EACH_KERNEL
@pytest.mark.parametrize("mask", MASKS)
def test_compile_takes_it_in_one_graph_forward_and_backward(kernel: str, mask: str):
    see = MASKS[mask]()

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rooftile.attention(q * 2, k, v, mask=see, softcap=5.0, kernel=kernel) + 1

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert_same(with_gradients(compiled, *inputs()), with_gradients(function, *inputs()))


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # inductor's own
def test_compile_by_inductor_takes_bias_sinks_and_lse():
    bias, sinks = torch.randn(1, 4, 12, 12), torch.tensor([0.1, 0.2, 0.3, 0.4])

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = rooftile.attention(q, k, v, bias=bias, sinks=sinks, return_lse=True)
        return out * lse.unsqueeze(-1)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True)
    assert_same(with_gradients(compiled, *inputs()), with_gradients(function, *inputs()))


@EACH_KERNEL
def test_compile_draws_another_dropout_mask_at_every_call(kernel: str):
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rooftile.attention(q, k, v, dropout_p=0.5, kernel=kernel)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.manual_seed(1)
    first, second = compiled(*inputs()), compiled(*inputs())
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(first, compiled(*inputs()))


class Layer(nn.Module):
    """One attention over its input, causal."""

    def __init__(self, kernel: str) -> None:
        super().__init__()
        self.kernel, self.project = kernel, nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.project(x).chunk(3, dim=-1))
        out: Tensor = rooftile.attention(q, k, v, mask=masks.causal(), kernel=self.kernel)
        return out.transpose(1, 2).flatten(2)


@EACH_KERNEL
def test_export_keeps_it_as_one_operator(kernel: str):
    layer, x = Layer(kernel), torch.randn(2, 9, 32)
    exported = torch.export.export(layer, (x,))
    names = [str(node.target) for node in exported.graph.nodes if "rooftile" in str(node.target)]
    assert names == ["rooftile.attention.default"]
    torch.testing.assert_close(exported.module()(x), layer(x))


@EACH_KERNEL
def test_fake_tensors_get_shapes_dtypes_and_strides(kernel: str):
    q, k, v = (x.detach() for x in inputs(torch.bfloat16))
    real_out, real_lse = rooftile.attention(q, k, v, return_lse=True, kernel=kernel)
    with torch._subclasses.FakeTensorMode() as mode:
        out, lse = rooftile.attention(
            *(mode.from_tensor(x) for x in (q, k, v)), mask=masks.causal(), return_lse=True, kernel=kernel
        )
    for fake, real in ((out, real_out), (lse, real_lse)):
        assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


# What is mapped over, besides q, k and v: per example another mask, bias or sinks.
MAPPED: dict[str, tuple[Any, Any]] = {
    "nothing": (torch.zeros(2), lambda x: {}),
    "lengths": (torch.tensor([[3, 12], [12, 7]]), lambda x: {"mask": masks.padding(x)}),
    "bias": (torch.randn(2, 1, 4, 12, 12), lambda x: {"bias": x}),
    "sinks": (torch.randn(2, 4), lambda x: {"sinks": x, "mask": masks.causal()}),
}


@EACH_KERNEL
@pytest.mark.parametrize("mapped", MAPPED)
def test_vmap_gives_what_a_loop_gives(kernel: str, mapped: str):
    """The results, and the gradients for each example."""
    q, k, v = (torch.stack([x.detach(), x.detach().flip(0)]) for x in inputs())
    other, extra = MAPPED[mapped]

    def loss(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        out, lse = rooftile.attention(q, k[0], v, return_lse=True, kernel=kernel, **extra(x))
        return (out.square() * lse.unsqueeze(-1)).sum()

    for function in (loss, torch.func.grad(loss, argnums=(0, 1, 2))):
        found = torch.func.vmap(function, in_dims=(0, None, 0, 0))(q, k, v, other)
        loop = [function(q[n], k, v[n], other[n]) for n in range(2)]
        expected = torch.stack(loop) if function is loss else [torch.stack(parts) for parts in zip(*loop, strict=True)]
        torch.testing.assert_close(list(found) if isinstance(found, tuple) else found, expected, rtol=1e-5, atol=1e-4)


@EACH_KERNEL
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # forward mode's own
def test_forward_mode_is_refused_in_a_sentence(kernel: str):
    q, k, v = (x.detach() for x in inputs())
    with pytest.raises(UsageError, match="forward-mode"):
        torch.func.jvp(lambda q: rooftile.attention(q, k, v, kernel=kernel), (q,), (torch.ones_like(q),))


@EACH_KERNEL
def test_autocast_computes_in_its_dtype_as_torchs_own_attention_does(kernel: str):
    q, k, v = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        out = rooftile.attention(q, k, v, kernel=kernel)
    assert out.dtype == torch.bfloat16
    expected = rooftile.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), kernel=kernel)
    assert torch.equal(out, expected)
    (gradient,) = torch.autograd.grad(out.float().sum(), v)
    assert gradient.dtype == torch.float32


@EACH_KERNEL
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_repeats_the_forward_pass_dropout_included(kernel: str, use_reentrant: bool):
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rooftile.attention(q, k, v, dropout_p=0.3, mask=masks.causal(), kernel=kernel)

    def checkpointed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(function, q, k, v, use_reentrant=use_reentrant)  # type: ignore[no-any-return]

    found = []
    for call in (function, checkpointed):
        torch.manual_seed(9)
        q, k, v = inputs()
        out = call(q, k, v)
        out.square().sum().backward()
        found.append([out.detach(), q.grad, k.grad, v.grad])
    for value, wanted in zip(*found, strict=True):
        assert torch.equal(value, wanted)  # type: ignore[arg-type]


@EACH_KERNEL
def test_inference_mode_and_no_grad_give_the_same_bits(kernel: str):
    q, k, v = inputs()
    expected = rooftile.attention(q, k, v, mask=masks.causal(), kernel=kernel)
    for context in (torch.inference_mode(), torch.no_grad()):
        with context:
            found = rooftile.attention(q, k, v, mask=masks.causal(), kernel=kernel)
        assert not found.requires_grad
        assert torch.equal(found, expected.detach())


@EACH_KERNEL
def test_only_the_gradients_that_are_asked_for_are_made(kernel: str):
    for asked in range(3):
        tensors = [x.detach().requires_grad_(n == asked) for n, x in enumerate(inputs())]
        rooftile.attention(*tensors, kernel=kernel).square().sum().backward()
        assert [x.grad is not None for x in tensors] == [n == asked for n in range(3)]


@EACH_KERNEL
@pytest.mark.parametrize("rich", [False, True])
def test_the_operators_pass_opcheck(kernel: str, rich: bool):
    q, k, v = inputs()
    lo = torch.zeros(1, 12, dtype=torch.int32)
    hi = torch.arange(1, 13, dtype=torch.int32)[None]
    extras: tuple[Any, ...] = (None,) * 6
    if rich:
        bias = torch.randn(1, 4, 12, 12, requires_grad=True)
        dense = torch.ones(1, 1, 12, 12, dtype=torch.bool)
        extras = (lo, hi, dense, bias, torch.randn(4, requires_grad=True), torch.tensor(77))
    arguments = (q, k, v, *extras, 0.4, 5.0 if rich else 0.0, 0.25 if rich else 0.0, False, kernel)
    torch.library.opcheck(torch.ops.rooftile.attention.default, arguments)
    with torch.no_grad():
        out, lse = torch.ops.rooftile.attention(*arguments)
    detached = [x.detach() if isinstance(x, Tensor) else x for x in arguments]
    backward = (torch.ones_like(out), torch.ones_like(lse), *detached, out, lse, [True, True, True, rich, rich])
    torch.library.opcheck(
        torch.ops.rooftile.attention_backward.default, backward, test_utils=("test_schema", "test_faketensor")
    )
