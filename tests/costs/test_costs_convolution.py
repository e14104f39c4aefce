"""Convolutions: every product counted by brute force, gradients by mask."""

from __future__ import annotations

from itertools import product as combinations

import pytest
import torch
from costs_recorder import call, calls_of, meta
from torch.utils.flop_counter import FlopCounterMode

from rooftile.capture.trace import Call
from rooftile.costs import Cost, cost_of


def cost(one: Call) -> Cost:
    found = cost_of(one)
    assert found is not None
    return found


def run(module: torch.nn.Module, x: torch.Tensor) -> tuple[Cost, Cost]:
    """Costs of the forward and of the backward convolution."""
    calls = [one for one in calls_of(lambda: module(x).sum().backward()) if "convolution" in one.operator]
    forward, backward = calls
    return cost(forward), cost(backward)


@pytest.mark.parametrize(
    ("groups", "stride", "padding", "transposed"), list(combinations((1, 2, 4), (1, 2), (0, 1), (False, True)))
)
def test_every_gradient_costs_as_many_products_as_the_forward_pass(
    groups: int, stride: int, padding: int, transposed: bool
) -> None:
    kind = torch.nn.ConvTranspose2d if transposed else torch.nn.Conv2d
    with torch.device("meta"):
        module = kind(8, 12, 3, stride=stride, padding=padding, groups=groups, bias=False)
        x = torch.empty(2, 8, 9, 10, requires_grad=True)
    # Independent count: one product per (sample, group, output channel, input channel of the group, tap, position),
    # where the positions are those of the output, or of the input when it is the input that is spread.
    height, width = (9, 10) if transposed else tuple(module(x).shape[2:])
    products = 2 * groups * (12 // groups) * (8 // groups) * 9 * height * width
    forward, backward = run(module, x)
    assert forward.flops == forward.matmul_flops == 2 * products
    assert backward.flops == backward.matmul_flops == 2 * 2 * products


def test_without_groups_torchs_counter_agrees_and_with_groups_it_does_not() -> None:
    for groups, agrees in ((1, True), (4, False)):
        with torch.device("meta"):
            module = torch.nn.Conv2d(8, 8, 3, groups=groups, bias=False)
            x = torch.empty(2, 8, 9, 9, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            module(x).sum().backward()
        forward, backward = run(module, x)
        assert (forward.flops + backward.flops == counter.get_total_flops()) is agrees


def test_only_the_gradients_that_the_mask_asks_for_are_counted_and_their_operands_read() -> None:
    grad, x, w = meta((2, 6, 7, 7)), meta((2, 4, 9, 9)), meta((6, 4, 3, 3))
    each = 2 * grad.numel * 4 * 9

    def backward(mask: tuple[bool, bool, bool]) -> Cost:
        wanted = tuple(t for t, on in zip((x, w, meta((6,))), mask, strict=True) if on)
        arguments = (grad, x, w, (6,), (1, 1), (0, 0), (1, 1), False, (0, 0), 1, mask)
        return cost(call("aten.convolution_backward.default", *arguments, outputs=wanted))

    assert backward((True, False, False)).flops == each
    assert backward((True, False, False)).bytes == grad.nbytes + w.nbytes + x.nbytes
    assert backward((False, True, False)).bytes == grad.nbytes + x.nbytes + w.nbytes
    assert backward((False, True, True)).flops == each + grad.numel
    only_bias = backward((False, False, True))
    assert (only_bias.flops, only_bias.bytes) == (grad.numel, grad.nbytes + 6 * 4)
    assert backward((True, True, True)).bytes_read == grad.nbytes + x.nbytes + w.nbytes


def test_a_frozen_convolution_has_no_weight_gradient() -> None:
    with torch.device("meta"):
        module = torch.nn.Conv1d(4, 4, 3).requires_grad_(False)
        x = torch.empty(2, 4, 20, requires_grad=True)
    forward, backward = run(module, x)
    assert backward.matmul_flops == forward.matmul_flops
    assert forward.flops - forward.matmul_flops == 2 * 4 * 18  # the bias
