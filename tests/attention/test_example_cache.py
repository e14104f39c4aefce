"""The example of generation: with a cache the zoo's Llama gives the logits of its own forward pass."""

import importlib.util
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "generate_with_cache.py"


@pytest.fixture
def example():
    spec = importlib.util.spec_from_file_location("generate_with_cache", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("options", [["--page-size", "0"], ["--prompts", "3", "0"], ["--new-tokens", "-1"]])
def test_sizes_below_one_are_a_sentence(options, example, capsys):
    with pytest.raises(SystemExit):
        example.main(options)
    assert "whole numbers, 1 or more" in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--page-size", "16"]])
def test_cached_generation_agrees_with_the_whole_forward(options, example, capsys):
    difference = example.main(["--prompts", "3", "40", "--new-tokens", "6", *options])
    assert difference < 1e-5
    assert "prompt of   40 tokens" in capsys.readouterr().out
