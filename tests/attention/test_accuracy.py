"""Every kernel against FP64: at most twice the error of eager attention in the same dtype, plus the round-off floor
(``tolerance.py``), in the output, the LSE and all gradients.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rooftile.errors import UsageError

from .inputs import Case
from .support import DTYPES, EVERY_KERNEL, EVERY_PLAIN_KERNEL, KERNELS, SLOW_KERNEL, attend, complaints, run
from .tolerance import Judge

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def in_every_dtype(cases: list[Case]) -> list[Case]:
    return [replace(case, dtype=dtype) for case in cases for dtype in DTYPES]


def in_rotating_dtypes(cases: list[Case]) -> list[Case]:
    return [replace(case, dtype=DTYPES[i % len(DTYPES)]) for i, case in enumerate(cases)]


# Lengths around every tile size, more queries than keys and fewer, head dims that fill no vector, the largest one,
# values wider and narrower than keys, groups of one to six query heads.
LENGTHS = [
    *in_every_dtype(
        [
            Case(1, 1, head_dim=16),
            Case(1, 239, head_dim=128, heads=(8, 2)),
            Case(3, 17, head_dim=8, batch=2),
            Case(17, 3, head_dim=33, value_dim=17),
            Case(31, 63, head_dim=40, heads=(6, 2), batch=2),
            Case(63, 31, head_dim=1, value_dim=5),
            Case(64, 64),
            Case(65, 127, head_dim=128, value_dim=64, heads=(4, 4)),
            Case(127, 65, head_dim=72, value_dim=128, heads=(3, 1)),
            Case(40, 70, head_dim=512, heads=(1, 1)),
            Case(70, 40, head_dim=257, value_dim=512, heads=(1, 1)),
            Case(239, 513, head_dim=80, heads=(1, 1), mask="causal"),
            Case(513, 239, heads=(2, 1), mask="causal-top-left"),
        ]
    ),
]
LONG = [
    Case(799, 1030, head_dim=64, heads=(2, 1), dtype=FP32),
    Case(1030, 799, head_dim=32, heads=(1, 1), dtype=BF16, mask="window-sides"),
    Case(1030, 799, head_dim=64, heads=(1, 1), dtype=FP16),
    Case(2048, 2048, head_dim=64, heads=(1, 1), dtype=BF16, mask="causal"),
    Case(2048, 300, head_dim=32, heads=(1, 1), dtype=FP32),
    Case(300, 2048, head_dim=64, heads=(1, 1), dtype=FP16, mask="causal"),
]


@EVERY_KERNEL
@pytest.mark.parametrize("case", LENGTHS, ids=str)
def test_every_length_and_head_dim_is_as_exact_as_eager(case: Case, kernel: str):
    assert complaints(kernel, case) == []


@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel != SLOW_KERNEL], indirect=True)
@pytest.mark.parametrize("case", LONG, ids=str)
def test_long_sequences_are_as_exact_as_eager(case: Case, kernel: str):
    assert complaints(kernel, case) == []


STRUCTURED = in_every_dtype(
    [
        Case(q_len, kv_len, values=values, batch=2, heads=(4, 2), mask=mask)
        for values in ("banded", "one_hot", "constant", "outlier")
        for q_len, kv_len, mask in ((65, 129, None), (130, 130, "causal"))
    ]
)


@EVERY_KERNEL
@pytest.mark.parametrize("case", STRUCTURED, ids=str)
def test_structured_and_outlier_inputs_are_as_exact_as_eager(case: Case, kernel: str):
    """TransformerEngine 3216: gradients were wrong on real activations with a batch of two, Gaussian tests passed."""
    assert complaints(kernel, case) == []


MASKED = in_rotating_dtypes(
    [
        Case(q_len, kv_len, head_dim=48, batch=3, heads=(2, 1), mask=mask)
        for q_len, kv_len, masks in (
            (150, 150, ("causal", "window", "padding-left", "prefix", "documents", "causal & documents")),
            (
                100,
                170,
                (
                    "causal",
                    "causal-top-left",
                    "window",
                    "window-top-left",
                    "window-sides",
                    "padding",
                    "padding-left",
                    "documents",
                    "dense",
                    "causal & window",
                    "causal & padding",
                    "causal & padding-left",
                    "window & padding-left",
                    "causal & dense",
                ),
            ),
            (170, 100, ("causal", "causal-top-left", "window", "window-top-left", "padding", "causal & padding-left")),
        )
        for mask in masks
    ]
)


@EVERY_KERNEL
@pytest.mark.parametrize("case", MASKED, ids=str)
def test_every_mask_is_as_exact_as_eager(case: Case, kernel: str):
    assert complaints(kernel, case) == []


EXTRAS = in_every_dtype(
    [
        Case(50, 77, head_dim=24, batch=2, heads=(4, 2), bias="bhqk"),
        Case(50, 77, head_dim=24, batch=2, heads=(4, 2), bias="hqk", mask="causal"),
        Case(77, 50, head_dim=24, batch=2, heads=(4, 2), bias="k", softcap=3.0),
        Case(40, 40, head_dim=24, batch=2, heads=(4, 2), bias="bh"),
        Case(45, 90, head_dim=24, batch=2, heads=(4, 2), bias="hqk", holes=True, mask="causal-top-left"),
        Case(66, 66, head_dim=24, batch=2, heads=(4, 2), bias="bqk", mask="window", sinks=True),
        Case(70, 130, head_dim=40, heads=(4, 2), softcap=1.0, mask="causal & padding"),
        Case(70, 130, head_dim=40, batch=2, heads=(6, 2), sinks=True, mask="causal & window"),
        Case(70, 130, head_dim=40, batch=2, heads=(4, 2), dropout_p=0.25),
        Case(
            67, 67, head_dim=40, batch=2, heads=(6, 2), dropout_p=0.1, mask="causal", sinks=True, bias="h", softcap=8.0
        ),
        Case(33, 65, head_dim=40, scale=0.5),
        Case(33, 65, head_dim=40, scale=-0.1, mask="causal"),
        Case(1, 300, head_dim=64, batch=2, heads=(8, 2), sinks=True, softcap=20.0, mask="padding"),
    ]
)


@EVERY_KERNEL
@pytest.mark.parametrize("case", EXTRAS, ids=str)
def test_bias_softcap_sinks_dropout_and_scale_are_as_exact_as_eager(case: Case, kernel: str):
    assert complaints(kernel, case) == []


FP64 = [
    replace(case, dtype=torch.float64)
    for case in (
        Case(17, 40, head_dim=9, value_dim=6, heads=(4, 2), batch=2),
        Case(40, 17, head_dim=9, heads=(2, 2), mask="causal", bias="hqk", softcap=2.0),
        Case(33, 33, head_dim=9, heads=(2, 1), mask="causal & padding-left", batch=3, sinks=True, dropout_p=0.2),
        Case(33, 33, head_dim=9, values="outlier"),
    )
]


@EVERY_PLAIN_KERNEL
@pytest.mark.parametrize("case", FP64, ids=str)
def test_fp64_is_fp64_all_the_way(case: Case, kernel: str):
    """Judged in extended precision: an FP32 step anywhere would be a hundred million times the tolerance."""
    assert complaints(kernel, case) == []


@EVERY_KERNEL
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bfloat16", "float16"])
def test_bias_and_sinks_may_be_fp32_or_16_bits(kernel: str, dtype: torch.dtype):
    """Their gradients have their own dtype."""
    case = Case(40, 66, head_dim=24, batch=2, heads=(4, 2), bias="hqk", sinks=True, dtype=dtype, mask="causal")
    problem = case.problem()
    assert problem.bias is not None
    assert problem.sinks is not None
    for bias, sinks in ((problem.bias.float(), problem.sinks), (problem.bias, problem.sinks.to(dtype))):
        mixed = replace(problem, bias=bias, sinks=sinks)
        results = run(kernel, mixed, case.build_mask(), case.wanted)
        assert (results["dbias"].dtype, results["dsinks"].dtype) == (bias.dtype, sinks.dtype)
        assert Judge.of(mixed, case.wanted).complaints(results) == []


def test_head_dims_beyond_the_native_kernel_are_another_kernels():
    case = Case(9, 14, head_dim=520, heads=(2, 1))
    assert complaints("auto", case) == []
    with pytest.raises(UsageError, match="520"):
        complaints("native", case)


@EVERY_KERNEL
def test_offsets_are_64_bits_wide(kernel: str):
    """The second sequence starts 2^31 elements after the first, the second head of each 2^30 after its first."""
    case = Case(5, 20, head_dim=8, batch=2, dtype=BF16)
    problem = case.problem()
    memory = torch.empty(2**31 + 2**30 + 4096, dtype=BF16)  # of which a few pages are touched

    def apart(x: torch.Tensor, at: int) -> torch.Tensor:
        far = memory.as_strided(x.shape, (2**31, 2**30, x.shape[3], 1), at)
        return far.copy_(x)

    far = replace(problem, q=apart(problem.q, 0), k=apart(problem.k, 1024), v=apart(problem.v, 2048))
    out, lse = attend(kernel, far.q, far.k, far.v, return_lse=True)
    assert Judge.of(problem, ()).complaints({"out": out, "lse": lse}) == []
