"""Inputs from public bug reports by people who do this job (numbers as in the project's list of cases)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rooftile
from rooftile.errors import UnitError


def tiny_llama(seq: int) -> rooftile.Step:
    """GQA 4:1, one head dim, lengths beyond what a toy needs so that the quadratic term shows."""
    config = rooftile.zoo.llama_config(
        "llama-3.1-8b", n_layers=2, n_heads=8, n_kv_heads=1, d_model=256, d_ff=512, vocab=100
    )
    with torch.device("meta"):
        model = rooftile.zoo.Llama(config, max_seq=seq)
        tokens = torch.zeros(1, seq, dtype=torch.int64)
        return rooftile.Step(model, {"tokens": tokens}, lambda y: y.float().mean())


@pytest.mark.parametrize("attention", ["tiled", "materialized"])
def test_case_26_twice_the_tokens_is_more_than_twice_the_flops(attention: str):
    """calflops 48: the quadratic term is there, and it is the attention's: 2 B H L^2 (D + Dv), a half of it causal."""
    totals = {}
    for seq in (4096, 8192, 16384):
        report = rooftile.audit(tiny_llama(seq), "h100-sxm", attention=attention, optimizer="none", ignore=["MEM"])
        totals[seq] = report.flops.forward
    first, second = totals[8192] - 2 * totals[4096], totals[16384] - 2 * totals[8192]
    assert first > 0
    assert second / first == pytest.approx(4, rel=0.02)


def test_case_27_tied_weights_are_one_storage_and_two_uses():
    """torchinfo 377: GPT-2 counts 124,439,808 parameters, and the head's product is in the FLOPs all the same."""
    report = rooftile.audit("gpt2", "h100-sxm", precision="fp32", ignore=["MEM"])
    assert report.params.count == 124_439_808
    assert report.memory.by_role["parameter"] == 4 * 124_439_808
    head = 2 * 1024 * 768 * 50257
    products = [op for op in report.trace.ops if op.phase == "forward" and op.operator == "aten.mm.default"]
    assert [2 * 1024 * 768 * op.call.outputs[0].shape[-1] for op in products] == [head]


def test_case_28_an_embedding_lookup_is_no_matmul():
    """tt-metal PR 50114: 0 FLOP, the gathered rows and their ids, never V x h."""
    step = rooftile.Step(nn.Embedding(1000, 64), (torch.zeros(2, 8, dtype=torch.int64),), phase="prefill")
    report = rooftile.audit(step, "h100-sxm", precision="fp32")
    assert report.flops.total == 0
    assert report.bytes.unfused == 16 * 64 * 4 * 2 + 16 * 8


def test_case_29_an_in_place_relu_takes_no_memory():
    """pytorch-summary 163."""

    def peak(inplace: bool) -> int:
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(inplace=inplace))
        step = rooftile.Step(model, (torch.randn(32, 64),), phase="prefill")
        return rooftile.audit(step, "h100-sxm", precision="fp32").memory.peak_bytes

    assert peak(False) - peak(True) == 32 * 64 * 4


@pytest.fixture
def custom_op():
    library = torch.library.Library("rooftile_cases", "FRAGMENT")
    library.define("mystery(Tensor x) -> Tensor")
    library.impl("mystery", lambda x: torch.empty_like(x), "Meta")
    yield "rooftile_cases::mystery"
    library._destroy()


def test_case_30_a_custom_operator_is_named_and_makes_the_counts_lower_bounds(custom_op: str):
    """pytorch 131041: not silently 0; and a public way to register a formula."""

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.rooftile_cases.mystery(x @ x)

    def audit() -> rooftile.Report:
        step = rooftile.Step(Model(), (torch.empty(8, 8, device="meta"),), phase="prefill")
        return rooftile.audit(step, "h100-sxm", precision="fp32")

    before = audit()
    assert before.coverage.unknown_ops == ("rooftile_cases.mystery.default",)
    assert before.coverage.ops == before.coverage.flops == pytest.approx(0.5)
    assert before.coverage.bytes < 1

    from rooftile.costs import Cost

    @rooftile.register_cost(custom_op)
    def mystery(call: rooftile.capture.Call) -> Cost:
        (x,) = call.inputs
        return Cost("custom", flops=3 * x.numel, bytes_read=x.nbytes, bytes_written=x.nbytes)

    after = audit()
    assert after.coverage.unknown_ops == ()
    assert after.coverage.ops == after.coverage.flops == after.coverage.bytes == 1
    assert after.flops.total - before.flops.total == 3 * 64


def test_case_32_a_rate_above_the_roof_is_an_error():
    """pytorch 145947: more than 1000 TFLOP/s on a 989 part."""
    with pytest.raises(UnitError, match="989"):
        rooftile.roofline.check_rate(1.05e15, 1.0, rooftile.devices.load("h100-sxm"), "bfloat16")


