"""transformers' masks become row intervals that show exactly the pairs that its own Boolean masks show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import masking_utils as hf

from rooftile.errors import UsageError
from rooftile.integrations import mask_functions
from rooftile.integrations.mask_functions import packed_rows
from rooftile.integrations.transformers_masks import VisibleKeys, make_mask

FUNCTIONS: dict[str, Any] = {
    "causal": hf.causal_mask_function,
    "bidirectional": hf.bidirectional_mask_function,
    "window": hf.sliding_window_causal_mask_function(4),
    "window on both sides": hf.sliding_window_bidirectional_mask_function(3),
    "chunks": hf.chunked_causal_mask_function(4, torch.tensor([0, 2])),
    "prefix": hf.or_masks(hf.causal_mask_function, lambda b, h, q, k: k < 3),
}
#: (queries, keys already there, keys dropped by a sliding cache, room to spare in a static cache)
LENGTHS = [(9, 0, 0, 0), (5, 7, 0, 0), (1, 12, 0, 0), (1, 12, 5, 0), (4, 9, 0, 6), (9, 0, 0, 6)]


def padding(kind: str, length: int) -> Tensor | None:
    if kind == "none":
        return None
    mask = torch.ones(2, length, dtype=torch.bool)
    {"left": mask[1, :2], "right": mask[1, -2:], "all": mask[1], "nothing": mask[1, :0]}[kind].fill_(False)
    return mask


def visible(mask: VisibleKeys) -> Tensor:
    """What the kernels would be told, pair by pair."""
    *_, q_len, kv_len = mask.shape
    pairs = torch.ones(1, 1, q_len, kv_len, dtype=torch.bool)
    if mask.mask is not None:
        see = mask.mask.visibility(q_len, kv_len, torch.device("cpu"))
        assert see.dense is None
        keys = torch.arange(kv_len)
        pairs = ((keys >= see.lo.unsqueeze(-1)) & (keys < see.hi.unsqueeze(-1))).unsqueeze(1)
    return pairs.expand(mask.shape)


@pytest.mark.parametrize("offset", [int, torch.tensor])
@pytest.mark.parametrize("kind", ["none", "left", "right", "all", "nothing"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_intervals_show_what_transformers_own_mask_shows(name: str, lengths: tuple[int, ...], kind: str, offset: Any):
    q_len, past, dropped, spare = lengths
    arguments = {
        "batch_size": 2, "q_length": q_len, "kv_length": past - dropped + q_len + spare, "q_offset": offset(past),
        "kv_offset": dropped, "mask_function": FUNCTIONS[name], "attention_mask": padding(kind, past + q_len),
    }  # fmt: skip
    own = hf.sdpa_mask(**arguments, allow_is_causal_skip=False).expand(2, 1, q_len, -1)
    mask = make_mask(**arguments)
    assert torch.equal(visible(mask), own)
    assert torch.equal(mask.materialize(), own)


def test_a_window_of_four_shows_four_keys():
    mask = make_mask(1, 9, 9, mask_function=hf.sliding_window_causal_mask_function(4))
    assert mask.materialize().sum(-1).flatten().tolist() == [1, 2, 3, 4, 4, 4, 4, 4, 4]


def test_padding_between_tokens_is_one_boolean_a_key_and_not_a_square():
    holes = torch.tensor([[1, 1, 0, 1, 1, 1, 0, 1, 1]]).bool()
    mask = make_mask(1, 9, 9, mask_function=hf.causal_mask_function, attention_mask=holes)
    see = mask.mask.visibility(9, 9, torch.device("cpu"))
    assert see.lo is not None
    assert see.dense.shape == (1, 1, 1, 9)
    own = hf.sdpa_mask(1, 9, 9, mask_function=hf.causal_mask_function, attention_mask=holes)
    assert torch.equal(mask.materialize(), own)


@pytest.mark.parametrize("function", [hf.causal_mask_function, hf.sliding_window_causal_mask_function(2)])
def test_packed_sequences_see_themselves_only(function: Any):
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1], list(range(9))])
    ids = hf.find_packed_sequence_indices(positions)
    packed = hf.packed_sequence_mask_function(ids)
    both = hf.and_masks(hf.remap_positions_for_packed_sequence(function, positions), packed)
    own = hf.sdpa_mask(2, 9, 9, mask_function=both, allow_is_causal_skip=False)
    assert torch.equal(visible(make_mask(2, 9, 9, mask_function=both)), own)


def test_positions_that_restart_without_documents_are_not_taken_for_documents():
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    function = hf.remap_positions_for_packed_sequence(hf.causal_mask_function, positions)
    own = hf.sdpa_mask(1, 6, 6, mask_function=function, allow_is_causal_skip=False)
    assert torch.equal(make_mask(1, 6, 6, mask_function=function).materialize(), own)


def test_a_mask_that_is_no_set_of_intervals_stays_as_it_is():
    def checkers(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q + k) % 2 == 0

    mask = make_mask(2, 600, 7, mask_function=checkers, use_vmap=True)
    own = hf.sdpa_mask(2, 600, 7, mask_function=checkers, use_vmap=True, allow_is_causal_skip=False)
    assert torch.equal(mask.materialize(), own)


def test_intervals_that_go_back_are_a_dense_mask():
    def backwards(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k <= 5 - q

    mask = make_mask(1, 6, 6, mask_function=backwards, use_vmap=True)
    assert mask.mask.visibility(6, 6, torch.device("cpu")).lo is None
    assert mask.materialize().sum(-1).flatten().tolist() == [6, 5, 4, 3, 2, 1]


def test_a_release_that_changes_a_mask_function_is_evaluated_and_not_read(monkeypatch: pytest.MonkeyPatch):
    def wider(sliding_window: int) -> Any:
        def inner_mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return k >= q - sliding_window

        inner_mask.__module__, inner_mask.__qualname__ = hf.__name__, "sliding_window_overlay.<locals>.inner_mask"
        return inner_mask

    monkeypatch.setattr(hf, "sliding_window_overlay", wider)
    mask_functions.readings_agree.cache_clear()
    try:
        assert not mask_functions.readings_agree()
        mask = make_mask(1, 9, 9, mask_function=hf.sliding_window_causal_mask_function(4))
        assert mask.materialize().sum(-1).max() == 5
    finally:
        monkeypatch.undo()
        mask_functions.readings_agree.cache_clear()
    assert mask_functions.readings_agree()


def test_cumulative_lengths_become_the_rows_of_their_sequences():
    rows = packed_rows(torch.tensor([0, 3, 3, 7], dtype=torch.int32), 9)
    assert rows.lo.tolist() == [[0, 0, 0, 3, 3, 3, 3, 7, 7]]
    assert rows.hi.tolist() == [[3, 3, 3, 7, 7, 7, 7, 9, 9]]


def test_a_model_that_works_on_its_mask_meets_a_boolean_tensor():
    mask = make_mask(2, 5, 5, mask_function=hf.causal_mask_function)
    own = torch.ones(5, 5).tril().bool().expand(2, 1, 5, 5)
    assert (mask.shape, mask.dtype, mask.ndim, mask.dim()) == (own.shape, torch.bool, 4, 4)
    assert torch.equal(mask[:, :, :, :3], own[..., :3])
    assert torch.equal(torch.where(mask, 1.0, 2.0), torch.where(own, 1.0, 2.0))
    assert torch.equal(torch.cat([mask, own], -1), torch.cat([own, own], -1))
    assert torch.equal(mask & own.flip(-1), own & own.flip(-1))
    assert torch.equal(~mask, ~own)
    assert torch.equal(mask.logical_not(), ~own)
    assert torch.equal(torch.zeros(2, 1, 5, 5).masked_fill(mask, 1.0), own.float())
    assert mask.to("cpu") is mask
    assert torch.equal(mask.to(torch.float32), own.float())


def test_added_to_scores_it_is_an_additive_mask():
    mask = make_mask(2, 5, 5, mask_function=hf.causal_mask_function)
    scores = torch.randn(2, 3, 5, 5)
    own = hf.eager_mask(2, 5, 5, mask_function=hf.causal_mask_function)
    assert torch.equal(scores + mask, scores + own)
    assert torch.equal(mask + scores, scores + own)
    everything = make_mask(2, 5, 5, mask_function=hf.bidirectional_mask_function)
    assert torch.equal(scores + everything, scores)


def test_other_arithmetic_on_a_mask_is_refused():
    mask = make_mask(2, 5, 5, mask_function=hf.causal_mask_function)
    with pytest.raises(UsageError, match=r"computes with its mask \(sub\)"):
        torch.ones(5, 5) - mask  # type: ignore[operator]


def test_an_argument_that_the_mask_does_not_know_is_refused():
    with pytest.raises(UsageError, match="future_option"):
        make_mask(1, 5, 5, mask_function=hf.causal_mask_function, future_option=3)


def test_a_mask_that_was_made_before_is_handed_on():
    mask = make_mask(1, 5, 5, mask_function=hf.causal_mask_function)
    assert make_mask(1, 5, 5, mask_function=hf.bidirectional_mask_function, attention_mask=mask) is mask


def test_on_tensors_without_values_padding_is_a_boolean_a_key():
    padded = torch.ones(2, 9, dtype=torch.bool, device="meta")
    mask = make_mask(2, 9, 9, mask_function=hf.causal_mask_function, attention_mask=padded, device="meta")
    see = mask.mask.visibility(9, 9, torch.device("meta"))
    assert (see.lo.device.type, see.dense.shape) == ("meta", (2, 1, 1, 9))
