"""The emulated autocast policy against the installed torch's own, on CUDA's and the CPU's dispatch keys."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rooftile import devices
from rooftile.capture import CaptureOptions, Step, capture
from rooftile.capture.policy.autocast import emulated, load_policy
from rooftile.devices import Device


def registered(key: str) -> set[str]:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return {n[6:] for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::") and has(n, key)}


@pytest.mark.parametrize(("name", "key"), [("cuda", "AutocastCUDA"), ("cpu", "AutocastCPU")])
def test_the_lists_name_exactly_the_operators_that_torch_registers(name: str, key: str):
    assert set(load_policy(name).rules) == registered(key)


def test_the_release_of_the_lists_is_the_installed_torchs():
    assert torch.__version__.split("+")[0] == load_policy("cuda").release


def programs(device: str) -> dict[str, object]:
    """One call for each kind of rule, on tensors that it makes itself."""

    def t(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    half = torch.bfloat16
    index = torch.zeros(4, dtype=torch.int64, device=device)
    return {
        "linear": lambda: F.linear(t(4, 8), t(3, 8), t(3)),
        "matmul": lambda: t(4, 8) @ t(8, 3),
        "bmm": lambda: torch.bmm(t(2, 4, 8), t(2, 8, 3)),
        "baddbmm": lambda: torch.baddbmm(t(2, 4, 3), t(2, 4, 8), t(2, 8, 3)),
        "einsum": lambda: torch.einsum("ij,jk->ik", t(4, 8), t(8, 3)),
        "conv2d": lambda: F.conv2d(t(1, 3, 8, 8), t(4, 3, 3, 3)),
        "sdpa": lambda: F.scaled_dot_product_attention(t(1, 2, 4, 8), t(1, 2, 4, 8), t(1, 2, 4, 8)),
        "softmax": lambda: torch.softmax(t(4, 8, dtype=half), -1),
        "softmax to a dtype": lambda: torch.softmax(t(4, 8, dtype=half), -1, dtype=torch.float64),
        "log_softmax": lambda: F.log_softmax(t(4, 8, dtype=half), -1),
        "layer_norm": lambda: F.layer_norm(t(4, 8, dtype=half), (8,)),
        "rms_norm": lambda: F.rms_norm(t(4, 8, dtype=half), (8,)),
        "group_norm": lambda: F.group_norm(t(4, 8, dtype=half), 2),
        "exp": lambda: t(4, dtype=half).exp(),
        "pow": lambda: t(4, dtype=half) ** 2.0,
        "rsqrt": lambda: t(4, dtype=half).rsqrt(),
        "sum": lambda: t(4, dtype=half).sum(),
        "sum over a dim": lambda: t(4, 8, dtype=half).sum(0),
        "mean": lambda: t(4, dtype=half).mean(),
        "prod": lambda: t(4, dtype=half).prod(),
        "cumsum": lambda: t(4, dtype=half).cumsum(0),
        "norm": lambda: torch.norm(t(4, dtype=half)),
        "vector_norm": lambda: torch.linalg.vector_norm(t(4, dtype=half)),
        "add": lambda: t(4, dtype=half) + t(4, dtype=half),
        "add of two dtypes": lambda: t(4, dtype=half) + t(4),
        "gelu": lambda: F.gelu(t(4, dtype=half)),
        "silu": lambda: F.silu(t(4, dtype=half)),
        "sigmoid": lambda: t(4, dtype=half).sigmoid(),
        "addcmul": lambda: torch.addcmul(t(4), t(4, dtype=half), t(4, dtype=half)),
        "cat": lambda: torch.cat([t(4), t(4, dtype=half)]),
        "stack": lambda: torch.stack([t(4), t(4, dtype=half)]),
        "cross_entropy": lambda: F.cross_entropy(t(4, 8, dtype=half), index),
        "nll_loss": lambda: F.nll_loss(t(4, 8, dtype=half), index),
        "mse_loss": lambda: F.mse_loss(t(4, dtype=half), t(4, dtype=half)),
        "kl_div": lambda: F.kl_div(t(4, dtype=half), t(4, dtype=half), reduction="sum"),
        "bce_with_logits": lambda: F.binary_cross_entropy_with_logits(t(4, dtype=half), t(4, dtype=half)),
        "embedding": lambda: F.embedding(index, t(8, 3)),
        "fp64 stays": lambda: F.linear(t(4, 8, dtype=torch.float64), t(3, 8, dtype=torch.float64)),
    }


class Dtypes(TorchDispatchMode):
    """What ran, and on which dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[torch.dtype, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        dtypes = tuple(t.dtype for t in tree_leaves((args, out)) if isinstance(t, Tensor))
        if func.namespace == "aten" and dtypes and "empty" not in str(func) and "zeros" not in str(func):
            self.seen.append((str(func), dtypes))
        return out


def observed(device: str) -> dict[str, object]:
    """Per program the operators with their dtypes; of attention, which is composed differently, the result's."""
    seen: dict[str, object] = {}
    for name, program in programs(device).items():
        with torch.no_grad(), Dtypes() as log:
            result = program()  # type: ignore[operator]
        seen[name] = result.dtype if name == "sdpa" else log.seen
    return seen


def on_cuda() -> dict[str, object]:
    """The oracle: torch's own CUDA kernels of autocast, over fake cuda tensors (no gradients, so no device)."""
    was = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        with FakeTensorMode():
            return observed("cuda")
    finally:
        torch.set_autocast_enabled("cuda", was[0])
        torch.set_autocast_dtype("cuda", was[1])


def test_every_kind_of_rule_runs_the_operators_and_dtypes_that_torch_runs_on_cuda():
    want = on_cuda()
    with emulated(load_policy("cuda"), lambda _: None, lambda *_: None), torch.autocast("cuda", dtype=torch.bfloat16):
        got = observed("meta")
    for name, operators in want.items():
        assert got[name] == operators, name


def test_the_cpus_policy_on_meta_tensors_is_the_cpus_own_on_real_ones():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = {name: program().dtype for name, program in programs("cpu").items()}  # type: ignore[operator]
    with emulated(load_policy("cpu"), lambda _: None, lambda *_: None), torch.autocast("cpu", dtype=torch.bfloat16):
        got = {name: program().dtype for name, program in programs("meta").items()}  # type: ignore[operator]
    assert got == want


def test_linear_under_cpu_autocast_keeps_weights_and_gradients_in_fp32():
    """Input, weight, output, weight gradient: fp32, fp32, bf16, fp32."""
    layer = torch.nn.Linear(4, 2, device="meta")
    x = torch.empty(3, 4, device="meta")
    with emulated(load_policy("cpu"), lambda _: None, lambda *_: None), torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    y.float().square().mean().backward()
    assert layer.weight.grad is not None
    assert [x.dtype, layer.weight.dtype, y.dtype, layer.weight.grad.dtype] == [
        torch.float32, torch.float32, torch.bfloat16, torch.float32,
    ]  # fmt: skip


def test_disabled_regions_and_nested_contexts_of_any_device_are_honoured():
    x, w = torch.empty(3, 4, device="meta"), torch.empty(2, 4, device="meta")
    with emulated(load_policy("cuda"), lambda _: None, lambda *_: None), torch.autocast("cuda", dtype=torch.float16):
        assert F.linear(x, w).dtype == torch.float16
        with torch.autocast("cuda", enabled=False):
            assert F.linear(x, w).dtype == torch.float32
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert F.linear(x, w).dtype == torch.bfloat16
        assert F.linear(x, w).dtype == torch.float16
    assert F.linear(x, w).dtype == torch.float32


def test_autocast_that_the_users_model_enters_itself_is_the_targets(h100: Device):
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = torch.nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                return torch.softmax(self.lin(x), -1)

    step = Step(Model(), (torch.randn(2, 4),), lambda y: y.sum())
    for device, want in ((h100, "float32"), (devices.load("tpu-v4"), "float32")):
        trace = capture(step, device, CaptureOptions(precision="fp32"))
        (softmax,) = [op for op in trace.ops if op.operator == "aten._softmax.default"]
        assert softmax.call.outputs[0].dtype == want
        (product,) = [op for op in trace.ops if op.operator == "aten.addmm.default"]
        assert product.call.outputs[0].dtype == "bfloat16"


def test_what_the_target_bans_is_an_error_with_the_users_line(h100: Device):
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = torch.nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.lin(x)
            return F.binary_cross_entropy(y, torch.zeros_like(y))

    with pytest.raises(Exception, match=r"test_autocast_policy.py:\d+ .*not allowed under the target's autocast"):
        capture(Step(Model(), (torch.randn(2, 4),)), h100, CaptureOptions())
