"""The ceilings of this machine, measured: what arithmetic and memory give when nothing else is asked of them.

With the C++ core, each is a loop of its own instructions. Without it, plain torch operations stand in and bear other
names (``fp32 matmul``): what torch reaches is a lower bound of what the machine can do.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rooftile._units import plural
from rooftile.bench import native_ceilings
from rooftile.bench.machine import Hardware, hardware, versions
from rooftile.bench.measuring import threads_set
from rooftile.bench.neighbours import Neighbours
from rooftile.bench.record import Record
from rooftile.errors import UsageError
from rooftile.formats import native as formats_native

__all__ = ["CEILINGS", "COMPUTE", "Ceiling", "Ceilings", "compute_ceiling", "measure_ceilings"]

_REPEATS = 9
_LEAST_SECONDS = 0.02  # of a round
_UNKNOWN_L3 = 64 << 20


@dataclass(frozen=True, slots=True)
class Ceiling:
    """One ceiling: the loop that measures it, and how many bytes each thread goes through (None: arithmetic)."""

    name: str
    unit: str
    loop: str
    dtype: str = ""
    level: int | None = None  # of the cache that holds the bytes; 4 is memory


CEILINGS = (
    Ceiling("fp32 FMA", "FLOP/s", "fma_fp32", "float32"),
    Ceiling("bf16 vdpbf16ps", "FLOP/s", "dot_bf16", "bfloat16"),
    Ceiling("bf16 AMX", "FLOP/s", "amx_bf16", "bfloat16"),
    Ceiling("exp2", "elements/s", "exp2_fp32", "float32"),
    Ceiling("read L1", "B/s", "read", level=1),
    Ceiling("read L2", "B/s", "read", level=2),
    Ceiling("read L3", "B/s", "read", level=3),
    Ceiling("read DRAM", "B/s", "read", level=4),
    Ceiling("copy DRAM", "B/s", "copy", level=4),
)

#: What attention's matrix products can be made of, by dtype: a ceiling, and the products that one exact product takes
#: (bf16 parts of an operand: two for fp16, three for fp32).
_PRODUCTS = {
    "float32": (("fp32 FMA", 1), ("bf16 AMX", 6), ("fp32 matmul", 1)),
    "bfloat16": (("fp32 FMA", 1), ("bf16 vdpbf16ps", 1), ("bf16 AMX", 1), ("fp32 matmul", 1), ("bf16 matmul", 1)),
    "float16": (("fp32 FMA", 1), ("bf16 AMX", 3), ("fp32 matmul", 1), ("bf16 matmul", 3)),
}

#: Those that :func:`compute_ceiling` reads.
COMPUTE = tuple(dict.fromkeys(name for ways in _PRODUCTS.values() for name, _ in ways))


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What was measured, and why the others were not; ``method`` says with what."""

    records: tuple[Record, ...]
    missing: tuple[tuple[str, str], ...]
    method: str

    def of(self, name: str, threads: int) -> Record | None:
        """The ceiling ``name`` at ``threads`` threads."""
        return next((r for r in self.records if r.task == name and r.threads == threads), None)


def measure_ceilings(
    threads: Sequence[int],
    *,
    only: Sequence[str] | None = None,
    repeats: int = _REPEATS,
    least_seconds: float = _LEAST_SECONDS,
    say: Callable[[str], None] | None = None,
) -> Ceilings:
    """The ceilings (those named in ``only``) at each number of threads: the best of ``repeats`` rounds."""
    _check_threads(threads)
    tell = say or (lambda _: None)
    if not native_ceilings.available():
        return _measured_with_torch(threads, only, repeats, least_seconds, tell)
    machine, records, missing = hardware(), [], {}
    for count in threads:
        for ceiling in CEILINGS:
            if only is not None and ceiling.name not in only:
                continue
            reason, nbytes = _placed(ceiling, machine, count)
            if reason:
                missing[ceiling.name] = reason
                continue
            tell(f"{ceiling.name}, {plural(count, 'thread')}")
            with Neighbours() as others:
                samples = native_ceilings.rates(
                    ceiling.loop, threads=count, repeats=repeats, least_seconds=least_seconds, nbytes=nbytes
                )
            records.append(_record(ceiling, samples, count, nbytes, "native", others))
    return Ceilings(tuple(records), tuple(missing.items()), formats_native.status().reason)


def compute_ceiling(ceilings: Ceilings, dtype: str, threads: int) -> tuple[str, float] | None:
    """Name and FLOP/s of the fastest way that was measured (:data:`COMPUTE`) to multiply ``dtype``; None for none."""
    found = [
        (name if products == 1 else f"{name} / {products}", record.value / products)
        for name, products in _PRODUCTS.get(dtype, ())
        if (record := ceilings.of(name, threads)) is not None
    ]
    return max(found, key=lambda pair: pair[1], default=None)


