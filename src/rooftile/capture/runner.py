"""One step under the recorder: forward and backward for every micro-batch, then the optimizer; and who is who."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rooftile._collector import collector_paused
from rooftile.capture.materialize import KV_CACHE_ARGUMENTS, autocast_dtype, held_tensors, tensors_inside
from rooftile.capture.modules import ModuleTracker
from rooftile.capture.options import CaptureOptions
from rooftile.capture.policy.autocast import emulated, load_policy
from rooftile.capture.policy.corrections import run_as_device
from rooftile.capture.policy.overrides import DevicePolicy
from rooftile.capture.policy.workspaces import workspaces_of
from rooftile.capture.recorder import Recorder
from rooftile.capture.roles import classifier, tag_outputs
from rooftile.capture.step import Step
from rooftile.capture.trace import Op, Storage
from rooftile.errors import UsageError
from rooftile.lowp.masters import MasterWeights

if TYPE_CHECKING:
    from rooftile.devices import Device

__all__ = ["LOSS_SCALE", "Progress", "Runner"]

Progress = Callable[[str], None]

#: GradScaler's first scale.
LOSS_SCALE = 65536.0


class Runner:
    """One step: forward and backward for every micro-batch, then the optimizer."""

    def __init__(
        self, step: Step, device: Device, options: CaptureOptions, precision: str,
        optimizer: torch.optim.Optimizer | MasterWeights | None, say: Progress,
    ) -> None:  # fmt: skip
        self.step, self.options, self.precision, self.optimizer, self.say = step, options, precision, optimizer, say
        self.policy = DevicePolicy(device, options.attention)
        self.autocast = autocast_dtype(precision)
        self.autocast_policy = load_policy(device.device_class)
        self.modules = ModuleTracker(step.model)
        run = run_as_device(device.device_class)
        self.recorder = Recorder(self.modules, self.policy.handler, run, workspaces_of(device))
        self._own_region = False
        self.entered: list[dict[str, str]] = []  # autocast contexts that the model made itself, each kind once

    def run(self) -> tuple[tuple[Op, ...], tuple[Storage, ...]]:
        """Record the step; the frozen ops and storages."""
        recorder = self.recorder
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.policy.installed())
            stack.enter_context(
                emulated(self.autocast_policy, lambda t: recorder.tag(t, "autocast_cache"), self._entered)
            )
            stack.enter_context(self.modules.tracking())
            self._tag_state()
            stack.enter_context(collector_paused())  # lifetimes are the same at every run
            try:
                with recorder:
                    if self.step.phase == "train":
                        self._train()
                    else:
                        self._infer()
            except Exception as error:
                error.rooftile_module = self.modules.failed  # type: ignore[attr-defined]
                raise
        classify = classifier(recorder, self.step.phase == "train")
        return recorder.finished(classify)

    # ----------------------------------------------------------------------------------------------------- the passes
    def _call(self) -> Any:
        inputs = self.step.inputs
        return self.step.model(**inputs) if isinstance(inputs, dict) else self.step.model(*inputs)

    def _region(self) -> contextlib.AbstractContextManager[Any]:
        if self.autocast is None:
            return contextlib.nullcontext()
        self._own_region = True
        try:
            return torch.autocast("cpu", dtype=self.autocast)  # the emulated key: the target's lists, not the CPU's
        finally:
            self._own_region = False

    def _entered(self, device_type: str, dtype: torch.dtype) -> None:
        kind = {"device_type": device_type, "dtype": str(dtype).removeprefix("torch."), "by": "model"}
        if not self._own_region and kind not in self.entered:
            self.entered.append(kind)

    def _infer(self) -> None:
        self.say("forward")
        with torch.no_grad(), self._region():
            output = self._call()
            tag_outputs(self.recorder, output, self.step.phase)

    def _train(self) -> None:
        recorder, count = self.recorder, self.options.micro_batches
        for recorder.micro_batch in range(count):
            which = f" {recorder.micro_batch + 1}/{count}" if count > 1 else ""
            self.say(f"forward{which}")
            recorder.phase = "forward"
            with self._region():
                output = self._call()
                tag_outputs(recorder, output, "train")
                loss = self._loss(output)
            self.modules.outside = "loss"
            scaled = loss * LOSS_SCALE if self.precision == "fp16-mixed" else loss
            if count > 1:
                scaled = scaled / count
            self.say(f"backward{which}")
            recorder.phase = "backward"
            scaled.backward()
            recorder.phase = "forward"
            self.modules.outside = ""
            del output, loss, scaled  # held until here, as a training loop's variables hold them
        self._tag_gradients()
        if self.optimizer is not None:
            self.say("optimizer")
            recorder.phase, self.modules.outside = "optimizer", "optimizer"
            if self.precision == "fp16-mixed":
                self._unscale()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def _loss(self, output: Any) -> Tensor:
        loss: Any
        if self.step.loss is not None:
            self.modules.outside = "loss"
            loss = self.step.loss(output)
        else:
            loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", output)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise UsageError(
                f"a training step needs a scalar loss, and got {found}; give Step(loss=callable(output) -> scalar), "
                "or phase='prefill' for inference."
            )
        if not loss.requires_grad:
            raise UsageError(
                "the loss does not depend on any parameter that requires a gradient; unfreeze some, or audit with "
                "phase='prefill'."
            )
        self.recorder.tag(loss, "logits_loss", "loss", "loss")
        return loss

    def _unscale(self) -> None:
        """What GradScaler does before the step: one fused check-and-divide over all gradients of a dtype."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for parameter in self.step.model.parameters():
            if parameter.grad is not None:
                by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
        for grads in by_dtype.values():
            found = torch.zeros((), dtype=torch.float32, device=grads[0].device)
            inverse = torch.full((), 1.0 / LOSS_SCALE, dtype=torch.float32, device=grads[0].device)
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found, inverse)

    # ---------------------------------------------------------------------------------------------------------- roles
    def _tag_state(self) -> None:
        tag, model = self.recorder.tag, self.step.model
        for name, parameter in model.named_parameters():
            tag(parameter, "parameter", name, name.rpartition(".")[0])
        for name, buffer in model.named_buffers():
            tag(buffer, "buffer", name, name.rpartition(".")[0])
        names = {id(p): name for name, p in model.named_parameters()}
        inner = self.optimizer
        if isinstance(inner, MasterWeights):
            for own, master in inner.pairs:
                name = names[id(master)] = names[id(own)]
                tag(master, "master_weight", name, name.rpartition(".")[0])
            inner = inner.optimizer
        if inner is not None:
            # Torch keeps the step counters in host memory on CUDA unless the optimizer is fused or capturable.
            on_device = any(group.get("fused") or group.get("capturable") for group in inner.param_groups)
            on_host = self.policy.device.device_class in ("cuda", "rocm") and not on_device
            for owned, state in inner.state.items():
                owner = names.get(id(owned), "")
                for key, value in state.items():
                    if key == "step" and isinstance(value, Tensor) and on_host:
                        self.recorder.mark_host(value)
                    elif isinstance(value, Tensor):
                        tag(value, "optimizer_state", f"{owner}.{key}", owner.rpartition(".")[0])
        self._tag_inputs()

    def _tag_inputs(self) -> None:
        inputs = self.step.inputs
        named = inputs.items() if isinstance(inputs, dict) else enumerate(inputs)
        for name, value in named:
            role = "kv_cache" if name in KV_CACHE_ARGUMENTS else "input"
            for tensor in tensors_inside(value):
                self.recorder.tag(tensor, role, str(name))  # type: ignore[arg-type]
        # A loss that holds its targets in a closure or a functools.partial: inputs of the step as well.
        for tensor in held_tensors(self.step.loss):
            self.recorder.tag(tensor, "input", "target", "loss")

    def _tag_gradients(self) -> None:
        for name, parameter in self.step.model.named_parameters():
            if parameter.grad is not None:
                self.recorder.tag(parameter.grad, "gradient", name, name.rpartition(".")[0])
