"""Lowerings of elementwise primitives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend import core

from onnx_remat.errors import ConversionError

from ..series import ERFCX
from . import kernels
from .lower import Lowering, Tensor, lowering

_UNARY = {
    "abs": "Abs", "acos": "Acos", "acosh": "Acosh", "asin": "Asin", "asinh": "Asinh", "atan": "Atan",
    "atanh": "Atanh", "ceil": "Ceil", "cos": "Cos", "cosh": "Cosh", "erf": "Erf", "exp": "Exp", "floor": "Floor",
    "log": "Log", "logistic": "Sigmoid", "neg": "Neg", "sign": "Sign", "sin": "Sin", "sinh": "Sinh", "sqrt": "Sqrt",
    "tan": "Tan", "tanh": "Tanh",
}  # fmt: skip
_BINARY = {"add": "Add", "add_any": "Add", "sub": "Sub", "mul": "Mul", "div": "Div", "max": "Max", "min": "Min"}
_NEUTRAL = {"add": 0, "add_any": 0, "sub": 0, "mul": 1, "div": 1}
_COMPARE = {"eq": "Equal", "lt": "Less", "le": "LessOrEqual", "gt": "Greater", "ge": "GreaterOrEqual"}
_LOGIC = {"and": "And", "or": "Or", "xor": "Xor", "not": "Not"}


def _out(eqn: core.JaxprEqn) -> dict[str, Any]:
    """Return shape and dtype of the first result."""
    aval: Any = eqn.outvars[0].aval
    return {"shape": aval.shape, "dtype": kernels.dtype_of_aval(aval)}


def _equals(x: Tensor, value: float) -> bool:
    """Return whether a tensor is a scalar constant of this value."""
    return not x.axes and x.constant is not None and bool(x.constant == value)


@lowering(*_UNARY)
def unary(low: Lowering, eqn: core.JaxprEqn, x: Tensor) -> Tensor:
    return low.elementwise(_UNARY[eqn.primitive.name], x, **_out(eqn))


@lowering(*_BINARY)
def binary(low: Lowering, eqn: core.JaxprEqn, x: Tensor, y: Tensor) -> Tensor:
    name = eqn.primitive.name
    if x.dtype == np.bool_:
        return low.elementwise({"Max": "Or", "Min": "And", "Add": "Or", "Mul": "And"}[_BINARY[name]], x, y, **_out(eqn))
    shape = tuple(eqn.outvars[0].aval.shape)  # type: ignore[attr-defined]
    if name in _NEUTRAL and x.shape == shape and _equals(y, _NEUTRAL[name]):
        return x
    if name in ("add", "add_any", "mul") and y.shape == shape and _equals(x, _NEUTRAL[name]):
        return y
    if name == "div" and x.dtype.kind in "iu":
        return _whole_quotient(low, x, y)
    if name == "max" and x.dtype.kind == "f" and (_equals(y, 0) or _equals(x, 0)):
        return low.elementwise("Relu", x if _equals(y, 0) else y, **_out(eqn))
    return low.elementwise(_BINARY[name], x, y, **_out(eqn))


def _whole_quotient(low: Lowering, x: Tensor, y: Tensor) -> Tensor:
    """Divide integers as XLA does: by zero to all bits set, by -1 without overflow, where C++ ends the process."""
    if y.constant is not None and not np.isin(y.constant, (0, -1)).any():
        return low.elementwise("Div", x, y)
    zero, safe = _safe_divisor(low, y)
    made = low.elementwise("Div", x, safe)
    if x.dtype.kind == "i":
        minus = low.elementwise("Equal", y, low.scalar(-1, y), dtype=np.bool_)
        made = low.elementwise("Where", minus, low.elementwise("Sub", low.scalar(0, x), x), made, dtype=x.dtype)
    ones = low.array(np.array(-1 if x.dtype.kind == "i" else np.iinfo(x.dtype).max, x.dtype))
    return low.elementwise("Where", zero, ones, made, dtype=x.dtype)


def _safe_divisor(low: Lowering, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return where divisors are zero, and the divisors with 1 in the place of 0 and -1."""
    zero = bad = low.elementwise("Equal", y, low.scalar(0, y), dtype=np.bool_)
    if y.dtype.kind == "i":
        bad = low.elementwise("Or", bad, low.elementwise("Equal", y, low.scalar(-1, y), dtype=np.bool_))
    return zero, low.elementwise("Where", bad, low.scalar(1, y), y, dtype=y.dtype)


