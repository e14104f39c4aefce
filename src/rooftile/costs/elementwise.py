"""Elementwise operators: a table of FLOPs per output element, from which their list forms follow too.

The convention is one FLOP for each scalar operation, and a transcendental (exp, erf, tanh, sqrt, sigmoid) is one. A
comparison, a selection or an integer operation is one as well: the table counts what the vector units are asked to do.
Bytes: each distinct element of every operand once (``x + x`` reads two operands: a Call does not know that they are
one storage), each output once.
"""

from __future__ import annotations

from collections.abc import Callable

from rooftile.capture.trace import Call
from rooftile.costs.operands import base_name, reads, strided_only, total_bytes, writes
from rooftile.costs.record import Cost, Family
from rooftile.costs.registry import formula

__all__ = ["FLOPS_PER_ELEMENT", "elementwise_cost"]

_ONE = (
    "abs absolute neg negative sign sgn signbit reciprocal square sqrt rsqrt exp exp2 expm1 log log2 log10 log1p "
    "sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf erfc erfinv lgamma digamma sigmoid ceil floor "
    "round trunc fix frac relu mul multiply div divide true_divide floor_divide remainder fmod pow float_power atan2 "
    "maximum minimum fmax fmin eq ne lt le gt ge isnan isinf isfinite isposinf isneginf logical_and logical_or "
    "logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor bitwise_left_shift bitwise_right_shift "
    "where masked_fill clamp_min clamp_max threshold threshold_backward tril triu hypot copysign nan_to_num heaviside "
    "special_erfcx i0 special_i0e special_i1 special_i1e special_ndtri special_log_ndtr special_zeta special_airy_ai "
    "special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_modified_bessel_i0 "
    "special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 special_spherical_bessel_j0 "
    "igamma igammac mvlgamma frexp isin __ilshift__ __irshift__ _conj_physical polygamma angle "
    "conj_physical not_equal greater greater_equal "
    "less less_equal gcd lcm nextafter ldexp __and__ __or__ __xor__ __lshift__ __rshift__ __iand__ __ior__ __ixor__ "
    "deg2rad rad2deg"
)

#: FLOPs per output element. Where it is not one, the comment gives the scalar operations that make it up.
FLOPS_PER_ELEMENT: dict[str, int] = {
    **dict.fromkeys(_ONE.split(), 1),
    # --- two or three operands ---
    "lerp": 3,  # a + w * (b - a)
    "logaddexp": 5,  # m = max(a, b); m + log1p(exp(min(a, b) - m))
    "logaddexp2": 5,
    "xlogy": 2,  # x * log(y)
    "special_xlog1py": 2,
    "special_entr": 3,  # -x * log(x)
    "isclose": 5,  # |a - b| <= atol + rtol * |b|: subtract, product, add, compare; the two signs as one
    "linalg_cross": 3,  # two products and a subtraction for each component
    "sinc": 3,  # sin(pi x) / (pi x)
    "logit": 3,  # log(x / (1 - x))
    # --- activations ---
    "hardtanh": 2,  # max with one bound, min with the other
    "leaky_relu": 2,  # x * slope, select
    "prelu": 2,
    "_prelu_kernel": 2,
    "rrelu": 2,
    "polar": 4,  # abs * cos(angle), abs * sin(angle)
    "elu": 4,  # exp, - 1, * alpha, select
    "celu": 5,  # x / alpha, then as elu
    "selu": 5,  # as elu, * scale
    "silu": 2,  # x * sigmoid(x)
    "mish": 4,  # x * tanh(log1p(exp(x)))
    "softplus": 5,  # log1p(exp(beta x)) / beta, select
    "hardsigmoid": 4,  # x + 3, two bounds, / 6
    "hardswish": 5,  # hardsigmoid(x) * x
    "hardshrink": 1,
    "softshrink": 2,  # x -+ lambda, select
    "log_sigmoid_forward": 5,  # min(x, 0) - log1p(exp(-|x|)): min, abs with sign, exp, log1p, subtract
    "glu": 2,  # a * sigmoid(b), per output element
    # --- their backward: the derivative, times the incoming gradient ---
    "sigmoid_backward": 3,  # dy * y * (1 - y)
    "tanh_backward": 3,  # dy * (1 - y * y)
    "silu_backward": 6,  # s = sigmoid(x); dy * s * (1 + x * (1 - s))
    "hardtanh_backward": 2,  # two comparisons that select dy
    "leaky_relu_backward": 2,
    "elu_backward": 4,  # dy * alpha * exp(x) 3, select
    "softplus_backward": 6,  # z = exp(beta x) 2; dy * z / (z + 1) 3, select
    "mish_backward": 10,  # s = sigmoid(x) 1, t = tanh(log1p(exp x)) 3; dy * (t + x * s * (1 - t * t)) 6
    "hardsigmoid_backward": 3,
    "hardswish_backward": 5,
    "hardshrink_backward": 1,
    "softshrink_backward": 1,
    "log_sigmoid_backward": 5,  # with the saved z = exp(-|x|): dy * (select - sign * z / (1 + z))
    "glu_backward": 4,  # per input element: half the work is dy * s, half dy * a * s * (1 - s) and s itself
    "_prelu_kernel_backward": 4,  # two gradients, each a product and a selection
    "logit_backward": 3,
}


