"""Partial states: merging what two sets of keys leave behind gives what all the keys would have left."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftile import AttentionState, UsageError, attention, masks, merge, merge_all
from rooftile._attention import library

B, H, LQ, DV = 2, 3, 4, 5
KERNELS = ["tiled", "reference"] + ([] if library.MISSING else ["native"])


def softmax_of(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The definition, in fp64: (out, lse) of scores (B, H, Lq, Lk) over v (B, H, Lk, Dv)."""
    scores, v = scores.double(), v.double()
    lse = torch.logsumexp(scores, -1)
    p = torch.where(lse.unsqueeze(-1) == -torch.inf, 0, torch.exp(scores - lse.unsqueeze(-1)))
    return p @ v, lse


def state_of(scores: Tensor, v: Tensor, dtype: torch.dtype = torch.float32) -> AttentionState:
    out, lse = softmax_of(scores, v)
    return AttentionState(out.to(dtype), lse.to(dtype))


def draw(keys: int, spread: float = 3.0) -> tuple[Tensor, Tensor]:
    return spread * torch.randn(B, H, LQ, keys), torch.randn(B, H, keys, DV)


def empty(dtype: torch.dtype = torch.float32) -> AttentionState:
    return AttentionState(torch.zeros(B, H, LQ, DV, dtype=dtype), torch.full((B, H, LQ), -torch.inf, dtype=dtype))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 2e-6), (torch.float64, 1e-14)])
def test_two_halves_merge_into_the_whole(dtype, atol):
    scores, v = draw(20)
    whole_out, whole_lse = softmax_of(scores, v)
    parts = [state_of(scores[..., a:b], v[..., a:b, :], dtype) for a, b in ((0, 7), (7, 20))]
    merged = merge(*parts)
    assert merged.out.dtype == merged.lse.dtype == dtype
    torch.testing.assert_close(merged.out.double(), whole_out, rtol=0, atol=atol)
    torch.testing.assert_close(merged.lse.double(), whole_lse, rtol=0, atol=4 * atol)


@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(0, 40), min_size=1, max_size=6), spread=st.floats(0, 60), seed=st.integers(0, 99))
def test_any_partition_in_any_bracketing_gives_the_whole(cuts, spread, seed):
    torch.manual_seed(seed)
    scores, v = draw(40, spread)
    edges = [0, *sorted(cuts), 40]
    parts = [state_of(scores[..., a:b], v[..., a:b, :]) for a, b in itertools.pairwise(edges)]
    whole_out, whole_lse = softmax_of(scores, v)
    at_once = merge_all(parts)
    from_the_left = parts[0]
    for part in parts[1:]:
        from_the_left = from_the_left.merge(part)
    from_the_right = parts[-1]
    for part in reversed(parts[:-1]):
        from_the_right = part.merge(from_the_right)
    # Each LSE was rounded to fp32 on the way in: an error of |lse| u in the exponent is one of |lse| u in the weights.
    bound = 2.0**-23 * (8 + 2 * float(whole_lse.abs().max())) * max(1.0, float(v.abs().max()))
    for merged in (at_once, from_the_left, from_the_right):
        assert float((merged.out - whole_out).abs().max()) <= bound
        assert float((merged.lse - whole_lse).abs().max()) <= bound


def test_merge_is_commutative_to_the_bit():
    a, b = state_of(*draw(5)), state_of(*draw(9))
    ab, ba = merge(a, b), merge(b, a)
    assert torch.equal(ab.out, ba.out)
    assert torch.equal(ab.lse, ba.lse)


def test_two_rows_without_keys_stay_a_row_without_keys():
    merged = merge_all([empty(), empty(), empty()])
    assert torch.equal(merged.out, empty().out)
    assert torch.equal(merged.lse, empty().lse)


def test_a_row_without_keys_changes_no_bit_of_the_other_state():
    state = state_of(*draw(9))
    for merged in (merge(state, empty()), merge(empty(), state), merge_all([empty(), state, empty()])):
        assert torch.equal(merged.out, state.out)
        assert torch.equal(merged.lse, state.lse)


def test_memory_behind_a_row_without_keys_is_never_read_into_the_result():
    state, poisoned = state_of(*draw(9)), empty()
    poisoned.out.fill_(torch.nan)
    merged = merge(state, poisoned)
    assert torch.equal(merged.out, state.out)
    assert torch.equal(merge(poisoned, poisoned).out, torch.zeros_like(state.out))


@pytest.mark.parametrize("gap", [88.0, 89.0, 104.0, 1e4, 3e38])
def test_a_gap_between_the_lses_of_any_size_overflows_nothing(gap):
    low, high = state_of(*draw(4)), state_of(*draw(4))
    high = AttentionState(high.out, high.lse + gap)
    for merged in (merge(low, high), merge(high, low)):
        assert torch.equal(merged.out, high.out)
        assert torch.equal(merged.lse, high.lse)


