"""Timing under the contract: warm, in turn, repeated, one number of threads, Python's collector out of the way."""

from __future__ import annotations

import contextlib
import datetime
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rooftile._collector import collector_paused
from rooftile.bench.machine import hardware, versions
from rooftile.bench.neighbours import Neighbours
from rooftile.bench.record import Option, Record, TensorError, quartiles
from rooftile.errors import UsageError

if TYPE_CHECKING:
    import torch

__all__ = ["Timing", "check_rounds", "measure", "paired_ratio", "recorded", "threads_set"]

#: A sample lasts at least this long, in seconds: short calls are made several times in a row.
LEAST_SAMPLE = 1e-3

#: Fewer samples have no quartiles.
_FEWEST = 3


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds a call, one sample a round; each is the mean of ``calls`` calls in a row.

    ``others_busy`` is how many processors other processes used during all rounds; None where it is unknown.
    """

    samples: tuple[float, ...]
    calls: int
    warm_up: int
    others_busy: float | None

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.samples)


def measure(
    contenders: Mapping[str, Callable[[], object]],
    *,
    warm_up: int = 2,
    repeats: int = 11,
    budget: float = 20.0,
    say: Callable[[str], None] | None = None,
) -> dict[str, Timing]:
    """Time each contender in every round, so that whatever else the machine does slows all of them alike.

    Round by round each takes its turn, in an order that shifts by one each time. The first ``warm_up`` rounds are
    dropped. A contender that would take longer than ``budget`` seconds in all gets fewer rounds, at least three, which
    its ``samples`` show. ``say`` is told who runs.
    """
    check_rounds(warm_up, repeats)
    for name, run in contenders.items():
        if not callable(run):
            raise UsageError(f"contender {name!r} is {run!r}: pass a function without arguments that does one call")
    if not contenders:
        raise UsageError("there is nothing to measure: pass a function without arguments for each contender")
    tell = say or (lambda _: None)
    calls: dict[str, int] = {}
    rounds: dict[str, int] = {}
    for name, run in contenders.items():
        tell(f"warming up {name}")
        calls[name], rounds[name] = _planned(run, warm_up, repeats, budget)
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    with collector_paused(), Neighbours() as others:
        for number in range(warm_up - 1 + repeats):  # planning was a round of warm-up
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                if number >= warm_up - 1 + rounds[name]:
                    continue
                tell(f"round {number + 1} of {warm_up - 1 + repeats}: {name}")
                seconds = _seconds_a_call(contenders[name], calls[name])
                if number >= warm_up - 1:
                    samples[name].append(seconds)
    return {name: Timing(tuple(taken), calls[name], warm_up, others.busy) for name, taken in samples.items()}


def check_rounds(warm_up: int, repeats: int) -> None:
    """Raise UsageError where there are too few rounds for a median and its spread."""
    if repeats < _FEWEST or warm_up < 1:
        raise UsageError(f"repeats {repeats}, warm-up {warm_up}: give at least {_FEWEST} repeats and 1 warm-up round")


def _planned(run: Callable[[], object], warm_up: int, repeats: int, budget: float) -> tuple[int, int]:
    """Calls a sample and samples, from one call that found caches and threads cold and, if short, one that did not."""
    seconds = _seconds_a_call(run, 1)
    if seconds < 10 * LEAST_SAMPLE:
        seconds = _seconds_a_call(run, 1)
    calls = max(1, round(LEAST_SAMPLE / max(seconds, 1e-9) + 0.5))
    rounds = int(budget / (seconds * calls)) - warm_up
    return calls, min(repeats, max(_FEWEST, rounds))


def _seconds_a_call(run: Callable[[], object], calls: int) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - started) / calls


def recorded(
    task: str,
    contender: str,
    timing: Timing,
    *,
    dtype: torch.dtype | None = None,
    shape: tuple[int, ...] = (),
    options: tuple[tuple[str, Option], ...] = (),
    kernel: str = "",
    path: str = "",
    work: tuple[tuple[str, float], ...] = (),
    errors: tuple[TensorError, ...] = (),
) -> Record:
    """The record of a timing: what was given, and machine, versions, torch's present number of threads, time of day."""
    import torch

    return Record(
        task=task,
        contender=contender,
        samples=timing.samples,
        unit="s",
        statistic="median",
        threads=torch.get_num_threads(),
        warm_up=timing.warm_up,
        calls=timing.calls,
        hardware=hardware(),
        versions=versions(),
        taken_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        others_busy=timing.others_busy,
        dtype="" if dtype is None else str(dtype).removeprefix("torch."),
        shape=shape,
        options=options,
        kernel=kernel,
        path=path,
        work=work,
        errors=errors,
    )


def paired_ratio(peer: Sequence[float], ours: Sequence[float]) -> tuple[float, float, float]:
    """How many times as fast as ``peer`` we are: first quartile, median, third quartile of the ratios of seconds.

    The ratio is taken round by round, so that what slows a whole round cancels out; rounds that only one of the two
    has, because the other one's budget was spent, are left out. Raises :class:`~rooftile.errors.UsageError` without a
    round.
    """
    if not peer or not ours:
        raise UsageError(f"{len(peer)} and {len(ours)} samples have no ratio: pass at least one of each")
    return quartiles(tuple(a / b for a, b in zip(peer, ours, strict=False)))


@contextlib.contextmanager
def threads_set(count: int) -> Iterator[None]:
    """``torch.set_num_threads(count)`` inside the block, and the caller's number after it."""
    import torch

    if not isinstance(count, int) or count < 1:
        raise UsageError(f"threads_set({count!r}): give a whole number, 1 or more")
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
