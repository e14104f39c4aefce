"""Roofs, ridges and bounds on machines whose answers are known by hand."""

import subprocess
import sys
import time

import pytest

from rooftile import devices, roofline
from rooftile.capture.trace import Call, Op, TensorMeta, Trace
from rooftile.costs.record import Cost
from rooftile.devices import Device, Peak, Provenance
from rooftile.errors import UnitError, UsageError


def machine(bandwidth=2e12, **peaks):
    return Device(
        name="synthetic",
        title="synthetic",
        vendor="nobody",
        device_class="cuda",
        peaks=tuple(Peak(dtype, "float32", rate, "by hand") for dtype, rate in peaks.items()),
        memory_bandwidth=bandwidth,
        nominal_bytes=10**10,
        visible_bytes=10**10,
        visible_evidence="declared",
        provenance=Provenance("by hand", "by hand", "by hand"),
    )


def gemm(n=1024, dtype="bfloat16", itemsize=2):
    flops = 2 * n**3
    return Cost("matmul", flops, 2 * n * n * itemsize, n * n * itemsize, flops, roof="matmul", roof_dtype=dtype)


def add(n=1000):
    return Cost("elementwise", n, 2 * n * 4, n * 4)


def call(operator, *shape):
    meta = TensorMeta(shape or (1,), (1,) * len(shape or (1,)), "bfloat16")
    return Call(operator, (meta,), (), (meta,))


def test_the_machine_of_100_tflops_and_2_tb_has_its_ridge_at_50():
    assert roofline.ridge(machine(bfloat16=100e12), "bfloat16") == 50


@pytest.mark.parametrize(("intensity", "tflops"), [(0.25, 0.5), (8, 16), (50, 100), (80, 100), (0, 0)])
def test_attainable_is_the_lower_of_the_two_roofs(intensity, tflops):
    assert roofline.attainable(intensity, 100e12, 2e12) == tflops * 1e12


def test_the_machine_of_60_and_120_tflops_has_ridges_at_40_and_80():
    assert roofline.ridges(machine(1.5e12, float32=60e12, float16=120e12)) == {"float32": 40, "float16": 80}


def test_the_a100_ridge_is_153():
    device = devices.load("a100-sxm-80gb")
    assert round(roofline.ridge(device, "float16"), 1) == 153.0
    assert roofline.ridge(device, "float32", tf32=True) == 156e12 / 2039e9
    # A square fp16 product of n = 64 has 21.3 FLOP/B, so at most 13.9 % of the peak.
    reached = roofline.attainable(64 / 3, 312e12, device.memory_bandwidth)
    assert round(100 * reached / 312e12, 1) == 13.9


@pytest.mark.parametrize("arguments", [(-1, 1, 1), (1, 0, 1), (1, 1, 0), (float("nan"), 1, 1)])
def test_attainable_refuses_what_is_no_machine(arguments):
    with pytest.raises(UsageError, match="has to be 0 or more"):
        roofline.attainable(*arguments)


def test_a_product_above_the_ridge_is_bound_by_arithmetic():
    bound = roofline.bound_of(gemm(1024), machine(bfloat16=100e12))  # 341 FLOP/B against a ridge of 50
    assert bound.limit == "compute"
    assert bound.seconds == bound.compute_seconds == 2 * 1024**3 / 100e12
    assert bound.memory_seconds == 3 * 2 * 1024**2 / 2e12
    assert bound.roof.input == "bfloat16"


def test_a_product_below_the_ridge_is_bound_by_bytes():
    bound = roofline.bound_of(gemm(128), machine(bfloat16=100e12))  # 42.7 FLOP/B
    assert bound.limit == "memory"
    assert bound.seconds == bound.memory_seconds == 3 * 2 * 128**2 / 2e12


def test_fp32_products_take_the_fp32_roof_unless_tf32_is_allowed():
    device = devices.load("a100-sxm-80gb")
    cost = gemm(4096, "float32", 4)
    assert roofline.bound_of(cost, device).compute_seconds == cost.flops / 19.5e12
    assert roofline.bound_of(cost, device, allow_tf32=True).compute_seconds == cost.flops / 156e12


def test_elementwise_work_stands_under_the_fp32_vector_roof():
    bound = roofline.bound_of(add(1000), machine(1e15, float32=1e9, bfloat16=1e15))
    assert (bound.limit, bound.seconds) == ("compute", 1e-6)


def test_the_two_units_work_side_by_side_so_the_slower_one_counts():
    device = machine(1e15, float32=1e12, bfloat16=100e12)
    attention = Cost("attention", 1_100, 0, 0, 1_000, roof="matmul", roof_dtype="bfloat16")
    assert roofline.bound_of(attention, device).compute_seconds == 100 / 1e12
    light = Cost("attention", 1_001, 0, 0, 1_000, roof="matmul", roof_dtype="bfloat16")
    assert roofline.bound_of(light, device).compute_seconds == 1_000 / 100e12


def test_a_view_takes_no_time():
    bound = roofline.bound_of(Cost("view", 0, 0, 0, zero_reason="view"), machine(float32=1e12))
    assert (bound.seconds, bound.limit, bound.roof) == (0, "memory", None)


def test_a_16_bit_product_on_a_device_without_it_is_an_error_that_names_the_device():
    with pytest.raises(UsageError, match="v100-sxm2-16gb has no peak for bfloat16"):
        roofline.bound_of(gemm(), devices.load("v100-sxm2-16gb"))


def test_an_unpublished_peak_is_unknown_and_never_zero():
    tpu = devices.load("tpu-v5e")
    bound = roofline.bound_of(add(), tpu)
    assert bound.compute_seconds is None
    assert bound.seconds == bound.memory_seconds > 0
    assert roofline.bound_of(gemm(64, "float64", 8), devices.load("h100-sxm")).compute_seconds is None