@lowering(*_COMPARE)
def compare(low: Lowering, eqn: core.JaxprEqn, x: Tensor, y: Tensor) -> Tensor:
    if eqn.primitive.name != "eq":
        x, y = _ordered(low, x), _ordered(low, y)
    return low.elementwise(_COMPARE[eqn.primitive.name], x, y, **_out(eqn))


def _ordered(low: Lowering, x: Tensor) -> Tensor:
    """Return bools as integers: ONNX has no order of bools."""
    return _cast(low, x, np.uint8) if x.dtype == np.bool_ else x


@lowering("lt_to")
def lt_to(low: Lowering, eqn: core.JaxprEqn, x: Tensor, y: Tensor) -> Tensor:
    return _before(low, x, y)


@lowering("le_to")
def le_to(low: Lowering, eqn: core.JaxprEqn, x: Tensor, y: Tensor) -> Tensor:
    return low.elementwise("Not", _before(low, y, x))


def _before(low: Lowering, x: Tensor, y: Tensor) -> Tensor:
    """Compare in the total order of floats: -0.0 comes before 0.0, and NaN after all numbers."""
    x, y = _ordered(low, x), _ordered(low, y)
    less = low.elementwise("Less", x, y, dtype=np.bool_)
    if x.dtype.kind in "iu":
        return less

    def test(op_type: str, *values: Tensor) -> Tensor:
        return low.elementwise(op_type, *values, dtype=np.bool_)

    signs = test("Less", *(low.elementwise("Reciprocal", v) for v in (x, y)))
    last = test("And", test("IsNaN", y), test("Not", test("IsNaN", x)))
    return test("Or", test("Or", less, last), test("And", test("Equal", x, y), signs))


@lowering("ne")
def ne(low: Lowering, eqn: core.JaxprEqn, x: Tensor, y: Tensor) -> Tensor:
    if x.dtype == np.bool_:
        return low.elementwise("Xor", x, y, **_out(eqn))
    return low.elementwise("Not", low.elementwise("Equal", x, y, **_out(eqn)), **_out(eqn))


@lowering(*_LOGIC)
def logic(low: Lowering, eqn: core.JaxprEqn, *xs: Tensor) -> Tensor:
    op_type = _LOGIC[eqn.primitive.name]
    return low.elementwise(op_type if xs[0].dtype == np.bool_ else f"Bitwise{op_type}", *xs, **_out(eqn))


@lowering("shift_left", "shift_right_logical")
def shift(low: Lowering, eqn: core.JaxprEqn, x: Tensor, y: Tensor) -> Tensor:
    bits = 8 * x.dtype.itemsize
    if y.constant is not None and _too_far(y.constant, bits).all():
        return low.array(np.zeros(x.shape, x.dtype))
    made = _shifted(low, x, y, "LEFT" if eqn.primitive.name == "shift_left" else "RIGHT")
    if y.constant is not None and not _too_far(y.constant, bits).any():
        return made
    return low.elementwise("Where", _is_too_far(low, y, bits), low.scalar(0, x), made, dtype=x.dtype)


def _shifted(low: Lowering, x: Tensor, y: Tensor, direction: str) -> Tensor:
    """Shift integers as unsigned ones of their width: ONNX has no shift of others."""
    words, amounts = (_cast(low, z, f"uint{8 * x.dtype.itemsize}") for z in (x, y))
    return _cast(low, low.elementwise("BitShift", words, amounts, direction=direction), x.dtype)


def _cast(low: Lowering, x: Tensor, dtype: Any) -> Tensor:
    return Tensor(low.cast(x.value, dtype), x.axes, x.shape, np.dtype(dtype))


def _too_far(amounts: np.ndarray, bits: int) -> np.ndarray:
    """Return where a shift leaves no bit: undefined in C++, all bits those shifted in by XLA."""
    made: np.ndarray = (amounts < 0) | (amounts >= bits)
    return made


