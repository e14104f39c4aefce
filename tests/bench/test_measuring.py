"""Contenders take turns, warm, with the collector paused; nobody else's time is taken for theirs."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rooftile.bench import measure, neighbours, paired_ratio, threads_set
from rooftile.errors import UsageError


class Clock:
    """A clock that only moves when a contender takes time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def contender(self, name: str, *seconds: float) -> Callable[[], None]:
        """Takes the given times call by call, the last one for ever."""
        left = list(seconds)

        def run() -> None:
            self.calls.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: made.now)
    return made


def test_every_round_has_every_contender_once_in_an_order_that_shifts(clock: Clock) -> None:
    measure({name: clock.contender(name, 0.1) for name in "abc"}, warm_up=2, repeats=4)
    assert clock.calls[:3] == ["a", "b", "c"], "the first round of warm-up"
    rounds = [clock.calls[i : i + 3] for i in range(3, len(clock.calls), 3)]
    assert len(rounds) == 5
    assert [set(one) for one in rounds] == [{"a", "b", "c"}] * 5
    assert [one[0] for one in rounds] == ["a", "b", "c", "a", "b"]


def test_warm_up_is_dropped(clock: Clock) -> None:
    found = measure({"a": clock.contender("a", 9.0, 8.0, 7.0, 1.0)}, warm_up=3, repeats=5, budget=1e3)
    assert found["a"].samples == pytest.approx([1.0] * 5)
    assert found["a"].warm_up == 3


def test_short_calls_are_made_in_a_row_until_a_sample_lasts_a_millisecond(clock: Clock) -> None:
    found = measure({"short": clock.contender("short", 1e-5), "long": clock.contender("long", 0.5)}, repeats=3)
    assert found["short"].calls * 1e-5 >= 1e-3
    assert found["short"].calls <= 110
    assert found["short"].samples == pytest.approx([1e-5] * 3)
    assert found["long"].calls == 1


def test_a_first_call_that_is_slow_does_not_decide_how_often_a_short_one_is_made(clock: Clock) -> None:
    assert measure({"a": clock.contender("a", 5e-3, 1e-5)}, repeats=3)["a"].calls >= 100


def test_a_slow_contender_gets_fewer_rounds_and_never_less_than_three(clock: Clock) -> None:
    seconds = {"slow": 2.0, "slower": 50.0, "fast": 0.1}
    contenders = {name: clock.contender(name, each) for name, each in seconds.items()}
    found = measure(contenders, warm_up=2, repeats=11, budget=14.0)
    assert {name: len(timing.samples) for name, timing in found.items()} == {"slow": 5, "slower": 3, "fast": 11}


def test_the_collector_is_paused_while_it_counts_and_back_after(clock: Clock) -> None:
    seen = []

    def run() -> None:
        seen.append(gc.isenabled())
        clock.now += 0.1

    measure({"a": run}, warm_up=2, repeats=3)
    assert not any(seen[-4:])
    assert gc.isenabled()


def test_a_contender_that_fails_is_heard(clock: Clock) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        measure({"a": fail})
    assert gc.isenabled()


def test_who_runs_is_told(clock: Clock) -> None:
    told: list[str] = []
    measure({"a": clock.contender("a", 0.1)}, warm_up=1, repeats=3, say=told.append)
    assert told == ["warming up a", *(f"round {n} of 3: a" for n in (1, 2, 3))]


@pytest.mark.parametrize(("warm_up", "repeats"), [(0, 11), (2, 2), (2, 0), (-1, 5)])
def test_too_few_rounds_are_refused(warm_up: int, repeats: int) -> None:
    with pytest.raises(UsageError, match="at least 3 repeats and 1 warm-up"):
        measure({"a": lambda: None}, warm_up=warm_up, repeats=repeats)


@pytest.mark.parametrize(
    ("run", "sentence"),
    [
        (lambda: measure({}), "nothing to measure"),
        (lambda: measure({"a": 3}), "contender 'a' is 3"),  # type: ignore[dict-item]
        (lambda: paired_ratio([], [1.0]), "0 and 1 samples"),
        (lambda: threads_set(0).__enter__(), r"threads_set\(0\)"),
    ],
)
def test_what_can_not_be_measured_is_refused_with_the_value(run: Callable[[], object], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        run()


def test_a_ratio_is_taken_round_by_round_so_that_drift_cancels() -> None:
    drift = [1.0, 3.0, 1.5, 4.0, 2.0]
    assert paired_ratio([2 * d for d in drift], drift) == pytest.approx((2, 2, 2))
    assert paired_ratio([2.0, 4.0, 6.0, 8.0], [1.0, 1.0]) == pytest.approx((2.5, 3, 3.5)), "rounds that both have"


def test_the_number_of_threads_is_set_inside_and_restored_also_after_an_error() -> None:
    before = torch.get_num_threads()

    def fail() -> None:
        with threads_set(1):
            assert torch.get_num_threads() == 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert torch.get_num_threads() == before


def stat(tmp_path: Path, user: int, idle: int) -> Path:
    path = tmp_path / "stat"
    path.write_text(f"cpu  {user} 0 0 {idle} 50 0 0 7 900 0\ncpu0 1 2 3 4\n")
    return path


def test_neighbours_are_the_machine_without_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wall, own = iter([10.0, 12.0]), iter([5.0, 6.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(wall))
    monkeypatch.setattr(time, "process_time", lambda: next(own))
    monkeypatch.setattr(neighbours, "_STAT", stat(tmp_path, 1000, 10))
    monkeypatch.setattr("os.sysconf", lambda name: 100)
    with neighbours.Neighbours() as others:
        stat(tmp_path, 1350, 60)  # 3.5 s of processors in 2 s, 1 of them ours
    assert others.busy == pytest.approx(1.25)


def test_where_the_system_does_not_say_neighbours_are_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "_STAT", tmp_path / "none")
    with neighbours.Neighbours() as others:
        pass
    assert others.busy is None
