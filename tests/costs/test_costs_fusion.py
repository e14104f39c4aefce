"""Fusion groups: what they save, what must still be written, and that they can run as one kernel."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from costs_recorder import Recorder, record
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftile.capture.trace import Trace
from rooftile.costs import trace_costs
from rooftile.costs.fusion import Fusion, fuse, fused_bytes
from rooftile.costs.operands import mutated_positions, read_positions

N = 1000
SIZE = 4 * N


def fusion_of(function: Callable[[], Any]) -> tuple[Trace, Fusion]:
    trace = record(function)
    return trace, fuse(trace, trace_costs(trace))


def x(count: int = N, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(count, dtype=dtype, device="meta")


def names(trace: Trace, ops: Sequence[int]) -> list[str]:
    return [trace.ops[index].operator.split(".")[1] for index in ops]


def keep(result: torch.Tensor, kept: list[torch.Tensor]) -> None:
    """A result that outlives the step."""
    kept.append(result)


def test_five_elementwise_ops_on_1e8_bf16_move_0_4_gb_instead_of_2() -> None:
    kept: list[torch.Tensor] = []
    source = x(10**8, torch.bfloat16)
    trace, fusion = fusion_of(lambda: keep(source.exp().neg().sin().tanh().abs(), kept))
    assert sum(cost.bytes for cost in trace_costs(trace) if cost) == 2_000_000_000
    assert fused_bytes(trace, trace_costs(trace)) == 400_000_000
    (group,) = fusion.groups
    assert group == ((0, 1, 2, 3, 4), 2_000_000_000, 400_000_000)


@pytest.mark.parametrize("length", [1, 2, 3, 10])
def test_k_operators_on_n_bytes_move_2n_instead_of_2kn(length: int) -> None:
    def chain() -> torch.Tensor:
        y = source
        for _ in range(length):
            y = y.exp()
        return y

    kept: list[torch.Tensor] = []
    source = x()
    trace, fusion = fusion_of(lambda: keep(chain(), kept))
    assert sum(cost.bytes for cost in trace_costs(trace) if cost) == 2 * length * SIZE
    assert sum(fusion.op_bytes) == 2 * SIZE


def test_an_intermediate_that_a_later_matrix_product_reads_is_still_written() -> None:
    a, weight = torch.empty(100, 10, device="meta"), torch.empty(10, 10, device="meta")

    def step() -> torch.Tensor:
        saved = a.exp()
        result = saved.neg()
        return saved @ weight + result @ weight

    trace, fusion = fusion_of(step)
    group = fusion.groups[0]
    assert names(trace, group.ops) == ["exp", "neg"]
    assert group.bytes_fused == 3 * SIZE  # a read, saved and result written


def test_a_matrix_product_between_two_members_keeps_them_apart() -> None:
    a, weight = torch.empty(100, 10, device="meta"), torch.empty(10, 10, device="meta")

    def residual() -> torch.Tensor:
        start = a.exp()
        return start + start @ weight  # start and the addition can't be one kernel: the product lies between

    _, fusion = fusion_of(residual)
    assert fusion.groups == ()


def test_a_chain_that_goes_around_a_matrix_product_is_still_found() -> None:
    a, gate, up = (torch.empty(10, 10, device="meta") for _ in range(3))

    def gated() -> torch.Tensor:
        return torch.nn.functional.silu(a @ gate) * (a @ up)

    trace, fusion = fusion_of(gated)
    (group,) = fusion.groups
    assert names(trace, group.ops) == ["silu", "mul"]


def test_casts_and_copies_take_part_with_their_own_widths() -> None:
    kept: list[torch.Tensor] = []
    source = x(dtype=torch.bfloat16)
    _, fusion = fusion_of(lambda: keep(source.float().exp().bfloat16(), kept))
    (group,) = fusion.groups
    assert len(group.ops) == 3
    assert group.bytes_fused == 2 * 2 * N


def test_in_place_chains_write_their_storage_once() -> None:
    weight, grad = x(), x()

    def update() -> None:
        weight.mul_(0.9).add_(grad).clamp_(-1, 1)

    trace, fusion = fusion_of(update)
    (group,) = fusion.groups
    assert group.bytes_unfused == (2 + 3 + 2) * SIZE
    assert group.bytes_fused == 3 * SIZE
    assert trace.storages[0].died is None


def test_a_weight_read_and_then_updated_in_place_is_one_kernel() -> None:
    weight, grad = x(), x()

    def update() -> None:
        decayed = grad.add(weight, alpha=0.1)
        weight.sub_(decayed.mul_(0.5))

    trace, fusion = fusion_of(update)
    (group,) = fusion.groups
    assert names(trace, group.ops) == ["add", "mul_", "sub_"]
    assert group.bytes_fused == 3 * SIZE


def test_two_halves_of_one_storage_are_both_read() -> None:
    kept: list[torch.Tensor] = []
    source = torch.empty(100, 20, device="meta")
    gate, value = source[:, :10], source[:, 10:]
    _, fusion = fusion_of(lambda: keep(gate.sigmoid() * value, kept))
    (group,) = fusion.groups
    assert group.bytes_fused == 3 * SIZE


def test_a_broadcast_operand_is_no_chain() -> None:
    row, matrix = torch.empty(10, device="meta"), torch.empty(100, 10, device="meta")
    _, fusion = fusion_of(lambda: row.exp() * matrix)
    assert fusion.groups == ()


def test_shared_inputs_are_read_once_by_a_group() -> None:
    kept: list[torch.Tensor] = []
    source = x()
    _, fusion = fusion_of(lambda: keep(source * source.exp() + source, kept))
    (group,) = fusion.groups
    assert group.bytes_unfused == (2 + 3 + 3) * SIZE
    assert group.bytes_fused == 2 * SIZE


def test_kernels_do_not_reach_across_phases() -> None:
    source = x()
    with Recorder() as recorder:
        y = source.exp()
        recorder.phase = "backward"
        y.neg()
    trace = recorder.trace()
    assert fuse(trace, trace_costs(trace)).groups == ()


def training_step(foreach: bool) -> Trace:
    """A small transformer-like step: norms, gated products, residuals, dropout, cross entropy, AdamW."""
    with torch.device("meta"):
        embed, head = torch.nn.Embedding(101, 32), torch.nn.Linear(32, 101)
        linear = torch.nn.Linear
        blocks = [(torch.nn.LayerNorm(32), linear(32, 64), linear(32, 64), linear(64, 32)) for _ in range(3)]
        parameters = [p for part in (embed, head, *(m for block in blocks for m in block)) for p in part.parameters()]
        optimizer = torch.optim.AdamW(parameters, foreach=foreach)
        tokens = torch.empty(4, 16, dtype=torch.long)
        for _ in range(2):
            with Recorder() as recorder:
                h = embed(tokens)
                for norm, gate, up, down in blocks:
                    z = norm(h)
                    h = h + torch.nn.functional.dropout(down(torch.nn.functional.silu(gate(z)) * up(z)), 0.1)
                loss = torch.nn.functional.cross_entropy(head(h).flatten(0, 1), tokens.flatten())
                recorder.phase = "backward"
                loss.backward()
                recorder.phase = "optimizer"
                optimizer.step()
    return recorder.trace()


@pytest.mark.parametrize("foreach", [True, False])
def test_fusion_never_moves_more_and_saves_in_a_training_step(foreach: bool) -> None:
    trace = training_step(foreach)
    costs = trace_costs(trace)
    assert None not in costs
    fusion = fuse(trace, costs)
    unfused = [cost.bytes for cost in costs if cost]
    assert sum(fusion.op_bytes) < 0.8 * sum(unfused)
    grouped = {index for group in fusion.groups for index in group.ops}
    for index, moved in enumerate(fusion.op_bytes):
        if index not in grouped:
            assert moved == unfused[index]
    for group in fusion.groups:
        assert 0 <= group.bytes_fused <= group.bytes_unfused
        assert group.bytes_fused == sum(fusion.op_bytes[index] for index in group.ops)


@pytest.mark.parametrize("foreach", [True, False])
def test_every_group_of_a_training_step_can_run_as_one_kernel(foreach: bool) -> None:
    _assert_runs_as_kernels(training_step(foreach))


def test_an_elementwise_operator_of_another_layout_keeps_its_neighbours_apart() -> None:
    kept: list[torch.Tensor] = []
    a = torch.empty(10, 10, device="meta")

    def through_a_transpose() -> torch.Tensor:
        start = a.exp()
        return start + start.t().neg().t().contiguous()  # element (i, j) needs element (j, i)

    trace, _ = fusion_of(lambda: keep(through_a_transpose(), kept))
    _assert_runs_as_kernels(trace)


STEPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "exp": lambda a, b: a.exp(),
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "mm": lambda a, b: a @ b,
    "transposed": lambda a, b: a.t() + b,
    "add_": lambda a, b: a.add_(b),
    "copy_": lambda a, b: a.copy_(b),
    "row_": lambda a, b: a[0].mul_(2),
    "half_": lambda a, b: a[:5].add_(b[5:]),
    "sum": lambda a, b: a + b.sum(),
    "cast": lambda a, b: a.half().float(),
}


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=25)
)
def test_the_groups_of_any_program_can_run_as_kernels_and_never_move_more(program: list[tuple[str, int, int]]) -> None:
    live = [torch.empty(10, 10, device="meta") for _ in range(3)]

    def run() -> None:
        for name, i, j in program:
            result = STEPS[name](live[i % len(live)], live[j % len(live)])
            if result.shape == (10, 10):
                live.append(result)
                del live[:-6]

    trace = record(run)
    costs = trace_costs(trace)
    fusion = fuse(trace, costs)
    assert all(group.bytes_fused <= group.bytes_unfused for group in fusion.groups)
    _assert_runs_as_kernels(trace)


def _assert_runs_as_kernels(trace: Trace) -> None:
    """Contract every group to one node: the dependencies of the step must stay free of cycles."""
    costs = trace_costs(trace)
    node = list(range(len(trace.ops)))
    for group in fuse(trace, costs).groups:
        for index in group.ops:
            node[index] = group.ops[0]
    edges: dict[int, set[int]] = {}
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for index, (op, cost) in enumerate(zip(trace.ops, costs, strict=True)):
        if cost and cost.family == "view":
            continue
        read = {op.inputs[at] for at in read_positions(op.call)}
        wrote = {op.inputs[at] for at in mutated_positions(op.call)} | set(op.outputs)
        for storage in read | wrote:
            if storage in writer:
                edges.setdefault(node[writer[storage]], set()).add(node[index])
        for storage in wrote:
            for reader in readers.pop(storage, []):
                edges.setdefault(node[reader], set()).add(node[index])
            writer[storage] = index
        for storage in read:
            readers.setdefault(storage, []).append(index)
    _assert_acyclic({a: {b for b in bs if b != a} for a, bs in edges.items()})


def _assert_acyclic(edges: dict[int, set[int]]) -> None:
    incoming: dict[int, int] = {}
    for targets in edges.values():
        for target in targets:
            incoming[target] = incoming.get(target, 0) + 1
    free = [n for n in edges if not incoming.get(n)]
    removed = 0
    while free:
        removed += 1
        for target in edges.get(free.pop(), ()):
            incoming[target] -= 1
            if not incoming[target]:
                free.append(target)
    assert removed == len(set(edges) | set(incoming))


def test_fifty_thousand_ops_are_fused_in_under_0_3_seconds() -> None:
    trace = training_step(True)
    long = Trace(trace.ops * (50_000 // len(trace.ops) + 1), trace.storages)
    costs = trace_costs(long)

    def seconds() -> float:
        start = time.process_time()  # of this process alone: the machine may be busy with others
        fuse(long, costs)
        return time.process_time() - start

    assert min(seconds() for _ in range(5)) < 0.3


def test_a_list_of_a_thousand_tensors_is_fused_in_linear_time() -> None:
    def update(count: int) -> tuple[Trace, float]:
        lists = [[torch.empty(4, device="meta") for _ in range(count)] for _ in range(3)]

        def step() -> None:
            for _ in range(8):
                torch._foreach_mul_(lists[0], 0.5)
                torch._foreach_add_(lists[0], lists[1])
                torch._foreach_addcmul_(lists[2], lists[0], lists[1])

        trace = record(step)
        costs = trace_costs(trace)
        times = []
        for _ in range(5):
            start = time.process_time()
            fuse(trace, costs)
            times.append(time.process_time() - start)
        return trace, min(times)

    (_, short), (trace, long) = update(250), update(2000)
    assert long < 24 * short  # eight times the tensors; quadratic would be sixty-four
    assert fuse(trace, trace_costs(trace)).groups