def _is_too_far(low: Lowering, y: Tensor, bits: int) -> Tensor:
    """Return `_too_far` of amounts that the run computes."""
    far = low.elementwise("GreaterOrEqual", y, low.scalar(bits, y), dtype=np.bool_)
    if y.dtype.kind == "u":
        return far
    return low.elementwise("Or", far, low.elementwise("Less", y, low.scalar(0, y), dtype=np.bool_))


@lowering("shift_right_arithmetic")
def shift_right_arithmetic(low: Lowering, eqn: core.JaxprEqn, x: Tensor, y: Tensor) -> Tensor:
    """Lower it to a logical shift; where x is negative, to the shift of the complement. XLA takes x as signed."""
    bits = 8 * x.dtype.itemsize
    x = _cast(low, x, f"int{bits}")
    if y.constant is None or _too_far(y.constant, bits).any():
        y = low.elementwise("Where", _is_too_far(low, y, bits), low.scalar(bits - 1, y), y, dtype=y.dtype)

    plain = _shifted(low, x, y, "RIGHT")
    negative = low.elementwise("Less", x, low.scalar(0, x), dtype=np.bool_)
    turned = _shifted(low, low.elementwise("BitwiseNot", x), y, "RIGHT")
    made = low.elementwise("Where", negative, low.elementwise("BitwiseNot", turned), plain, dtype=x.dtype)
    return _cast(low, made, kernels.dtype_of_aval(eqn.outvars[0].aval))


@lowering("select_n")
def select_n(low: Lowering, eqn: core.JaxprEqn, which: Tensor, *cases: Tensor) -> Tensor:
    if which.dtype == np.bool_:
        if len(cases) == 1:
            return cases[0]
        return low.elementwise("Where", which, cases[1], cases[0], **_out(eqn))
    chosen = cases[-1]
    for index in reversed(range(len(cases) - 1)):
        here = low.elementwise("LessOrEqual", which, low.scalar(index, which), dtype=np.bool_)
        chosen = low.elementwise("Where", here, cases[index], chosen, **_out(eqn))
    return chosen


@lowering("clamp")
def clamp(low: Lowering, eqn: core.JaxprEqn, lower: Tensor, x: Tensor, upper: Tensor) -> Tensor:
    return low.elementwise("Min", low.elementwise("Max", x, lower, **_out(eqn)), upper, **_out(eqn))


@lowering("convert_element_type")
def convert_element_type(low: Lowering, eqn: core.JaxprEqn, x: Tensor) -> Tensor:
    """Cast; of floats to integers the ends of their range beyond it, and zero of NaN, as XLA does."""
    dtype = kernels.dtype_of_aval(eqn.outvars[0].aval)
    if dtype.kind not in "iu" or x.dtype.kind in "iub":
        return Tensor(low.cast(x.value, dtype), x.axes, x.shape, dtype)
    exact: type[np.floating[Any]] = np.float64 if x.dtype == np.float64 else np.float32
    x = Tensor(low.cast(x.value, exact), x.axes, x.shape, np.dtype(exact))
    ends = np.iinfo(dtype)
    top = float(exact(ends.max))
    if int(top) > ends.max:
        top = float(np.nextafter(exact(top), exact(0)))
    number = low.elementwise("Equal", x, x, dtype=np.bool_)
    inside = low.elementwise("Where", number, x, low.scalar(0, x), dtype=exact)
    inside = low.elementwise("Min", low.elementwise("Max", inside, low.scalar(ends.min, x)), low.scalar(top, x))
    made = Tensor(low.cast(inside.value, dtype), inside.axes, inside.shape, dtype)
    if int(top) == ends.max:
        return made
    above = low.elementwise("Greater", x, low.scalar(top, x), dtype=np.bool_)
    return low.elementwise("Where", above, low.array(np.array(ends.max, dtype)), made, dtype=dtype)


@lowering("reduce_precision")
def reduce_precision(low: Lowering, eqn: core.JaxprEqn, x: Tensor) -> Tensor:
    """Cast to the dtype with these bits, and back."""
    bits = (eqn.params["exponent_bits"], eqn.params["mantissa_bits"])
    dtypes = {(5, 10): np.float16, (8, 7): kernels.BFLOAT16, (8, 23): np.float32, (11, 52): np.float64}
    if bits not in dtypes:
        raise ConversionError(f"reduce_precision to {bits[0]} exponent and {bits[1]} mantissa bits: no such dtype")
    return Tensor(low.cast(low.cast(x.value, dtypes[bits]), x.dtype), x.axes, x.shape, x.dtype)


