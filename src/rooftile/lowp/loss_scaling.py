"""Loss scaling around torch's GradScaler: where to start, how far it may go, what was skipped and why.

GradScaler stays the engine (scale, check, unscale, skip, grow, back off). What it lacks is added here: an initial scale
from one backward pass, a floor and a ceiling, a record of every skipped step with the tensors that overflowed, and the
verdict that no scale works. Source: Micikevicius et al. 2018, section 3.2.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from rooftile.errors import UsageError
from rooftile.formats.format import FloatFormat
from rooftile.formats.histogram import ExponentHistogram, exponent_histogram, merge_all
from rooftile.formats.reach import LossScaleWindow, loss_scale_window
from rooftile.lowp.masters import MasterWeights

__all__ = ["GradientWatch", "LossScaler", "SkippedStep", "initial_scale", "watch_gradients"]

_HEADROOM = 4.0  # below the window's upper end: gradients grow by a few times from one step to the next


@dataclass
class GradientWatch:
    """Histograms of what one backward pass computed: weights' gradients, and those of the modules' outputs."""

    histograms: list[ExponentHistogram] = field(default_factory=list)

    @property
    def merged(self) -> ExponentHistogram:
        """All of them together."""
        return merge_all(self.histograms)


@contextlib.contextmanager
def watch_gradients(model: nn.Module) -> Iterator[GradientWatch]:
    """Run one backward pass inside, unscaled and in FP32 or BF16; afterwards :func:`initial_scale` reads the watch.

    Gradients of activations count as well as those of weights: under FP16 both are stored in 16 bits, and it is often
    the former that vanish.
    """
    watch = GradientWatch()

    def note(grad: Tensor) -> None:
        watch.histograms.append(exponent_histogram(grad))

    def watch_outputs(_module: nn.Module, _inputs: object, outputs: object) -> None:
        for output in tree_leaves(outputs):
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(note)

    def weight_gradient(parameter: Tensor) -> None:
        if parameter.grad is not None:
            note(parameter.grad)

    handles = [m.register_forward_hook(watch_outputs) for m in model.modules() if not list(m.children())]
    handles += [p.register_post_accumulate_grad_hook(weight_gradient) for p in model.parameters() if p.requires_grad]
    try:
        yield watch
    finally:
        for handle in handles:
            handle.remove()


def initial_scale(
    watch: GradientWatch | ExponentHistogram, fmt: FloatFormat | str = "fp16", *, allowed: float = 1e-3
) -> tuple[float, LossScaleWindow]:
    """A power of two inside the window of a backward pass, and the window.

    Two binades below the upper end where the window is wide enough, else its largest power of two; where the window is
    empty, the largest scale that overflows nothing (``window.empty`` then says that something is lost at any scale).

    Args:
        watch: of :func:`watch_gradients`, or a histogram of unscaled gradients.
        fmt: what gradients are stored in.
        allowed: share of the non-zero gradients that may be flushed.

    Raises:
        UsageError: no finite non-zero gradient was seen.
    """
    histogram = watch.merged if isinstance(watch, GradientWatch) else watch
    window = loss_scale_window(histogram, fmt, allowed)
    largest = math.ldexp(1.0, math.frexp(window.high)[1] - 1)
    return (largest / _HEADROOM if largest / _HEADROOM >= window.low else largest), window


@dataclass(frozen=True, slots=True)
class SkippedStep:
    """A step that was not taken. ``tensors`` are the parameters whose gradients were not finite, with their counts."""

    step: int
    scale: float
    tensors: tuple[tuple[str, int], ...]

    @property
    def reading(self) -> str:
        """One line for a person."""
        if not self.tensors:
            return f"step {self.step} at scale {self.scale:g} was skipped"
        names = ", ".join(f"{name} ({count:,} values)" for name, count in self.tensors[:3])
        more = f" and {len(self.tensors) - 3} more" if len(self.tensors) > 3 else ""
        return f"step {self.step} at scale {self.scale:g} was skipped: {names}{more} not finite"


class LossScaler:
    """A GradScaler with a floor, a ceiling and a memory.

    One update, with micro-batches, clipping and any number of optimizers, in the only right order::

        for batch in micro_batches:
            scaler.scale(loss(batch) / len(micro_batches)).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)               # 1. before anything looks at the gradients
            clip_grad_norm_(parameters, 1.0)         # 2. on true magnitudes, of what this optimizer updates
            scaler.step(optimizer)                   # 3. skipped where something is not finite
        scaler.update()                              # 4. once, after all of them

    ``step`` unscales by itself where ``unscale_`` was not called. An optimizer may be a :class:`MasterWeights`; line 2
    is then ``masters.clip_grad_norm_(1.0)``: after line 1 the masters have the gradients and the model has none.

    Parameters
    ----------
    parameters:
        ``model.named_parameters()``: the names that the record of skips uses.
    initial:
        The first scale; :func:`initial_scale` finds one.
    floor, ceiling:
        The scale stays inside; a step that overflows at the floor is what :attr:`verdict` tells.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        initial: float = 65536.0,
        floor: float = 1.0,
        ceiling: float = 2.0**24,
        growth_interval: int = 2000,
        device: str = "cuda",
    ) -> None:
        if not 0 < floor <= initial <= ceiling < math.inf:
            raise UsageError(f"floor {floor:g}, initial {initial:g} and ceiling {ceiling:g} have to rise in this order")
        try:
            torch.device(device)
        except RuntimeError:
            raise UsageError(f"device is {device!r}, which torch doesn't know; pass 'cuda' or 'cpu'") from None
        if growth_interval < 1:
            raise UsageError(f"growth_interval is {growth_interval}; the scale grows after 1 or more steps")
        if device == "cuda" and not torch.cuda.is_available():
            raise UsageError("GradScaler scales nothing where CUDA is not available; pass device='cpu'")
        self.engine = torch.amp.GradScaler(device, init_scale=initial, growth_interval=growth_interval)
        self.floor, self.ceiling = floor, ceiling
        self.skipped: list[SkippedStep] = []
        self.steps = 0
        self._named = list(parameters)
        self._unscaled: set[int] = set()
        self._overflow: dict[str, int] = {}
        self._stepped: set[int] = set()
        self._skipping = False
        self._at_floor = 0

    @property
    def scale_value(self) -> float:
        """The scale now."""
        return float(self.engine.get_scale())

    def scale(self, loss: Tensor) -> Tensor:
        """``loss`` times the scale; call backward on it."""
        scaled: Tensor = self.engine.scale(loss)
        return scaled

    def unscale_(self, optimizer: torch.optim.Optimizer | MasterWeights) -> None:
        """Divide this optimizer's gradients by the scale, once an update, and note which are not finite.

        Raises:
            UsageError: the second call for one optimizer in one update; FP16 gradients without master weights.
        """
        if id(optimizer) in self._stepped:
            raise UsageError("step was already called for this optimizer since the last update(); call update() first")
        if id(optimizer) in self._unscaled:
            raise UsageError("unscale_ was called twice for one optimizer since the last update(); call it once")
        if isinstance(optimizer, MasterWeights):
            optimizer.take_gradients()
        inner = _inner(optimizer)
        if isinstance(inner, torch.optim.LBFGS):
            raise UsageError("LBFGS calls a closure several times a step, which loss scaling can't; use another one")
        grads = [p.grad for group in inner.param_groups for p in group["params"] if p.grad is not None]
        if any(g.dtype == torch.float16 for g in grads):
            raise UsageError("the gradients are fp16, and divided by the scale they would vanish; use MasterWeights")
        if not grads:
            raise UsageError("the optimizer's parameters have no gradients; call backward before unscale_ and step")
        self._note_overflow(optimizer)
        self.engine.unscale_(inner)
        self._unscaled.add(id(optimizer))

    def step(self, optimizer: torch.optim.Optimizer | MasterWeights) -> bool:
        """Take the step unless a gradient is not finite; whether it was taken. Unscales where that was not done."""
        if id(optimizer) in self._stepped:
            raise UsageError("step was called twice for one optimizer since the last update(); call update() between")
        if id(optimizer) not in self._unscaled:
            self.unscale_(optimizer)
        stepped: list[None] = []
        inner = _inner(optimizer)
        handle = inner.register_step_post_hook(lambda *_: stepped.append(None))
        try:
            self.engine.step(inner)
        finally:
            handle.remove()
        self._stepped.add(id(optimizer))
        # A fused optimizer is called in any case and looks at the overflow itself.
        found = self.engine._found_inf_per_device(inner).values()  # the engine tells nobody else
        taken = bool(stepped) and not any(float(each) for each in found)
        self._skipping |= not taken
        if isinstance(optimizer, MasterWeights):
            if taken:
                optimizer.write_back()
            else:
                optimizer.drop_gradients()
        return taken

    def update(self) -> None:
        """End the update: the scale backs off after a skip, grows after a long run without, and stays in range."""
        before = self.scale_value
        self.engine.update()
        self.steps += 1
        if self._skipping:
            self.skipped.append(SkippedStep(self.steps, before, tuple(self._overflow.items())))
            self._at_floor = self._at_floor + 1 if before <= self.floor else 0
        else:
            self._at_floor = 0
        clamped = min(max(self.scale_value, self.floor), self.ceiling)
        if clamped != self.scale_value:
            self.engine.update(clamped)
        self._overflow, self._stepped, self._unscaled, self._skipping = {}, set(), set(), False

    @property
    def verdict(self) -> str:
        """Empty while scaling works; a sentence once a step has overflowed at the floor."""
        if not self._at_floor:
            return ""
        last = self.skipped[-1]
        names = ", ".join(name for name, _ in last.tensors[:3]) or "some gradient"
        return (
            f"no loss scale works: {names} is not finite even at the floor {self.floor:g} "
            f"({self._at_floor} steps in a row); the forward pass overflows or the format is "
            "too narrow, so use bf16 or fp32 for that part"
        )

    def _note_overflow(self, optimizer: torch.optim.Optimizer | MasterWeights) -> None:
        grads = {id(p): p.grad for group in _inner(optimizer).param_groups for p in group["params"]}
        if isinstance(optimizer, MasterWeights):
            grads |= {id(p): master.grad for p, master in optimizer.pairs}
        for name, parameter in self._named:
            grad = grads.get(id(parameter))
            if grad is not None:
                count = int((~torch.isfinite(grad)).sum())
                if count:
                    self._overflow[name] = count

    def state_dict(self) -> dict[str, object]:
        """The engine's state and the count of steps; the record of skips is not kept."""
        return {"engine": self.engine.state_dict(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Continue from :meth:`state_dict`.

        Raises:
            UsageError: a state that is not such a one; nothing is changed then.
        """
        if not state.get("engine") or "steps" not in state:
            raise UsageError("the state has no 'engine' and 'steps'; give what LossScaler.state_dict returned")
        self.engine.load_state_dict(state["engine"])  # type: ignore[arg-type]
        self.steps = int(state["steps"])  # type: ignore[call-overload]


def _inner(optimizer: torch.optim.Optimizer | MasterWeights) -> torch.optim.Optimizer:
    return optimizer.optimizer if isinstance(optimizer, MasterWeights) else optimizer
