"""Master weights: what a bf16 model loses without them, and what they do not keep alive."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

from rooftile import lowp
from rooftile.errors import UsageError


def sgd(lr: float):
    return lambda parameters: torch.optim.SGD(parameters, lr=lr)


def ones(n: int = 768) -> nn.Parameter:
    return nn.Parameter(torch.ones(n, dtype=torch.bfloat16))


def pull(weight: nn.Parameter, value: float = 1.0) -> None:
    weight.grad = torch.full_like(weight, value)


def test_weights_that_bf16_never_moves_move_with_masters() -> None:
    plain, with_masters = ones(), ones()
    optimizer, masters = torch.optim.SGD([plain], lr=6e-4), lowp.MasterWeights([with_masters], sgd(6e-4))
    for _ in range(100):
        pull(plain)
        optimizer.step()
        pull(with_masters)
        masters.step()
    assert int((plain != 1).sum()) == 0
    assert int((with_masters != 1).sum()) == 768
    assert torch.equal(with_masters, torch.full((768,), 1 - 0.06).bfloat16())


@pytest.mark.parametrize("keep", [True, False])
def test_stochastic_rounding_moves_the_weights_by_the_right_amount_on_average(keep: bool) -> None:
    weight = ones(20_000)
    generator = torch.Generator().manual_seed(0)
    masters = lowp.MasterWeights([weight], sgd(6e-4), rounding="stochastic", keep=keep, generator=generator)
    for _ in range(20):
        pull(weight)
        masters.step()
    assert float(weight.detach().float().mean()) == pytest.approx(1 - 0.012, abs=2e-4)
    assert len(weight.unique()) > 1


def test_nothing_but_masters_and_state_is_alive_between_steps() -> None:
    weight = ones(5000)
    masters = lowp.MasterWeights([weight], sgd(0.1))
    pull(weight)
    masters.step()
    masters.zero_grad()
    gc.collect()
    sizes = [o.dtype for o in gc.get_objects() if type(o) in (torch.Tensor, nn.Parameter) and o.numel() == 5000]
    assert sorted(map(str, sizes)) == ["torch.bfloat16", "torch.float32"]


def test_without_keep_no_master_is_alive_between_steps() -> None:
    weight = ones(5001)
    masters = lowp.MasterWeights([weight], sgd(0.1), rounding="stochastic", keep=False)
    for _ in range(2):
        pull(weight)
        masters.step()
        masters.zero_grad()
        gc.collect()
        alive = [o for o in gc.get_objects() if type(o) in (torch.Tensor, nn.Parameter) and o.numel() == 5001]
        assert [o.dtype for o in alive] == [torch.bfloat16]


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_a_state_dict_round_trip_continues_with_the_same_bits(keep: bool, make: type[torch.optim.Optimizer]) -> None:
    def built() -> tuple[nn.Linear, lowp.MasterWeights]:
        torch.manual_seed(0)
        model = nn.Linear(8, 8).bfloat16()
        generator = torch.Generator().manual_seed(1)
        rounding = "nearest-even" if keep else "stochastic"
        return model, lowp.MasterWeights(
            model.parameters(), lambda p: make(p, lr=1e-3), rounding=rounding, keep=keep, generator=generator
        )

    def run(model: nn.Linear, masters: lowp.MasterWeights, steps: int) -> None:
        for step in range(steps):
            x = torch.full((4, 8), 0.1 * (step + 1), dtype=torch.bfloat16)
            model(x).float().square().sum().backward()
            masters.step()
            masters.zero_grad()

    model, masters = built()
    run(model, masters, 3)
    saved = copy.deepcopy((model.state_dict(), masters.state_dict(), masters.generator.get_state()))
    run(model, masters, 3)
    other, again = built()
    other.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    again.generator.set_state(saved[2])
    run(other, again, 3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_fp32_parameters_are_updated_as_they_are() -> None:
    wide, narrow = nn.Parameter(torch.ones(4)), ones(4)
    masters = lowp.MasterWeights([wide, narrow], sgd(0.5))
    pull(wide)
    pull(narrow)
    masters.step()
    assert torch.equal(wide, torch.full((4,), 0.5))
    assert torch.equal(narrow.float(), torch.full((4,), 0.5))


def test_a_parameter_without_gradient_keeps_its_bits() -> None:
    used, unused = ones(4), nn.Parameter(torch.full((4,), 0.3, dtype=torch.bfloat16))
    before = unused.detach().clone()
    masters = lowp.MasterWeights([used, unused], sgd(0.1), rounding="stochastic")
    pull(used)
    masters.step()
    assert torch.equal(unused, before)


def test_bad_input_gets_one_sentence() -> None:
    with pytest.raises(UsageError, match="no parameter requires a gradient"):
        lowp.MasterWeights([nn.Parameter(torch.ones(2), requires_grad=False)], sgd(0.1))
    with pytest.raises(UsageError, match="rounding is 'up'"):
        lowp.MasterWeights([ones()], sgd(0.1), rounding="up")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="keep=False"):
        lowp.MasterWeights([ones()], sgd(0.1), keep=False)
    state = lowp.MasterWeights([ones(3)], sgd(0.1)).state_dict()
    with pytest.raises(UsageError, match=r"shapes \[\(3,\)\]"):
        lowp.MasterWeights([ones(4)], sgd(0.1)).load_state_dict(state)


def test_clipping_the_masters_bounds_the_update_and_the_model_keeps_no_stale_gradient() -> None:
    weight = ones(4)
    masters = lowp.MasterWeights([weight], sgd(1.0))
    pull(weight, 8.0)
    assert float(masters.clip_grad_norm_(1.0)) == 16.0
    assert weight.grad is None
    masters.step()
    assert torch.equal(weight.float(), torch.full((4,), 0.5))
    assert [p.dtype for p in masters.parameters()] == [torch.float32]


def test_gradients_of_a_later_backward_are_added_and_zero_grad_drops_taken_ones() -> None:
    weight = ones(4)
    masters = lowp.MasterWeights([weight], sgd(0.125))
    for _ in range(2):
        pull(weight)
        masters.take_gradients()
    pull(weight)
    masters.step()
    assert torch.equal(weight.float(), torch.full((4,), 1 - 3 * 0.125))
    pull(weight)
    masters.take_gradients()
    masters.zero_grad()
    assert not masters.has_gradients


def test_refresh_keeps_weights_that_were_loaded_into_the_model() -> None:
    model = nn.Linear(2, 1, bias=False).bfloat16()
    masters = lowp.MasterWeights(model.parameters(), sgd(0.5))
    model.load_state_dict({"weight": torch.full((1, 2), 8.0)})
    masters.refresh()
    pull(model.weight)
    masters.step()
    assert torch.equal(model.weight.float(), torch.full((1, 2), 7.5))


def test_misuse_gets_one_sentence_and_changes_nothing() -> None:
    model = nn.Linear(2, 1).bfloat16()
    with pytest.raises(UsageError, match="not named_parameters"):
        lowp.MasterWeights(model.named_parameters(), sgd(0.1))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="not the optimizer itself"):
        lowp.MasterWeights(model.parameters(), torch.optim.SGD(model.parameters(), lr=0.1))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="LBFGS"):
        lowp.MasterWeights(model.parameters(), torch.optim.LBFGS)
    masters = lowp.MasterWeights([ones(2)], sgd(0.1))
    with pytest.raises(UsageError, match="no 'optimizer'"):
        masters.load_state_dict({"masters": [torch.zeros(2)]})
    assert torch.equal(masters.parameters()[0], torch.ones(2))
