"""Packed sequences: each is attended to as if it were alone, and offsets that don't add up are refused."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from rooftile import UsageError, attention, attention_varlen, masks
from rooftile._attention import library

HQ, HKV, D, DV = 4, 2, 16, 24
KERNELS = ["tiled", "reference"] + ([] if library.MISSING else ["native"])
LENGTHS = [(5, 5), (0, 0), (1, 7), (70, 70), (3, 0), (0, 4), (9, 40), (40, 9)]
MASKS = [
    None,
    masks.causal(align="bottom-right"),
    masks.causal(align="top-left"),
    masks.window(4, align="bottom-right"),
    masks.causal(align="bottom-right") & masks.window(left=6, right=2, align="bottom-right"),
    masks.prefix(0, align="bottom-right"),
]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def offsets(lengths, dtype=torch.int32) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype)


def packed(pairs, dtype=torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows, keys = ([pair[i] for pair in pairs] for i in (0, 1))
    q, k = torch.randn(sum(rows), HQ, D), torch.randn(sum(keys), HKV, D)
    return q.to(dtype), k.to(dtype), torch.randn(sum(keys), HKV, DV).to(dtype), offsets(rows), offsets(keys)


def alone(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, mask, sinks=None) -> tuple[Tensor, Tensor]:
    """The definition in fp64, sequence by sequence: out (Tq, Hq, Dv) and LSE (Hq, Tq)."""
    outs, lses = [], []
    bounds = zip(itertools.pairwise(cu_q.tolist()), itertools.pairwise(cu_k.tolist()), strict=True)
    for (q0, q1), (k0, k1) in bounds:
        qs = q[q0:q1].double().transpose(0, 1)
        ks, vs = (x[k0:k1].double().transpose(0, 1).repeat_interleave(HQ // HKV, 0) for x in (k, v))
        scores = qs @ ks.mT / math.sqrt(D)
        if mask is not None and q1 > q0:
            scores = scores.masked_fill(~mask.materialize(q1 - q0, k1 - k0)[0, 0], -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double().view(HQ, 1, 1).expand(HQ, q1 - q0, 1)], -1)
            vs = torch.cat([vs, torch.zeros(HQ, 1, DV, dtype=torch.float64)], 1)
        lse = torch.logsumexp(scores, -1)
        p = torch.where(lse.unsqueeze(-1) == -torch.inf, 0, torch.exp(scores - lse.unsqueeze(-1)))
        outs.append((p @ vs).transpose(0, 1))
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses, 1)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_every_sequence_is_attended_to_as_if_it_were_alone(kernel, mask):
    operands = packed(LENGTHS)
    out, lse = attention_varlen(*operands, mask=mask, return_lse=True, kernel=kernel)
    want_out, want_lse = alone(*operands, mask)
    assert out.is_contiguous()
    torch.testing.assert_close(out.double(), want_out, rtol=0, atol=3e-6)
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=5e-6)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6),
    mask=st.sampled_from(MASKS),
    index=st.sampled_from([torch.int32, torch.int64]),
)
def test_any_lengths_in_either_index_type_agree_with_the_definition(lengths, mask, index):
    q, k, v, cu_q, cu_k = packed(lengths, torch.float64)
    out, lse = attention_varlen(q, k, v, cu_q.to(index), cu_k.to(index), mask=mask, return_lse=True)
    if not lengths:
        assert out.shape == (0, HQ, DV)
        assert lse.shape == (HQ, 0)
        return
    want_out, want_lse = alone(q, k, v, cu_q, cu_k, mask)
    torch.testing.assert_close(out, want_out, rtol=0, atol=1e-13)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=1e-13)


def test_a_prefix_longer_than_a_sequence_is_all_of_it():
    q, k, v, cu, _ = packed([(3, 3), (9, 9)])
    out = attention_varlen(q, k, v, cu, cu, mask=masks.prefix(5))
    torch.testing.assert_close(out[:3], attention_varlen(q[:3], k[:3], v[:3], offsets([3]), offsets([3])))


def test_an_alignment_needs_no_saying_where_every_sequence_has_as_many_keys_as_queries():
    operands = packed([(5, 5), (0, 3), (8, 8)])
    out = attention_varlen(*operands, mask=masks.causal())
    want, _ = alone(*operands, masks.causal())
    torch.testing.assert_close(out.double(), want, rtol=0, atol=3e-6)
    with pytest.raises(UsageError, match="sequence 1: causal"):
        attention_varlen(*packed([(5, 5), (2, 3)]), mask=masks.causal())


@pytest.mark.parametrize("kernel", KERNELS)
def test_scale_softcap_and_sinks_are_those_of_attention(kernel):
    q, k, v, cu_q, cu_k = packed([(4, 6), (3, 3)])
    sinks = torch.randn(HQ)
    got = attention_varlen(q, k, v, cu_q, cu_k, scale=0.3, softcap=2.0, sinks=sinks, return_lse=True, kernel=kernel)
    for rows, keys in ((slice(0, 4), slice(0, 6)), (slice(4, 7), slice(6, 9))):
        q1, k1, v1 = (x.transpose(0, 1).unsqueeze(0) for x in (q[rows], k[keys], v[keys]))
        out, lse = attention(q1, k1, v1, scale=0.3, softcap=2.0, sinks=sinks, return_lse=True, kernel="reference")
        torch.testing.assert_close(got[0][rows], out[0].transpose(0, 1), rtol=0, atol=3e-6)
        torch.testing.assert_close(got[1][:, rows], lse[0], rtol=0, atol=5e-6)
    want_out, _ = alone(q, k, v, cu_q, cu_k, None, sinks)
    out = attention_varlen(q, k, v, cu_q, cu_k, sinks=sinks, kernel=kernel)
    torch.testing.assert_close(out.double(), want_out, rtol=0, atol=3e-6)


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients_are_those_of_the_sequences_alone(kernel):
    q, k, v, cu_q, cu_k = packed([(6, 6), (3, 8), (2, 0)])
    mask = masks.causal(align="bottom-right")
    dout, dlse = torch.randn(11, HQ, DV), torch.randn(HQ, 11)
    dlse[:, -2:] = 0  # rows without a key
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = attention_varlen(*leaves, cu_q, cu_k, mask=mask, return_lse=True, kernel=kernel)
    got = torch.autograd.grad([out, lse], leaves, [dout, dlse])
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    want = torch.autograd.grad(alone(*exact, cu_q, cu_k, mask), exact, [dout.double(), dlse.double()])
    for grad, true in zip(got, want, strict=True):
        torch.testing.assert_close(grad.double(), true.nan_to_num(), rtol=0, atol=2e-5)


def test_dropout_is_reproducible_from_a_generator():
    operands = packed([(20, 20), (7, 9)])
    draws = [attention_varlen(*operands, dropout_p=0.5, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize("kernel", KERNELS)
def test_nan_in_one_sequence_reaches_no_other(kernel):
    q, k, v, cu_q, cu_k = packed([(5, 5), (6, 6), (4, 4)])
    clean = attention_varlen(q, k, v, cu_q, cu_k, kernel=kernel)
    for x in (k, v):
        x[5:11] = torch.nan
    out = attention_varlen(q, k, v, cu_q, cu_k, kernel=kernel)
    assert bool(out[5:11].isnan().all())
    torch.testing.assert_close(out[:5], clean[:5], rtol=0, atol=1e-6)
    torch.testing.assert_close(out[11:], clean[11:], rtol=0, atol=1e-6)


def test_it_compiles_whole_and_checks_its_offsets_when_it_runs():
    operands = packed([(5, 5), (0, 3), (8, 9)])
    mask = masks.causal(align="bottom-right")

    def run(*tensors: Tensor) -> Tensor:
        return attention_varlen(*tensors, mask=mask)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*operands), run(*operands))
    q, k, v, cu_q, cu_k = operands
    with pytest.raises(RuntimeError, match="cu_seqlens_k"):
        compiled(q, k, v, cu_q, cu_k - 1)


def test_it_exports_and_runs_on_fake_tensors():
    operands = packed([(5, 5), (0, 3), (8, 9)])

    class Packed(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> Tensor:
            return attention_varlen(*tensors, mask=masks.causal(align="bottom-right"))

    exported = torch.export.export(Packed(), operands).module()
    assert torch.equal(exported(*operands), Packed()(*operands))
    with FakeTensorMode() as mode:
        assert Packed()(*map(mode.from_tensor, operands)).shape == (13, HQ, DV)


Q, K, V, CU, _ = packed([(3, 3), (4, 4)])
CAUSAL = masks.causal(align="bottom-right")


@pytest.mark.parametrize(
    ("arguments", "options", "sentence"),
    [
        ((Q[None], K, V, CU, CU), {}, r"\(1, 7, 4, 16\): give \(tokens, heads, D\)"),
        ((Q, K, None, CU, CU), {}, "v is NoneType"),
        ((Q, K[:, :, :8], V, CU, CU), {}, "head dim"),
        ((Q[:, :3], K, V, CU, CU), {}, "multiple of kv heads"),
        ((Q, K.half(), V, CU, CU), {}, "float16"),
        ((Q, K, V, CU.float(), CU), {}, "cu_seqlens_q is torch.float32"),
        ((Q, K, V, CU, CU.tolist()), {}, "cu_seqlens_k is list"),
        ((Q, K, V, CU[None], CU), {}, r"cu_seqlens_q is torch.int32 \(1, 3\)"),
        ((Q, K, V, CU, CU[:0]), {}, "cu_seqlens_k is empty"),
        ((Q, K, V, CU + 1, CU), {}, "cu_seqlens_q starts with 1"),
        ((Q, K, V, offsets([9, -2]), CU), {}, "cu_seqlens_q falls from 9 to 7 at sequence 1"),
        ((Q, K, V, CU, offsets([3, 3])), {}, "cu_seqlens_k ends with 6 and there are 7"),
        ((Q, K, V, CU, offsets([3, 5])), {}, "cu_seqlens_k ends with 8 and there are 7"),
        ((Q, K, V, CU, offsets([3, 2, 2])), {}, "cu_seqlens_q is of 2 sequences and cu_seqlens_k of 3"),
        ((Q, K, V, CU, CU.to("meta")), {}, "cu_seqlens_k is on meta"),
        ((Q, K, V, CU, CU), {"mask": masks.padding([3, 4])}, "padding"),
        ((Q, K, V, CU, CU), {"mask": CAUSAL & masks.documents(torch.zeros(7).long())}, "documents"),
        ((Q, K, V, CU, CU), {"mask": masks.dense(torch.ones(7, 7, dtype=torch.bool))}, "dense"),
        ((Q, K, V, CU, CU), {"mask": torch.ones(7, 7)}, "mask is Tensor"),
        ((Q, K, V, CU, offsets([2, 5])), {"mask": masks.prefix(4)}, "sequence 0: prefix"),
        ((Q, K, V, CU, CU), {"sinks": torch.zeros(3)}, "sinks"),
        ((Q, K, V, CU, CU), {"dropout_p": 1.0}, "dropout_p"),
        ((Q, K, V, CU, CU), {"return_lse": 1}, "return_lse=1"),
        ((Q, K, V, CU, CU), {"kernel": "fast"}, "fast"),
    ],
)
def test_what_can_not_be_honoured_is_refused_with_the_value(arguments, options, sentence):
    with pytest.raises(UsageError, match=sentence):
        attention_varlen(*arguments, **options)
