"""Inside the block every route to SDPA is rooftile's; outside, and for calls it doesn't take, torch's own runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import rooftile
from rooftile.errors import UsageError
from rooftile.integrations import route_sdpa

SDPA = F.scaled_dot_product_attention


def qkv(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, dtype=dtype, generator=generator).requires_grad_() for _ in range(3))  # type: ignore[return-value]


def inference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.inference_mode():
        return SDPA(q, k, v)


def no_grad(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        return SDPA(q, k, v)


ROUTES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "functional": SDPA,
    "torch._C._nn": torch._C._nn.scaled_dot_product_attention,
    "torch.ops.aten": torch.ops.aten.scaled_dot_product_attention,
    "aten overload": torch.ops.aten.scaled_dot_product_attention.default,
    "inference_mode": inference,
    "no_grad": no_grad,
}


@pytest.mark.parametrize("route", ROUTES)
def test_a_route_is_taken_inside_the_block_and_not_after_it(route: str):
    q, k, v = qkv(2, 3, 5, 8)
    own = ROUTES[route](q, k, v)
    with route_sdpa() as routed:
        out = ROUTES[route](q, k, v)
    assert (routed.taken, sum(routed.refused.values())) == (1, 0)
    assert (out - own).abs().max() <= 1e-14
    ROUTES[route](q, k, v)
    assert routed.taken == 1


@pytest.mark.parametrize("fast_path", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_modules_that_attend_are_routed(training: bool, fast_path: bool):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).train(training)
    x = torch.randn(2, 5, 16)
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(fast_path)
    try:
        with torch.no_grad():
            own = layer(x)
            with route_sdpa() as routed:
                out = layer(x)
        assert torch.backends.mha.get_fastpath_enabled() == fast_path
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
    assert routed.taken == 1
    assert (out - own).abs().max() <= 1e-6


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_inside_backward_is_routed(reentrant: bool):
    q, k, v = qkv(1, 2, 5, 8)
    with route_sdpa() as routed:
        checkpoint(SDPA, q, k, v, use_reentrant=reentrant).sum().backward()
    assert routed.taken == 2


CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "plain": ((2, 4, 7, 8), (2, 4, 9, 8), {}),
    "causal is aligned at the top left": ((2, 4, 3, 8), (2, 4, 9, 8), {"is_causal": True}),
    "causal with more queries than keys": ((2, 4, 9, 8), (2, 4, 3, 8), {"is_causal": True}),
    "groups": ((2, 6, 7, 8), (2, 2, 9, 8), {"enable_gqa": True}),
    "scale": ((2, 4, 7, 8), (2, 4, 9, 8), {"scale": 0.7}),
    "three dimensions": ((4, 7, 8), (4, 9, 8), {"is_causal": True}),
    "two dimensions": ((7, 8), (9, 8), {}),
    "broadcast batch": ((1, 4, 7, 8), (3, 4, 9, 8), {}),
    "broadcast kv head": ((2, 4, 7, 8), (2, 1, 9, 8), {}),
    "broadcast query head": ((2, 1, 7, 8), (2, 4, 9, 8), {}),
    "bool mask": ((2, 4, 7, 8), (2, 4, 9, 8), {"attn_mask": (7, 9)}),
    "bool mask of heads": ((2, 4, 7, 8), (2, 4, 9, 8), {"attn_mask": (2, 4, 7, 9)}),
    "bool mask in three dimensions": ((4, 7, 8), (4, 9, 8), {"attn_mask": (4, 7, 9)}),
}


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_torchs_materialised_path(name: str):
    q_shape, k_shape, options = CASES[name]
    generator = torch.Generator().manual_seed(0)
    if "attn_mask" in options:
        mask = torch.rand(options["attn_mask"], generator=generator) < 0.6
        mask[..., 0] = True
        options = {"attn_mask": mask}
    q = torch.randn(q_shape, dtype=torch.float64, generator=generator).requires_grad_()
    k = torch.randn(k_shape, dtype=torch.float64, generator=generator).requires_grad_()
    v = torch.randn((*k_shape[:-1], 5), dtype=torch.float64, generator=generator).requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        own = SDPA(q, k, v, **options)
    weight = torch.randn(own.shape, dtype=torch.float64, generator=generator)
    expected = torch.autograd.grad((own * weight).sum(), (q, k, v))
    with route_sdpa() as routed:
        out = SDPA(q, k, v, **options)
        found = torch.autograd.grad((out * weight).sum(), (q, k, v))
    assert routed.taken == 1, str(routed)
    assert out.shape == own.shape
    for mine, theirs in ((out, own), *zip(found, expected, strict=True)):
        assert (mine - theirs).abs().max() <= 1e-13


def test_a_float_mask_is_a_bias_with_a_gradient():
    q, k, v = qkv(2, 4, 7, 8)
    bias = torch.randn(4, 7, 7, dtype=torch.float64, requires_grad=True)
    with sdpa_kernel(SDPBackend.MATH):
        expected = torch.autograd.grad(SDPA(q, k, v, attn_mask=bias).square().sum(), (bias, q))
    with route_sdpa() as routed:
        found = torch.autograd.grad(SDPA(q, k, v, attn_mask=bias).square().sum(), (bias, q))
    assert routed.taken == 1
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine - theirs).abs().max() <= 1e-13


def test_dropout_draws_from_torchs_generator_and_keeps_the_mean():
    q, k, _ = qkv(2, 4, 64, 8)
    v = torch.ones_like(q)
    with route_sdpa() as routed:
        outs = []
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            outs.append(SDPA(q, k, v, dropout_p=0.5)[..., 0])
    assert routed.taken == 3
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    assert abs(outs[0].mean() - 1) <= 5 * outs[0].std() / outs[0].numel() ** 0.5


def test_a_row_that_sees_no_key_is_zero_and_its_gradient_finite():
    q, k, v = qkv(1, 2, 4, 8)
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[2] = False
    with route_sdpa():
        out = SDPA(q, k, v, attn_mask=mask)
        out.sum().backward()
    assert not out[:, :, 2].any()
    assert all(torch.isfinite(t.grad).all() for t in (q, k, v))


# ------------------------------------------------------------------------------------------------ what is not taken
def compiled(q: Tensor) -> Tensor:
    torch._dynamo.reset()
    return torch.compile(lambda x: SDPA(x, x, x), backend="aot_eager")(q)


def jvp(q: Tensor) -> Tensor:
    from torch.autograd import forward_ad

    with sdpa_kernel(SDPBackend.MATH), forward_ad.dual_level():  # torch's other kernels have none
        x = forward_ad.make_dual(q.detach(), torch.ones_like(q))
        return forward_ad.unpack_dual(torch.ops.aten.scaled_dot_product_attention(x, x, x)).tangent


def with_backend(q: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return SDPA(q, q, q)


class Own(Tensor):
    """A subclass."""


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "torch.compile": (compiled, "would outlive the block"),
    "vmap": (torch.vmap(lambda x: SDPA(x, x, x)), "torch.func"),
    "grad": (torch.func.grad(lambda x: SDPA(x, x, x).square().sum()), "torch.func"),
    "forward mode": (jvp, "forward-mode"),
    "a chosen backend": (with_backend, "sdpa_kernel"),
    "causal and a mask": (lambda x: SDPA(x, x, x, torch.ones(5, 5).bool(), is_causal=True), "together with a mask"),
    "five dimensions": (lambda x: SDPA(x[None], x[None], x[None]), "5, 5 and 5 dimensions"),
    "a subclass": (lambda x: torch.Tensor.as_subclass(SDPA(*[x.as_subclass(Own)] * 3), Tensor), "Own"),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's own vmap rule
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own forward mode
@pytest.mark.parametrize("name", REFUSED)
def test_a_call_that_is_not_taken_runs_as_torch_does_and_is_told(name: str):
    call, reason = REFUSED[name]
    q = qkv(2, 3, 5, 8)[0].detach()
    with route_sdpa() as routed:
        out = call(q)
    assert torch.equal(out, call(q))
    assert routed.taken == 0
    assert any(reason in told for told in routed.refused), routed.refused
    assert reason in str(routed)


def test_what_is_compiled_in_the_block_is_torchs_own_after_it():
    q = qkv(1, 2, 5, 8)[0].detach()
    torch._dynamo.reset()
    function = torch.compile(lambda x: SDPA(x, x, x), backend="aot_eager")
    with route_sdpa() as routed:
        function(q)
    assert torch.equal(function(q), SDPA(q, q, q))
    assert routed.taken == 0


def test_a_kernel_that_refuses_leaves_the_call_and_the_generator_to_torch():
    q, k, v = qkv(1, 2, 5, 8)  # fp64, which the native kernel has not
    torch.manual_seed(0)
    own = SDPA(q, k, v, dropout_p=0.5)
    torch.manual_seed(0)
    with route_sdpa(kernel="native") as routed:
        out = SDPA(q, k, v, dropout_p=0.5)
    assert torch.equal(out, own)
    assert routed.taken == 0
    assert any("native" in reason for reason in routed.refused)


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (((1, 2, 5, 8), (1, 2, 5, 9)), {}),
        (((1, 4, 5, 8), (1, 2, 5, 8)), {}),
        (((1, 2, 5, 8), (1, 2, 5, 8)), {"dropout_p": 1.5}),
    ],
    ids=str,
)
def test_what_torch_refuses_it_refuses_in_its_own_words(arguments: tuple[Any, Any], options: dict[str, Any]):
    q, k = (torch.randn(shape) for shape in arguments)
    with pytest.raises(RuntimeError) as own:
        SDPA(q, k, k, **options)
    with route_sdpa() as routed, pytest.raises(RuntimeError) as same:
        SDPA(q, k, k, **options)
    assert str(same.value).splitlines()[0] == str(own.value).splitlines()[0]
    assert routed.taken == 0


def test_a_kernel_that_is_no_name_is_refused():
    with pytest.raises(UsageError, match="nativ"), route_sdpa(kernel="nativ"):
        pass
    with pytest.raises(UsageError, match="kernel=3"), route_sdpa(kernel=3):  # type: ignore[arg-type]
        pass


# --------------------------------------------------------------------------------------------- exits, nesting, threads
def test_an_exception_restores_torchs_own():
    q, k, v = qkv(1, 2, 5, 8)
    fast_path = torch.backends.mha.get_fastpath_enabled()
    with pytest.raises(ZeroDivisionError), route_sdpa() as routed:
        raise ZeroDivisionError
    SDPA(q, k, v)
    assert (routed.taken, dict(routed.refused)) == (0, {})
    assert torch.backends.mha.get_fastpath_enabled() == fast_path


def test_a_block_inside_a_block_counts_its_own_calls():
    q, k, v = qkv(1, 2, 5, 8)
    with route_sdpa() as outer:
        SDPA(q, k, v)
        with route_sdpa(kernel="reference") as inner:
            SDPA(q, k, v)
        SDPA(q, k, v)
    SDPA(q, k, v)
    assert (outer.taken, inner.taken) == (2, 1)


def test_other_threads_run_torchs_own_and_may_have_blocks_of_their_own():
    q, k, v = qkv(1, 2, 5, 8)
    inside, leave = threading.Event(), threading.Event()
    counts: dict[str, int] = {}

    def with_a_block() -> None:
        with route_sdpa() as routed:
            inside.set()
            leave.wait(60)
            SDPA(q, k, v)
        counts["own"] = routed.taken

    with route_sdpa() as routed:
        thread = threading.Thread(target=SDPA, args=(q, k, v))
        thread.start()
        thread.join()
        other = threading.Thread(target=with_a_block)
        other.start()
        inside.wait(60)
    SDPA(q, k, v)  # this thread's block is closed, the other's is still open
    leave.set()
    other.join()
    assert routed.taken == 0
    assert counts == {"own": 1}


def test_an_audit_of_a_model_that_routes_sees_rooftiles_attention():
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(16, 48)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (t.reshape(2, -1, 2, 8).transpose(1, 2) for t in self.proj(x).chunk(3, -1))
            with route_sdpa():
                return SDPA(q, k, v, is_causal=True)

    step = rooftile.Step(Routed(), (torch.randn(2, 8, 16),), lambda y: y.sum())
    report = rooftile.audit(step, device="h100-sxm")
    assert [decision.kernel for decision in report.target.attention_decision] == ["rooftile"]
    assert report.coverage.ops == 1.0