@lowering("integer_pow")
def integer_pow(low: Lowering, eqn: core.JaxprEqn, x: Tensor) -> Tensor:
    """Lower small powers to multiplications, as XLA does."""
    power: int = eqn.params["y"]
    result: Tensor | None = None
    square, left = x, abs(power)
    while left:
        if left & 1:
            result = square if result is None else low.elementwise("Mul", result, square)
        left >>= 1
        square = low.elementwise("Mul", square, square) if left else square
    if result is None:
        return low.array(np.ones(x.shape, x.dtype))
    return low.elementwise("Reciprocal", result) if power < 0 else result


@lowering("pow")
def power(low: Lowering, eqn: core.JaxprEqn, x: Tensor, y: Tensor) -> Tensor:
    if _equals(y, 0.5):
        return low.elementwise("Sqrt", x)
    return low.elementwise("Pow", x, y, **_out(eqn))


@lowering("square")
def square(low: Lowering, eqn: core.JaxprEqn, x: Tensor) -> Tensor:
    return low.elementwise("Mul", x, x)


@lowering("rsqrt")
def rsqrt(low: Lowering, eqn: core.JaxprEqn, x: Tensor) -> Tensor:
    return low.elementwise("Reciprocal", low.elementwise("Sqrt", x))


@lowering("cbrt")
def cbrt(low: Lowering, eqn: core.JaxprEqn, x: Tensor) -> Tensor:
    root = low.elementwise("Pow", low.elementwise("Abs", x), low.scalar(1 / 3, x))
    return low.elementwise("Mul", low.elementwise("Sign", x), root)


@lowering("exp2")
def exp2(low: Lowering, eqn: core.JaxprEqn, x: Tensor) -> Tensor:
    return low.elementwise("Pow", low.scalar(2, x), x)


@lowering("expm1")
def expm1(low: Lowering, eqn: core.JaxprEqn, x: Tensor) -> Tensor:
    """Compute ``tanh(x / 2) * (exp(x) + 1)``, which is accurate near zero."""
    half = low.elementwise("Tanh", low.elementwise("Mul", x, low.scalar(0.5, x)))
    return low.elementwise("Mul", half, low.elementwise("Add", low.elementwise("Exp", x), low.scalar(1, x)))


@lowering("log1p")
def log1p(low: Lowering, eqn: core.JaxprEqn, x: Tensor) -> Tensor:
    return _log1p(low, x)


def _log1p(low: Lowering, x: Tensor) -> Tensor:
    """Compute ``log(u) + (x - (u - 1)) / u`` with u = 1 + x rounded, which is accurate near zero."""
    u = low.elementwise("Add", x, low.scalar(1, x))
    rounded = low.elementwise("Sub", u, low.scalar(1, x))
    log = low.elementwise("Log", u)
    rest = low.elementwise("Div", low.elementwise("Sub", x, rounded), u)
    exact = low.elementwise("Equal", x, rounded, dtype=np.bool_)  # also where x is -1 or infinite
    return low.elementwise("Where", exact, log, low.elementwise("Add", log, rest), dtype=x.dtype)


@lowering("erfc")
def erfc(low: Lowering, eqn: core.JaxprEqn, x: Tensor) -> Tensor:
    """Compute 1 - erf(x) below 0.5, and by `ERFCX` above, where that would lose digits."""
    right = low.elementwise("Max", x, low.scalar(0, x))
    scaled = low.elementwise("Add", low.elementwise("Mul", right, low.scalar(0.5, x)), low.scalar(1, x))
    t = low.elementwise("Reciprocal", scaled)
    power = low.scalar(ERFCX[0], x)
    for factor in ERFCX[1:]:
        power = low.elementwise("Add", low.elementwise("Mul", power, t), low.scalar(factor, x))
    power = low.elementwise("Sub", power, low.elementwise("Mul", right, right))
    tail = low.elementwise("Mul", t, low.elementwise("Exp", power))
    plain = low.elementwise("Sub", low.scalar(1, x), low.elementwise("Erf", x))
    near = low.elementwise("Less", x, low.scalar(0.5, x), dtype=np.bool_)
    return low.elementwise("Where", near, plain, tail, dtype=x.dtype)


