"""What a storage is for, where nobody said so while the step ran."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from rooftile.capture.recorder import Recorder
    from rooftile.capture.trace import Role

__all__ = ["classifier", "output_tensors", "tag_outputs"]


def output_tensors(value: Any) -> list[Tensor]:
    """Tensors of a nested output or cache; objects that torch's pytrees don't know are looked into one level deep."""
    found: list[Tensor] = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dict__"):
            for item in tree_leaves(list(vars(leaf).values())):
                if isinstance(item, Tensor):
                    found.append(item)
                elif hasattr(item, "__dict__"):  # a cache object that holds layer objects
                    found += [t for t in tree_leaves(list(vars(item).values())) if isinstance(t, Tensor)]
    return found


def tag_outputs(recorder: Recorder, output: Any, phase: str) -> None:
    """The model's first output is its logits; whatever an inference step returns besides is its KV cache."""
    tensors = output_tensors(output)
    for index, tensor in enumerate(tensors):
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
