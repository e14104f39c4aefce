"""Attention kernels side by side on one case, beside torch's own, under the measurement contract."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from rooftile.bench.attention_case import Case, Inputs
from rooftile.bench.attention_contenders import PEER, Contender, our_kernel, timed_pass, torch_sdpa
from rooftile.bench.attention_oracle import attention_errors, heads_compared
from rooftile.bench.measuring import Timing, check_rounds, measure, recorded, threads_set
from rooftile.bench.record import Record, TensorError
from rooftile.errors import UsageError

__all__ = ["KERNELS", "Outcome", "record_of", "run_case"]

#: Kernels of ours, the materialised one last.
KERNELS = ("native", "tiled", "reference")

_REFERENCE_BYTES = 2 << 30  # of one materialised score matrix, several of which are alive at once


@dataclass(frozen=True, slots=True)
class Outcome:
    """One record a contender, in the order of the contenders, and why others did not run."""

    case: Case
    backward: bool
    records: tuple[Record, ...]
    refused: tuple[tuple[str, str], ...]
    kv_heads_compared: int

    def of(self, contender: str) -> Record | None:
        """What ``contender`` took; None where it did not run."""
        return next((record for record in self.records if record.contender == contender), None)


def run_case(
    case: Case,
    *,
    kernels: Sequence[str] = KERNELS,
    backward: bool = False,
    threads: int | None = None,
    warm_up: int = 2,
    repeats: int = 11,
    budget: float = 20.0,
    errors: bool = True,
    say: Callable[[str], None] | None = None,
) -> Outcome:
    """Measure one pass (forward, or backward alone) of each kernel that takes the case, in turn with torch's own.

    ``errors``: compare every result with FP64. ``budget`` is in seconds a contender.
    """
    check_rounds(warm_up, repeats)
    tell = say or (lambda _: None)
    with threads_set(threads or torch.get_num_threads()):
        inputs = case.inputs()
        contenders, refused = _contenders(case, inputs, kernels, backward)
        passes, results = {}, {}
        for name, contender in contenders.items():
            tell(f"first call of {name}")
            passes[name], results[name] = timed_pass(contender.attend, inputs, backward)
        found: Mapping[str, tuple[TensorError, ...]] = {}
        if errors:
            tell("FP64")
            found = attention_errors(case, inputs, results)
        del results
        timings = measure(passes, warm_up=warm_up, repeats=repeats, budget=budget, say=say)
        records = tuple(
            record_of(case, name, contenders[name], timing, backward=backward, errors=found.get(name, ()))
            for name, timing in timings.items()
        )
    return Outcome(case, backward, records, refused, heads_compared(case, backward) if errors else 0)


def _contenders(
    case: Case, inputs: Inputs, kernels: Sequence[str], backward: bool
) -> tuple[dict[str, Contender], tuple[tuple[str, str], ...]]:
    found, refused = {}, []
    for name in kernels:
        if name == "reference" and case.square * 4 > _REFERENCE_BYTES:
            refused.append((name, f"would materialise {case.square * 4 / 2**30:,.1f} GiB of scores"))
            continue
        try:
            found[name] = our_kernel(case, inputs, name, backward)
        except UsageError as error:
            refused.append((name, str(error)))
    found[PEER] = torch_sdpa(case, inputs)
    return found, tuple(refused)


def record_of(
    case: Case,
    name: str,
    contender: Contender,
    timing: Timing,
    *,
    backward: bool = False,
    errors: tuple[TensorError, ...] = (),
) -> Record:
    """The record of a pass that was timed at torch's present number of threads."""
    return recorded(
        f"attention {'backward' if backward else 'forward'}",
        name,
        timing,
        dtype=case.dtype,
        shape=case.shape,
        options=case.options,
        kernel=contender.kernel,
        path=contender.path,
        work=(
            ("visible FLOPs", case.flops(backward, case.visible_pairs)),
            ("dense FLOPs", case.flops(backward, case.square)),
        ),
        errors=errors,
    )
