"""A record holds every condition, survives a file, and is compared with records of the same conditions only."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rooftile.bench import Cache, Record, TensorError, compare, hardware, load_records, save_records, versions
from rooftile.bench.comparison import compare_all, difference
from rooftile.bench.digits import figure, scaled, significant_digits, with_digits
from rooftile.bench.record import quartiles
from rooftile.errors import UsageError


def test_median_quartiles_and_spread_are_those_of_numpy(record: Record) -> None:
    samples = tuple(float(x) for x in np.random.default_rng(0).lognormal(size=11))
    low, median, high = np.percentile(samples, [25, 50, 75])
    taken = dataclasses.replace(record, samples=samples)
    assert quartiles(samples) == pytest.approx((low, median, high))
    assert (taken.median, taken.iqr, taken.spread) == pytest.approx((median, high - low, (high - low) / median))


def test_the_best_sample_is_the_shortest_time_and_the_highest_rate(record: Record) -> None:
    assert dataclasses.replace(record, statistic="best").value == 0.010
    assert dataclasses.replace(record, statistic="best", unit="B/s").value == 0.013
    assert record.value == record.median == pytest.approx(0.0115)


def test_the_standard_error_is_that_of_the_median_of_normal_samples(record: Record) -> None:
    drawn = np.random.default_rng(1).normal(100, 5, size=(4000, 11))
    told = [dataclasses.replace(record, samples=tuple(row)).standard_error for row in drawn]
    assert np.mean(told) == pytest.approx(np.median(drawn, axis=1).std(), rel=0.1)


def test_a_wide_spread_and_busy_neighbours_are_told(record: Record) -> None:
    assert record.wide
    assert not record.disturbed
    quiet = dataclasses.replace(record, samples=(1.0, 1.01, 1.02), others_busy=1.4)
    assert not quiet.wide
    assert quiet.disturbed
    assert not dataclasses.replace(record, others_busy=None).disturbed


def test_a_rate_is_work_over_the_value(record: Record) -> None:
    assert record.rate("dense FLOPs") == pytest.approx(8.6e9 / 0.0115)


# --- files ---


def test_records_survive_their_file(record: Record, tmp_path: Path) -> None:
    path = tmp_path / "records.json"
    others = dataclasses.replace(record, others_busy=None, errors=(), options=(("window", 256), ("share", 0.5)))
    save_records([record, others], path)
    assert load_records(path) == (record, others)
    assert os.listdir(tmp_path) == ["records.json"]


def test_an_error_that_is_nan_or_infinite_survives_and_the_file_is_plain_json(record: Record, tmp_path: Path) -> None:
    path = tmp_path / "records.json"
    save_records([dataclasses.replace(record, errors=(TensorError("out", math.nan, math.inf, 3),))], path)
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    (error,) = load_records(path)[0].errors
    assert math.isnan(error.largest)
    assert error.mean == math.inf


def test_the_file_shows_the_figures_that_follow_from_its_samples(record: Record, tmp_path: Path) -> None:
    save_records([record], tmp_path / "records.json")
    (written,) = json.loads((tmp_path / "records.json").read_text())["records"]
    assert (written["median"], written["repeats"], written["wide"]) == (pytest.approx(0.0115), 4, True)
    assert written["hardware"]["huge_pages"] == "madvise"


def test_a_field_that_a_later_release_added_does_not_hinder_reading(record: Record, tmp_path: Path) -> None:
    path = tmp_path / "records.json"
    save_records([record], path)
    document = json.loads(path.read_text())
    document["records"][0]["temperature"] = 60
    path.write_text(json.dumps(document))
    assert load_records(path) == (record,)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"schema": "rooftile.bench/2", "records": []}', "schema rooftile.bench/2, newer than rooftile.bench/1"),
        ('{"schema": "rooftile.trace/1"}', "holds no measurements (its schema is 'rooftile.trace/1')"),
        ("[1, 2]", "holds no measurements"),
        ("not json", "is not JSON"),
        ('{"schema": "rooftile.bench/1"}', "is not a whole file of measurements"),
        ('{"schema": "rooftile.bench/1", "records": [{"task": "x"}]}', "is not a whole file of measurements"),
        ('{"schema": "rooftile.bench/1", "records": [3]}', "is not a whole file of measurements"),
    ],
)
def test_a_file_that_is_none_or_newer_is_refused_in_a_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "given.json"
    path.write_text(text)
    with pytest.raises(UsageError) as refused:
        load_records(path)
    assert sentence in str(refused.value)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize("samples", [[], [0.0, 1.0], [-1.0], ["x"]])
def test_samples_that_are_no_times_are_refused(samples: list[object], record: Record, tmp_path: Path) -> None:
    path = tmp_path / "records.json"
    save_records([record], path)
    document = json.loads(path.read_text())
    document["records"][0]["samples"] = samples
    path.write_text(json.dumps(document))
    with pytest.raises(UsageError, match="is not a whole file of measurements"):
        load_records(path)


def test_a_missing_file_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="can't be read: No such file"):
        load_records(tmp_path / "nowhere.json")


# --- comparison ---

#: What may differ. Everything else that a record holds is a condition.
FREE = {
    "contender", "kernel", "path", "samples", "calls", "taken_at", "others_busy", "work", "errors",
    "versions.rooftile", "versions.native_core",
}  # fmt: skip


def changed(value: object) -> object:
    if isinstance(value, tuple):
        return (*value, *value)
    return value + "!" if isinstance(value, str) else value + 1 if isinstance(value, int | float) else None


def variations(record: Record) -> dict[str, Record]:
    """The record with each of its fields changed, one at a time."""
    found = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            for part in dataclasses.fields(value):
                inner = dataclasses.replace(value, **{part.name: changed(getattr(value, part.name))})
                found[f"{field.name}.{part.name}"] = dataclasses.replace(record, **{field.name: inner})
        else:
            found[field.name] = dataclasses.replace(record, **{field.name: changed(value)})
    return found


def test_every_condition_that_differs_is_refused_by_its_name(record: Record) -> None:
    varied = variations(record)
    assert varied.keys() >= FREE | {"hardware.cpu", "hardware.huge_pages", "threads", "dtype", "shape", "options"}
    for name, other in varied.items():
        if name in FREE:
            assert compare(record, other).before is record
        else:
            with pytest.raises(UsageError, match=rf"can't be compared: {name} is .* in one and .* in the other"):
                compare(record, other)


def test_the_sentence_has_both_values(record: Record) -> None:
    other = dataclasses.replace(record, hardware=dataclasses.replace(record.hardware, cpu="Other CPU"))
    with pytest.raises(UsageError, match=r"hardware\.cpu is 'Some CPU' in one and 'Other CPU' in the other"):
        compare(record, other)
    assert difference(record, record) is None


def test_faster_is_less_time_and_a_higher_rate(record: Record) -> None:
    twice = dataclasses.replace(record, samples=tuple(s / 2 for s in record.samples))
    found = compare(record, twice)
    assert found.faster == pytest.approx(2)
    assert found.low < 2 < found.high
    rates = [dataclasses.replace(r, unit="B/s") for r in (record, twice)]
    assert compare(*rates).faster == pytest.approx(0.5)
    assert compare(*rates).low < 0.5 < compare(*rates).high


@pytest.mark.parametrize("unit", ["s", "B/s"])
def test_the_interval_holds_the_ratio_also_where_the_figure_is_the_best_round(unit: Any, record: Record) -> None:
    record = dataclasses.replace(record, unit=unit, statistic="best")
    lucky = (0.004, *[0.012] * 7) if unit == "s" else (*[0.011] * 7, 0.04)
    found = compare(record, dataclasses.replace(record, samples=lucky))
    assert found.low < found.faster < found.high
    assert found.low < 1 < found.high, "one lucky round is no difference"


def test_files_are_matched_by_task_and_number_of_threads(record: Record) -> None:
    one, two = (dataclasses.replace(record, threads=n, samples=(float(n),)) for n in (1, 2))
    fp32 = dataclasses.replace(record, dtype="float32")
    compared, alone = compare_all([one, two], [two, fp32, one])
    assert [(c.before, c.after) for c in compared] == [(one, one), (two, two)]
    assert alone == [fp32]
    with pytest.raises(UsageError, match="threads is 1 in one and 2 in the other"):
        compare_all([one], [two])


# --- the machine ---


def test_the_machine_is_read_from_the_system() -> None:
    found = hardware()
    assert found.cpu
    assert 1 <= found.cores <= found.logical_cpus <= (os.cpu_count() or 1)
    assert 0.9 < found.memory_gib / (os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30) < 1.1
    if sys.platform == "linux":
        assert found.huge_pages in ("always", "madvise", "never")
        assert found.cache_bytes(1) < found.cache_bytes(2)
        assert all(isinstance(cache, Cache) and cache.shared_by >= 1 for cache in found.caches)
    assert found.cache_bytes(9) == 0


def test_versions_name_the_core_that_runs() -> None:
    from rooftile.formats import native_status

    found = versions()
    assert found.torch.startswith("2.")
    assert found.native_core.startswith(native_status().isa)
    assert len(found.native_core.rpartition(" ")[2]) == 12


def test_records_files_and_comparison_need_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from rooftile import bench\n"
        "import rooftile.bench.digits, rooftile.bench.neighbours\n"
        "bench.hardware(); bench.compare; bench.load_records"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- digits ---


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [(12.3456, 0.2, "12.3"), (12.3456, 3.0, "12"), (12.3456, 0.0, "12.35"), (0.012349, 0.0002, "0.0123"),
     (1234.5, 40, "1,230"), (5.0, 60.0, "5"), (9.96, 0.2, "10"), (0.0, 1.0, "0")],
)  # fmt: skip
def test_only_digits_that_the_error_leaves_are_shown(value: float, error: float, text: str) -> None:
    assert with_digits(value, significant_digits(value, error)) == text


def test_figures_have_prefixes_and_units(record: Record) -> None:
    assert scaled(1.9e12, "FLOP/s") == "1.90 TFLOP/s"
    assert scaled(7.5e9, "elements/s", 2) == "7.5 G elements/s"
    assert scaled(3e-11, "s", 1) == "0.03 ns"
    assert figure(dataclasses.replace(record, samples=(0.0123, 0.0123, 0.0123))) == "12.30 ms"
