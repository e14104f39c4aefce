"""Small traces written by hand, so that a ledger's figures can be counted on paper."""

from __future__ import annotations

import random
from typing import Any

from rooftile.capture.trace import Call, Op, Storage, TensorMeta, Trace


def meta(*shape: int, dtype: str = "float32", stride: tuple[int, ...] | None = None) -> TensorMeta:
    """A contiguous tensor, unless ``stride`` says otherwise."""
    if stride is None:
        steps, step = [], 1
        for size in reversed(shape):
            steps.append(step)
            step *= size
        stride = tuple(reversed(steps))
    return TensorMeta(shape, stride, dtype)


def op(
    operator: str,
    inputs: list[tuple[TensorMeta, int]],
    outputs: list[tuple[TensorMeta, int]],
    *,
    module: str = "",
    phase: str = "forward",
    rest: tuple[Any, ...] = (),
) -> Op:
    """An op on (tensor, storage id) pairs; ``rest`` are arguments that are no tensors."""
    call = Call(operator, tuple(m for m, _ in inputs) + rest, (), tuple(m for m, _ in outputs))
    return Op(call, module, phase, tuple(s for _, s in inputs), tuple(s for _, s in outputs))  # type: ignore[arg-type]


def storage(sid: int, nbytes: int, role: str, born: int, died: int | None, **more: Any) -> Storage:
    return Storage(sid, nbytes, role, born, died, more.pop("module", ""), **more)  # type: ignore[arg-type]


def nothing(count: int, phases: list[str] | None = None) -> tuple[Op, ...]:
    """Ops that only take up time."""
    return tuple(op("aten.sin.default", [], [], phase=(phases or ["forward"] * count)[i]) for i in range(count))


def random_trace(seed: int, ops: int = 60, storages: int = 80) -> Trace:
    """Lifetimes of every kind: there before, there after, one op long."""
    rng = random.Random(seed)
    roles = ("parameter", "activation", "temporary", "gradient", "optimizer_state", "input")
    made = []
    for sid in range(storages):
        born = rng.randrange(-1, ops)
        died = None if rng.random() < 0.3 else rng.randrange(max(born, 0), ops)
        made.append(storage(sid, rng.randrange(1, 1000), rng.choice(roles), born, died, module=f"layers.{sid % 3}.a"))
    phases = sorted((rng.choice(("forward", "backward", "optimizer")) for _ in range(ops)),
                    key=("forward", "backward", "optimizer").index)  # fmt: skip
    return Trace(nothing(ops, phases), tuple(made))
