"""Loss scaling: where it starts, what it records, its order, and the verdict that nothing helps."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from rooftile import lowp
from rooftile.errors import UsageError


def scaler(model: nn.Module, **options: float) -> lowp.LossScaler:
    return lowp.LossScaler(model.named_parameters(), device="cpu", **options)  # type: ignore[arg-type]


def model16() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 4, bias=False).half()


def test_a_gradient_of_2_to_the_minus_26_is_recovered_exactly_with_scale_2_to_the_12() -> None:
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float16))
    for scale, expected in ((1.0, 0.0), (2.0**12, 2.0**-26)):
        masters = lowp.MasterWeights([weight], lambda p: torch.optim.SGD(p, lr=1.0))
        scaling = lowp.LossScaler([("w", weight)], initial=scale, device="cpu")
        factor = torch.tensor(2.0**-26)
        scaling.scale(weight.float().sum() * factor).backward()
        scaling.unscale_(masters)
        assert masters.pairs[0][1].grad.item() == expected
        masters.zero_grad()


def test_the_initial_scale_saves_small_gradients_and_overflows_none() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    x = torch.randn(8, 16)
    with lowp.watch_gradients(model) as watch:
        (model(x).square().mean() * 1e-6).backward()
    scale, window = lowp.initial_scale(watch)
    assert math.frexp(scale)[0] == 0.5
    assert window.low <= scale <= window.high
    grads = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert (grads * scale).half().isfinite().all()
    assert (grads[grads != 0].half() == 0).float().mean() > 0.1  # unscaled, many vanish
    assert ((grads * scale).half() == 0).sum() <= (grads == 0).sum() + 0.001 * grads.numel()
    assert not any(m._backward_hooks for m in model.modules())


def test_an_empty_window_is_said_and_the_scale_then_overflows_nothing() -> None:
    from rooftile.formats import exponent_histogram

    h = exponent_histogram(torch.tensor([1e-12, 1e4]))
    scale, window = lowp.initial_scale(h, allowed=0.0)
    assert window.empty
    assert 1e4 * scale <= 65504


def test_a_skip_names_the_tensor_that_overflowed_and_the_weights_stay() -> None:
    model = model16()
    before = model.weight.detach().clone()
    masters = lowp.MasterWeights(model.parameters(), lambda p: torch.optim.SGD(p, lr=0.1))
    scaling = scaler(model, initial=65536.0)
    scaling.scale(model(torch.full((2, 4), 100.0).half()).float().sum()).backward()
    assert scaling.step(masters) is False
    scaling.update()
    assert torch.equal(model.weight, before)
    assert [(s.step, s.scale, s.tensors) for s in scaling.skipped] == [(1, 65536.0, (("weight", 16),))]
    assert "weight" in scaling.skipped[0].reading
    assert scaling.scale_value == 32768.0
    assert scaling.verdict == ""


def test_after_back_off_the_step_is_taken_with_true_gradients() -> None:
    model = model16()
    expected = model.weight.detach().float() - 0.1 * 200.0
    masters = lowp.MasterWeights(model.parameters(), lambda p: torch.optim.SGD(p, lr=0.1))
    scaling = scaler(model, initial=1024.0)
    taken = False
    while not taken:
        masters.zero_grad()
        scaling.scale(model(torch.full((2, 4), 100.0).half()).float().sum()).backward()
        taken = scaling.step(masters)
        scaling.update()
    assert scaling.scale_value == 256.0
    assert torch.equal(model.weight, expected.half())


def test_the_scale_stays_between_floor_and_ceiling() -> None:
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaling = scaler(model, initial=4.0, floor=2.0, ceiling=8.0, growth_interval=1)
    for _ in range(5):
        scaling.scale(model(torch.ones(1, 2)).sum()).backward()
        assert scaling.step(optimizer)
        scaling.update()
    assert scaling.scale_value == 8.0
    for _ in range(5):
        scaling.scale(model(torch.full((1, 2), math.inf)).sum()).backward()
        assert not scaling.step(optimizer)
        scaling.update()
        optimizer.zero_grad()
    assert scaling.scale_value == 2.0
    assert "no loss scale works: weight is not finite even at the floor 2 (3 steps in a row)" in scaling.verdict


def test_clipping_sees_true_magnitudes_and_micro_batches_add_up() -> None:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))

    def update(scaled: bool) -> torch.Tensor:
        torch.manual_seed(1)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scaling = scaler(model, initial=1024.0)
        for part in x.split(2):
            loss = model(part).square().mean() / 2
            (scaling.scale(loss) if scaled else loss).backward()
        if scaled:
            scaling.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if scaled:
            assert scaling.step(optimizer)
            scaling.update()
        else:
            optimizer.step()
        return model.weight.detach()

    assert torch.allclose(update(True), update(False), rtol=0, atol=0)


def test_several_optimizers_are_judged_apart() -> None:
    good, bad = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    both = nn.ModuleDict({"good": good, "bad": bad})
    scaling = scaler(both, initial=2.0)
    first, second = torch.optim.SGD(good.parameters(), lr=0.1), torch.optim.SGD(bad.parameters(), lr=0.1)
    before = bad.weight.detach().clone()
    loss = good(torch.ones(1, 2)).sum() + bad(torch.full((1, 2), math.inf)).sum()
    scaling.scale(loss).backward()
    assert scaling.step(first) is True
    assert scaling.step(second) is False
    scaling.update()
    assert torch.equal(bad.weight, before)
    assert [name for name, _ in scaling.skipped[0].tensors] == ["bad.weight"]


def test_a_state_dict_round_trip() -> None:
    model = nn.Linear(2, 2)
    one, two = scaler(model, initial=64.0), scaler(model)
    two.load_state_dict(one.state_dict())
    assert two.scale_value == 64.0


def test_bad_use_gets_one_sentence() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="rise in this order"):
        scaler(model, initial=1.0, floor=2.0)
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="device='cpu'"):
            lowp.LossScaler(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaling = scaler(model)
    with pytest.raises(UsageError, match="call backward"):
        scaling.unscale_(optimizer)
    scaling.scale(model(torch.ones(1, 2)).sum()).backward()
    scaling.unscale_(optimizer)
    with pytest.raises(UsageError, match="twice"):
        scaling.unscale_(optimizer)
    half = model16()
    plain = torch.optim.SGD(half.parameters(), lr=0.1)
    half(torch.ones(1, 4).half()).float().sum().backward()
    with pytest.raises(UsageError, match="MasterWeights"):
        scaler(half).unscale_(plain)


def test_clipping_masters_between_unscale_and_step_bounds_the_update() -> None:
    model = nn.Linear(4, 1, bias=False).half()
    nn.init.zeros_(model.weight)
    masters = lowp.MasterWeights(model.parameters(), lambda p: torch.optim.SGD(p, lr=1.0))
    scaling = scaler(model, initial=16.0)
    scaling.scale(model(torch.full((1, 4), 8.0).half()).float().sum()).backward()
    scaling.unscale_(masters)
    assert model.weight.grad is None
    assert float(masters.clip_grad_norm_(1.0)) == 16.0
    assert scaling.step(masters)
    assert float(model.weight.detach().float().norm()) == pytest.approx(1.0, rel=1e-3)


def test_a_fused_optimizers_skipped_step_is_told_although_no_parameter_is_watched() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight], lr=0.1, fused=True)
    scaling = lowp.LossScaler([], device="cpu", initial=2.0)
    scaling.scale((weight * math.inf).sum()).backward()
    assert scaling.step(optimizer) is False
    scaling.update()
    assert len(scaling.skipped) == 1
    assert torch.equal(weight, torch.ones(2))


def test_misuse_of_a_scaler_gets_one_sentence() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(UsageError, match="device is 'gpu'"):
        lowp.LossScaler(model.named_parameters(), device="gpu")
    with pytest.raises(UsageError, match="growth_interval is 0"):
        scaler(model, growth_interval=0)
    scaling = scaler(model)
    with pytest.raises(UsageError, match="'engine' and 'steps'"):
        scaling.load_state_dict({})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaling.scale(model(torch.ones(1, 2)).sum()).backward()
    with pytest.raises(UsageError, match="LBFGS"):
        scaling.step(torch.optim.LBFGS(model.parameters()))
    scaling.step(optimizer)
    with pytest.raises(UsageError, match="twice"):
        scaling.step(optimizer)
