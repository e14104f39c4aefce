"""The native kernel's pass for few query rows: what its bits may depend on, and what it must not read.

The shapes cross its bounds: chunks of 256 keys, blocks of 64 keys, packs of 4 rows, and vectors of 8 and 16 lanes.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from rooftile._attention import library, native
from rooftile._attention.call import Call, empty_output
from rooftile._attention.library import PATHS
from rooftile.masks import Visibility

from .support import EVERY_DTYPE, NATIVE_KERNELS

PATHS_HERE = [kernel.removeprefix("native/") for kernel in NATIVE_KERNELS]
EVERY_PATH = pytest.mark.parametrize("path", PATHS_HERE)
Result = tuple[Tensor, Tensor]

# (sequences, query heads, kv heads, rows, keys, D, Dv)
SHAPES = [(1, 4, 1, 1, 1000, 128, 128), (2, 6, 2, 1, 300, 40, 72), (1, 2, 2, 7, 513, 33, 7), (1, 1, 1, 1, 3, 8, 8)]
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))


def problem(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Call:
    """Row i sees keys [lo, hi): intervals of their own, the last one all keys."""
    batch, q_heads, kv_heads, rows, keys, dim, value_dim = shape
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    lo = torch.randint(0, keys, (batch, rows), generator=generator, dtype=torch.int32)
    hi = torch.randint(0, keys + 1, (batch, rows), generator=generator, dtype=torch.int32)
    lo[:, -1], hi[:, -1] = 0, keys
    q, k = normal(batch, q_heads, rows, dim), normal(batch, kv_heads, keys, dim)
    v, sinks = normal(batch, kv_heads, keys, value_dim), torch.randn(q_heads, generator=generator)
    return Call(q, k, v, Visibility(lo, hi, None), None, sinks, dim**-0.5, 0.0, 0.0, None)


def changed(call: Call, **fields: object) -> Call:
    values = {name: getattr(call, name) for name in Call.__dataclass_fields__}
    return Call(**(values | fields))


def run(call: Call, path: str, threads: int = 1) -> Result:
    return native.forward(call, PATHS.index(path), threads)


def same(a: Result, b: Result) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def visible(call: Call) -> Tensor:
    """(B, 1, Lq, Lk)."""
    j = torch.arange(call.k.shape[2])
    lo, hi = call.visibility.lo, call.visibility.hi
    assert lo is not None
    assert hi is not None
    return ((j >= lo.unsqueeze(-1)) & (j < hi.unsqueeze(-1))).unsqueeze(1)


@EVERY_PATH
def test_few_rows_are_split_over_keys_and_many_are_not(path: str):
    few, many = problem((1, 8, 4, 1, 1000, 64, 64), torch.float32), problem((1, 4, 4, 64, 1000, 64, 64), torch.float32)
    plan = library.plan(few, PATHS.index(path))
    assert plan.split_keys > 0
    assert plan.scores == 8 * 1000
    assert plan.tasks >= 4
    assert library.plan(many, PATHS.index(path)).split_keys == 0


@EVERY_PATH
@EVERY_DTYPE
@EVERY_SHAPE
def test_bits_do_not_depend_on_threads_capacity_or_neighbours(path: str, dtype: torch.dtype, shape: tuple[int, ...]):
    call = problem(shape, dtype)
    out, lse = run(call, path)
    assert out.isfinite().all()
    for threads in (2, 3):
        assert same(run(call, path, threads), (out, lse))
    longer = [torch.cat([x, torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)], 2) for x in (call.k, call.v)]
    assert same(run(changed(call, k=longer[0], v=longer[1]), path, 2), (out, lse))
    lo, hi = call.visibility.lo, call.visibility.hi
    assert lo is not None
    assert hi is not None
    for b, i in itertools.product(range(shape[0]), range(shape[3])):
        at, row = slice(b, b + 1), slice(i, i + 1)
        seen = Visibility(lo[at, row], hi[at, row], None)
        alone = changed(call, q=call.q[at, :, row], k=call.k[at], v=call.v[at], visibility=seen)
        assert same(run(alone, path, 2), (out[at, :, row], lse[at, :, row]))


@EVERY_PATH
@EVERY_DTYPE
@EVERY_SHAPE
def test_bits_do_not_depend_on_where_the_memory_lies(path: str, dtype: torch.dtype, shape: tuple[int, ...]):
    """Keys a token apart, elements that are not neighbours, and pages of any size in any order."""
    call = problem(shape, dtype)
    expected = run(call, path)
    k, v = call.k, call.v
    apart = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
    strided = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (k, v)]
    for keys, values in (apart, strided, (k, strided[1]), (apart[0], v)):
        assert same(run(changed(call, k=keys, v=values), path, 2), expected)
    for size in (1, 7, 16, 100):
        pages = -(-k.shape[2] // size)
        table = torch.randperm(k.shape[0] * pages, generator=torch.Generator().manual_seed(1)).int()
        table = table.view(k.shape[0], pages)
        paged = [torch.full((table.numel(), x.shape[1], size, x.shape[3]), torch.nan, dtype=dtype) for x in (k, v)]
        for b, p in itertools.product(range(k.shape[0]), range(pages)):
            for memory, x in zip(paged, (k, v), strict=True):
                part = x[b, :, p * size : (p + 1) * size]
                memory[table[b, p], :, : part.shape[1]] = part
        found = empty_output(call.q, v)
        library.forward(
            changed(call, k=paged[0], v=paged[1]), *found, PATHS.index(path), 2, library.Pages(table, size, k.shape[2])
        )
        assert same(found, expected)


@EVERY_PATH
@EVERY_DTYPE
@EVERY_SHAPE
def test_a_key_that_is_not_finite_changes_the_rows_that_see_it_only(
    path: str, dtype: torch.dtype, shape: tuple[int, ...]
):
    call = problem(shape, dtype)
    out, lse = run(call, path)
    sees = visible(call).expand(*call.q.shape[:3], -1)
    for key in {0, shape[4] // 2, shape[4] - 1}:
        k, v = call.k.clone(), call.v.clone()
        k[:, :, key], v[:, :, key] = torch.inf, torch.nan
        found_out, found_lse = run(changed(call, k=k, v=v), path, 2)
        hit = sees[..., key]
        assert hit.any()
        assert found_out[hit].isnan().all()
        assert torch.equal(found_out[~hit], out[~hit])
        assert torch.equal(found_lse[~hit], lse[~hit])


@EVERY_PATH
@EVERY_DTYPE
@EVERY_SHAPE
def test_equal_values_give_that_value_over_any_number_of_chunks(path: str, dtype: torch.dtype, shape: tuple[int, ...]):
    call = problem(shape, dtype)
    call = changed(call, v=torch.ones_like(call.v), sinks=None)
    out, lse = native.forward(call, PATHS.index(path), 2, fp32_out=True)
    assert torch.equal(out[lse.isfinite()], torch.ones_like(out[lse.isfinite()]))


@EVERY_PATH
def test_rows_that_see_nothing_and_heads_without_a_dimension(path: str):
    call = problem((2, 4, 2, 2, 300, 16, 16), torch.float32)
    nothing = torch.full((2, 2), 7, dtype=torch.int32)
    out, lse = run(changed(call, visibility=Visibility(nothing, nothing, None), sinks=None), path)
    assert not out.any()
    assert lse.isneginf().all()
    everything = Visibility(None, None, None)
    out, lse = run(changed(call, q=call.q[..., :0], k=call.k[..., :0], visibility=everything, sinks=None), path)
    mean = call.v.mean(2, keepdim=True).repeat_interleave(2, 1).expand(out.shape)
    torch.testing.assert_close(out, mean, rtol=1e-5, atol=1e-6)
    out, lse = run(changed(call, v=call.v[..., :0], visibility=everything, sinks=None), path)
    assert out.shape == (2, 4, 2, 0)
    whole = run(changed(call, visibility=everything, sinks=None), path)[1]
    assert torch.equal(lse, whole)
