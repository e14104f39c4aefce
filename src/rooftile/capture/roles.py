"""What a storage is for, where nobody said so while the step ran."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rooftile.capture.materialize import tensors_inside

if TYPE_CHECKING:
    from rooftile.capture.recorder import Recorder
    from rooftile.capture.trace import Role

__all__ = ["classifier", "tag_outputs"]


def tag_outputs(recorder: Recorder, output: Any, phase: str) -> None:
    """The model's first output is its logits; whatever an inference step returns besides is its KV cache."""
    for index, tensor in enumerate(tensors_inside(output)):
        cache = phase != "train" and index > 0
        recorder.tag(tensor, "kv_cache" if cache else "logits_loss", "kv_cache" if cache else "output")


def classifier(recorder: Recorder, train: bool) -> Callable[[Any], Role]:
    """The role of a storage by when it was born and whether the backward pass still needed it."""
    first_backward = next((i for i, op in enumerate(recorder.ops) if op.phase == "backward"), None)

    def classify(storage: Any) -> Role:
        if storage.born < 0:
            return "buffer"  # a constant that the model holds without registering it
        if not train or storage.phase not in ("forward", "recompute"):
            return "temporary"
        if storage.module == "loss":
            return "logits_loss"
        if storage.read_in_backward:
            return "activation"
        outlives = storage.phase == "forward" and first_backward is not None and (
            storage.died is None or (storage.died >= first_backward and storage.born < first_backward)
        )  # fmt: skip
        return "activation" if outlives else "temporary"

    return classify
