"""Dropout: one mask in every kernel, forward and backward, from a torch generator; statistics of the undropped P."""

from __future__ import annotations

import pytest
import torch

import rooftile

from .inputs import Case, drawn_seed
from .philox import dropout_factor
from .support import EVERY_DTYPE, EVERY_KERNEL, attend


@EVERY_KERNEL
@EVERY_DTYPE
@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.97])
def test_the_mask_is_that_of_philox_pair_by_pair(kernel: str, dtype: torch.dtype, p: float):
    """Even probabilities and one-hot values: each output element is one pair's, dropped or kept."""
    keys = 130
    q = torch.zeros(2, 4, 19, 8, dtype=dtype)
    k, v = torch.ones(2, 2, keys, 8, dtype=dtype), torch.eye(keys, dtype=dtype).expand(2, 2, keys, keys)
    out = attend(kernel, q, k, v, dropout_p=p, generator=torch.Generator().manual_seed(5))
    seed = drawn_seed(torch.Generator().manual_seed(5))
    for b in range(2):
        for h in range(4):
            kept = torch.from_numpy(dropout_factor(seed, p, b * 4 + h, 19, keys))
            assert torch.equal(out[b, h] != 0, kept != 0)
            torch.testing.assert_close(out[b, h].double(), kept / keys, rtol=torch.finfo(dtype).eps, atol=0)


@EVERY_KERNEL
def test_the_lse_is_of_the_probabilities_before_dropout(kernel: str):
    q, k, v = (torch.randn(1, 2, 30, 8) for _ in range(3))
    _, plain = attend(kernel, q, k, v, return_lse=True)
    _, dropped = attend(kernel, q, k, v, return_lse=True, dropout_p=0.5)
    torch.testing.assert_close(plain, dropped, rtol=1e-6, atol=0)


@EVERY_KERNEL
def test_the_seed_comes_from_the_generator_or_from_torchs_own(kernel: str):
    q, k, v = (torch.randn(1, 2, 30, 8) for _ in range(3))

    def call(generator: torch.Generator | None) -> torch.Tensor:
        return attend(kernel, q, k, v, dropout_p=0.5, generator=generator)  # type: ignore[no-any-return]

    generator = torch.Generator().manual_seed(4)
    first, second = call(generator), call(generator)
    assert not torch.equal(first, second)
    assert torch.equal(call(torch.Generator().manual_seed(4)), first)
    torch.manual_seed(4)
    assert torch.equal(call(None), first)


@EVERY_KERNEL
def test_no_dropout_draws_no_seed(kernel: str):
    q = torch.randn(1, 2, 30, 8)
    before = torch.get_rng_state()
    attend(kernel, q, q, q)
    assert torch.equal(torch.get_rng_state(), before)


@EVERY_KERNEL
def test_a_pair_keeps_its_bits_whatever_the_mask_and_the_lengths(kernel: str):
    """More keys and queries change no bit of the pairs that were there: tiles and splits draw by index."""
    case = Case(40, 700, head_dim=8, heads=(2, 1), dropout_p=0.5, seed=6)
    problem = case.problem()
    q, k = torch.zeros_like(problem.q), problem.k
    v = torch.zeros(1, 1, 700, 512)
    v[0, 0, :512] = torch.eye(512)  # the first 512 keys show themselves
    whole = attend(kernel, q, k, v, dropout_p=0.5, generator=case.generator())
    part = attend(kernel, q[:, :, :7], k[:, :, :512], v[:, :, :512], dropout_p=0.5, generator=case.generator())
    masked = attend(
        kernel, q, k, v, mask=rooftile.masks.padding(torch.tensor([512])), dropout_p=0.5, generator=case.generator()
    )
    assert torch.equal(whole[:, :, :7] != 0, part != 0)
    assert torch.equal(whole != 0, masked != 0)
    assert 0.45 < float((whole != 0).double().mean()) < 0.55


def test_dropout_of_zero_is_no_dropout():
    problem = Case(9, 9, head_dim=8).problem()
    generator = torch.Generator().manual_seed(1)
    out = rooftile.attention(problem.q, problem.k, problem.v, dropout_p=0.0, generator=generator)
    assert torch.equal(out, rooftile.attention(problem.q, problem.k, problem.v))
    assert drawn_seed(generator) == drawn_seed(torch.Generator().manual_seed(1))
