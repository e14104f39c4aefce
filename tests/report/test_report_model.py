from __future__ import annotations

import copy
import io
import json
import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rooftile import _audit
from rooftile.errors import UsageError
from rooftile.report import SCHEMA, SECTIONS, Report
from rooftile.report.terminal import render


@pytest.fixture(scope="module")
def report() -> Report:
    return _audit.audit("gpt2", "h100-sxm", seq=64)


@pytest.fixture
def document(report: Report) -> dict[str, Any]:
    return json.loads(report.to_json())  # type: ignore[no-any-return]


def test_the_top_level_keys_are_the_schemas_and_each_is_an_attribute(report: Report, document: dict[str, Any]) -> None:
    assert list(document) == ["schema", *SECTIONS]
    assert document["schema"] == SCHEMA == "rooftile.audit/1"
    for name in SECTIONS:
        assert hasattr(report, name)


@pytest.mark.parametrize(
    ("section", "keys", "kinds"),
    [
        ("params", ["count", "trainable", "embedding", "bytes"], int),
        ("flops", ["forward", "backward", "recompute", "optimizer", "total", "matmul"], int),
        ("bytes", ["unfused", "fused"], int),
        ("roofline", ["bound_s", "ridge"], float),
        ("memory", ["peak_bytes", "visible_bytes"], int),
        ("memory", ["fits"], bool),
        ("memory", ["peak_at"], str),
        ("memory", ["by_role"], dict),
        ("kv_cache", ["bytes_per_token"], int),
        ("coverage", ["ops", "flops", "bytes"], float),
        ("coverage", ["unknown_ops"], list),
    ],
)
def test_the_promised_figures_are_plain_values(
    document: dict[str, Any], report: Report, section: str, keys: list[str], kinds: type
) -> None:
    for key in keys:
        assert isinstance(document[section][key], kinds), key
        if kinds not in (dict, list):
            assert getattr(getattr(report, section), key) == document[section][key]


def test_total_flops_are_the_sum_of_the_phases(document: dict[str, Any]) -> None:
    flops = document["flops"]
    assert flops["total"] == sum(flops[phase] for phase in ("forward", "recompute", "backward", "optimizer"))
    assert 0 < flops["matmul"] < flops["total"]


def test_a_report_comes_back_from_json_as_it_was(report: Report, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(report.to_json(), encoding="utf-8")
    loaded = Report.load(path)
    assert loaded == report
    assert loaded.to_json() == report.to_json()
    assert loaded.trace is None
    assert report.trace is not None


def test_a_report_is_read_only_and_can_be_pickled(report: Report) -> None:
    with pytest.raises(FrozenInstanceError):
        report.memory = None  # type: ignore[misc,assignment]
    with pytest.raises(AttributeError, match="read-only"):
        report.memory.peak_bytes = 0
    assert pickle.loads(pickle.dumps(report.memory)) == report.memory


def test_a_misspelt_attribute_names_what_there_is(report: Report) -> None:
    with pytest.raises(AttributeError, match="peak_bytes"):
        _ = report.memory.peak


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        ("[]", "names no schema"),
        ("null", "names no schema"),
        ('{"schema": "rooftile.audit/2"}', "newer than rooftile.audit/1"),
        ('{"schema": "rooftile.audit/10000000000000000000000"}', "newer than"),
        ('{"schema": "rooftile.audit/0"}', "no rooftile audit"),
        ('{"schema": "rooftile.audit/²"}', "no rooftile audit"),
        ('{"schema": "rooftile.trace/1"}', "'rooftile.trace/1'"),
        ('{"schema": 1}', "no rooftile audit"),
        ('{"schema": "rooftile.audit/1"}', "lacks the key 'target'"),
    ],
)
def test_a_newer_or_foreign_document_is_refused_in_one_sentence(text: str | bytes, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        Report.from_json(text, "report.json")
    assert said in str(caught.value)
    assert str(caught.value).startswith("report.json ")
    assert "\n" not in str(caught.value)


def test_a_section_of_the_wrong_kind_is_refused(document: dict[str, Any]) -> None:
    document["memory"] = 3
    with pytest.raises(UsageError, match="'memory' is a int"):
        Report.from_dict(document)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="can't be read"):
        Report.load(tmp_path / "none.json")