def test_a_rate_above_its_roof_is_an_error_not_a_number():
    device = devices.load("h100-sxm")
    assert roofline.check_rate(989.4e12, 1, device, "bfloat16") == 989.4e12
    with pytest.raises(UnitError, match=r"1,000\.0 TFLOP/s of bfloat16 is above the roof of h100-sxm, 989\.4 TFLOP/s"):
        roofline.check_rate(1000e12, 1, device, "bfloat16")
    assert roofline.check_rate(1000e12, 1, device, "float8_e4m3fn") == 1000e12
    with pytest.raises(UnitError, match="is no rate"):
        roofline.check_rate(1, 0, device, "bfloat16")
    with pytest.raises(UnitError, match=r"4,000\.0 GB/s is above the memory bandwidth of h100-sxm, 3,350\.0 GB/s"):
        roofline.check_bandwidth(4e12, 1, device)
    assert roofline.check_bandwidth(3.35e12, 1, device) == 3.35e12


def layered_trace(layers=4):
    """Per layer a product bound by arithmetic and an addition bound by bytes, then an operator nobody knows."""
    product, addition, custom = call("aten.mm.default", 1024), call("aten.add.Tensor", 1000), call("mylib.foo.default")
    ops, costs = [], []
    for i in range(layers):
        ops += [
            Op(product, f"blocks.{i}.mlp", "forward", (0,), (1,)),
            Op(addition, f"blocks.{i}", "forward", (1,), (2,)),
        ]
        costs += [gemm(1024), add(1000)]
    ops.append(Op(custom, "head", "forward", (2,), (3,)))
    return Trace(tuple(ops), ()), [*costs, None]


def test_the_summary_sums_per_op_bounds_and_groups_repeated_layers():
    device = machine(float32=10e12, bfloat16=100e12)
    trace, costs = layered_trace()
    result = roofline.summary(trace, costs, device)
    product, addition = roofline.bound_of(gemm(1024), device), roofline.bound_of(add(1000), device)
    assert result.bound_s == pytest.approx(4 * (product.seconds + addition.seconds), rel=1e-12)
    assert result.flops == 4 * (2 * 1024**3 + 1000)
    assert result.bytes == 4 * (6 * 1024**2 + 12_000)
    assert result.intensity == result.flops / result.bytes
    assert [(row.family, row.ops, row.limit) for row in result.families] == [
        ("matmul", 4, "compute"),
        ("elementwise", 4, "memory"),
    ]
    assert [(row.module, row.count, row.roof) for row in result.heaviest] == [
        ("blocks.*.mlp", 4, "bfloat16"),
        ("blocks.*", 4, "memory"),
    ]
    assert result.heaviest[0].operator == "aten.mm.default"
    assert result.heaviest[0].intensity == pytest.approx(1024 / 3)
    assert result.limit == "compute"
    assert result.ridge == {"float32": 5, "bfloat16": 50}


def test_an_operator_without_a_formula_makes_the_sum_a_lower_bound_and_is_named():
    device = machine(float32=10e12, bfloat16=100e12)
    trace, costs = layered_trace()
    assert roofline.summary(trace, costs, device).unknown_ops == ("mylib.foo.default",)
    assert roofline.summary(trace, costs, device).lower_bound
    complete = Trace(trace.ops[:-1], ())
    assert not roofline.summary(complete, costs[:-1], device).lower_bound


def test_an_unpublished_roof_makes_the_sum_a_lower_bound_and_is_named():
    trace, costs = layered_trace()
    complete = Trace(trace.ops[:-1], ())
    result = roofline.summary(complete, costs[:-1], devices.load("tpu-v5e"))
    assert result.unknown_roofs == ("fp32 vector arithmetic",)
    assert result.lower_bound


def test_another_schedule_replaces_the_bytes():
    device = machine(float32=10e12, bfloat16=100e12)
    trace, costs = layered_trace(2)
    result = roofline.summary(trace, costs, device, op_bytes=[10, 0, 10, 4_000, 0], schedule="fused")
    assert result.bytes == 4_020
    assert result.schedule == "fused"
    assert result.heaviest[1].bytes == 4_000
    assert result.heaviest[1].count == 2
    with pytest.raises(UsageError, match="5 ops, 5 costs and 2 byte counts"):
        roofline.summary(trace, costs, device, op_bytes=[1, 2])
    with pytest.raises(UsageError, match="5 ops, 1 costs"):
        roofline.summary(trace, costs[:1], device)


def test_only_the_ten_heaviest_are_kept_in_order():
    device = machine(float32=10e12)
    ops = [Op(call("aten.add.Tensor", n), f"m{n}", "forward", (0,), (1,)) for n in range(1, 15)]
    result = roofline.summary(Trace(tuple(ops), ()), [add(n) for n in range(1, 15)], device)
    assert [row.module for row in result.heaviest] == [f"m{n}" for n in range(14, 4, -1)]


def test_an_empty_trace_has_no_bound():
    result = roofline.summary(Trace((), ()), (), devices.load("h100-sxm"))
    assert (result.bound_s, result.flops, result.intensity, result.families) == (0, 0, None, ())


def test_fifty_thousand_ops_are_placed_in_half_a_second():
    trace, costs = layered_trace(25_000)
    start = time.perf_counter()
    roofline.summary(trace, costs, machine(float32=10e12, bfloat16=100e12))
    assert time.perf_counter() - start < 0.5


def test_roofline_and_closed_forms_need_no_torch():
    code = (
        "import sys; import rooftile.roofline, rooftile.ledgers.closed_forms, rooftile.ledgers.communication;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
