from __future__ import annotations

import time
from itertools import pairwise

import pytest
from ledger_traces import nothing, random_trace, storage

from rooftile.capture.trace import Trace
from rooftile.ledgers.memory import downsample, fit, memory
from rooftile.ledgers.modules import module_group


def alive_by_hand(trace: Trace, index: int) -> list:
    """The definition: alive at both ends of its life."""
    return [s for s in trace.storages if s.born <= index and (s.died is None or index <= s.died)]


@pytest.mark.parametrize("seed", range(8))
def test_live_bytes_are_the_sum_of_the_storages_alive_at_each_op(seed: int) -> None:
    trace = random_trace(seed)
    assert memory(trace).live == tuple(
        sum(s.nbytes for s in alive_by_hand(trace, index)) for index in range(len(trace.ops))
    )


@pytest.mark.parametrize("seed", range(8))
def test_roles_and_modules_alive_at_the_peak_add_up_to_the_peak(seed: int) -> None:
    trace = random_trace(seed)
    ledger = memory(trace)
    assert sum(ledger.by_role.values()) == sum(ledger.by_module.values()) == ledger.peak_bytes == max(ledger.live)
    at_peak = alive_by_hand(trace, ledger.peak_at.op)
    assert ledger.by_role["parameter"] == sum(s.nbytes for s in at_peak if s.role == "parameter")


@pytest.mark.parametrize("seed", range(8))
def test_a_phase_peak_is_the_largest_of_its_own_ops(seed: int) -> None:
    trace = random_trace(seed)
    ledger = memory(trace)
    for peak in ledger.phase_peaks:
        own = [n for n, op in zip(ledger.live, trace.ops, strict=True) if op.phase == peak.phase]
        assert peak.peak_bytes == max(own) == ledger.live[peak.op]


def test_a_storage_counts_at_both_ends_of_its_life() -> None:
    trace = Trace(nothing(4), (storage(0, 10, "temporary", 1, 2),))
    assert memory(trace).live == (0, 10, 10, 0)


def test_gradients_freed_and_made_again_count_once_in_the_states() -> None:
    trace = Trace(
        nothing(4),
        (storage(0, 8, "gradient", 0, 1), storage(1, 8, "gradient", 2, 3), storage(2, 5, "parameter", -1, None)),
    )
    states = memory(trace).states
    assert (states.gradients, states.weights, states.total) == (8, 5, 13)


def test_a_step_without_ops_peaks_before_it() -> None:
    ledger = memory(Trace((), (storage(0, 7, "parameter", -1, None),)))
    assert (ledger.peak_bytes, ledger.peak_at.op, str(ledger.peak_at)) == (7, -1, "before the step")
    assert ledger.timeline() == ()


def test_leaving_storages_out_gives_the_ledger_of_the_step_without_them() -> None:
    trace = random_trace(3)
    dropped = {s.id for s in trace.storages if s.role == "temporary"}
    kept = Trace(trace.ops, tuple(s for s in trace.storages if s.id not in dropped))
    assert memory(trace, without=dropped) == memory(kept)


@pytest.mark.parametrize("points", [1, 7, 80, 500])
def test_a_downsampled_timeline_keeps_the_peak_and_every_phase(points: int) -> None:
    phases = ["forward"] * 900 + ["backward"] * 1100 + ["optimizer"] * 5
    live = [(i * 7919) % 1000 for i in range(2005)]
    timeline = downsample(live, phases, points)
    assert max(p.live_bytes for p in timeline) == max(live)
    assert [p.phase for p in timeline] == sorted((p.phase for p in timeline), key=phases.index)
    assert {p.phase for p in timeline} == set(phases)
    assert len(timeline) <= points + 16
    for piece, following in pairwise(timeline):
        assert piece.live_bytes == max(live[piece.first_op : following.first_op])


def test_a_peak_that_only_just_fits_does_and_one_byte_more_does_not() -> None:
    assert fit(100, 100).fits is True
    assert fit(101, 100).fits is False
    assert fit(100, 100, context_bytes=1).fits is False
    assert fit(100, None).fits is None


def test_the_time_grows_with_the_ops_and_storages_and_not_with_their_product() -> None:
    def seconds(ops: int, storages: int) -> float:
        trace = random_trace(0, ops, storages)
        times = []
        for _ in range(3):
            start = time.perf_counter()
            memory(trace)
            times.append(time.perf_counter() - start)
        return min(times)

    # Sixteen times both: linear is 16, a product would be 256.
    assert seconds(48_000, 96_000) < 64 * seconds(3_000, 6_000)


@pytest.mark.parametrize(
    ("path", "group"),
    [
        ("model.layers.3.mlp.up_proj", "model.layers.*.mlp"),
        ("blocks.11", "blocks.*"),
        ("h.0.ln.1", "h.*.ln"),
        ("model.norm", "model.norm"),
        ("lm_head", "lm_head"),
        ("", "(top level)"),
    ],
)
def test_equal_layers_are_one_group(path: str, group: str) -> None:
    assert module_group(path) == group
