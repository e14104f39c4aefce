"""Matrix products: against torch's own counter where it counts, against the published intensities where it does not."""

from __future__ import annotations

import pytest
import torch
from costs_recorder import call, calls_of, meta
from torch.utils.flop_counter import FlopCounterMode

from rooftile.capture.trace import Call
from rooftile.costs import Cost, cost_of
from rooftile.costs.gemm import Gemm, alignment, gemm_of, ideal_intensity, tile_quantisation, wave_quantisation
from rooftile.errors import UsageError


def cost(one: Call) -> Cost:
    found = cost_of(one)
    assert found is not None
    return found


def only(calls: list[Call], name: str) -> Call:
    (one,) = [item for item in calls if item.operator.startswith(name)]
    return one


def test_the_products_equal_torchs_counter_where_it_counts() -> None:
    with torch.device("meta"):
        a, b, c = torch.empty(5, 7), torch.empty(7, 3), torch.empty(5, 3)
        batched = torch.empty(4, 5, 7), torch.empty(4, 7, 3), torch.empty(4, 5, 3)
    runs = [
        lambda: a @ b,
        lambda: torch.addmm(c, a, b),
        lambda: torch.bmm(batched[0], batched[1]),
        lambda: torch.baddbmm(batched[2], batched[0], batched[1]),
        lambda: torch.einsum("bij,bjk->bik", batched[0], batched[1]),
    ]
    for run in runs:
        with FlopCounterMode(display=False) as counter:
            run()
        assert sum(cost(one).matmul_flops for one in calls_of(run)) == counter.get_total_flops() > 0


def test_what_torchs_counter_misses_is_counted() -> None:
    with torch.device("meta"):
        matrix, vector = torch.empty(6, 8), torch.empty(8)
        ints = torch.empty(32, 16, dtype=torch.int8), torch.empty(16, 24, dtype=torch.int8)
    runs = {
        "aten.mv": (lambda: torch.mv(matrix, vector), 2 * 6 * 8),
        "aten.dot": (lambda: torch.dot(vector, vector), 2 * 8),
        "aten.addmv": (lambda: torch.addmv(torch.empty(6, device="meta"), matrix, vector), 2 * 6 * 8),
        "aten._int_mm": (lambda: torch._int_mm(*ints), 2 * 32 * 16 * 24),
    }
    for name, (run, flops) in runs.items():
        assert cost(only(calls_of(run), name)).matmul_flops == flops
        with FlopCounterMode(display=False) as counter:
            run()
        assert counter.get_total_flops() == 0, "the pitfall is gone: say so in the documentation"


def test_a_grouped_product_counts_the_rows_that_are_present() -> None:
    tokens, experts = meta((100, 16), "bfloat16"), meta((8, 16, 32), "bfloat16")
    offsets = meta((8,), "int32")
    one = call("aten._grouped_mm.default", tokens, experts, offsets, outputs=(meta((100, 32), "bfloat16"),))
    assert cost(one).flops == 2 * 100 * 16 * 32
    assert cost(one).bytes_read == 2 * (100 * 16 + 8 * 16 * 32) + 8 * 4
    weight_gradient = call(
        "aten._grouped_mm.default", meta((16, 100)), meta((100, 32)), offsets, outputs=(meta((8, 16, 32)),)
    )
    assert cost(weight_gradient).flops == 2 * 100 * 16 * 32


def test_beta_decides_whether_c_is_read_and_added() -> None:
    n = 64
    square = meta((n, n), "float16")

    def addmm(**kwargs: float) -> Cost:
        return cost(call("aten.addmm.default", square, square, square, outputs=(square,), **kwargs))

    assert addmm().bytes == 4 * n * n * 2
    assert addmm().flops == 2 * n**3 + n * n
    assert addmm(beta=0).bytes == 3 * n * n * 2
    assert addmm(beta=0).flops == 2 * n**3
    assert addmm(beta=0.5, alpha=2).flops == 2 * n**3 + 3 * n * n
    assert addmm().matmul_flops == 2 * n**3


def test_a_bias_row_is_read_once_and_is_no_full_c() -> None:
    x, w, bias = meta((32, 16)), meta((16, 8)), meta((8,))
    one = call("aten.addmm.default", bias, x, w, outputs=(meta((32, 8)),))
    assert cost(one).bytes_read == 4 * (8 + 32 * 16 + 16 * 8)
    assert gemm_of(one) == Gemm(1, 32, 8, 16, "float32", "float32", reads_c=False)
    whole = call("aten.addmm.default", meta((32, 8)), x, w, outputs=(meta((32, 8)),))
    assert gemm_of(whole) == Gemm(1, 32, 8, 16, "float32", "float32", reads_c=True)
    assert gemm_of(call("aten.relu.default", x, outputs=(x,))) is None


