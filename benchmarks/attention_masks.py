"""The section on masks: what each costs, against the share of the square that its tiles visit."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import torch
from attention_rows import Row, Section, Setting, dtype_name

from rooftile import attention, masks
from rooftile.bench import Record, measure, paired_ratio, threads_set
from rooftile.bench.attention_case import Case, Inputs
from rooftile.bench.attention_contenders import PEER, our_kernel, timed_pass, torch_sdpa
from rooftile.bench.attention_run import record_of
from rooftile.bench.digits import figure

MOST = 1.3


def mask_section(setting: Setting) -> Section:
    """bf16 and fp32, forward and backward: causal, window 256, padding to half, 8 documents, all in turn."""
    length = max(64, 4096 // setting.shorter)
    section = Section(f"masks at N {length}", "time / (time without a mask x share of the square that is visited)")
    for dtype, threads, backward in itertools.product((torch.bfloat16, torch.float32), setting.threads, (False, True)):
        setting.say(f"masks {dtype_name(dtype)} {'backward' if backward else 'forward'}, {threads} threads")
        with threads_set(threads):
            cases = list(_cases(length, dtype))
            records = _measured(cases, setting, backward)
            section.rows += _rows(cases, records, setting, threads, backward)
        section.records += records.values()
    return section


def _cases(length: int, dtype: torch.dtype) -> Iterator[Case]:
    full = Case(1, 8, 8, length, length, 64, dtype)
    window = min(256, length // 16)
    yield full
    for name, mask in (
        ("causal", masks.causal()),
        (f"window {window}", masks.window(window)),
        ("padding to half", masks.padding(torch.tensor([length // 2]))),
        ("8 documents", masks.documents(torch.arange(length) * 8 // length)),
    ):
        yield dataclasses.replace(full, mask=mask, mask_name=name)


def _measured(cases: list[Case], setting: Setting, backward: bool) -> dict[tuple[str, str], Record]:
    """(contender, mask) -> record; all in the same rounds."""
    inputs = cases[0].inputs()
    contenders = {}
    for case in cases:
        contenders[setting.kernel, case.mask_name] = case, our_kernel(case, inputs, setting.kernel, backward)
        contenders[PEER, case.mask_name] = case, torch_sdpa(case, inputs)
    passes = {f"{who} {mask}": timed_pass(c.attend, inputs, backward)[0] for (who, mask), (_, c) in contenders.items()}
    timings = measure(passes, repeats=setting.repeats, budget=setting.budget)
    return {
        (who, mask): record_of(case, who, contender, timings[f"{who} {mask}"], backward=backward)
        for (who, mask), (case, contender) in contenders.items()
    }


def _rows(
    cases: list[Case], records: dict[tuple[str, str], Record], setting: Setting, threads: int, backward: bool
) -> Iterator[Row]:
    inputs: Inputs = cases[0].inputs()
    unmasked = records[setting.kernel, ""]
    for case in cases[1:]:
        ours, peer = records[setting.kernel, case.mask_name], records[PEER, case.mask_name]
        q, k, v = (x.requires_grad_(backward) for x in (inputs.q, inputs.k, inputs.v))
        told = attention.explain(q, k, v, mask=case.mask, kernel=setting.kernel)
        low, cost, high = (share / told.visited_share for share in paired_ratio(ours.samples, unmasked.samples))
        faster = paired_ratio(peer.samples, ours.samples)[1]
        visible = case.visible_pairs / case.square
        yield Row(
            f"{case.name} {case.mask_name} {'backward' if backward else 'forward'}",
            dtype_name(case.dtype),
            threads,
            path=ours.path,
            ours=figure(ours),
            peer=figure(unmasked),
            ratio=cost,
            low=low,
            high=high,
            minimum=MOST,
            at_most=True,
            note=f"visits {told.visited_share:.1%} ({visible:.1%} visible), {faster:.1f} x torch",
        )