def elementwise_cost(call: Call, per_element: int, family: Family = "elementwise") -> Cost:
    """``per_element`` FLOPs for every element of the largest output (of every output, for a list operator)."""
    strided_only(call)
    written = writes(call)
    if base_name(call.operator).startswith("_foreach"):
        elements = sum(meta.numel for meta in written)
    else:
        elements = max((meta.numel for meta in written), default=0)
    return Cost(
        family,
        flops=per_element * elements,
        bytes_read=total_bytes(reads(call)),
        bytes_written=total_bytes(written),
        elementwise=True,
    )


def _constant(per_element: int) -> Callable[[Call], Cost]:
    return lambda call: elementwise_cost(call, per_element)


for _name, _flops in FLOPS_PER_ELEMENT.items():
    formula(f"aten.{_name}")(_constant(_flops))


def _scalar(call: Call, position: int, name: str) -> float:
    """A scalar argument; anything that is not the number 1 (a tensor too) costs its multiplication."""
    value = call.argument(position, name, 1)
    return float(value) if isinstance(value, (int, float)) else 0.0


@formula("aten.add", "aten.sub", "aten.subtract", "aten.rsub", "aten._foreach_add", "aten._foreach_sub")
def add(call: Call) -> Cost:
    """``a + alpha * b``: one addition, and one product where alpha is not 1 (third argument of the Tensor form)."""
    return elementwise_cost(call, 1 if _scalar(call, 2, "alpha") == 1 else 2)


@formula("aten.addcmul", "aten.addcdiv", "aten._foreach_addcmul", "aten._foreach_addcdiv")
def addcmul(call: Call) -> Cost:
    """``a + value * b * c`` (or ``b / c``): product, addition, and one product more where value is not 1."""
    return elementwise_cost(call, 2 if _scalar(call, 3, "value") == 1 else 3)


@formula("aten.clamp", "aten.clip")
def clamp(call: Call) -> Cost:
    """One comparison for each bound that is given."""
    bounds = [call.argument(1, "min"), call.argument(2, "max")]
    return elementwise_cost(call, sum(bound is not None for bound in bounds))


@formula("aten.gelu")
def gelu(call: Call) -> Cost:
    """erf form ``x/2 * (1 + erf(x/sqrt 2))``: 5; tanh form: ``x + a x^3`` 4, scale, tanh, 1 +, two products: 9."""
    return elementwise_cost(call, 9 if call.argument(1, "approximate", "none") == "tanh" else 5)


@formula("aten.gelu_backward")
def gelu_backward(call: Call) -> Cost:
    """erf form: cdf 4, density ``k exp(-x^2/2)`` 4, ``dy * (cdf + x * density)`` 3.

    tanh form: inner 5, tanh 1, halves and sums 3, ``1 - t^2`` 2, inner derivative 3, their product 2, result 2.
    """
    return elementwise_cost(call, 18 if call.argument(2, "approximate", "none") == "tanh" else 11)


@formula("aten.native_dropout", "aten._fused_dropout")
def native_dropout(call: Call) -> Cost:
    """``x * (u < keep) * 1/keep``: comparison and two products; random bits are integer work. Writes a byte mask."""
    if call.argument(2, "train", True) is False:
        return Cost(
            "dropout", 0, total_bytes(reads(call)), total_bytes(writes(call)), zero_reason="copy", elementwise=True
        )
    return elementwise_cost(call, 3, "dropout")


@formula("aten.native_dropout_backward", "aten._masked_scale")
def native_dropout_backward(call: Call) -> Cost:
    """``dy * mask * scale``: two products."""
    return elementwise_cost(call, 2, "dropout")


_FOREACH_ONE_OPERAND = (
    "abs neg sign reciprocal sqrt rsqrt exp expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh erf "
    "erfc lgamma sigmoid ceil floor round trunc frac mul div pow maximum minimum clamp_min clamp_max lerp"
)
for _name in _FOREACH_ONE_OPERAND.split():
    # A list operator does what the plain one does, to every tensor of the list.
    formula(f"aten._foreach_{_name}")(_constant(FLOPS_PER_ELEMENT[_name]))
