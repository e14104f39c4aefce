"""What can't be honoured is a ValueError that names the argument, its value and the way out; nothing is converted,
broadcast or ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import rooftile
from rooftile import masks
from rooftile.errors import UsageError

Q, K, V = torch.zeros(2, 4, 6, 8), torch.zeros(2, 2, 6, 8), torch.zeros(2, 2, 6, 5)
LONG = torch.zeros(2, 2, 9, 8)


def call(q: Any = Q, k: Any = K, v: Any = V, **extra: Any) -> Any:
    return rooftile.attention(q, k, v, **extra)


def varlen(q_ends: list[int], kv_ends: list[int], **extra: Any) -> Any:
    q, k = torch.zeros(6, 4, 8), torch.zeros(9, 2, 8)
    ends = [torch.tensor(x, dtype=torch.int32) for x in (q_ends, kv_ends)]
    return rooftile.attention_varlen(q, k, k, *ends, **extra)


# The call, and what its message must say: the argument, the value, the way out.
WRONG: dict[str, tuple[Callable[[], object], tuple[str, ...]]] = {
    "head dims that differ": (lambda: call(k=K[..., :7]), ("head dim", "8", "7")),
    "devices that differ": (lambda: call(k=K.to("meta")), ("device", "cpu", "meta")),
    "query heads that are no multiple of kv heads": (lambda: call(q=Q[:, :3]), ("3", "2", "multiple")),
    "no kv heads": (lambda: call(k=K[:, :0], v=V[:, :0]), ("0", "multiple")),
    "batches that differ": (lambda: call(k=K[:1], v=V[:1]), ("batch", "expand")),
    "k and v of different lengths": (lambda: call(v=V[:, :, :5]), ("length", "(2, 2, 6, 8)", "(2, 2, 5, 5)")),
    "k and v of different heads": (lambda: call(v=V[:, :1]), ("heads",)),
    "dtypes that differ": (lambda: call(k=K.double()), ("dtype", "float32", "float64")),
    "integer tensors": (lambda: call(Q.long(), K.long(), V.long()), ("q", "int64", "convert")),
    "complex tensors": (lambda: call(q=Q.to(torch.complex64)), ("q", "complex64")),
    "three dims": (lambda: call(q=Q[0]), ("q", "(4, 6, 8)", "unsqueeze")),
    "no tensor": (lambda: call(v=[1.0]), ("v", "list")),
    "causal without alignment": (
        lambda: call(k=LONG, v=LONG, mask=masks.causal()),
        ("align", "bottom-right", "top-left"),
    ),
    "window without alignment": (lambda: call(k=LONG, v=LONG, mask=masks.window(2)), ("align", "6", "9")),
    "an alignment that is none": (lambda: masks.causal(align="right"), ("align", "'right'", "bottom-right")),
    "window 0": (lambda: masks.window(0), ("window(0)", "at least 1")),
    "a negative window": (lambda: masks.window(left=-1, right=0), ("left=-1",)),
    "a window of half a key": (lambda: masks.window(2.5), ("2.5", "integer")),
    "a window said twice": (lambda: masks.window(4, left=3, right=0), ("twice",)),
    "a window open at one end": (lambda: masks.window(left=3), ("right=None",)),
    "masks that contradict": (
        lambda: masks.causal(align="top-left") & masks.window(3, align="bottom-right"),
        ("top-left", "bottom-right"),
    ),
    "prefix and causal": (lambda: masks.prefix(3) & masks.causal(), ("prefix(3)", "union")),
    "a mask joined with a tensor": (
        lambda: masks.causal() & torch.ones(6, 6, dtype=torch.bool),
        ("causal()", "masks.dense"),
    ),
    "padding longer than the keys": (lambda: call(mask=masks.padding(torch.tensor([3, 7]))), ("7", "6", "padding")),
    "a negative length": (lambda: call(mask=masks.padding(torch.tensor([3, -1]))), ("-1", "padding")),
    "padding of another batch": (lambda: call(mask=masks.padding(torch.tensor([3, 3, 3]))), ("3", "2")),
    "lengths that are floats": (lambda: masks.padding(torch.tensor([3.0])), ("lengths", "integer", "float32")),
    "a side that is none": (lambda: masks.padding(torch.tensor([3]), side="both"), ("side", "'both'", "left")),
    "documents in pieces": (
        lambda: call(mask=masks.documents(torch.tensor([0, 0, 1, 1, 0, 0]))),
        ("contiguous", "dense"),
    ),
    "documents of another length": (lambda: call(mask=masks.documents(torch.tensor([0, 1]))), ("2", "6", "ids")),
    "a dense mask of another shape": (lambda: call(mask=masks.dense(torch.ones(6, 5, dtype=torch.bool))), ("6", "5")),
    "a dense mask of floats": (lambda: masks.dense(torch.ones(6, 6)), ("bool", "float32", "bias")),
    "a dense mask of other heads": (
        lambda: call(mask=masks.dense(torch.ones(1, 3, 6, 6, dtype=torch.bool))),
        ("heads", "3", "4"),
    ),
    "a mask on another device": (
        lambda: call(mask=masks.dense(torch.ones(6, 6, dtype=torch.bool, device="meta"))),
        ("mask", "meta", "cpu"),
    ),
    "a tensor as mask": (lambda: call(mask=torch.ones(6, 6, dtype=torch.bool)), ("mask", "masks.dense")),
    "a bias of another shape": (lambda: call(bias=torch.zeros(1, 2, 6, 6)), ("bias", "(1, 2, 6, 6)", "4")),
    "a bias of two dims": (lambda: call(bias=torch.zeros(6, 6)), ("bias", "(6, 6)", "4")),
    "a boolean bias": (lambda: call(bias=torch.ones(1, 1, 6, 6, dtype=torch.bool)), ("bias", "masks.dense")),
    "a bias of another dtype": (lambda: call(bias=torch.zeros(1, 1, 6, 6).half()), ("bias", "float16", "float32")),
    "a bias on another device": (lambda: call(bias=torch.zeros(1, 1, 6, 6, device="meta")), ("bias", "meta")),
    "sinks of another number": (lambda: call(sinks=torch.zeros(2)), ("sinks", "(2,)", "4")),
    "sinks of integers": (lambda: call(sinks=torch.zeros(4).long()), ("sinks", "int64")),
    "dropout of 1": (lambda: call(dropout_p=1.0), ("dropout_p=1.0", "[0, 1)")),
    "negative dropout": (lambda: call(dropout_p=-0.1), ("dropout_p=-0.1", "[0, 1)")),
    "dropout of NaN": (lambda: call(dropout_p=float("nan")), ("dropout_p=nan",)),
    "dropout of a name": (lambda: call(dropout_p="half"), ("dropout_p", "half")),
    "a generator that is a seed": (lambda: call(dropout_p=0.1, generator=7), ("generator", "int")),
    "a softcap of 0": (lambda: call(softcap=0.0), ("softcap=0.0", "positive")),
    "a softcap of infinity": (lambda: call(softcap=float("inf")), ("softcap=inf",)),
    "a scale of NaN": (lambda: call(scale=float("nan")), ("scale=nan", "finite")),
    "a scale that fp32 can't hold": (lambda: call(scale=1e300), ("scale=1e+300", "fp32")),
    "a softcap that fp32 can't hold": (lambda: call(softcap=1e-45), ("softcap=1e-45", "fp32")),
    "a scale that is a tensor": (lambda: call(scale=torch.tensor(0.1)), ("scale", "number")),
    "a kernel that is none": (lambda: call(kernel="flash"), ("'flash'", "native", "tiled")),
    "no kernel": (lambda: call(kernel=()), ("kernel=()",)),
    "a kernel that can't": (lambda: call(Q.double(), K.double(), V.double(), kernel="native"), ("native", "float64")),
    "return_lse that is no bool": (lambda: call(return_lse=1), ("return_lse=1",)),
    "dropout in a partial state": (lambda: rooftile.AttentionState.of(Q, K, V, dropout_p=0.1), ("dropout_p=0.1",)),
    "cu_seqlens that fall": (lambda: varlen([0, 4, 3, 6], [0, 2, 5, 9]), ("cu_seqlens_q", "from 4 to 3")),
    "cu_seqlens that do not start at 0": (lambda: varlen([1, 6], [0, 9]), ("cu_seqlens_q", "0")),
    "cu_seqlens that end early": (lambda: varlen([0, 6], [0, 8]), ("cu_seqlens_k", "8", "9")),
    "cu_seqlens that end beyond": (lambda: varlen([0, 7], [0, 9]), ("cu_seqlens_q", "7", "6")),
    "cu_seqlens of different numbers": (lambda: varlen([0, 3, 6], [0, 9]), ("cu_seqlens",)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_bad_input_is_refused_with_argument_value_and_way_out(wrong: str):
    attempt, words = WRONG[wrong]
    with pytest.raises(UsageError) as caught:
        attempt()
    message = str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert [word for word in words if word not in message] == [], message
    assert "\n" not in message


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_nothing_is_broadcast(name: str, dim: int):
    """A size of 1 where another one has more is no permission."""
    operands: dict[str, Tensor] = {"q": Q, "k": K, "v": V}
    operands[name] = operands[name].narrow(dim, 0, 1)
    if (name, dim) in {("q", 2)}:
        assert call(**operands).shape == (2, 4, 1, 5)  # one query is a call of its own
        return
    if name == "q" and dim == 1:
        with pytest.raises(UsageError, match="multiple"):
            call(**operands)
        return
    with pytest.raises(UsageError):
        call(**operands)
