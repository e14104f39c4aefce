"""Attention is measured on the stated work, beside torch's own, and judged by FP64 written from the definition."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from rooftile import masks
from rooftile.bench import attention_oracle, attention_run
from rooftile.bench.attention_case import Case, Inputs, parse_shape
from rooftile.bench.attention_contenders import PEER
from rooftile.bench.attention_oracle import attention_errors, heads_compared
from rooftile.bench.attention_run import run_case
from rooftile.errors import UsageError

FP64 = torch.float64


def case(mask: masks.Mask | None = None, dtype: torch.dtype = FP64, **sizes: int) -> Case:
    shape = {"batch": 2, "q_heads": 4, "kv_heads": 2, "q_len": 33, "kv_len": 33, "head_dim": 16} | sizes
    return Case(**shape, dtype=dtype, mask=mask, mask_name="" if mask is None else "some")


MASKS = {
    "none": None,
    "causal": masks.causal(),
    "window": masks.window(5),
    "padding": masks.padding(torch.tensor([33, 7])),
    "documents": masks.documents(torch.arange(33) // 9),
    "prefix": masks.prefix(6),
    "dense": masks.dense(torch.rand(2, 4, 33, 33, generator=torch.Generator().manual_seed(1)) < 0.8),
    "both": masks.causal() & masks.padding(torch.tensor([20, 33])),
}


def by_torch(one: Case, inputs: Inputs) -> dict[str, torch.Tensor]:
    """Output and gradients by torch's materialised attention and autograd."""
    q, k, v = (x.detach().double().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    shown = None if one.mask is None else one.mask.materialize(one.q_len, one.kv_len)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=shown, enable_gqa=True)
    grads = torch.autograd.grad(out, (q, k, v), inputs.dout.double())
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


@pytest.mark.parametrize("rows", [1, 7, 1000])
@pytest.mark.parametrize("name", MASKS)
def test_fp64_by_the_definition_is_fp64_by_torch(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_oracle, "_PART_BYTES", rows * 8 * 2 * 33)
    one = case(MASKS[name])
    inputs = one.inputs()
    errors = attention_errors(one, inputs, {"torch": by_torch(one, inputs)})["torch"]
    assert [error.tensor for error in errors] == ["out", "dq", "dk", "dv"]
    assert [error.elements for error in errors] == [2 * 4 * 33 * 16, 2 * 4 * 33 * 16, 2 * 2 * 33 * 16, 2 * 2 * 33 * 16]
    assert all(error.largest < 1e-13 and error.mean <= error.largest for error in errors)


def test_an_error_is_found_where_it_is_and_counted_once() -> None:
    one = case()
    inputs = one.inputs()
    out = by_torch(one, inputs)["out"].clone()
    out[1, 3, 20, 5] += 0.25
    (error,) = attention_errors(one, inputs, {"wrong": {"out": out}})["wrong"]
    assert error.largest == pytest.approx(0.25)
    assert error.mean == pytest.approx(0.25 / out.numel())


def test_a_nan_is_an_error_that_no_later_head_hides() -> None:
    one = case()
    inputs = one.inputs()
    out = by_torch(one, inputs)["out"].clone()
    out[0, 0, 0, 0] = math.nan
    (error,) = attention_errors(one, inputs, {"wrong": {"out": out}})["wrong"]
    assert math.isnan(error.largest)
    assert math.isnan(error.mean)


def test_a_case_too_large_for_fp64_is_compared_on_the_heads_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    one = case()
    monkeypatch.setattr(attention_oracle, "_FLOPS", 3.5 * 4 * 2 * 33 * 33 * 16)
    inputs = one.inputs()
    assert heads_compared(one, backward=False) == 3
    (error,) = attention_errors(one, inputs, {"torch": {"out": by_torch(one, inputs)["out"]}})["torch"]
    assert error.elements == 3 * 2 * 33 * 16
    monkeypatch.setattr(attention_oracle, "_FLOPS", 1.0)
    assert attention_errors(one, inputs, {"torch": {"out": inputs.q}})["torch"] == ()


@pytest.mark.parametrize("name", MASKS)
def test_visible_pairs_are_those_that_the_mask_shows(name: str) -> None:
    one = case(MASKS[name])
    mask = MASKS[name]
    shown = torch.ones(1, 1, 33, 33) if mask is None else mask.materialize(33, 33)
    assert one.visible_pairs == shown.expand(2, 4, 33, 33).sum()


def test_flops_are_two_products_forward_and_five_backward() -> None:
    one = case(masks.causal())
    assert one.visible_pairs == 2 * 4 * 33 * 34 // 2
    assert one.flops(False, one.square) == 4 * 2 * 4 * 33 * 33 * 16
    assert one.flops(True, one.square) == 10 * 2 * 4 * 33 * 33 * 16


