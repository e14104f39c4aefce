"""Attention kernels side by side on one case, beside torch's own, under the measurement contract."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from rooftile._attention import attention
from rooftile.bench.attention_case import Case, Inputs
from rooftile.bench.attention_oracle import attention_errors, heads_compared
from rooftile.bench.machine import hardware, versions
from rooftile.bench.measuring import Timing, check_rounds, measure, threads_set
from rooftile.bench.record import Record, TensorError
from rooftile.errors import UsageError

__all__ = ["KERNELS", "PEER", "Outcome", "run_case"]

#: What every ratio is against: F.scaled_dot_product_attention, called directly.
PEER = "torch SDPA"

#: Kernels of ours, the materialised one last.
KERNELS = ("native", "tiled", "reference")

_REFERENCE_BYTES = 2 << 30  # of one materialised score matrix, several of which are alive at once

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to compute the case, and what it says of itself."""

    attend: Attend
    kernel: str
    path: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """One record a contender, in the order of the contenders, and why others did not run."""

    case: Case
    backward: bool
    records: tuple[Record, ...]
    refused: tuple[tuple[str, str], ...]
    kv_heads_compared: int

    @property
    def peer(self) -> Record | None:
        """What torch's own attention took."""
        return next((record for record in self.records if record.contender == PEER), None)


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

    Forward passes run without gradients. A backward pass is ``torch.autograd.grad`` of q, k and v on a graph that is
    kept. ``errors``: compare every result with FP64.
    """
    check_rounds(warm_up, repeats)
    tell = say or (lambda _: None)
    with threads_set(threads or torch.get_num_threads()):
        inputs = case.inputs()
        contenders, refused = _contenders(case, inputs, kernels, backward)
        passes, results = {}, {}
        for name, contender in contenders.items():
            tell(f"first call of {name}")
            passes[name], results[name] = _passed(contender.attend, inputs, backward)
        found: Mapping[str, tuple[TensorError, ...]] = {}
        if errors:
            tell("FP64")
            found = attention_errors(case, inputs, results)
        del results
        timings = measure(passes, warm_up=warm_up, repeats=repeats, budget=budget, say=say)
        records = tuple(
            _record(case, backward, name, contenders[name], timing, found.get(name, ()))
            for name, timing in timings.items()
        )
    return Outcome(case, backward, records, refused, heads_compared(case, backward) if errors else 0)


def _contenders(
    case: Case, inputs: Inputs, kernels: Sequence[str], backward: bool
) -> tuple[dict[str, Contender], tuple[tuple[str, str], ...]]:
    found, refused = {}, []
    probe = inputs if not backward else _with_gradients(inputs)
    for name in kernels:
        if name == "reference" and case.square * 4 > _REFERENCE_BYTES:
            refused.append((name, f"would materialise {case.square * 4 / 2**30:,.1f} GiB of scores"))
            continue
        try:
            told = attention.explain(probe.q, probe.k, probe.v, mask=case.mask, kernel=name)
        except UsageError as error:
            refused.append((name, str(error)))
            continue
        found[name] = Contender(_ours(case, name), told.kernel, told.path)
    found[PEER] = _torch_sdpa(case, inputs)
    return found, tuple(refused)


def _ours(case: Case, kernel: str) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attention(q, k, v, mask=case.mask, kernel=kernel)
        assert isinstance(out, Tensor)  # without return_lse there is nothing else
        return out

    return attend


def _torch_sdpa(case: Case, inputs: Inputs) -> Contender:
    """The call that a user of torch would write: ``is_causal`` where that is what the mask means, else booleans."""
    is_causal = case.mask_name == "causal" and case.q_len == case.kv_len
    shows_all = case.mask is None or is_causal or case.visible_pairs == case.square
    shown = None if shows_all or case.mask is None else case.mask.materialize(case.q_len, case.kv_len)
    grouped = case.q_heads != case.kv_heads
    choice = torch._fused_sdp_choice(
        inputs.q, inputs.k, inputs.v, attn_mask=shown, is_causal=is_causal, enable_gqa=grouped
    )

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=shown, is_causal=is_causal, enable_gqa=grouped)

    names = {backend.value: backend.name.lower() for backend in map(SDPBackend, SDPBackend.__members__.values())}
    return Contender(attend, "scaled_dot_product_attention", names.get(choice, "unknown"))


def _with_gradients(inputs: Inputs) -> Inputs:
    q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    return Inputs(q, k, v, inputs.dout)


def _passed(attend: Attend, inputs: Inputs, backward: bool) -> tuple[Callable[[], object], dict[str, Tensor]]:
    """The pass that is timed, and what it computes."""
    if not backward:

        def forward() -> Tensor:
            with torch.no_grad():
                return attend(inputs.q, inputs.k, inputs.v)

        return forward, {"out": forward()}
    mine = _with_gradients(inputs)
    out = attend(mine.q, mine.k, mine.v)

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, (mine.q, mine.k, mine.v), mine.dout, retain_graph=True)

    return gradients, dict(zip(("dq", "dk", "dv"), gradients(), strict=True))


def _record(
    case: Case, backward: bool, name: str, contender: Contender, timing: Timing, errors: tuple[TensorError, ...]
) -> Record:
    work = (
        ("visible FLOPs", case.flops(backward, case.visible_pairs)),
        ("dense FLOPs", case.flops(backward, case.square)),
    )
    return Record(
        task=f"attention {'backward' if backward else 'forward'}",
        contender=name,
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
        dtype=str(case.dtype).removeprefix("torch."),
        shape=case.shape,
        options=case.options,
        kernel=contender.kernel,
        path=contender.path,
        work=work,
        errors=errors,
    )
