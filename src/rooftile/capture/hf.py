"""A Hugging Face ``config.json`` as a target: the architecture with no weights, built on meta (extra ``hf``)."""

from __future__ import annotations

import contextlib
import difflib
import json
from pathlib import Path
from typing import Any

import torch

from rooftile.capture.failures import capture_error
from rooftile.capture.meta_init import on_meta
from rooftile.capture.step import Step, StepPhase
from rooftile.errors import UsageError

__all__ = ["config_step"]

#: Sequence where none is given, if the model has that many positions.
_DEFAULT_SEQ = 4096


def config_step(path: Path, *, batch: int, seq: int | None, phase: StepPhase, live: bool = False) -> Step:
    """A causal language model's (or, failing that, masked language model's) step from its configuration file.

    Training takes labels of its own vocabulary and the model's own loss; prefill and decode keep a KV cache, decode
    adds one token to ``seq`` cached ones. Raises UsageError for a file that is no configuration, for a sequence that
    the model's positions do not hold, and where transformers is not installed.
    """
    config = _load_config(path)
    positions = getattr(config, "max_position_embeddings", None)
    most = positions - (phase == "decode") if positions else None
    if seq is None:
        seq = min(_DEFAULT_SEQ, most) if most else _DEFAULT_SEQ
    if most is not None and seq > most:
        raise UsageError(f"seq is {seq}, but {path} has {positions} positions; use {most} or less")
    with contextlib.nullcontext() if live else on_meta():
        model, causal = _build_model(config, path)
        new = 1 if phase == "decode" else seq
        inputs: dict[str, Any] = {"input_ids": torch.zeros(batch, new, dtype=torch.int64)}
        if phase == "train":
            inputs["labels"] = torch.zeros(batch, new, dtype=torch.int64)
            inputs |= {"use_cache": False} if causal else {}
        elif causal:
            inputs["use_cache"] = True
            if phase == "decode":
                inputs["past_key_values"] = _cache(config, model, batch, seq)
        elif phase == "decode":
            raise UsageError(f"{path} is not a causal language model, so it has no decode phase; use prefill")
    model.train(phase == "train")
    model.register_forward_pre_hook(_nothing_is_packed)
    model.register_forward_hook(_packing_as_before, always_call=True)
    sizes = {k: v for k, v in config.to_dict().items() if isinstance(v, int | float | str) and not isinstance(v, bool)}
    return Step(model, inputs, None, None, phase, str(path), batch, seq, sizes)


def _load_config(path: Path) -> Any:
    try:
        from transformers import CONFIG_MAPPING, AutoConfig
    except ImportError as error:
        raise UsageError(f"{path} needs transformers; install rooftile with the extra hf.") from error
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"there is no file {str(path)!r}; check the path.") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{str(path)!r} is not a JSON file ({error}).") from error
    kind = values.pop("model_type", None) if isinstance(values, dict) else None
    if kind is None:
        raise UsageError(f"{str(path)!r} has no 'model_type', so it is no Hugging Face model configuration.")
    try:
        return AutoConfig.for_model(kind, **values)
    except (ValueError, KeyError, TypeError) as error:
        near = difflib.get_close_matches(str(kind), CONFIG_MAPPING.keys(), n=3)
        if kind not in CONFIG_MAPPING:
            hint = f"did you mean {' or '.join(near)}?" if near else f"it knows {len(CONFIG_MAPPING)} others."
            raise UsageError(f"transformers can't read {str(path)!r}: no model_type {kind!r}; {hint}") from error
        first = (str(error).splitlines() or [""])[0]
        raise UsageError(f"transformers can't read {str(path)!r} (model_type {kind!r}): {first}") from error


def _build_model(config: Any, path: Path) -> tuple[torch.nn.Module, bool]:
    """The model and whether it is causal, by the first architecture that its configuration names."""
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    named = " ".join(getattr(config, "architectures", None) or ())
    causal = type(config) in AutoModelForCausalLM._model_mapping and "MaskedLM" not in named
    if not causal and type(config) not in AutoModelForMaskedLM._model_mapping:
        raise UsageError(
            f"{path} is neither a causal nor a masked language model; write a function that returns a rooftile.Step."
        )
    auto = AutoModelForCausalLM if causal else AutoModelForMaskedLM
    try:
        return auto.from_config(config), causal
    except Exception as error:
        raise capture_error(error) from error


def _cache(config: Any, model: torch.nn.Module, batch: int, length: int) -> Any:
    """A cache of ``length`` tokens, filled layer by layer as a prefill would have left it."""
    from transformers import DynamicCache

    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dtype = next(model.parameters()).dtype
    cache = DynamicCache(config=config)
    for layer in range(config.num_hidden_layers):
        shape = (batch, heads, length, dim)
        cache.update(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype), layer)
    return cache


_detectors: list[Any] = []


def _nothing_is_packed(module: torch.nn.Module, args: Any) -> None:  # noqa: ARG001
    """While the model runs, transformers need not look for packed sequences in the positions.

    It reads their values, which an audit has not, and without them builds a mask that a real run would leave out: an
    audit's rows are one sequence each, and then the causal kernel is taken.
    """
    from transformers import masking_utils

    _detectors.append(getattr(masking_utils, "find_packed_sequence_indices", None))
    masking_utils.find_packed_sequence_indices = lambda position_ids: None  # noqa: ARG005


def _packing_as_before(module: torch.nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001
    from transformers import masking_utils

    masking_utils.find_packed_sequence_indices = _detectors.pop()