def test_a_saved_report_is_rendered_without_torch(report: Report, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(report.to_json(), encoding="utf-8")
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from rooftile.report import Report\n"
        "from rooftile.report.terminal import console, render\n"
        f"render(Report.load({str(path)!r}), console())"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "rooftile audit  gpt2" in shown.stdout


def at(document: dict[str, Any], path: str, value: Any) -> None:
    holder: Any = document
    *way, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    for step in way:
        holder = holder[step]
    if value is MISSING:
        del holder[last]
    else:
        holder[last] = value


MISSING = object()


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("memory.peak_bytes", "abc", "'memory.peak_bytes' is 'abc', where a whole number of 0 or more belongs"),
        ("memory.peak_bytes", float("nan"), "'memory.peak_bytes' is nan"),
        ("memory.peak_bytes", -5, "'memory.peak_bytes' is -5"),
        ("memory.peak_bytes", 1.5, "'memory.peak_bytes' is 1.5"),
        ("memory.peak_bytes", True, "'memory.peak_bytes' is true"),
        ("memory.peak_bytes", 10**400, "'memory.peak_bytes' is a whole number of more than 40 digits"),
        ("memory.timeline", [1, 2], "'memory.timeline[0]' is 1, where an object belongs"),
        ("flops.total", None, "'flops.total' is null"),
        ("findings.0.severity", MISSING, "the key 'findings[0].severity' is missing"),
        ("findings.0.severity", "grave", "'findings[0].severity' is 'grave', where error, warning or note belongs"),
        ("findings.0", 3, "'findings[0]' is 3, where an object belongs"),
        ("device.peaks", {}, "'device.peaks' is an object, where a list belongs"),
        ("target.notes", "abc", "'target.notes' is 'abc', where a list belongs"),
        ("roofline.families.0.bound_s", "1", "'roofline.families[0].bound_s' is '1'"),
        ("roofline.gemm.tile", [128], "'roofline.gemm.tile' has 1 items, where 2 belong"),
        ("kv_cache.tokens", None, "'kv_cache.tokens' is null"),
        ("target.config.rate", float("inf"), "'target.config.rate' is inf"),
    ],
)
def test_a_wrong_value_is_refused_in_one_sentence_that_names_its_key(
    document: dict[str, Any], path: str, value: Any, said: str, tmp_path: Path
) -> None:
    at(document, path, value)
    file = tmp_path / "report.json"
    file.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        Report.load(file)
    assert str(caught.value).startswith(f"{file}: {said}")
    assert "\n" not in str(caught.value)


def test_whatever_one_value_is_replaced_by_the_report_is_shown_or_refused_but_never_breaks(
    report: Report,
) -> None:
    def places(value: Any, path: str = "") -> list[str]:
        items = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
        inner = [place for key, item in items for place in places(item, f"{path}.{key}" if path else str(key))]
        return ([path] if path else []) + inner

    whole = report.to_dict()
    whole["roofline"]["heaviest"] = whole["roofline"]["heaviest"][:1]
    whole["memory"]["timeline"] = whole["memory"]["timeline"][:2]
    whole["device"] |= {"provenance": {}, "links": [], "measured": []}
    whole["memory"] |= {"by_module": {"wte": 1}, "role_peaks": {}}
    whole["target"] |= {"config": {}, "seconds": {}}
    whole |= {"conventions": {"flop": "two"}}
    whole["roofline"] |= {"ridges": {}, "bandwidth": 1.0}
    whole["bytes"] |= {"by_family": [], "by_phase": {}}
    shown = 0
    for path in places(whole):
        for value in (None, "x", -1, [], 0):
            document = copy.deepcopy(whole)
            at(document, path, value)
            try:
                loaded = Report.from_dict(document)
            except UsageError:
                continue
            render(loaded, Console(file=io.StringIO(), width=100))
            loaded.to_json()
            shown += 1
    assert shown > 0