def test_a_shape_is_read() -> None:
    assert parse_shape("1,8,2048,64", FP64, False) == Case(1, 8, 8, 2048, 2048, 64, FP64)
    decode = parse_shape("2, 32/8, 1/4096, 128", FP64, True)
    assert decode == Case(2, 32, 8, 1, 4096, 128, FP64, masks.causal(align="bottom-right"), "causal")
    assert decode.name == "2 x 32/8 x 1/4096 x 128"
    assert decode.visible_pairs == decode.square, "the last query sees all keys"


@pytest.mark.parametrize("text", ["", "1,8,2048", "1,8,2048,64,2", "1,8,-1,64", "1x8x2048x64", "a,b,c,d", "1,8,64.0,8"])
def test_a_shape_that_is_none_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="is not B,H,L,D; give four numbers such as 1,8,2048,64"):
        parse_shape(text, FP64, False)


@pytest.mark.parametrize("text", ["0,8,16,64", "1,0,16,64", "1,8,16,0", "1,8/3,16,64", "1,2/4,16,64"])
def test_a_shape_without_work_or_with_uneven_groups_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="has a 0, or query heads that are no multiple"):
        parse_shape(text, FP64, False)


def test_inputs_are_the_same_for_a_seed_and_of_the_case_s_dtype() -> None:
    one = case(dtype=torch.bfloat16)
    first, second = one.inputs(3), one.inputs(3)
    assert torch.equal(first.dout, second.dout)
    assert first.q.dtype == torch.bfloat16
    assert not torch.equal(first.q, one.inputs(4).q)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_run_side_by_side_with_torch_s_own(dtype: torch.dtype, backward: bool) -> None:
    one = parse_shape("1,4/2,48,16", dtype, True)
    found = run_case(one, backward=backward, threads=1, warm_up=1, repeats=3, budget=2.0)
    by_name = {record.contender: record for record in found.records}
    assert {"tiled", "reference", PEER} <= by_name.keys()
    assert by_name.keys() | dict(found.refused).keys() == {*attention_run.KERNELS, PEER}
    assert found.of(PEER) is by_name[PEER]
    assert found.kv_heads_compared == 2
    bound = 1e-5 if dtype == torch.float32 else 0.1
    for name, record in by_name.items():
        assert record.task == f"attention {'backward' if backward else 'forward'}"
        assert [error.tensor for error in record.errors] == (["dq", "dk", "dv"] if backward else ["out"])
        assert all(error.largest < bound for error in record.errors), name
        assert (record.threads, record.dtype) == (1, str(dtype).removeprefix("torch."))
        assert record.kernel == ("scaled_dot_product_attention" if name == PEER else name)
        assert record.path
        assert dict(record.options) == {"kv_heads": 2, "kv_len": 48, "mask": "causal"}
        assert record.rate("dense FLOPs") > record.rate("visible FLOPs") > 0


def test_the_reference_is_not_run_where_it_would_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_run, "_REFERENCE_BYTES", 4 * 4 * 48 * 48 - 1)
    one = parse_shape("1,4,48,16", torch.float32, False)
    found = run_case(one, kernels=("reference",), warm_up=1, repeats=3, errors=False)
    assert [record.contender for record in found.records] == [PEER]
    assert found.records[0].errors == ()
    assert found.kv_heads_compared == 0
    assert dict(found.refused)["reference"].startswith("would materialise")


def test_a_kernel_that_refuses_is_told_with_its_reason() -> None:
    one = parse_shape("1,2,16,16", torch.float64, False)
    found = run_case(one, kernels=("native", "tiled"), warm_up=1, repeats=3)
    assert "native" in dict(found.refused)
    assert "float64" in dict(found.refused)["native"] or "fp64" in dict(found.refused)["native"]


def test_torch_is_called_as_its_user_would_and_says_which_backend_it_takes() -> None:
    for text, dtype, is_causal in (("1,2,64,16", torch.float32, True), ("1,4/2,1/64,16", torch.bfloat16, True)):
        found = run_case(parse_shape(text, dtype, is_causal), kernels=(), warm_up=1, repeats=3)
        (peer,) = found.records
        assert peer.path in ("flash", "math")
        assert peer.errors[0].largest < 0.05


def test_a_comparison_of_two_kernels_of_one_run_is_allowed() -> None:
    from rooftile.bench import compare

    one = parse_shape("1,2,32,16", torch.float32, False)
    tiled, peer = run_case(one, kernels=("tiled",), warm_up=1, repeats=3).records
    assert compare(tiled, peer).faster > 0
    with pytest.raises(UsageError, match="dtype is 'float32' in one and 'float16' in the other"):
        compare(tiled, dataclasses.replace(peer, dtype="float16"))
