"""Training steps of the usual families: every operator that comes stands on a formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from costs_recorder import Recorder, record

from rooftile.capture.trace import Trace
from rooftile.costs import known_operators, trace_costs

SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 97,
         "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}  # fmt: skip


def tokens() -> dict[str, torch.Tensor]:
    ids = torch.zeros(2, 16, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def image() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.zeros(2, 3, 64, 64), "labels": torch.zeros(2, dtype=torch.long)}


def gpt2() -> torch.nn.Module:
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=97, bos_token_id=0, eos_token_id=1)
    config.loss_type = "ForCausalLM"
    return transformers.GPT2LMHeadModel(config)


def llama() -> torch.nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, num_key_value_heads=2))


def mixtral() -> torch.nn.Module:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SMALL, num_key_value_heads=2))


def bert() -> torch.nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL))


def t5() -> torch.nn.Module:
    config = transformers.T5Config(
        d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4, vocab_size=97, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def resnet() -> torch.nn.Module:
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(depths=[1, 1, 1, 1], num_labels=3))


def vit() -> torch.nn.Module:
    config = {name: value for name, value in SMALL.items() if not name.endswith("token_id") and name != "vocab_size"}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**config, image_size=64, num_labels=3))


def step(build: Callable[[], torch.nn.Module], inputs: dict[str, torch.Tensor], device: str, **kind: Any) -> Trace:
    """The second training step, with gradient clipping and AdamW."""
    with torch.device(device):
        model = build().train()
        optimizer = torch.optim.AdamW(model.parameters(), **kind)
        moved = {name: value.to(device) for name, value in inputs.items()}
        for _ in range(2):
            with Recorder() as recorder:
                model(**moved).loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    return recorder.trace()


def uncounted(trace: Trace) -> set[str]:
    """Operators without a formula, and those that are 0 FLOP without a reason."""
    costs = zip(trace.ops, trace_costs(trace), strict=True)
    return {op.operator for op, cost in costs if cost is None or (cost.flops == 0 and not cost.zero_reason)}


@pytest.mark.parametrize(
    ("build", "inputs", "device", "kind"),
    [
        (gpt2, tokens, "meta", {"foreach": True}), (llama, tokens, "meta", {"foreach": False}),
        (mixtral, tokens, "cpu", {"foreach": True}), (bert, tokens, "cpu", {"fused": True}),
        (t5, tokens, "cpu", {"foreach": True}), (resnet, image, "meta", {"foreach": True}),
        (vit, image, "meta", {"foreach": True}),
    ],
)  # fmt: skip
def test_every_operator_of_a_training_step_is_counted(
    build: Callable[[], torch.nn.Module],
    inputs: Callable[[], dict[str, torch.Tensor]],
    device: str,
    kind: dict[str, bool],
) -> None:
    trace = step(build, inputs(), device, **kind)
    assert len(trace.ops) > 300
    assert uncounted(trace) == set()


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_every_operator_of_a_recurrent_training_step_is_counted(kind: type[torch.nn.RNNBase], device: str) -> None:
    with torch.device(device):
        model = kind(12, 16, 2, bidirectional=True)
        x = torch.empty(5, 2, 12)
        trace = record(lambda: model(x)[0].sum().backward())
    assert uncounted(trace) == set()


OPTIMIZERS = ["Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("foreach", [True, False])
def test_every_operator_of_every_optimizer_is_counted(name: str, foreach: bool) -> None:
    weight = torch.nn.Parameter(torch.zeros(8, 8))
    weight.grad = torch.ones(8, 8)
    optimizer = getattr(torch.optim, name)([weight], lr=0.01, foreach=foreach)
    optimizer.step()
    trace = record(optimizer.step)
    assert uncounted(trace) == set()
    assert sum(cost.flops for cost in trace_costs(trace) if cost) > 64


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_every_fused_optimizer_is_counted(name: str) -> None:
    weight = torch.nn.Parameter(torch.zeros(8, 8))
    weight.grad = torch.ones(8, 8)
    extra = {"momentum": 0.9} if name == "SGD" else {}
    optimizer = getattr(torch.optim, name)([weight], lr=0.01, fused=True, **extra)
    optimizer.step()
    trace = record(optimizer.step)
    assert uncounted(trace) == set()
    assert any(op.operator.startswith("aten._fused") for op in trace.ops)


def test_every_name_in_the_table_is_an_operator_of_the_installed_torch() -> None:
    import torch.distributed._functional_collectives
    import torch.distributed.fsdp

    names = (name.split(".", 1) for name in sorted(known_operators()) if not name.startswith("rooftile."))
    spaces = ((getattr(torch.ops, space), base) for space, base in names)
    missing = [str(base) for ops, base in spaces if not hasattr(ops, base) and not hasattr(ops, base + "_")]
    assert missing == []
