"""Scaling laws: the published optima, and exponents that follow from the constants and from nothing else."""

import pytest

from rooftile.errors import UsageError
from rooftile.ledgers.scaling import CONSTANTS, ScalingLaw, optimal_split


@pytest.mark.parametrize(
    ("law", "billions"), [("chinchilla-rounded", 32.2), ("chinchilla-unrounded", 40.4), ("epoch", 72.2)]
)
def test_optimal_parameters_at_the_chinchilla_budget(law, billions):
    split = optimal_split(5.76e23, law)
    assert round(split.parameters / 1e9, 1) == billions
    assert 6 * split.parameters * split.tokens == pytest.approx(5.76e23)
    assert split.law == law


@pytest.mark.parametrize("law", CONSTANTS)
def test_no_other_split_of_the_budget_has_a_lower_loss(law):
    best, c = optimal_split(1e22, law), CONSTANTS[law]
    for factor in (0.5, 0.9, 1.1, 2):
        n = best.parameters * factor
        assert c.E + c.A / n**c.alpha + c.B / (1e22 / 6 / n) ** c.beta > best.loss


def test_exponents_follow_from_alpha_and_beta():
    rounded = CONSTANTS["chinchilla-rounded"]
    assert (round(rounded.parameter_exponent, 2), round(rounded.token_exponent, 2)) == (0.45, 0.55)


def test_kaplan_exponents_give_0_83_not_the_0_73_that_is_printed_beside_them():
    assert round(ScalingLaw(0, 1, 1, 0.057, 0.28, "as quoted").parameter_exponent, 2) == 0.83


def test_the_constants_have_no_default_and_a_wrong_name_lists_them():
    with pytest.raises(TypeError):
        optimal_split(1e22)
    with pytest.raises(UsageError, match="unknown set of scaling constants 'chinchilla'; near matches: chinchilla-r"):
        optimal_split(1e22, "chinchilla")
    with pytest.raises(UsageError, match="flops is 0"):
        optimal_split(0, "epoch")