_SINGLE = (
    (5.0, 2.5, (
        2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503, -0.00417768164,
        0.246640727, 1.50140941,
    )),
    (np.inf, 3.0, (
        -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613, 0.00943887047,
        1.00167406, 2.83297682,
    )),
)  # fmt: skip
_DOUBLE = (
    (6.25, 3.125, (
        -3.6444120640178196996e-21, -1.685059138182016589e-19, 1.2858480715256400167e-18, 1.115787767802518096e-17,
        -1.333171662854620906e-16, 2.0972767875968561637e-17, 6.6376381343583238325e-15, -4.0545662729752068639e-14,
        -8.1519341976054721522e-14, 2.6335093153082322977e-12, -1.2975133253453532498e-11, -5.4154120542946279317e-11,
        1.051212273321532285e-09, -4.1126339803469836976e-09, -2.9070369957882005086e-08, 4.2347877827932403518e-07,
        -1.3654692000834678645e-06, -1.3882523362786468719e-05, 0.0001867342080340571352, -0.00074070253416626697512,
        -0.0060336708714301490533, 0.24015818242558961693, 1.6536545626831027356,
    )),
    (16.0, 3.25, (
        2.2137376921775787049e-09, 9.0756561938885390979e-08, -2.7517406297064545428e-07, 1.8239629214389227755e-08,
        1.5027403968909827627e-06, -4.013867526981545969e-06, 2.9234449089955446044e-06, 1.2475304481671778723e-05,
        -4.7318229009055733981e-05, 6.8284851459573175448e-05, 2.4031110387097893999e-05, -0.0003550375203628474796,
        0.00095328937973740049703, -0.0016882755560235047313, 0.0024914420961078508066, -0.0037512085075692412107,
        0.005370914553590063617, 1.0052589676941592334, 3.0838856104922207635,
    )),
    (np.inf, 5.0, (
        -2.7109920616438573243e-11, -2.5556418169965252055e-10, 1.5076572693500548083e-09, -3.7894654401267369937e-09,
        7.6157012080783393804e-09, -1.4960026627149240478e-08, 2.9147953450901080826e-08, -6.7711997758452339498e-08,
        2.2900482228026654717e-07, -9.9298272942317002539e-07, 4.5260625972231537039e-06, -1.9681778105531670567e-05,
        7.5995277030017761139e-05, -0.00021503011930044477347, -0.00013871931833623122026, 1.0103004648645343977,
        4.8499064014085844221,
    )),
)  # fmt: skip
"""Polynomials of `erf_inv`: the bound below which each holds, the shift of its argument, its factors."""


@lowering("erf_inv")
def erf_inv(low: Lowering, eqn: core.JaxprEqn, x: Tensor) -> Tensor:
    """Approximate erfinv by Giles (2012), Approximating the erfinv function, as XLA does in single or double
    precision.

    The argument of the first polynomial is w, and that of the others its root.
    """
    pieces = _DOUBLE if x.dtype == np.float64 else _SINGLE
    w = low.elementwise("Neg", _log1p(low, low.elementwise("Neg", low.elementwise("Mul", x, x))))
    below = [low.elementwise("Less", w, low.scalar(bound, x), dtype=np.bool_) for bound, _, _ in pieces[:-1]]

    def chosen(values: Sequence[Tensor]) -> Tensor:
        *most, made = values
        for condition, value in zip(reversed(below), reversed(most), strict=True):
            made = low.elementwise("Where", condition, value, made, dtype=x.dtype)
        return made

    shifted = [
        low.elementwise("Sub", low.elementwise("Sqrt", w) if place else w, low.scalar(shift, x))
        for place, (_, shift, _) in enumerate(pieces)
    ]
    z = chosen(shifted)
    total: Tensor | None = None
    length = max(len(factors) for _, _, factors in pieces)
    for powers in zip(*((0.0,) * (length - len(factors)) + factors for _, _, factors in pieces), strict=True):
        term = chosen([low.scalar(factor, x) for factor in powers])
        total = term if total is None else low.elementwise("Add", low.elementwise("Mul", total, z), term)
    assert total is not None
    end = low.elementwise("Equal", low.elementwise("Abs", x), low.scalar(1, x), dtype=np.bool_)
    total = low.elementwise("Where", end, low.scalar(np.inf, x), total, dtype=x.dtype)
    return low.elementwise("Mul", total, x)