def test_the_matrix_roof_is_keyed_by_the_input_dtype() -> None:
    a = meta((16, 16), "float8_e4m3fn")
    scale, out = meta(()), meta((16, 16), "bfloat16")
    scaled = cost(call("aten._scaled_mm.default", a, a, scale, scale, outputs=(out,)))
    assert (scaled.roof, scaled.roof_dtype) == ("matmul", "float8_e4m3fn")
    assert scaled.flops == 2 * 16**3 + 16 * 16
    assert scaled.bytes_written == 16 * 16 * 2


@pytest.mark.parametrize(
    ("n", "itemsize", "read_c", "expected"),
    [
        (64, 2, False, 64 / 3), (64, 2, True, 64 / 4), (128, 4, False, 21.3), (128, 2, False, 42.7),
        (2048, 4, False, 341.3), (2048, 2, False, 682.7), (256, 4, False, 42.7), (256, 2, False, 85.3),
    ],
)  # fmt: skip
def test_square_products_have_the_published_intensities(n: int, itemsize: int, read_c: bool, expected: float) -> None:
    assert ideal_intensity(n, n, n, itemsize, read_c) == pytest.approx(expected, abs=0.05)
    # and the same from the cost of a Call: its products per byte
    square = meta((n, n), {2: "float16", 4: "float32"}[itemsize])
    name, args = ("aten.addmm.default", (square,) * 3) if read_c else ("aten.mm.default", (square,) * 2)
    found = cost(call(name, *args, outputs=(square,)))
    assert found.matmul_flops / found.bytes == pytest.approx(ideal_intensity(n, n, n, itemsize, read_c))


def test_n_64_on_an_a100_80_is_capped_at_13_9_percent() -> None:
    ridge = 312e12 / 2039e9
    assert ridge == pytest.approx(153.0, abs=0.05)
    assert ideal_intensity(64, 64, 64, 2) / ridge == pytest.approx(0.139, abs=5e-4)


def test_tiles_and_waves_have_the_published_shares() -> None:
    tiles, useful = tile_quantisation(256, 257)
    assert tiles == 6
    assert useful == pytest.approx(0.669, abs=5e-4)
    assert wave_quantisation(12, 8) == 0.75
    assert wave_quantisation(8, 8) == 1.0


def test_gpt2s_vocabulary_is_named_as_the_misaligned_dimension() -> None:
    logits = alignment(Gemm(1, 8192, 50257, 768, "float16", "float16"))
    assert logits.granule == 8
    assert logits.misaligned == ("n",)
    assert logits.padded == (8192, 50264, 768)
    assert logits.padded_share == pytest.approx(7 / 50264)
    assert alignment(Gemm(1, 4, 4, 4, "float32", "float32")).misaligned == ()
    assert alignment(Gemm(1, 8, 8, 8, "float8_e4m3fn", "bfloat16")).misaligned == ("m", "n", "k")


@pytest.mark.parametrize("bad", [(0, 1, 1, 2), (1, -1, 1, 2), (1, 1, 1, 0)])
def test_impossible_sizes_are_refused(bad: tuple[int, int, int, int]) -> None:
    with pytest.raises(UsageError):
        ideal_intensity(*bad)
    with pytest.raises(UsageError, match="sm_count is 0"):
        wave_quantisation(3, 0)


def test_a_frozen_base_has_no_weight_gradient() -> None:
    def flops(train_base: bool) -> int:
        with torch.device("meta"):
            base, down, up = (
                torch.nn.Linear(64, 64, False),
                torch.nn.Linear(64, 4, False),
                torch.nn.Linear(4, 64, False),
            )
            base.requires_grad_(train_base)
            x = torch.empty(8, 64, requires_grad=True)
        run = calls_of(lambda: (base(x) + up(down(x))).sum().backward())
        return sum(cost(one).matmul_flops for one in run)

    weight_gradient = 2 * 8 * 64 * 64
    assert flops(True) - flops(False) == weight_gradient
    adapters = 3 * 2 * (2 * 8 * 64 * 4)
    assert flops(False) == 2 * weight_gradient + adapters
