"""An audit under FP8: bytes by the closed forms of the recipe, the tensor-core roof, and the layers that are kept."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rooftile
from rooftile.capture.trace import Call, TensorMeta
from rooftile.cli.main import run
from rooftile.costs import cost_of
from rooftile.errors import UsageError
from rooftile.report import Report

ROWS, WIDTH = 128, 768
#: GPT-2's linear layers in a block, (out, in).
LINEARS = ((3 * WIDTH, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH))


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    return {
        precision: rooftile.audit("gpt2", device="h100-sxm", seq=ROWS, precision=precision)
        for precision in ("bf16-mixed", "fp8-block", "fp8-tensor")
    }


def up(size: int, by: int) -> int:
    return -(-size // by)


def test_codes_and_scales_by_role_are_the_recipes_closed_form(reports: dict[str, Report]) -> None:
    scaled = {each.role: each for each in reports["fp8-block"].precision.scaled}
    # X is quantised along K and, from its codes, along the tokens; dY along N and along the tokens; W once.
    assert scaled["input"].code_bytes == 12 * sum(2 * ROWS * k for _, k in LINEARS)
    assert scaled["gradient"].code_bytes == 12 * sum(2 * ROWS * n for n, _ in LINEARS)
    assert scaled["weight"].code_bytes == 12 * sum(n * k for n, k in LINEARS)
    assert scaled["input"].scale_bytes == 12 * sum(4 * (ROWS * up(k, 128) + k * up(ROWS, 128)) for _, k in LINEARS)
    assert scaled["weight"].scale_bytes == 12 * sum(4 * up(n, 128) * up(k, 128) for n, k in LINEARS)
    assert [each.count for each in scaled.values()] == [96, 48, 96]
    assert {each.format for each in scaled.values()} == {"fp8_e4m3fn"}


def test_one_scale_a_tensor_quantises_each_operand_once_and_gradients_in_e5m2(reports: dict[str, Report]) -> None:
    scaled = {each.role: each for each in reports["fp8-tensor"].precision.scaled}
    assert {role: (each.format, each.block, each.count) for role, each in scaled.items()} == {
        "input": ("fp8_e4m3fn", "tensor", 48),
        "weight": ("fp8_e4m3fn", "tensor", 48),
        "gradient": ("fp8_e5m2", "tensor", 48),
    }
    assert all(each.scale_bytes == 4 * 48 for each in scaled.values())


@pytest.mark.parametrize("precision", ["fp8-block", "fp8-tensor"])
def test_the_products_stand_under_the_fp8_roof_and_are_as_many_as_before(
    precision: str, reports: dict[str, Report]
) -> None:
    report, before = reports[precision], reports["bf16-mixed"]
    assert report.flops.matmul == before.flops.matmul
    assert report.coverage.ops == 1.0
    products = [f for f in report.precision.families if f.family == "matmul" and "float8" in f.storage.value]
    assert products
    assert all((f.product.value, f.accumulate.value) == ("exact", "float32") for f in products)
    assert any("lm_head" in note for note in report.trace.notes)
    assert {role.role: dict(role.dtypes) for role in report.precision.roles}["parameter"].keys() == {"float32"}


def test_the_saved_input_is_one_byte_a_value(reports: dict[str, Report]) -> None:
    def activations(name: str, dtype: str) -> int:
        role = next(r for r in reports[name].precision.roles if r.role == "activation")
        return int(role.dtypes.get(dtype, 0))

    assert activations("fp8-block", "float8_e4m3fn") == 12 * sum(ROWS * k + n * k for n, k in LINEARS)
    assert activations("fp8-block", "bfloat16") < activations("bf16-mixed", "bfloat16")


def meta(shape: tuple[int, int], dtype: str, stride: tuple[int, int] | None = None) -> TensorMeta:
    return TensorMeta(shape, stride or (shape[1], 1), dtype)


def product(b_stride: tuple[int, int] | None = None, block: tuple[int, int] = (1, 128)) -> Call:
    m, n, k = 256, 512, 1024
    a, b = meta((m, k), "float8_e4m3fn"), meta((n, k), "float8_e4m3fn", b_stride)
    scales = meta((m, 8), "float32"), meta((4, 8), "float32")
    arguments = (
        a,
        scales[0],
        block,
        "fp8_e4m3fn",
        b,
        scales[1],
        (block[0] and 128, block[1]),
        "fp8_e4m3fn",
        "bfloat16",
    )
    return Call("rooftile.scaled_mm.default", arguments, (), (meta((m, n), "bfloat16"),))


def test_a_scaled_product_costs_2mnk_its_scales_and_a_copy_of_what_lies_across() -> None:
    m, n, k = 256, 512, 1024
    cost = cost_of(product())
    assert cost is not None
    assert (cost.roof, cost.roof_dtype, cost.matmul_flops) == ("matmul", "float8_e4m3fn", 2 * m * n * k)
    assert cost.flops - cost.matmul_flops == 2 * 8 * m * n  # eight partial sums of 128 terms: scaled, added
    assert cost.bytes == m * k + n * k + 4 * (m * 8 + 4 * 8) + 2 * m * n
    across = cost_of(product(b_stride=(1, n)))
    assert across is not None
    assert across.bytes - cost.bytes == 2 * n * k
    whole = cost_of(product(block=(0, 0)))
    assert whole is not None
    assert whole.flops - whole.matmul_flops == m * n


@pytest.mark.parametrize("precision", ["fp8-block", "fp8-tensor"])
def test_live_and_without_data_give_the_same_ops_and_the_same_peak(precision: str) -> None:
    model = nn.Sequential(nn.Linear(200, 300), nn.GELU(), nn.Linear(300, 200))

    def step() -> rooftile.Step:
        return rooftile.Step(model, (torch.randn(4, 50, 200),), loss=lambda y: y.square().mean())

    dry, live = (rooftile.audit(step(), device="h100-sxm", precision=precision, live=on) for on in (False, True))
    assert [op.operator for op in dry.trace.ops] == [op.operator for op in live.trace.ops]
    assert dry.memory.peak_bytes == live.memory.peak_bytes
    assert dry.precision.scaled == live.precision.scaled


def test_a_device_without_fp8_is_refused_before_the_work() -> None:
    with pytest.raises(UsageError, match="has no float8_e4m3fn"):
        rooftile.audit("gpt2", device="a100-sxm-80gb", precision="fp8-block")


def test_the_command_prints_the_scaled_operands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["audit", "gpt2", "--device", "h100-sxm", "--seq", "128", "--precision", "fp8-block"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "fp8-block (declared)" in out
    assert "scaled operands input e4m3fn 1x128 x 96" in out
    assert "weight e4m3fn 128x128 x 48" in out
