"""The example's quick run: every precision trains, and the table and the plot are there."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_small_gpt.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_small_gpt", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_quick_run_trains_every_precision_and_writes_table_plot_and_json(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    runs = example.main(["--quick", "--plot", str(tmp_path / "out.png"), "--json", str(tmp_path / "out.json")])
    assert [run.precision for run in runs] == list(example.PRECISIONS)
    assert all(math.isfinite(run.validation) and run.losses[-1] < run.losses[0] for run in runs)
    by_name = {run.precision: run for run in runs}
    assert by_name["fp32"].flushed == by_name["fp32"].swallowed == 0
    assert by_name["bf16-pure"].swallowed > 0.02
    assert by_name["fp16-scaled"].flushed < by_name["fp16"].flushed
    assert by_name["deepseek-v3"].losses != by_name["bf16-autocast"].losses
    assert by_name["fp8-tensor"].losses != by_name["deepseek-v3"].losses
    out = capsys.readouterr().out
    assert "minus fp32" in out
    assert "not shown" in out
    assert (tmp_path / "out.png").stat().st_size > 10_000
    assert len(json.loads((tmp_path / "out.json").read_text())["runs"]) == 7


def test_an_unknown_precision_is_one_sentence(example: ModuleType) -> None:
    with pytest.raises(SystemExit, match="no precision is called 'fp7'"):
        example.main(["--quick", "--precisions", "fp7"])
