"""Masks: intervals are what their definitions say, compositions are intersections, and what is kept is never stale."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftile import masks
from rooftile.errors import UsageError

CPU = torch.device("cpu")
LENGTHS = [(1, 1), (1, 5), (5, 1), (4, 4), (3, 7), (7, 3), (0, 4), (4, 0)]


def written_out(mask: masks.Mask, q_len: int, kv_len: int) -> Tensor:
    """The intervals as booleans: what a kernel would let through."""
    see = mask.visibility(q_len, kv_len, CPU)
    keys = torch.arange(kv_len)
    pairs = torch.ones(1, 1, q_len, kv_len, dtype=torch.bool)
    if see.lo is not None and see.hi is not None:
        pairs = ((keys >= see.lo[..., None]) & (keys < see.hi[..., None])).unsqueeze(1)
    return pairs if see.dense is None else pairs & see.dense


@st.composite
def positional(draw: Any) -> masks.Mask:
    align = draw(st.sampled_from(["top-left", "bottom-right"]))
    window = masks.window(left=draw(st.integers(0, 9)), right=draw(st.integers(0, 4)), align=align)
    chosen = draw(
        st.sampled_from([masks.causal(align=align), masks.window(draw(st.integers(1, 9)), align=align), window])
    )
    return draw(st.sampled_from([chosen, chosen & window, chosen & window & masks.causal(align=align)]))


@settings(deadline=None)
@given(mask=positional(), q_len=st.integers(0, 12), kv_len=st.integers(0, 12))
def test_intervals_let_through_what_the_definition_shows(mask: masks.Mask, q_len: int, kv_len: int):
    torch.testing.assert_close(written_out(mask, q_len, kv_len), mask.materialize(q_len, kv_len))


@settings(deadline=None)
@given(mask=positional(), q_len=st.integers(1, 12), kv_len=st.integers(1, 12))
def test_ends_of_intervals_lie_inside_the_keys_and_never_fall(mask: masks.Mask, q_len: int, kv_len: int):
    see = mask.visibility(q_len, kv_len, CPU)
    assert see.lo is not None
    assert see.hi is not None
    assert see.lo.dtype == see.hi.dtype == torch.int32
    seen = see.lo < see.hi
    for end in (see.lo, see.hi):
        assert int(end.min()) >= 0
        assert int(end.max()) <= kv_len
        assert bool((end[seen].diff() >= 0).all())


@pytest.mark.parametrize(("q_len", "kv_len"), LENGTHS)
@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_and_causal_is_the_intersection(q_len: int, kv_len: int, side: Any):
    lengths = torch.tensor([0, kv_len, kv_len // 2])
    both = masks.padding(lengths, side=side) & masks.causal(align="bottom-right")
    apart = masks.padding(lengths, side).materialize(q_len, kv_len) & masks.causal("bottom-right").materialize(
        q_len, kv_len
    )
    assert torch.equal(both.materialize(q_len, kv_len), apart)
    assert torch.equal(written_out(both, q_len, kv_len), apart)


def test_documents_meet_their_own_keys_alone():
    q_ids, kv_ids = torch.tensor([[5, 5, 2, 9]]), torch.tensor([[5, 2, 2, 2, 7]])
    mask = masks.documents(q_ids, kv_ids)
    expected = [[1, 0, 0, 0, 0], [1, 0, 0, 0, 0], [0, 1, 1, 1, 0], [0, 0, 0, 0, 0]]
    assert mask.materialize(4, 5)[0, 0].int().tolist() == expected
    assert written_out(mask, 4, 5)[0, 0].int().tolist() == expected


def test_documents_that_meet_the_keys_in_another_order_are_refused():
    with pytest.raises(UsageError, match=r"order of the keys.*dense"):
        masks.documents(torch.tensor([1, 0]), torch.tensor([0, 1])).visibility(2, 2, CPU)


def test_a_window_is_a_number_of_keys():
    rows = masks.window(4).materialize(9, 9)[0, 0].sum(-1)
    assert rows.tolist() == [1, 2, 3, 4, 4, 4, 4, 4, 4]
    assert masks.window(4) == masks.window(left=3, right=0)


def test_a_prefix_is_read_in_both_directions():
    assert masks.prefix(2).materialize(4, 4)[0, 0].sum(-1).tolist() == [2, 2, 3, 4]
    assert written_out(masks.prefix(2), 4, 4)[0, 0].sum(-1).tolist() == [2, 2, 3, 4]


@pytest.mark.parametrize(("align", "expected"), [("top-left", [1, 2]), ("bottom-right", [4, 5])])
def test_alignment_is_the_callers_choice(align: Any, expected: list[int]):
    assert masks.causal(align=align).materialize(2, 5)[0, 0].sum(-1).tolist() == expected


@pytest.mark.parametrize("mask", [masks.causal(), masks.window(3), masks.prefix(1)])
def test_an_alignment_that_would_matter_has_no_default(mask: masks.Mask):
    mask.materialize(4, 4)
    with pytest.raises(UsageError, match=r"bottom-right.*top-left"):
        mask.materialize(4, 5)
    with pytest.raises(UsageError, match=r"bottom-right.*top-left"):
        (mask & masks.padding([5])).visibility(4, 5, CPU)


def test_a_window_that_ends_at_the_query_contradicts_a_prefix_as_causal_does():
    for mask in (masks.causal(), masks.window(3)):
        with pytest.raises(UsageError, match="union"):
            masks.prefix(2) & mask
    masks.prefix(2) & masks.window(left=3, right=1)


def test_only_masks_compose():
    with pytest.raises(UsageError, match=r"masks\.dense"):
        masks.causal() & torch.ones(3, 3, dtype=torch.bool)
    with pytest.raises(TypeError):
        masks.causal() & 3


@pytest.mark.parametrize("far", [2**31 - 1, 2**31, 2**63 - 1, 10**20])
def test_distances_beyond_any_key_are_as_good_as_open(far: int):
    causal, everything = masks.causal().materialize(7, 7), torch.ones(1, 1, 7, 7, dtype=torch.bool)
    for mask, expected in (
        (masks.window(far), causal),
        (masks.window(left=far, right=0), causal),
        (masks.window(left=0, right=far), causal.mT),
        (masks.window(left=far, right=far), everything),
        (masks.prefix(far), everything),
    ):
        assert torch.equal(mask.materialize(7, 7), expected)
        assert torch.equal(written_out(mask, 7, 7), expected)


def test_masks_are_equal_by_their_numbers_and_by_the_identity_of_their_tensors():
    assert masks.causal() & masks.window(3) == masks.causal() & masks.window(3)
    assert hash(masks.causal() & masks.window(3)) == hash(masks.causal() & masks.window(3))
    lengths = torch.tensor([1, 2])
    assert masks.padding(lengths) == masks.padding(lengths)
    assert masks.padding(lengths) != masks.padding(lengths.clone())
    assert masks.padding(lengths) != masks.padding(lengths, side="left")


def test_layers_share_intervals_until_a_tensor_changes():
    lengths = torch.tensor([1, 2])
    mask = masks.padding(lengths)
    first = mask.visibility(3, 3, CPU)
    assert mask.visibility(3, 3, CPU) is first
    lengths[0] = 3
    changed = mask.visibility(3, 3, CPU).hi
    assert changed is not None
    assert changed[:, 0].tolist() == [3, 2]


def test_what_is_kept_of_a_mask_goes_with_it():
    from rooftile.masks import base

    before = len(base._OF_TENSORS)
    mask = masks.padding(torch.tensor([1, 2]))
    mask.visibility(3, 3, CPU)
    assert len(base._OF_TENSORS) == before + 1
    del mask
    gc.collect()
    assert len(base._OF_TENSORS) == before


def test_intervals_made_in_inference_mode_serve_training_later():
    mask = masks.window(1234)
    with torch.inference_mode():
        mask.visibility(5, 5, CPU)
    made = mask.visibility(5, 5, CPU).lo
    assert made is not None
    assert not made.is_inference()


def test_fake_tensors_are_not_kept():
    from torch._subclasses import FakeTensorMode

    mask = masks.window(4321)
    with FakeTensorMode():
        mask.visibility(5, 5, CPU)
    assert written_out(mask, 5, 5).sum() == 15
