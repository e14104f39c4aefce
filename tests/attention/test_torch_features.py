"""attention under what torch does with functions: opcheck, compile, export, vmap, grad, autocast, checkpoint, fakes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import rooftile
from rooftile import masks
from rooftile._attention.kernels import KERNELS
from rooftile.errors import UsageError

N = 9


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


Q, K, V = random(2, 4, N, 8), random(2, 2, N, 8), random(2, 2, N, 6)

MASKS: dict[str, masks.Mask | None] = {
    "none": None,
    "causal": masks.causal(),
    "window": masks.causal() & masks.window(3),
    "padding": masks.padding(torch.tensor([3, N])),
    "documents": masks.documents(torch.arange(N) // 4) & masks.causal(),
    "dense": masks.dense(random(N, N) > 0),
}
EVERY_MASK = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


# -------------------------------------------------------------------------------------------------- operators, compile
@EVERY_MASK
@pytest.mark.parametrize("kernel", ["native", "tiled", "reference"])
def test_opcheck_passes(mask: masks.Mask | None, kernel: str):
    see = masks.Visibility() if mask is None else mask.visibility(N, N, Q.device)
    leaves = [x.clone().requires_grad_() for x in (Q, K, V, random(1, 4, N, N), random(4))]
    scalars = (0.3, 0.0, 0.0, False, kernel)
    inputs = (*leaves[:3], see.lo, see.hi, see.dense, *leaves[3:], None, *scalars)
    torch.library.opcheck(torch.ops.rooftile.attention.default, inputs)
    out, lse = (x.detach() for x in torch.ops.rooftile.attention(*inputs))
    held = tuple(x.detach() if isinstance(x, Tensor) else x for x in inputs)
    for dout, dlse in ((out, None), (None, lse), (out, lse)):
        wanted = [True, True, False, True, True]
        torch.library.opcheck(torch.ops.rooftile.attention_backward.default, (dout, dlse, *held, out, lse, wanted))


@EVERY_MASK
def test_a_whole_graph_compiles_to_the_same_bits(mask: masks.Mask | None):
    def given(q: Tensor, mask: masks.Mask | None) -> Any:
        return rooftile.attention(q, K, V, mask=mask, return_lse=True)

    def closed(q: Tensor) -> Any:
        return rooftile.attention(q, K, V, mask=mask, return_lse=True)

    for function, arguments in ((given, (mask,)), (closed, ())):
        results = []
        for run in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
            q = Q.clone().requires_grad_()
            out, lse = run(q, *arguments)
            (out.sum() + lse.sum()).backward()
            results.append((out, lse, q.grad, out.stride()))
        assert all(torch.equal(a, b) for a, b in zip(results[0][:3], results[1][:3], strict=True))
        assert results[0][3] == results[1][3]


def test_masks_may_be_made_inside_of_the_graph():
    def function(q: Tensor) -> Any:
        return rooftile.attention(q, K, V, mask=masks.causal() & masks.window(3) & masks.padding(torch.tensor([2, 9])))

    assert torch.equal(torch.compile(function, fullgraph=True, backend="aot_eager")(Q), function(Q))


def test_one_graph_serves_many_lengths():
    compiled = torch.compile(
        lambda q: rooftile.attention(q, q, q, mask=masks.causal()), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for length in (5, 8, 13):
        q = random(1, 2, length, 4)
        assert torch.equal(compiled(q), rooftile.attention(q, q, q, mask=masks.causal()))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of torch.jit
def test_inductor_takes_the_operator():
    def function(q: Tensor) -> Any:
        return rooftile.attention(q * 2, K, V, mask=masks.causal()) + 1

    torch.testing.assert_close(torch.compile(function, fullgraph=True)(Q), function(Q))


def test_an_explanation_in_compiled_code_is_the_one_outside_of_it():
    told = []

    def function(q: Tensor) -> Any:
        told.append(rooftile.attention.explain(q, K, V, dropout_p=0.1))
        return rooftile.attention(q, K, V)

    out = torch.compile(function, backend="aot_eager")(Q)
    assert torch.equal(out, rooftile.attention(Q, K, V))
    assert told == [rooftile.attention.explain(Q, K, V, dropout_p=0.1)]


def test_dropout_stays_in_the_graph_and_draws_the_same_seeds():
    def function(q: Tensor) -> Any:
        return rooftile.attention(q, K, V, dropout_p=0.5)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.manual_seed(1)
    expected = [function(Q), function(Q)]
    torch.manual_seed(1)
    assert [torch.equal(compiled(Q), want) for want in expected] == [True, True]
    assert not torch.equal(*expected)


def test_values_of_a_mask_are_still_checked_when_a_graph_runs():
    compiled = torch.compile(
        lambda q, n: rooftile.attention(q, K, V, mask=masks.padding(n)), fullgraph=True, backend="aot_eager"
    )
    compiled(Q, torch.tensor([3, N]))
    with pytest.raises(RuntimeError, match="don't fit"):
        compiled(Q, torch.tensor([3, N + 1]))


class Layer(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: masks.Mask | None) -> Any:
        return rooftile.attention(q, k, v, mask=mask)


@EVERY_MASK
def test_export_takes_a_mask_as_an_argument(mask: masks.Mask | None):
    exported = torch.export.export(Layer(), (Q, K, V, mask))
    assert torch.equal(exported.module()(Q, K, V, mask), Layer()(Q, K, V, mask))


def test_export_of_an_open_length():
    class Causal(torch.nn.Module):
        def forward(self, q: Tensor) -> Any:
            return rooftile.attention(q, q, q, mask=masks.causal())

    exported = torch.export.export(Causal(), (Q,), dynamic_shapes={"q": {2: torch.export.Dim("n", min=2, max=99)}})
    longer = random(2, 4, 21, 8)
    assert torch.equal(exported.module()(longer), Causal()(longer))


def test_fake_and_meta_tensors_give_the_shapes_and_strides_of_real_ones():
    from torch._subclasses import FakeTensorMode

    real, real_lse = rooftile.attention(Q, K, V, mask=masks.window(5), return_lse=True)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (Q, K, V)]
        fake = rooftile.attention(*fakes, mask=masks.window(5), return_lse=True)
    meta = rooftile.attention(*(x.to("meta") for x in (Q, K, V)), mask=masks.window(5), return_lse=True)
    for out, lse in (fake, meta):
        assert (out.shape, out.stride(), out.dtype) == (real.shape, real.stride(), real.dtype)
        assert (lse.shape, lse.stride(), lse.dtype) == (real_lse.shape, real_lse.stride(), real_lse.dtype)


# ---------------------------------------------------------------------------------------------------------- torch.func
def close(ours: Tensor, expected: list[Tensor]) -> None:
    torch.testing.assert_close(ours, torch.stack(expected), atol=1e-5, rtol=1e-5)


@EVERY_MASK
def test_vmap_is_one_by_one(mask: masks.Mask | None):
    many = random(3, 2, 4, N, 8)

    def function(q: Tensor) -> Any:
        return rooftile.attention(q, K, V, mask=mask)

    close(torch.func.vmap(function)(many), [function(q) for q in many])


def test_vmap_over_lengths_bias_and_sinks():
    lengths, bias, sinks = torch.tensor([[3, 9], [1, 2], [4, 5]]), random(3, 1, 4, N, N), random(3, 4)

    def function(n: Tensor, b: Tensor, s: Tensor) -> Any:
        return rooftile.attention(Q, K, V, mask=masks.padding(n), bias=b, sinks=s)

    close(
        torch.func.vmap(function)(lengths, bias, sinks), [function(*x) for x in zip(lengths, bias, sinks, strict=True)]
    )


def test_vmap_still_refuses_lengths_beyond_the_keys():
    with pytest.raises(UsageError, match="lengths 10 must"):
        torch.func.vmap(lambda n: rooftile.attention(Q, K, V, mask=masks.padding(n)))(torch.tensor([[3, 9], [1, 10]]))


@pytest.mark.parametrize("kernel", ["native", "tiled", "reference"])
def test_gradients_of_every_example(kernel: str):
    many, bias, sinks = random(3, 2, 4, N, 8), random(1, 4, N, N), random(4)

    def loss(q: Tensor, b: Tensor, s: Tensor) -> Any:
        return rooftile.attention(q, K, V, bias=b, sinks=s, kernel=kernel).square().sum()

    for argnums in (0, 1, 2):
        each = torch.func.grad(loss, argnums)
        found = torch.func.vmap(each, in_dims=(0, None, None))(many, bias, sinks)
        close(found, [each(q, bias, sinks) for q in many])


def test_a_gradient_through_vmap():
    many = random(3, 2, 4, N, 8)
    found = torch.func.grad(lambda x: torch.func.vmap(lambda q: rooftile.attention(q, K, V))(x).square().sum())(many)
    each = torch.func.grad(lambda q: rooftile.attention(q, K, V).square().sum())
    close(found, [each(q) for q in many])


def test_examples_share_dropout_or_not_as_vmap_is_told():
    same = Q.expand(2, *Q.shape)

    def function(q: Tensor) -> Any:
        return rooftile.attention(q, K, V, dropout_p=0.5)

    assert torch.equal(*torch.func.vmap(function, randomness="same")(same))
    assert not torch.equal(*torch.func.vmap(function, randomness="different")(same))


def test_second_derivatives_by_torch_func_through_the_reference():
    q = random(1, 1, 2, 3)

    def loss(q: Tensor) -> Any:
        return rooftile.attention(q, q, q, mask=masks.causal(), kernel="reference").square().sum()

    found = torch.func.jacrev(torch.func.jacrev(loss))(q)
    torch.testing.assert_close(found, torch.autograd.functional.hessian(loss, q), atol=1e-6, rtol=1e-5)


def test_batched_gradients_are_those_of_one_at_a_time():
    def function(q: Tensor) -> Any:
        return rooftile.attention(q, K, V).sum((1, 2))

    fast, slow = (torch.autograd.functional.jacobian(function, Q, vectorize=v) for v in (True, False))
    torch.testing.assert_close(fast, slow)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # likewise
def test_forward_mode_is_refused_in_a_sentence():
    with pytest.raises(UsageError, match="reverse-mode"):
        torch.func.jvp(lambda q: rooftile.attention(q, K, V), (Q,), (Q,))
    with pytest.raises(UsageError, match=r"jacrev\(jacrev"):
        torch.func.hessian(lambda q: rooftile.attention(q, K, V, kernel="reference").sum())(Q)
    with forward_ad.dual_level(), pytest.raises(UsageError, match="k carries"):
        rooftile.attention(Q, forward_ad.make_dual(K, K), V)


# ---------------------------------------------------------------------------------------------------- autocast, modes
@pytest.mark.parametrize("kernel", ["native", "tiled", "reference"])
def test_autocast_casts_the_operands_and_nothing_inside(kernel: str):
    bias = random(1, 4, N, N)
    with torch.autocast("cpu", torch.bfloat16):
        q = Q.clone().requires_grad_()
        out, lse = rooftile.attention(q, K.bfloat16(), V, bias=bias, return_lse=True, kernel=kernel)
        out.sum().backward()
    narrow = Q.bfloat16().requires_grad_()
    expected, expected_lse = rooftile.attention(
        narrow, K.bfloat16(), V.bfloat16(), bias=bias, return_lse=True, kernel=kernel
    )
    expected.sum().backward()
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    assert torch.equal(q.grad, narrow.grad.float())


def test_autocast_leaves_fp64_alone():
    wide = [x.double() for x in (Q, K, V)]
    with torch.autocast("cpu", torch.bfloat16):
        out = rooftile.attention(*wide)
    assert torch.equal(out, rooftile.attention(*wide))


def test_a_checkpoint_draws_the_same_dropout_again():
    grads = []
    for run in (lambda f, q: f(q), lambda f, q: checkpoint(f, q, use_reentrant=False)):
        q = Q.clone().requires_grad_()
        torch.manual_seed(3)
        run(lambda x: rooftile.attention(x, K, V, dropout_p=0.5), q).sum().backward()
        grads.append(q.grad)
    assert torch.equal(*grads)


def test_a_generator_alone_decides_the_dropout():
    def draw(seed: int) -> Any:
        return rooftile.attention(Q, K, V, dropout_p=0.5, generator=torch.Generator().manual_seed(seed))

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


@pytest.mark.parametrize("kernel", KERNELS)
def test_inference_mode_gives_the_same_bits(kernel: str):
    with torch.inference_mode():
        out = rooftile.attention(Q, K, K, mask=masks.causal(), kernel=kernel)
    assert torch.equal(out, rooftile.attention(Q, K, K, mask=masks.causal(), kernel=kernel))


def test_the_profiler_and_dispatch_modes_see_the_operator():
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        watched = rooftile.attention(Q, K, V)
    assert "rooftile.attention.default" in seen
    with torch.profiler.profile() as profile:
        rooftile.attention(Q, K, V)
    assert "rooftile::attention" in {event.key for event in profile.key_averages()}
    assert torch.equal(watched, rooftile.attention(Q, K, V))


def test_a_negated_view_is_read_as_what_it_says():
    negated = torch.complex(K, -K).conj().imag  # a view with the negative bit: its memory holds -K
    assert negated.is_neg()
    assert torch.equal(rooftile.attention(Q, negated, V), rooftile.attention(Q, negated.resolve_neg(), V))


@pytest.mark.parametrize("kernel", ["native", "tiled", "reference"])
def test_only_what_wants_a_gradient_gets_one(kernel: str):
    for chosen in range(5):
        leaves = [Q.clone(), K.clone(), V.clone(), random(1, 4, N, N), random(4)]
        leaves[chosen].requires_grad_()
        out = rooftile.attention(*leaves[:3], bias=leaves[3], sinks=leaves[4], kernel=kernel)
        out.square().sum().backward()
        assert [x.grad is not None for x in leaves] == [i == chosen for i in range(5)]


@pytest.mark.parametrize("kernel", ["native", "tiled", "reference"])
def test_calls_without_a_pair_have_results_and_gradients(kernel: str):
    for rows, keys, heads, batch in ((0, 3, 4, 2), (3, 0, 4, 2), (3, 3, 4, 0), (3, 3, 0, 2)):
        q = torch.randn(batch, heads, rows, 8, requires_grad=True)
        k, v = (torch.randn(batch, heads // 2, keys, d, requires_grad=True) for d in (8, 6))
        sinks = torch.randn(heads, requires_grad=True)
        out, lse = rooftile.attention(q, k, v, sinks=sinks, return_lse=True, kernel=kernel)
        assert out.shape == (batch, heads, rows, 6)
        assert torch.equal(out, torch.zeros_like(out))
        if rows and batch and heads:
            assert torch.equal(lse, sinks.detach().view(1, -1, 1).expand(lse.shape))
        (out.sum() + lse.sum()).backward()
        assert all(x.grad is not None and not x.grad.any() for x in (q, k, v))
        assert torch.equal(sinks.grad, torch.full((heads,), float(batch * rows)))


@pytest.mark.parametrize("kernel", ["native", "tiled", "reference"])
def test_a_jit_trace_records_attention_as_an_operator(kernel: str) -> None:
    """What a kernel writes through pointers is no operator: a trace of it would return unwritten memory."""
    q, k, v = (torch.randn(1, 2, 20, 16) for _ in range(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(
            lambda a, b, c: rooftile.attention(a, b, c, kernel=kernel), (q, k, v), check_trace=False
        )
    torch.testing.assert_close(traced(q + 1, k, v), rooftile.attention(q + 1, k, v, kernel=kernel))
