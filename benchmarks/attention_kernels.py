"""Sections that time the kernels alone: forward, backward, small shapes, decode."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from attention_rows import Row, Section, Setting, dtype_name

from rooftile import masks
from rooftile.bench import Record, hardware, measure, measure_ceilings, paired_ratio, threads_set
from rooftile.bench.attention_case import Case
from rooftile.bench.attention_contenders import PEER, Contender, our_kernel, torch_sdpa
from rooftile.bench.attention_run import record_of, run_case
from rooftile.bench.digits import figure

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
Shape = tuple[int, int, int, int]

SHAPES: tuple[Shape, ...] = ((1, 8, 2048, 64), (1, 16, 1024, 128), (4, 12, 512, 64))
SMALL: tuple[Shape, ...] = (
    (2, 8, 128, 64), (1, 8, 64, 64), (8, 12, 128, 64), (1, 4, 256, 32), (4, 8, 17, 64), (1, 1, 512, 128),
)  # fmt: skip

#: (dtype, causal, backward) -> the least ratio asked for, and the aim.
GOALS = {
    (BF16, False, False): (2.0, 3.0), (BF16, True, False): (2.5, 4.0),
    (BF16, False, True): (3.5, 7.0), (BF16, True, True): (3.5, 7.0),
    (FP16, False, False): (2.0, 3.0), (FP16, True, False): (2.0, 3.0),
    (FP16, False, True): (2.0, 3.0), (FP16, True, True): (2.0, 3.0),
    (FP32, False, False): (1.15, 1.5), (FP32, True, False): (1.4, 2.2),
    (FP32, False, True): (1.2, 1.5), (FP32, True, True): (1.4, 2.2),
}  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """A pass of a case, and the ratio that is asked for."""

    case: Case
    backward: bool
    minimum: float
    aim: float | None = None

    @property
    def what(self) -> str:
        return f"{self.case.name} {self.case.mask_name or 'full'} {'backward' if self.backward else 'forward'}"


def forward(setting: Setting) -> Section:
    """bf16, fp16 and fp32, full and causal, three shapes, each number of threads."""
    return _against_torch("forward", _table(setting, backward=False), setting)


def backward(setting: Setting) -> Section:
    """The same, the backward pass alone."""
    return _against_torch("backward", _table(setting, backward=True), setting)


def small(setting: Setting) -> Section:
    """Shapes where a call's own cost counts: no slower than torch."""
    asked = (
        Asked(_square(shape, dtype, False, setting.shorter), is_backward, 1.0)
        for is_backward, dtype, shape in itertools.product((False, True), (BF16, FP32), SMALL)
    )
    return _against_torch("small shapes", asked, setting)


def _table(setting: Setting, backward: bool) -> Iterator[Asked]:
    for dtype, is_causal, shape in itertools.product((BF16, FP16, FP32), (False, True), SHAPES):
        case = _square(shape, dtype, is_causal, setting.shorter)
        yield Asked(case, backward, *GOALS[dtype, is_causal, backward])


def _square(shape: Shape, dtype: torch.dtype, is_causal: bool, shorter: int) -> Case:
    batch, heads, length, head_dim = shape
    length = max(1, length // shorter)
    mask = masks.causal() if is_causal else None
    return Case(batch, heads, heads, length, length, head_dim, dtype, mask, "causal" if is_causal else "")


def _against_torch(title: str, asked: Iterable[Asked], setting: Setting) -> Section:
    section = Section(title, f"time of {PEER} / ours")
    for one, threads in itertools.product(asked, setting.threads):
        setting.say(f"{one.what} {dtype_name(one.case.dtype)}, {threads} threads")
        outcome = run_case(
            one.case, kernels=(setting.kernel,), backward=one.backward, threads=threads, repeats=setting.repeats,
            budget=setting.budget,
        )  # fmt: skip
        section.records += outcome.records
        section.rows.append(_row(one, threads, outcome.of(setting.kernel), outcome.of(PEER)))
        section.notes |= {f"{who} did not run: {why}": None for who, why in outcome.refused}
    return section


def _row(one: Asked, threads: int, ours: Record | None, peer: Record | None) -> Row:
    assert peer is not None
    row = Row(one.what, dtype_name(one.case.dtype), threads, peer=figure(peer), minimum=one.minimum, aim=one.aim)
    if ours is None:
        return row
    low, ratio, high = paired_ratio(peer.samples, ours.samples)
    errors = [sum(e.mean * e.elements for e in record.errors) for record in (ours, peer)]
    error = errors[0] / errors[1] if all(errors) else None
    return dataclasses.replace(
        row, path=ours.path, ours=figure(ours), ratio=ratio, low=low, high=high, error=error
    )  # fmt: skip


def decode(setting: Setting) -> Section:
    """One query over keys that are in no cache of the processor, as each layer of a model finds its own.

    Keys and values are several sets that take turns, four times the last cache in all.
    """
    section = Section("decode: Lq 1, 32 query / 8 kv heads, K and V from memory", f"time of {PEER} / ours")
    for keys, threads in itertools.product((4096, 8192), setting.threads):
        case = Case(1, 32, 8, 1, max(1, keys // setting.shorter), 128, BF16)
        one = Asked(case, False, 1.7)
        setting.say(f"{one.what}, {threads} threads")
        (roof,) = measure_ceilings([threads], only=["read DRAM"], repeats=5).records[-1:] or (None,)
        with threads_set(threads):
            ours, peer = _decoded(case, setting)
        row = _row(one, threads, ours, peer)
        section.records += [ours, peer]
        if roof is not None:
            section.records.append(roof)
            share = ours.rate("bytes of K and V") / roof.value
            row = dataclasses.replace(row, note=f"{share:.0%} of the measured DRAM read rate, which is the aim")
        section.rows.append(row)
    return section


def _decoded(case: Case, setting: Setting) -> tuple[Record, Record]:
    inputs = case.inputs()
    nbytes = 2 * inputs.k.nbytes
    last_cache = max((cache.nbytes for cache in hardware().caches), default=64 << 20)
    sets = [(inputs.k, inputs.v)]
    if setting.shorter == 1:
        sets += [(inputs.k.clone(), inputs.v.clone()) for _ in range(min(4 * last_cache, 1 << 30) // nbytes)]
    turns = itertools.cycle(sets)  # one cycle for both: neither finds what the other has just read

    def step(contender: Contender) -> Callable[[], object]:
        def run() -> object:
            with torch.no_grad():
                return contender.attend(inputs.q, *next(turns))

        return run

    contenders = {setting.kernel: our_kernel(case, inputs, setting.kernel), PEER: torch_sdpa(case, inputs)}
    passes = {name: step(contender) for name, contender in contenders.items()}
    timings = measure(passes, repeats=setting.repeats, budget=setting.budget)
    made = (record_of(case, name, contenders[name], timing) for name, timing in timings.items())
    ours, peer = (
        dataclasses.replace(
            record,
            options=(*case.options, ("kv_sets", len(sets))),
            work=(*record.work, ("bytes of K and V", float(nbytes))),
        )
        for record in made
    )
    return ours, peer
