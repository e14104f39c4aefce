from __future__ import annotations

import pytest

from rooftile import devices
from rooftile.capture import CaptureOptions, capture, load_target
from rooftile.capture.trace import Trace
from rooftile.costs import trace_costs
from rooftile.costs.fusion import fuse
from rooftile.ledgers.bundle import Ledgers, read_ledgers
from rooftile.ledgers.precision import Slot
from rooftile.ledgers.precision import precision as read_precision


def audited(device: str = "h100-sxm", phase: str = "train", **options: object) -> tuple[Trace, Ledgers]:
    step = load_target("gpt2", batch=1, seq=32, phase=phase)  # type: ignore[arg-type]
    trace = capture(step, devices.load(device), CaptureOptions(**options))  # type: ignore[arg-type]
    costs = trace_costs(trace)
    return trace, read_ledgers(trace, costs, fuse(trace, costs).op_bytes, devices.load(device))


def test_families_and_phases_each_add_up_to_the_bytes_of_the_step() -> None:
    trace, ledgers = audited()
    traffic = ledgers.traffic
    whole = sum(cost.bytes for cost in trace_costs(trace) if cost is not None)
    assert traffic.unfused == whole
    assert sum(row.unfused for row in traffic.by_family) == sum(traffic.by_phase.values()) == whole
    assert sum(row.fused for row in traffic.by_family) == traffic.fused < whole
    assert traffic.fusion_removes == whole - traffic.fused


def test_an_op_without_a_formula_is_counted_as_unknown_and_not_as_zero() -> None:
    trace, _ = audited()
    costs = [
        None if op.operator == "aten.mm.default" else c for op, c in zip(trace.ops, trace_costs(trace), strict=True)
    ]
    ledgers = read_ledgers(trace, costs, [0] * len(costs), devices.load("h100-sxm"))
    assert ledgers.traffic.unknown_ops == sum(op.operator == "aten.mm.default" for op in trace.ops) > 0


def roles(ledgers: Ledgers) -> dict[str, set[str]]:
    return {role.role: set(role.dtypes) for role in ledgers.precision.roles}


def test_mixed_precision_keeps_fp32_states_and_16_bit_copies_of_the_weights() -> None:
    _, ledgers = audited(precision="bf16-mixed")
    dtypes = roles(ledgers)
    for role in ("parameter", "gradient", "optimizer_state"):
        assert dtypes[role] == {"float32"}, role
    assert dtypes["autocast_cache"] == {"bfloat16"}
    assert "bfloat16" in ledgers.precision.autocast.value
    assert ledgers.precision.autocast_source


def test_masters_are_fp32_beside_16_bit_weights() -> None:
    _, ledgers = audited(precision="bf16-master")
    dtypes = roles(ledgers)
    assert (dtypes["parameter"], dtypes["master_weight"]) == ({"bfloat16"}, {"float32"})
    assert ledgers.precision.autocast.value == "none"


def test_a_16_bit_product_accumulated_in_fp32_is_exact_and_an_fp32_one_is_not() -> None:
    for precision, product in (("bf16-mixed", "exact"), ("fp32", "float32")):
        _, ledgers = audited(precision=precision)
        (matmul,) = (f for f in ledgers.precision.families if f.family == "matmul")
        assert matmul.product == Slot(product, "derived")
        assert matmul.accumulate == Slot("float32", "derived")
        assert matmul.storage.evidence == "observed"


def test_what_a_device_does_inside_is_unknown_where_nothing_says_it() -> None:
    _, ledgers = audited(device="tpu-v4", precision="bf16")
    softmax = next(f for f in ledgers.precision.families if f.family == "softmax")
    assert (softmax.accumulate.value, softmax.accumulate.evidence) == ("unknown", "")
    assert "bfloat16" in softmax.storage.value


@pytest.mark.parametrize(
    ("precision", "device", "value"),
    [("fp16-mixed", "v100-sxm2-16gb", "dynamic"), ("bf16-mixed", "h100-sxm", "none"), ("fp32", "h100-sxm", "none")],
)
def test_the_loss_is_scaled_for_fp16_only(precision: str, device: str, value: str) -> None:
    _, ledgers = audited(device, precision=precision)
    assert ledgers.precision.loss_scale.value.startswith(value)


def test_accumulation_names_the_dtype_that_the_sum_is_kept_in() -> None:
    _, one = audited()
    _, four = audited(micro_batches=4)
    assert one.precision.gradient_accumulation.value.startswith("none (1 micro-batch")
    assert four.precision.gradient_accumulation == Slot("float32, in place over 4 micro-batches", "observed")


def test_inference_has_no_gradients_to_accumulate_and_no_loss_to_scale() -> None:
    _, ledgers = audited(phase="prefill")
    assert ledgers.precision.gradient_accumulation.value == "none (no gradients)"
    assert ledgers.precision.loss_scale.value == "none (no backward pass)"


def test_autocast_that_the_model_entered_is_told_and_never_none() -> None:
    trace, _ = audited(precision="as-is")
    entered = [{"dtype": "bfloat16", "device_type": "cuda", "by": "model"}] * 2
    settings = trace.settings | {"autocast_entered": entered, "torch": "2.13.0+cpu"}
    own = read_precision(Trace(trace.ops, trace.storages, settings, trace.notes), trace_costs(trace)).autocast
    assert own == Slot("bfloat16, entered by the model, by the cuda lists of torch 2.13.0", "observed")
    assert read_precision(trace, trace_costs(trace)).autocast == Slot("none", "observed")


def test_the_cache_says_what_the_captured_step_keeps_it_in() -> None:
    _, decoding = audited(phase="decode", precision="bf16")
    assert decoding.kv_cache.captured_dtype == "bfloat16"
    _, training = audited()
    assert training.kv_cache.captured_dtype is None
