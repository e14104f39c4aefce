"""The loops compute what they claim, no faster than silicon can, and never fault where an instruction is missing."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest
import torch

from rooftile.bench import Record, compute_ceiling, hardware, measure_ceilings, native_ceilings
from rooftile.bench.ceilings import CEILINGS, Ceilings
from rooftile.errors import UsageError
from rooftile.formats.native import ISA_NAMES, status

BEST = ISA_NAMES.index(status().isa)
QUICK = {"threads": 1, "repeats": 3, "least_seconds": 2e-4}

#: FLOPs a cycle of one core that no processor exceeds: two units of fused multiply-adds as wide as the registers.
FMA_A_CYCLE = {0: 2 * 2 * 4, 1: 2 * 2 * 8, 2: 2 * 2 * 16}
FASTEST_CLOCK = 6.5e9


def rates(loop: str, **options: object) -> tuple[float, ...]:
    return native_ceilings.rates(loop, **(QUICK | options))  # type: ignore[arg-type]


@pytest.mark.parametrize("isa", range(BEST + 1))
def test_fused_multiply_adds_are_no_faster_than_two_units_at_the_fastest_clock(isa: int) -> None:
    """A compiler that saw through the loop would leave some of its work out."""
    assert 1e9 < max(rates("fma_fp32", isa=isa)) < FMA_A_CYCLE[isa] * FASTEST_CLOCK


def test_bf16_products_are_no_faster_than_four_times_fp32() -> None:
    if native_ceilings.supported("dot_bf16"):
        assert 1e9 < max(rates("dot_bf16")) < 2 * FMA_A_CYCLE[2] * FASTEST_CLOCK
    assert native_ceilings.supported("dot_bf16") == ("avx512_bf16" in hardware().isa)


@pytest.mark.parametrize("isa", range(BEST + 1))
def test_exp2_is_exp2(isa: int) -> None:
    x = torch.cat([torch.linspace(-125, 125, 60_000), torch.arange(-120.0, 120.0), torch.zeros(16)])
    x = x[: x.numel() // 16 * 16].contiguous()
    y = torch.empty(x.numel() + 16)
    y = y[(64 - y.data_ptr() % 64) % 64 // 4 :][: x.numel()]
    aligned = torch.empty(x.numel() + 16)
    aligned = aligned[(64 - aligned.data_ptr() % 64) % 64 // 4 :][: x.numel()].copy_(x)
    native_ceilings.exp2(aligned.data_ptr(), y.data_ptr(), x.numel(), isa)
    exact = torch.exp2(aligned.double())
    assert ((y.double() - exact) / exact).abs().max() < 7e-7
    whole = aligned == aligned.round()
    assert torch.equal(y[whole].double(), exact[whole]), "powers of two are exact"


@pytest.mark.parametrize("loop", ["read", "copy"])
def test_a_cache_is_read_faster_than_memory_and_no_faster_than_two_lines_a_cycle(loop: str) -> None:
    small, large = (max(rates(loop, nbytes=n, least_seconds=2e-3)) for n in (16 << 10, 256 << 20))
    assert small < 3 * 64 * 2 * FASTEST_CLOCK
    if loop == "read":
        assert small > large
    assert large < 400e9, "one core reads no faster from any memory"


def test_every_ceiling_is_measured_or_has_a_reason() -> None:
    found = measure_ceilings([1], repeats=3, least_seconds=1e-3)
    measured = [record.task for record in found.records]
    assert sorted([*measured, *dict(found.missing)]) == sorted(ceiling.name for ceiling in CEILINGS)
    assert {"fp32 FMA", "exp2", "read DRAM", "copy DRAM"} <= set(measured)
    assert all(record.statistic == "best" and record.value == record.best for record in found.records)
    assert all(record.path == status().isa and record.hardware == hardware() for record in found.records)
    assert "C++ core in use" in found.method


def test_memory_is_read_over_much_more_than_the_last_cache() -> None:
    (record,) = measure_ceilings([1], only=["read DRAM"], repeats=3, least_seconds=1e-3).records
    assert dict(record.options)["bytes a thread"] >= 4 * hardware().cache_bytes(3)


def test_tile_instructions_are_refused_where_there_are_none() -> None:
    """Where there are, one loop of them must end and give a rate."""
    if native_ceilings.supported("amx_bf16"):
        assert 1e11 < max(rates("amx_bf16")) < 1e14
        return
    with pytest.raises(RuntimeError, match="refused the ceiling amx_bf16"):
        rates("amx_bf16")
    found = measure_ceilings([1], only=["bf16 AMX"])
    assert found.records == ()
    assert dict(found.missing).keys() == {"bf16 AMX"}


@pytest.mark.parametrize(
    "options", [{"isa": 3}, {"threads": 0}, {"repeats": 0}, {"least_seconds": 0.0}, {"least_seconds": float("nan")}]
)
def test_an_argument_that_means_nothing_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(RuntimeError, match="refused the ceiling fma_fp32"):
        rates("fma_fp32", **options)
    with pytest.raises(RuntimeError, match="refused the ceiling read"):
        rates("read", nbytes=100)


@pytest.mark.parametrize("threads", [0, -1, 100_000])
def test_threads_that_are_not_there_are_a_sentence(threads: int) -> None:
    with pytest.raises(UsageError, match=f"{threads} threads on .* processors; give 1 to"):
        measure_ceilings([threads])


def test_a_forked_child_measures_on_one_thread_and_refuses_two() -> None:
    code = (
        "import os\nfrom rooftile.bench import native_ceilings\nfrom rooftile.errors import UsageError\n"
        "def go(n): return native_ceilings.rates('fma_fp32', threads=n, repeats=3, least_seconds=1e-4)\n"
        "go(2)\npid = os.fork()\n"
        "if pid == 0:\n"
        "    go(1)\n"
        "    try: go(2)\n"
        "    except UsageError as error: os._exit(7 if 'forked process' in str(error) else 1)\n"
        "    os._exit(1)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)


def test_without_the_core_torch_operations_stand_in_under_names_of_their_own() -> None:
    code = (
        "from rooftile.bench import measure_ceilings, compute_ceiling\n"
        "found = measure_ceilings([1], repeats=3, least_seconds=1e-3)\n"
        "assert [r.task for r in found.records][:2] == ['fp32 matmul', 'bf16 matmul'], found\n"
        "assert {r.contender for r in found.records} == {'torch'}\n"
        "assert {'fp32 FMA', 'read L1'} <= dict(found.missing).keys()\n"
        "assert 'ROOFTILE_NATIVE=0' in found.method\n"
        "few = measure_ceilings([1], only=['read DRAM'], repeats=3, least_seconds=1e-3).records\n"
        "assert [r.task for r in few] == ['read DRAM']\n"
        "assert compute_ceiling(found, 'float32', 1)[0] == 'fp32 matmul'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"ROOFTILE_NATIVE": "0"}, timeout=120)


def test_a_dtype_s_ceiling_is_the_fastest_way_to_make_its_products(record: Record) -> None:
    """fp16 is two bf16 parts and three products, fp32 three parts and six."""

    def measured(name: str, rate: float) -> Record:
        return dataclasses.replace(record, task=name, samples=(rate,), unit="FLOP/s", threads=1)

    slow, fast = measured("fp32 FMA", 2e11), measured("bf16 AMX", 3e12)
    without, both = (Ceilings(records, (), "") for records in ((slow,), (slow, fast)))
    assert compute_ceiling(without, "bfloat16", 1) == ("fp32 FMA", 2e11)
    assert compute_ceiling(both, "bfloat16", 1) == ("bf16 AMX", 3e12)
    assert compute_ceiling(both, "float16", 1) == ("bf16 AMX / 3", 1e12)
    assert compute_ceiling(both, "float32", 1) == ("bf16 AMX / 6", 5e11)
    assert compute_ceiling(both, "float64", 1) is None
    assert compute_ceiling(both, "float32", 2) is None