@lowering("atan2")
def atan2(low: Lowering, eqn: core.JaxprEqn, y: Tensor, x: Tensor) -> Tensor:
    """Compute all four quadrants; zeros count as positive."""

    def where(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return low.elementwise("Where", condition, a, b, dtype=y.dtype)

    zero = low.scalar(0, y)
    below, above = (low.elementwise(op, y, zero, dtype=np.bool_) for op in ("Less", "Greater"))
    at_axis = where(below, low.scalar(-np.pi / 2, y), where(above, low.scalar(np.pi / 2, y), y))
    signs = low.elementwise("Mul", low.elementwise("Sign", y), low.elementwise("Sign", x))
    far_y, far_x = (
        low.elementwise("Equal", low.elementwise("Abs", v), low.scalar(np.inf, v), dtype=np.bool_) for v in (y, x)
    )
    slope = where(low.elementwise("And", far_y, far_x), signs, low.elementwise("Div", y, x))
    angle = low.elementwise("Atan", slope)
    half_turn = where(below, low.scalar(-np.pi, y), low.scalar(np.pi, y))
    left, at_zero = (low.elementwise(op, x, low.scalar(0, x), dtype=np.bool_) for op in ("Less", "Equal"))
    angle = where(left, low.elementwise("Add", angle, half_turn), angle)
    return low.elementwise("Where", at_zero, at_axis, angle, **_out(eqn))


@lowering("rem")
def rem(low: Lowering, eqn: core.JaxprEqn, x: Tensor, y: Tensor) -> Tensor:
    """Of integers by zero the dividend, as XLA does; of 64 bits by the quotient, as fmod=1 computes in float64."""
    if x.dtype.kind == "f" or x.dtype == kernels.BFLOAT16:
        return low.elementwise("Mod", x, y, fmod=1, **_out(eqn))
    zero, safe = (None, y)
    if y.constant is None or np.isin(y.constant, (0, -1)).any():
        zero, safe = _safe_divisor(low, y)
    if x.dtype.itemsize < 8:
        made = low.elementwise("Mod", x, safe, fmod=1, **_out(eqn))
    else:
        made = low.elementwise("Sub", x, low.elementwise("Mul", low.elementwise("Div", x, safe), safe), **_out(eqn))
    return made if zero is None else low.elementwise("Where", zero, x, made, dtype=x.dtype)


@lowering("round")
def rounded(low: Lowering, eqn: core.JaxprEqn, x: Tensor) -> Tensor:
    if int(eqn.params["rounding_method"]) == 1:  # to nearest even
        return low.elementwise("Round", x)
    size = low.elementwise("Abs", x)
    down = low.elementwise("Floor", size)
    half = low.elementwise("Less", low.elementwise("Sub", size, down), low.scalar(0.5, x), dtype=np.bool_)
    up = low.elementwise("Where", half, down, low.elementwise("Add", down, low.scalar(1, x)), dtype=x.dtype)
    return low.elementwise("Mul", low.elementwise("Sign", x), up)


@lowering("is_finite")
def is_finite(low: Lowering, eqn: core.JaxprEqn, x: Tensor) -> Tensor:
    return low.elementwise("Less", low.elementwise("Abs", x), low.scalar(np.inf, x), dtype=np.bool_)


@lowering("copy", "copy_p", "name", "stop_gradient", "sharding_constraint", "random_clone", "pvary", "reshard")
def same(low: Lowering, eqn: core.JaxprEqn, x: Tensor) -> Tensor:
    return x


@lowering("optimization_barrier")
def in_order(low: Lowering, eqn: core.JaxprEqn, *xs: Tensor) -> list[Tensor]:
    """Return the arrays with their axes in order, so that later equations need not transpose each of them."""
    made = []
    for x in xs:
        axes = sorted(x.axes)
        made.append(Tensor(low.transpose(x.value, [x.axes.index(a) for a in axes]), tuple(axes), x.shape, x.dtype))
    return made