def test_nan_in_a_state_reaches_its_row_and_no_other():
    a, b = state_of(*draw(4)), state_of(*draw(4))
    a.out[0, 1, 2, 3] = torch.nan
    b.lse[1, 0, 3] = torch.nan
    merged = merge(a, b)
    out_nan, lse_nan = torch.zeros(B, H, LQ, DV, dtype=torch.bool), torch.zeros(B, H, LQ, dtype=torch.bool)
    out_nan[0, 1, 2, 3] = True
    out_nan[1, 0, 3] = lse_nan[1, 0, 3] = True
    assert torch.equal(merged.out.isnan(), out_nan)
    assert torch.equal(merged.lse.isnan(), lse_nan)


def test_nan_behind_a_weight_that_underflows_still_propagates():
    a, b = state_of(*draw(4)), state_of(*draw(4))
    a.out[0, 0, 0, 0] = torch.nan
    assert merge(a, AttentionState(b.out, b.lse + 500)).out[0, 0, 0, 0].isnan()


def test_the_lse_is_a_natural_logarithm():
    one_key = AttentionState(torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1))
    assert merge(one_key, one_key).lse.item() == pytest.approx(math.log(2), abs=1e-7)


def test_states_of_ones_stay_within_eight_ulps_of_one_after_sixty_merges():
    parts = []
    for _ in range(61):
        scores, _v = draw(8, 20.0)
        parts.append(AttentionState(torch.ones(B, H, LQ, DV), torch.logsumexp(scores, -1)))
    merged = merge_all(parts)
    assert float((merged.out - 1).abs().max()) <= 8 * 2.0**-23


def test_merging_is_differentiable_in_every_part():
    scores, v = draw(6)
    inputs = [t.requires_grad_() for half in (scores.split(3, -1), v.split(3, -2)) for t in softmax_inputs(half)]

    def merged(s1: Tensor, s2: Tensor, v1: Tensor, v2: Tensor) -> tuple[Tensor, Tensor]:
        parts = [AttentionState(*softmax_of(s, v)) for s, v in ((s1, v1), (s2, v2))]
        return merge_all(parts).finish(sinks=torch.tensor([0.0, -1.0, 2.0]))

    torch.autograd.gradcheck(merged, inputs)


def softmax_inputs(halves: tuple[Tensor, ...]) -> list[Tensor]:
    return [half.detach().double().clone() for half in halves]


def test_rows_without_keys_and_far_rows_have_finite_gradients():
    a = AttentionState(*(t.requires_grad_() for t in (empty().out, empty().lse)))
    b = AttentionState(*(t.requires_grad_() for t in (empty().out, empty().lse)))
    far = AttentionState(torch.ones(B, H, LQ, DV).requires_grad_(), torch.full((B, H, LQ), -500.0).requires_grad_())
    near = AttentionState(torch.ones(B, H, LQ, DV).requires_grad_(), torch.full((B, H, LQ), 500.0).requires_grad_())
    for x, y in ((a, b), (a, near), (far, near)):
        merged = merge(x, y)
        loss = merged.out.sum() + merged.lse.masked_fill(merged.lse == -torch.inf, 0).sum()
        for gradient in torch.autograd.grad(loss, [x.out, x.lse, y.out, y.lse]):
            assert bool(gradient.isfinite().all())


def test_sinks_enter_once_as_a_logit_without_a_value():
    scores, v = draw(7)
    sinks = torch.tensor([0.5, -2.0, 30.0])
    with_sink = torch.cat([scores, sinks.view(1, H, 1, 1).expand(B, H, LQ, 1)], -1)
    expected_out, expected_lse = softmax_of(with_sink, torch.cat([v, torch.zeros(B, H, 1, DV)], -2))
    out, lse = merge(state_of(scores[..., :3], v[..., :3, :]), state_of(scores[..., 3:], v[..., 3:, :])).finish(
        torch.float32, sinks
    )
    torch.testing.assert_close(out.double(), expected_out, rtol=0, atol=2e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=4e-6)


def test_a_row_without_keys_has_the_sink_alone():
    out, lse = empty().finish(sinks=torch.tensor([1.0, -torch.inf, 3.0]))
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse[0, :, 0], torch.tensor([1.0, -torch.inf, 3.0]))


