"""Any strides: expanded, transposed, stepped, odd ones of size-1 dims. The result is that of contiguous inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import rooftile

from .inputs import Case
from .support import EVERY_DTYPE, EVERY_KERNEL, arguments, attend, run
from .tolerance import Judge


def stepped(x: Tensor) -> Tensor:
    """Every other element of a row twice as long: the last dim has stride 2."""
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan, dtype=x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def unaligned(x: Tensor) -> Tensor:
    """Starting at an address that no vector likes."""
    flat = torch.full((x.numel() + 1,), torch.nan, dtype=x.dtype)
    flat[1:] = x.flatten()
    return flat[1:].view(x.shape)


def odd_size_1_strides(x: Tensor) -> Tensor:
    """Dims of size 1 with strides that point anywhere (pytorch 191937)."""
    strides = [7 if size == 1 else stride for size, stride in zip(x.shape, x.contiguous().stride(), strict=True)]
    return x.contiguous().as_strided(x.shape, strides)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads before rows in memory": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "rows before batch in memory": lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "channels first": lambda x: x.mT.contiguous().mT,
    "every other channel": stepped,
    "unaligned": unaligned,
    "a slice of qkv": lambda x: torch.cat([x, x, x], dim=-1)[..., x.shape[-1] : 2 * x.shape[-1]],
}


@EVERY_KERNEL
@EVERY_DTYPE
@pytest.mark.parametrize("layout", LAYOUTS)
def test_case_10_strides_do_not_change_the_result(kernel: str, dtype: torch.dtype, layout: str):
    """pytorch 191937, 116333: strided K, V or gradients gave wrong results; here every operand is strided. A native
    kernel gives the same bits; torch's own products add in another order for other strides.
    """
    case = Case(37, 70, head_dim=24, value_dim=40, heads=(4, 2), batch=2, mask="causal", bias="hqk", dtype=dtype)
    problem, arrange = case.problem(), LAYOUTS[layout]
    assert problem.bias is not None
    inputs = {"dq": problem.q, "dk": problem.k, "dv": problem.v, "dbias": problem.bias}
    inputs = {name: arrange(x).requires_grad_() for name, x in inputs.items()}
    extra = arguments(problem, case.build_mask()) | {"bias": inputs["dbias"]}
    out, lse = attend(kernel, inputs["dq"], inputs["dk"], inputs["dv"], return_lse=True, **extra)
    grads = torch.autograd.grad([out, lse], list(inputs.values()), [arrange(problem.dout), problem.dlse])  # type: ignore[list-item]
    results = {"out": out.detach(), "lse": lse.detach(), **dict(zip(inputs, grads, strict=True))}
    assert Judge.of(problem, case.wanted).complaints(results) == []
    if kernel.startswith("native"):
        expected = run(kernel, problem, case.build_mask(), case.wanted)
        for name, value in expected.items():
            assert torch.equal(results[name], value), name


@EVERY_KERNEL
@EVERY_DTYPE
def test_case_10_dims_of_size_1_may_have_any_stride(kernel: str, dtype: torch.dtype):
    """FlagGems 5896."""
    case = Case(1, 50, head_dim=16, heads=(1, 1), dtype=dtype)
    problem = case.problem()
    odd = replace(problem, **{name: odd_size_1_strides(getattr(problem, name)) for name in ("q", "k", "v", "dout")})
    assert odd.q.stride(2) == 7
    inputs = {name: x.requires_grad_() for name, x in (("dq", odd.q), ("dk", odd.k), ("dv", odd.v))}
    out, lse = attend(kernel, odd.q, odd.k, odd.v, return_lse=True)
    grads = torch.autograd.grad([out, lse], list(inputs.values()), [odd.dout, problem.dlse])  # type: ignore[list-item]
    results = {"out": out.detach(), "lse": lse.detach(), **dict(zip(inputs, grads, strict=True))}
    assert Judge.of(problem, case.wanted).complaints(results) == []


@EVERY_KERNEL
@EVERY_DTYPE
def test_case_10_expanded_keys_and_values_are_read_as_if_copied(kernel: str, dtype: torch.dtype):
    """Stride 0 over the batch, over the heads, and over the keys; their gradients are sums over what was expanded."""
    problem = Case(20, 33, head_dim=16, heads=(4, 2), batch=2, dtype=dtype).problem()
    for dim in (0, 1, 2):
        k, v = (x.narrow(dim, 0, 1) for x in (problem.k, problem.v))
        shape = problem.k.shape
        small = [x.detach().clone().requires_grad_() for x in (k, v)]
        out, lse = attend(kernel, problem.q, *(x.expand(shape) for x in small), return_lse=True)
        grads = torch.autograd.grad([out, lse], small, [problem.dout, problem.dlse])  # type: ignore[list-item]
        whole = replace(problem, k=k.expand(shape).contiguous(), v=v.expand(shape).contiguous())
        judge = Judge.of(whole, ("dk", "dv"))
        assert judge.complaints({"out": out.detach(), "lse": lse.detach()}) == []
        for grad, name in zip(grads, ("dk", "dv"), strict=True):
            expected = judge.exact.value[name].sum(axis=dim, keepdims=True)
            eager = judge.errors(name, judge.eager[name])[1]
            room = (2 * eager + judge.floor(name)).sum(axis=dim, keepdims=True).max()
            assert abs(grad.double().numpy() - expected).max() <= room, (name, dim)


@EVERY_KERNEL
@EVERY_DTYPE
def test_case_10_a_gradient_of_stride_0_is_read_as_if_copied(kernel: str, dtype: torch.dtype):
    """``out.sum().backward()`` sends one number with strides of 0."""
    case = Case(19, 40, head_dim=16, heads=(4, 2), dtype=dtype)
    problem = replace(case.problem(), dout=torch.ones(1, 4, 19, 16, dtype=dtype), dlse=None)
    expanded = replace(problem, dout=torch.ones((), dtype=dtype).expand(1, 4, 19, 16))
    results = run(kernel, expanded, None, case.wanted)
    assert Judge.of(problem, case.wanted).complaints(results) == []


@EVERY_KERNEL
@EVERY_DTYPE
def test_the_output_merges_its_heads_without_a_copy(kernel: str, dtype: torch.dtype):
    q = torch.randn(2, 4, 9, 8).to(dtype)
    out = rooftile.attention(q, q, q, kernel=kernel)
    merged = out.transpose(1, 2).flatten(2)
    assert merged.data_ptr() == out.data_ptr()
    assert out.transpose(1, 2).is_contiguous()