def _check_threads(threads: Sequence[int]) -> None:
    machine = hardware()
    for count in threads:
        if not 1 <= count <= machine.logical_cpus:
            raise UsageError(f"{count} threads on {machine.logical_cpus} processors; give 1 to {machine.logical_cpus}")


def _placed(ceiling: Ceiling, machine: Hardware, threads: int) -> tuple[str, int]:
    """Why the ceiling can't be measured, or how many bytes each thread goes through."""
    if not native_ceilings.supported(ceiling.loop):
        return "this processor, its system or the core's compiler lacks the instructions", 0
    if ceiling.level is None:
        return "", 0
    l1, l2, l3 = (machine.cache_bytes(level) for level in (1, 2, 3))
    if ceiling.level == 4:
        # Four times the last cache in all, so that hardly any of it is still there when it is read again.
        nbytes = max(4 * max(l3, l2, 0) or 4 * _UNKNOWN_L3, 64 << 20) // threads
        available = int(machine.memory_gib * 2**30) // 4
        return ("too little memory to leave the caches behind", 0) if nbytes * threads > available else ("", nbytes)
    if (l1, l2, l3)[ceiling.level - 1] == 0:
        return f"the system does not say how large the L{ceiling.level} cache is", 0
    if ceiling.level < 3:
        return "", (l1, l2)[ceiling.level - 1] // 2
    nbytes = min(8 * l2, l3 // 2 // threads)
    return ("its share for a thread is no larger than L2", 0) if nbytes < 2 * l2 else ("", nbytes)


def _record(
    ceiling: Ceiling, samples: tuple[float, ...], threads: int, nbytes: int, contender: str, others: Neighbours
) -> Record:
    return Record(
        task=ceiling.name,
        contender=contender,
        samples=samples,
        unit=ceiling.unit,
        statistic="best",
        threads=threads,
        warm_up=1,
        calls=1,
        hardware=hardware(),
        versions=versions(),
        taken_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        others_busy=others.busy,
        dtype=ceiling.dtype,
        options=(("bytes a thread", nbytes),) if nbytes else (),
        kernel=ceiling.loop,
        path=formats_native.status().isa,
    )


def _measured_with_torch(
    threads: Sequence[int],
    only: Sequence[str] | None,
    repeats: int,
    least_seconds: float,
    tell: Callable[[str], None],
) -> Ceilings:
    """fp32 and bf16 matrix products, exp2, and DRAM read and copied by torch's own operations."""
    machine = hardware()
    large = max(4 * max((cache.nbytes for cache in machine.caches), default=_UNKNOWN_L3), 64 << 20)
    small = torch.linspace(-20, 0, 1 << 15)
    source, target = torch.ones(large // 4), torch.ones(large // 4)
    size = 1024
    fp32, bf16 = torch.ones(size, size), torch.ones(size, size, dtype=torch.bfloat16)
    loops: tuple[tuple[Ceiling, float, Callable[[], object]], ...] = (
        (Ceiling("fp32 matmul", "FLOP/s", "torch.mm", "float32"), 2.0 * size**3, lambda: fp32 @ fp32),
        (Ceiling("bf16 matmul", "FLOP/s", "torch.mm", "bfloat16"), 2.0 * size**3, lambda: bf16 @ bf16),
        (Ceiling("exp2", "elements/s", "torch.exp2", "float32"), small.numel(), lambda: torch.exp2(small, out=small)),
        (Ceiling("read DRAM", "B/s", "torch.sum", level=4), large, source.sum),
        (Ceiling("copy DRAM", "B/s", "torch.copy_", level=4), 2.0 * large, lambda: target.copy_(source)),
    )
    records = []
    for count in threads:
        with threads_set(count):
            for ceiling, work, run in loops:
                if only is not None and ceiling.name not in only:
                    continue
                tell(f"{ceiling.name}, {plural(count, 'thread')}")
                nbytes = large // count if ceiling.level else 0
                with Neighbours() as others:
                    samples = tuple(work / _seconds(run, least_seconds) for _ in range(repeats + 1))[1:]
                records.append(_record(ceiling, samples, count, nbytes, "torch", others))
    names = {ceiling.name for ceiling, _, _ in loops}
    missing = tuple((c.name, "only the C++ core can measure it") for c in CEILINGS if c.name not in names)
    return Ceilings(
        tuple(records), missing, f"torch's own operations: the C++ core is {formats_native.status().reason}"
    )


def _seconds(run: Callable[[], object], least_seconds: float) -> float:
    """Seconds a call, called until ``least_seconds`` have passed."""
    calls, started = 0, time.perf_counter()
    while True:
        run()
        calls += 1
        passed = time.perf_counter() - started
        if passed >= least_seconds:
            return passed / calls
