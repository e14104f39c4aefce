"""Unknown operators, custom formulas, memory and speed."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch
from costs_recorder import Recorder, call, meta

from rooftile.capture.trace import Call, Op, Trace
from rooftile.costs import Cost, cost_of, known_operators, register_cost, registry, trace_costs
from rooftile.errors import UsageError

X = meta((4, 8))


@pytest.fixture(autouse=True)
def _no_custom_formula_survives_a_test() -> Iterator[None]:
    before = dict(registry._CUSTOM)
    yield
    registry._CUSTOM.clear()
    registry._CUSTOM.update(before)
    cost_of.cache_clear()


def simple(call: Call) -> Cost:
    return Cost("custom", flops=call.inputs[0].numel, bytes_read=1, bytes_written=1)


def test_an_operator_without_a_formula_has_no_cost_instead_of_a_zero_cost() -> None:
    assert cost_of(call("mylib.foo.default", X, outputs=(X,))) is None


def test_an_operand_of_unknown_element_size_makes_the_operator_unknown() -> None:
    odd = meta((4,), "bits16")
    assert cost_of(call("aten.relu.default", odd, outputs=(odd,))) is None


@pytest.mark.parametrize("spelling", ["mylib::foo", "mylib.foo", "mylib::foo.default", "mylib.foo.default"])
def test_a_custom_operator_is_counted_once_a_formula_is_registered(spelling: str) -> None:
    one = call("mylib.foo.default", X, outputs=(X,))
    assert cost_of(one) is None
    register_cost(spelling)(simple)
    assert cost_of(one) == Cost("custom", 32, 1, 1)


def test_a_formula_for_one_overload_leaves_the_others_unknown() -> None:
    register_cost("mylib::foo.Tensor")(simple)
    assert cost_of(call("mylib.foo.Tensor", X)) is not None
    assert cost_of(call("mylib.foo.Scalar", X)) is None


def test_torch_operators_and_custom_op_objects_name_themselves() -> None:
    @torch.library.custom_op("rooftile_costs_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    for op in (twice, torch.ops.rooftile_costs_test.twice, torch.ops.rooftile_costs_test.twice.default):
        register_cost(op, override=True)(simple)
    with Recorder() as recorder:
        twice(torch.zeros(3))
    costs = trace_costs(recorder.trace())
    assert Cost("custom", 3, 1, 1) in costs


def test_a_known_operator_is_replaced_only_when_override_says_so() -> None:
    with pytest.raises(UsageError, match=r"aten\.mm already has a cost formula; pass override=True"):
        register_cost("aten::mm")(simple)
    register_cost("mylib::foo")(simple)
    with pytest.raises(UsageError, match="override=True"):
        register_cost("mylib.foo.default")(simple)
    register_cost("aten::mm", override=True)(simple)
    cost = cost_of(call("aten.mm.default", meta((2, 3)), meta((3, 4)), outputs=(meta((2, 4)),)))
    assert cost is not None
    assert cost.family == "custom"


@pytest.mark.parametrize("name", ["foo", "", "a::b::c::d", "my lib::foo", 3, None])
def test_a_name_that_is_no_operator_is_refused_in_one_sentence(name: object) -> None:
    with pytest.raises(UsageError, match="names no operator"):
        register_cost(name)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "returned NoneType"),
        (17, "returned int 17"),
        (Cost("custom", -1, 0, 0), "flops = -1"),
        (Cost("custom", 1, -5, 0), "bytes_read = -5"),
        (Cost("custom", 1.5, 0, 0), "flops = 1.5"),  # type: ignore[arg-type]
        (Cost("custom", 1, 0, 0, matmul_flops=2), "above flops"),
        (Cost("custom", 0, 0, 0), "without a reason"),
        (Cost("nonsense", 1, 0, 0), "family 'nonsense'"),  # type: ignore[arg-type]
    ],
)
def test_a_formula_that_returns_something_impossible_is_named_in_one_sentence(returned: object, words: str) -> None:
    register_cost("mylib::foo")(lambda call: returned)  # type: ignore[arg-type,return-value]
    with pytest.raises(UsageError, match=words) as caught:
        cost_of(call("mylib.foo.default", X))
    assert "mylib.foo.default" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_formula_that_raises_is_named_with_its_error() -> None:
    register_cost("mylib::foo")(lambda call: call.inputs[7])  # type: ignore[arg-type,return-value]
    with pytest.raises(UsageError, match=r"mylib\.foo\.default raised IndexError"):
        cost_of(call("mylib.foo.default", X))


def test_an_empty_tensor_costs_nothing_and_says_so() -> None:
    empty = meta((0, 8))
    cost = cost_of(call("aten.relu.default", empty, outputs=(empty,)))
    assert cost == Cost("elementwise", 0, 0, 0, zero_reason="empty", elementwise=True)


def test_every_operator_that_never_computes_gives_its_reason() -> None:
    reasons = registry.zero_flop_operators()
    allowed = {
        "view", "copy", "fill", "allocation", "random", "lookup", "gather", "ordering", "host", "communication", "wait",
    }  # fmt: skip
    assert set(reasons.values()) <= allowed
    assert reasons["aten.view"] == "view"
    assert reasons["aten.embedding"] == "lookup"
    assert reasons["_c10d_functional.all_reduce"] == "communication"
    assert set(reasons) <= known_operators()


def test_ten_thousand_ops_are_costed_in_under_fifty_milliseconds() -> None:
    calls = [call("aten.mm.default", meta((n, 64)), meta((64, n)), outputs=(meta((n, n)),)) for n in range(1, 301)]
    trace = Trace(tuple(Op(calls[i % 300], "", "forward", (0, 1), (2,)) for i in range(10_000)), ())
    trace_costs(trace)
    best = min(_seconds(trace) for _ in range(3))
    assert best < 0.05


def _seconds(trace: Trace) -> float:
    cost_of.cache_clear()
    start = time.perf_counter()
    assert len(trace_costs(trace)) == 10_000
    return time.perf_counter() - start


def test_costs_are_read_without_torch() -> None:
    code = "import sys, rooftile.costs, rooftile.costs.fusion, rooftile.costs.flops, rooftile.costs.attention_traffic"
    subprocess.run([sys.executable, "-c", code + "; assert 'torch' not in sys.modules"], check=True)
