"""Any shapes, strides, masks, dtypes and kernels: the same promises."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import rooftile

from .inputs import Case
from .support import DTYPES, KERNELS, NATIVE_KERNELS, SLOW_KERNEL, attend, complaints, registered, run
from .test_strides import LAYOUTS
from .visibility import KINDS

SETTINGS = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate, Phase.shrink],
)
FAST_NATIVE = [kernel for kernel in NATIVE_KERNELS if kernel != SLOW_KERNEL]
LENGTHS = st.one_of(st.integers(1, 20), st.sampled_from([31, 32, 33, 63, 64, 65, 95, 127, 128, 129, 160]))


@st.composite
def cases(draw: st.DrawFn, max_dim: int = 70) -> Case:
    q_len, kv_len = draw(LENGTHS), draw(LENGTHS)
    mask = draw(st.sampled_from([None, *KINDS]))
    if mask == "prefix":
        q_len = kv_len = max(q_len, 20)  # the only mask that has no alignment
    kv_heads = draw(st.integers(1, 3))
    return Case(
        q_len,
        kv_len,
        head_dim=draw(st.integers(1, max_dim)),
        value_dim=draw(st.none() | st.integers(1, max_dim)),
        heads=(kv_heads * draw(st.integers(1, 4)), kv_heads),
        batch=draw(st.integers(1, 3)),
        dtype=draw(st.sampled_from(DTYPES)),
        values=draw(st.sampled_from(["gaussian", "banded", "one_hot", "constant", "outlier"])),
        mask=mask,
        bias=draw(st.sampled_from([None, None, "bhqk", "hqk", "k", "bq", "h"])),
        holes=draw(st.booleans()),
        softcap=draw(st.sampled_from([None, None, 2.0, 30.0])),
        sinks=draw(st.booleans()),
        dropout_p=draw(st.sampled_from([0.0, 0.0, 0.1, 0.5])),
        seed=draw(st.integers(0, 5)),
    )


@SETTINGS
@given(case=cases(), kernel=st.sampled_from(KERNELS))
def test_every_call_is_as_exact_as_eager(case: Case, kernel: str):
    with registered(kernel):
        assert complaints(kernel, case) == []


@SETTINGS
@given(case=cases(max_dim=40), kernel=st.sampled_from(FAST_NATIVE or KERNELS), layout=st.sampled_from(list(LAYOUTS)))
def test_strides_do_not_change_a_bit(case: Case, kernel: str, layout: str):
    problem = case.problem()
    moved = replace(problem, **{name: LAYOUTS[layout](getattr(problem, name)) for name in ("q", "k", "v")})
    with registered(kernel):
        expected, found = (
            attend(kernel, p.q, p.k, p.v, mask=case.build_mask(), softcap=case.softcap, return_lse=True)
            for p in (problem, moved)
        )
    for value, wanted in zip(found, expected, strict=True):
        assert torch.equal(value, wanted)


@SETTINGS
@given(case=cases(max_dim=40), kernel=st.sampled_from(KERNELS), cut=st.floats(0, 1))
def test_two_parts_of_the_keys_merge_into_the_whole(case: Case, kernel: str, cut: float):
    """A state of any part of the keys, none of them included, and of the rest."""
    case = replace(case, mask=None, bias=None, sinks=False, dropout_p=0.0, values="gaussian")
    problem, middle = case.problem(), round(cut * case.kv_len)
    q, k, v = (x.float() for x in (problem.q, problem.k, problem.v))
    with registered(kernel):
        whole = rooftile.AttentionState.of(q, k, v, softcap=case.softcap, kernel=kernel)
        parts = [
            rooftile.AttentionState.of(q, k[:, :, part], v[:, :, part], softcap=case.softcap, kernel=kernel)
            for part in (slice(0, middle), slice(middle, None))
        ]
    merged = rooftile.merge(*parts)
    torch.testing.assert_close(merged.lse, whole.lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(merged.out, whole.out, rtol=1e-4, atol=1e-5)


@SETTINGS
@given(case=cases(max_dim=40), kernel=st.sampled_from(KERNELS))
def test_a_materialised_mask_gives_what_its_intervals_give(case: Case, kernel: str):
    """Intervals skip and cut tiles; the same pairs as a dense mask do neither."""
    if case.mask is None:
        return
    case = replace(case, bias=None, dropout_p=0.0, values="gaussian")
    problem, mask = case.problem(), case.build_mask()
    with registered(kernel):
        by_interval = run(kernel, problem, mask, case.wanted)
        dense = rooftile.masks.dense(mask.materialize(case.q_len, case.kv_len))
        by_pair = run(kernel, problem, dense, case.wanted)
    for name, value in by_interval.items():
        bound = 8 * torch.finfo(case.dtype).eps * max(1.0, float(value.nan_to_num(neginf=0.0).abs().max()))
        torch.testing.assert_close(by_pair[name], value, rtol=0, atol=bound)