def test_finish_rounds_the_output_and_never_the_lse():
    out, lse = state_of(*draw(4)).finish(torch.bfloat16)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert state_of(*draw(4)).finish()[0].dtype == torch.float32


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attention_over_split_keys_merges_into_attention_over_all(kernel, dtype):
    q, k, v = torch.randn(B, 6, 30, 16), torch.randn(B, 2, 90, 16), torch.randn(B, 2, 90, 24)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    sinks = torch.randn(6)
    parts = []
    for a, b in ((0, 40), (40, 41), (41, 90)):
        # These keys' columns of the whole mask.
        mask = masks.dense(masks.causal(align="bottom-right").materialize(30, 90)[0, 0, :, a:b])
        parts.append(AttentionState.of(q, k[:, :, a:b], v[:, :, a:b], mask=mask, softcap=3.0, kernel=kernel))
    assert {part.out.dtype for part in parts} == {part.lse.dtype for part in parts} == {torch.float32}
    out, lse = merge_all(parts).finish(dtype, sinks)
    exact = [x.double() for x in (q, k, v)]
    want_out, want_lse = attention(
        *exact, mask=masks.causal(align="bottom-right"), softcap=3.0, sinks=sinks.double(), return_lse=True,
        kernel="reference",
    )  # fmt: skip
    tolerance = 3e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), want_out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=1e-5 if dtype == torch.float32 else 2e-3)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_of_one_give_a_state_within_four_ulps_of_one_and_eight_after_a_merge(kernel, dtype):
    q, k = (torch.randn(B, 2, n, 32).mul(4).to(dtype) for n in (20, 150))
    ones = torch.ones(B, 2, 150, 8, dtype=dtype)
    parts = [AttentionState.of(q, k[:, :, a:b], ones[:, :, a:b], kernel=kernel) for a, b in ((0, 70), (70, 150))]
    for part in parts:
        assert float((part.out - 1).abs().max()) <= 4 * 2.0**-23
    merged = merge_all(parts)
    assert float((merged.out - 1).abs().max()) <= 8 * 2.0**-23
    assert dtype == torch.float32 or bool((merged.finish(dtype)[0] == 1).all())


@pytest.mark.parametrize("kernel", ["tiled", "reference"])
def test_a_state_in_fp64_stays_in_fp64(kernel):
    q, k, v = (torch.randn(1, 1, n, 4, dtype=torch.float64) for n in (3, 8, 8))
    whole = attention(q, k, v, kernel="reference")
    out, lse = merge(*(AttentionState.of(q, k[:, :, h], v[:, :, h], kernel=kernel) for h in (slice(3), slice(3, 8)))
                     ).finish()  # fmt: skip
    assert out.dtype == lse.dtype == torch.float64
    torch.testing.assert_close(out, whole, rtol=0, atol=1e-14)


def test_gradients_flow_through_states_and_their_merge_to_the_operands():
    q, k, v = (torch.randn(1, 2, n, 4, dtype=torch.float64, requires_grad=True) for n in (3, 6, 6))

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        parts = [AttentionState.of(q, k[:, :, half], v[:, :, half]) for half in (slice(4), slice(4, 6))]
        return merge_all(parts).finish()

    torch.autograd.gradcheck(run, (q, k, v))


def test_merging_works_under_compile():
    parts = [state_of(*draw(4)) for _ in range(3)]

    def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        states = [AttentionState(out, lse) for out, lse in zip(tensors[::2], tensors[1::2], strict=True)]
        return merge_all(states).finish(torch.bfloat16, torch.zeros(H))

    tensors = [t for part in parts for t in (part.out, part.lse)]
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for found, expected in zip(compiled(*tensors), run(*tensors), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: AttentionState(torch.zeros(B, H, LQ, DV).half(), torch.zeros(B, H, LQ)), "out torch.float16"),
        (lambda: AttentionState(torch.zeros(B, H, LQ, DV), torch.zeros(B, H, LQ).double()), "lse torch.float64"),
        (lambda: AttentionState(torch.zeros(B, H, LQ, DV), torch.zeros(B, LQ, H)), r"\(2, 4, 3\)"),
        (lambda: AttentionState(torch.zeros(H, LQ, DV), torch.zeros(H, LQ)), r"\(3, 4, 5\)"),
        (lambda: AttentionState(torch.zeros(B, H, LQ, DV), torch.zeros(B, H, LQ, device="meta")), "lse on meta"),
        (lambda: AttentionState.of(*[torch.zeros(1, 1, 2, 4)] * 3, dropout_p=0.1), "dropout_p=0.1"),
        (lambda: AttentionState.of(*[torch.zeros(1, 1, 2, 4)] * 2, torch.zeros(1, 1, 3, 4)), "length"),
        (lambda: merge_all([]), "at least one"),
        (lambda: merge(empty(), 3), "int"),
        (lambda: merge_all(empty()), "in a list"),
        (lambda: merge(empty(), empty(torch.float64)), "state 1 has dtype torch.float64"),
        (lambda: merge(empty(), AttentionState(torch.zeros(B, H, 1, DV), torch.zeros(B, H, 1))), "state 1 has shape"),
        (lambda: empty().finish(torch.int32), "int32"),
        (lambda: empty().finish(sinks=torch.zeros(2)), r"\(3,\)"),
        (lambda: empty().finish(sinks=torch.zeros(H, dtype=torch.int64)), "int64"),
        (lambda: empty().finish(sinks=torch.zeros(H, device="meta")), "sinks is on meta"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_refused_with_the_value(build, sentence):
    with pytest.raises(UsageError, match=sentence):
        build()