def test_case_33_the_kv_cache_counts_kv_heads():
    """LLM-Viewer 12: GQA ignored was 8x too much; also for a K that was expanded and copied first."""

    class Repeated(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = (t[:, :, None].expand(1, 2, 8, 32, 64).reshape(1, 16, 32, 64) for t in (k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    q, kv = torch.empty(1, 16, 32, 64, device="meta"), torch.empty(1, 2, 32, 64, device="meta")
    step = rooftile.Step(Repeated(), (q, kv, kv), phase="prefill")
    assert rooftile.audit(step, "h100-sxm", precision="bf16").kv_cache.bytes_per_token == 2 * 2 * 64 * 2
    report = rooftile.audit("llama-3.1-8b", "h100-sxm", phase="prefill", seq=128)
    assert report.kv_cache.bytes_per_token == 131_072


def test_case_34_the_autocast_weight_cache_is_its_own_line():
    """transformers 8403: N Linears under autocast hold 2 bytes more per fp32 weight."""
    model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(4)])
    step = rooftile.Step(model, (torch.randn(1, 512),), phase="prefill")
    report = rooftile.audit(step, "h100-sxm", precision="bf16-mixed")
    assert report.memory.by_role["autocast_cache"] == 4 * 2 * 512 * 512


def test_case_35_what_fits_is_decided_by_the_visible_capacity():
    """An "80 GB" H100 shows 79.15-79.21 GiB: 79.5 GiB of weights do not fit, though 80 GiB would hold them."""

    def fits(gib: float) -> bool:
        rows = int(gib * 2**30 / 4096 / 2)
        with torch.device("meta"):
            model = nn.Linear(4096, rows, bias=False, dtype=torch.bfloat16)
            step = rooftile.Step(model, (torch.empty(0, 4096),), phase="prefill")
        return rooftile.audit(step, "h100-sxm", precision="as-is").memory.fits

    assert fits(79.0)
    assert not fits(79.5)


def test_case_36_a_frozen_base_has_no_weight_gradient():
    """calflops 24: LoRA's backward counted as a full one. dX for all layers, dW for the adapters only."""

    class Lora(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(256, 256, bias=False).requires_grad_(False)
            self.a, self.b = nn.Linear(256, 4, bias=False), nn.Linear(4, 256, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.b(self.a(x))

    step = rooftile.Step(nn.Sequential(Lora(), Lora()), (torch.randn(32, 256),), lambda y: y.sum())
    report = rooftile.audit(step, "h100-sxm", precision="fp32", optimizer="none")
    base, adapter = 2 * 32 * 256 * 256, 2 * 32 * 256 * 4
    backward = sum(
        2 * op.call.inputs[0].shape[0] * op.call.inputs[0].shape[1] * op.call.inputs[1].shape[1]
        for op in report.trace.ops
        if op.phase == "backward" and op.operator == "aten.mm.default"
    )
    # Layer 2: dX through base, b, a and dW of a, b. Layer 1, whose input needs none: dW of a, b and dX through b.
    assert backward == base + 2 * adapter + 2 * adapter + 2 * adapter + adapter
    assert report.flops.matmul == 2 * (base + 2 * adapter) + backward


def test_a_tensor_that_is_given_twice_is_read_once():
    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x

    class Halves(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            a, b = x.chunk(2)  # alike in shape and storage, and not the same elements
            return a * b

    x = torch.empty(1024, 1024, device="meta")
    square = rooftile.audit(rooftile.Step(Square(), (x,), phase="prefill"), "h100-sxm", precision="fp32")
    assert square.bytes.unfused == 2 * 4 * 2**20
    halves = rooftile.audit(rooftile.Step(Halves(), (x,), phase="prefill"), "h100-sxm", precision="fp32")
    assert halves.bytes.unfused == 3 * 4 * 2**19


def test_a_complex_product_is_four_real_ones_and_other_complex_work_is_unknown():
    class Product(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a @ b

    a, b = (torch.empty(shape, dtype=torch.complex64, device="meta") for shape in ((256, 64), (64, 32)))
    report = rooftile.audit(rooftile.Step(Product(), (a, b), phase="prefill"), "h100-sxm", precision="as-is")
    assert report.flops.total == 8 * 256 * 64 * 32

    class Scaled(nn.Module):
        def forward(self, a: Tensor) -> Tensor:
            return a * 2

    report = rooftile.audit(rooftile.Step(Scaled(), (a,), phase="prefill"), "h100-sxm", precision="as-is")
    assert report.coverage.unknown_ops == ("aten.mul.Tensor",)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_grouped_products_count_the_routed_rows_in_any_dtype(precision: str):
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.empty(4, 64, 32))

        def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
            return F.grouped_mm(x, self.w, offs=offsets)

    with torch.device("meta"):
        step = rooftile.Step(
            Experts(), (torch.empty(48, 64), torch.empty(4, dtype=torch.int32)), lambda y: y.float().sum()
        )
    report = rooftile.audit(step, "h100-sxm", precision=precision, optimizer="none")
    assert report.flops.forward >= 2 * 48 * 64 * 32
    assert report.flops.matmul == 2 * (2 * 48 * 64 * 32)  # forward and the weights' gradient


def test_a_package_of_two_devices_is_audited_as_the_one_that_a_process_sees():
    whole = rooftile.devices.load("mi250x")
    report = rooftile.audit("gpt2", "mi250x", seq=64)
    assert report.memory.visible_bytes == whole.visible_bytes // 2
    assert report.roofline.ridge == pytest.approx(383e12 / 3277e9, rel=1e-3)
    assert report.device.memory_bandwidth == whole.memory_bandwidth / 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": None}, "device is None"),
        ({"batch": "4"}, "batch is '4'"),
        ({"batch": True}, "batch is True"),
        ({"live": "yes"}, "live is 'yes'"),
    ],
)
def test_arguments_of_the_wrong_kind_are_one_sentence(arguments: dict, message: str):
    with pytest.raises(rooftile.UsageError, match=message):
        rooftile.audit("gpt2", **{"device": "h100-sxm", **arguments})


def test_one_rule_is_as_good_as_a_list_of_one():
    one = rooftile.audit("gpt2", "h100-sxm", seq=64, select="GEM")
    assert {finding.code for finding in one.findings} == {"GEM001"}
