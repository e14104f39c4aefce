"""Recurrent layers against their decomposition; sparse products against their format."""

from __future__ import annotations

import pytest
import torch
from costs_recorder import call, calls_of, meta, plain, to_meta

from rooftile.capture.trace import Call, TensorMeta
from rooftile.costs import Cost, cost_of
from rooftile.costs.layouts import csr_bytes
from rooftile.errors import UsageError

LAYERS = {"LSTM": torch.nn.LSTM, "GRU": torch.nn.GRU, "RNN_TANH": torch.nn.RNN}


def cost(one: Call) -> Cost:
    found = cost_of(one)
    assert found is not None
    return found


@pytest.mark.parametrize("mode", ["LSTM", "GRU", "RNN_TANH"])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_recurrent_layer_does_what_its_decomposition_does(mode: str, bidirectional: bool, bias: bool) -> None:
    with torch.device("meta"):
        module = LAYERS[mode](24, 16, num_layers=2, bidirectional=bidirectional, bias=bias, batch_first=True)
        x = torch.empty(3, 7, 24, requires_grad=True)
        with torch.no_grad():
            decomposed = [cost(one) for one in calls_of(lambda: module(x))]
    weights = tuple(to_meta(weight) for weight in module.parameters())
    hidden = meta((4 if bidirectional else 2, 3, 16))
    states = (hidden, hidden) if mode == "LSTM" else (hidden,)
    output, reserve = meta((3, 7, 32 if bidirectional else 16)), meta((100,))
    options = (mode, 2, 0.0, True, bidirectional, True)
    forward = cost(
        call("rooftile.rnn.default", to_meta(x), states, weights, *options, outputs=(output, *states, reserve))
    )  # fmt: skip
    assert forward.matmul_flops == sum(one.matmul_flops for one in decomposed)
    pointwise, theirs = (sum(one.flops - one.matmul_flops for one in group) for group in ([forward], decomposed))
    assert pointwise == pytest.approx(theirs, rel=0.15)  # the decomposition spells some gates with one operator more
    backward = call(
        "rooftile.rnn_backward.default", (output, *states), to_meta(x), states, weights, output, reserve, *options,
        outputs=(to_meta(x), *states, *weights),
    )  # fmt: skip
    assert cost(backward).matmul_flops == 2 * forward.matmul_flops


def test_the_cpu_lstm_that_torchs_counter_misses_is_counted() -> None:
    module, x = torch.nn.LSTM(24, 16, num_layers=2, batch_first=True), torch.zeros(3, 7, 24)
    calls = calls_of(lambda: module(x)[0].sum().backward())
    weights = sum(weight.numel() for weight in module.parameters() if weight.dim() == 2)
    forward = [cost(one) for one in calls if one.operator == "aten.mkldnn_rnn_layer.default"]
    backward = [cost(one) for one in calls if one.operator == "aten.mkldnn_rnn_layer_backward.default"]
    assert sum(one.matmul_flops for one in forward) == 2 * 21 * weights
    assert sum(one.matmul_flops for one in backward) == 4 * 21 * weights


def test_a_projected_lstm_counts_its_projection_and_its_hidden_units() -> None:
    module = torch.nn.LSTM(24, 16, proj_size=4, bias=False)
    weights = tuple(to_meta(weight) for weight in module.parameters())
    x = meta((7, 3, 24))
    found = cost(
        call("rooftile.rnn.default", x, (), weights, "LSTM", 1, 0.0, True, False, False, outputs=(meta((7, 3, 4)),))
    )
    assert found.matmul_flops == 2 * 21 * (64 * 24 + 64 * 4 + 4 * 16)
    assert found.flops - found.matmul_flops == 21 * 13 * 16


def test_cudnns_weight_list_is_a_view_of_its_buffer_and_read_once() -> None:
    w = (meta((64, 24)), meta((64, 16)), meta((64,)), meta((64,)))
    buffer = meta((sum(t.numel for t in w),))
    x, h = meta((7, 3, 24)), meta((1, 3, 16))
    arguments = (x, w, 4, buffer, h, h, 2, 16, 0, 1, False, 0.0, True, False, (), None)
    found = cost(call("aten._cudnn_rnn.default", *arguments, outputs=(meta((7, 3, 16)), h, h)))
    assert found.bytes_read == x.nbytes + buffer.nbytes + 2 * h.nbytes
    assert found.matmul_flops == 2 * 21 * (64 * 24 + 64 * 16)


def test_a_fused_cell_counts_its_pointwise_part() -> None:
    gates, state = meta((3, 64)), meta((3, 16))
    found = cost(call("aten._thnn_fused_lstm_cell.default", gates, gates, state, outputs=(state, state, gates)))
    assert found.flops == 13 * 48
    biased = call("aten._thnn_fused_lstm_cell.default", gates, gates, state, meta((64,)), meta((64,)), outputs=(state,))
    assert cost(biased).flops == (13 + 8) * 48


def test_csr_holds_one_percent_in_80_4_mb_against_4_gb() -> None:
    rows, columns = 100_000, 10_000
    nnz = rows * columns // 100
    assert csr_bytes(rows, nnz, itemsize=4, index_itemsize=4) / 1e6 == pytest.approx(80.4, abs=0.05)
    dense = meta((rows, columns))
    assert dense.nbytes == 4_000_000_000
    assert dense.nbytes / csr_bytes(rows, nnz, 4, 4) == pytest.approx(50, rel=0.01)
    with pytest.raises(UsageError):
        csr_bytes(-1, 5, 4)


def test_a_sparse_product_works_on_the_non_zeros_and_reads_the_format() -> None:
    sparse = TensorMeta((1000, 500), (), "float32", "sparse_csr[int32]", 5000)
    dense, out = meta((500, 32)), meta((1000, 32))
    found = cost(call("aten.mm.default", sparse, dense, outputs=(out,)))
    assert (found.family, found.roof, found.flops) == ("sparse", "vector", 2 * 5000 * 32)
    assert found.bytes_read == 5000 * 8 + 1001 * 4 + dense.nbytes
    wide = sparse._replace(layout="sparse_csr")  # torch's indices are 64-bit unless made otherwise
    assert cost(call("aten.mm.default", wide, dense, outputs=(out,))).bytes_read == 5000 * 12 + 1001 * 8 + dense.nbytes
    unknown = sparse._replace(nnz=None)
    assert cost_of(call("aten.mm.default", unknown, dense, outputs=(out,))) is None


def test_every_operator_of_sparse_training_is_counted() -> None:
    x = torch.randn(5, 3, requires_grad=True)
    matrix = torch.eye(5).to_sparse()
    calls = calls_of(lambda: torch.sparse.mm(matrix, x).sum().backward())
    products = [cost(one) for one in calls if cost(one).family == "sparse"]
    assert [one.matmul_flops for one in products] == [2 * 5 * 3, 2 * 5 * 3]
    assert plain(matrix).nnz == 5
