"""Functions as LLVM text, of float32: exp, log, tanh, erf, the logistic function; of float64: powers of a constant.

Each is computed without branches, from polynomials that come closest to it in the maximum norm (Remez's algorithm), so
that loops of calls become vector code. Results are within 1.5 units in the last place (2.5 for the logistic function, 6
for tanh, about as ONNX Runtime's own, and 2 for powers), special values and denormal results included;
``tests/fuse/test_functions.py`` compares them with exact ones.
"""

from __future__ import annotations

import decimal
import math
from collections.abc import Mapping, Sequence
from typing import Final

from onnx_remat.fuse.code import Code, literal

_LN2, _LOG2_E = 0.6931471805599453, 1.4426950408889634
_LN2_HIGH = 0.693145751953125  # ends in zeros: its product with an exponent is exact
_EXP_LEAST, _EXP_MOST = -104.0, 89.0  # below it is 0, above infinite
_EXP = (1.0, 1.0, 0.49999994, 0.1666652, 0.041668393, 0.00836878, 0.0013814496)
_LOG = (0.33333313, -0.2500001, 0.20002118, -0.16668, 0.14219561, -0.124055386, 0.1188804, -0.11675913, 0.06747242)
_TANH_ABOVE = (1.0, 0.13785546, 0.0040087146, 3.1591833e-05, 5.07619e-08)
_TANH_BELOW = (1.0, 0.4711888, 0.02773832, 0.00042077218, 1.6175989e-06, 7.373152e-10)
_TANH_FAR = 9.0625  # where the ratio is 1 to the bit
_ERF = (0.12837917, -0.37612635, 0.1128372, -0.026860753, 0.0052044350, -0.0008181917, 8.538799e-05)
_ERF_NEAR = 0.9
_ERFC = (0.0001705683, -1.1294953, -0.6333865, -0.1082368, 0.025091618, -0.0041605732, 0.00043231266, -2.0910398e-05)
_ERF_FAR = 3.95  # from here on it is 1
_SIGMOID_FAR = 88.0  # from here on its distance to 0 or 1 is denormal
_LN2_REST = 2.3190468138462996e-17  # ln 2 less what float64 has of it
_TERMS = 13  # of Taylor's series, besides the first
_POWER_LEAST, _POWER_MOST = -746.0, 710.0  # exponents of e from which on a float64 is 0, or infinite


class _Function:
    """Writer of one function of a float."""

    def __init__(self) -> None:
        self.code = Code([0])

    def binary(self, op: str, a: str, b: str) -> str:
        return self.code.new(f"{op} float {a}, {b}")

    def add(self, a: str, b: str) -> str:
        return self.binary("fadd", a, b)

    def sub(self, a: str, b: str) -> str:
        return self.binary("fsub", a, b)

    def mul(self, a: str, b: str) -> str:
        return self.binary("fmul", a, b)

    def div(self, a: str, b: str) -> str:
        return self.binary("fdiv", a, b)

    def call(self, name: str, *arguments: str) -> str:
        return self.code.new(f"call float @{name}({', '.join(f'float {each}' for each in arguments)})")

    def fma(self, a: str, b: str, c: str) -> str:
        """Return a * b + c, rounded once."""
        return self.call("llvm.fma.f32", a, b, c)

    def magnitude(self, a: str) -> str:
        return self.call("llvm.fabs.f32", a)

    def choose(self, order: str, a: str, b: str, then: str, otherwise: str) -> str:
        """Return `then` where `a` and `b` compare as LLVM's `order` says, else `otherwise`."""
        chosen = self.code.new(f"fcmp {order} float {a}, {b}")
        return self.code.new(f"select i1 {chosen}, float {then}, float {otherwise}")

    def between(self, least: float, a: str, most: float) -> str:
        """Return `a` within two bounds; a NaN stays one."""
        a = self.choose("ogt", a, number(most), number(most), a)
        return self.choose("olt", a, number(least), number(least), a)

    def polynomial(self, x: str, coefficients: Sequence[float]) -> str:
        *lower, highest = coefficients
        made = number(highest)
        for each in reversed(lower):
            made = self.fma(made, x, number(each))
        return made

    def integer(self, a: str) -> str:
        """Return a whole number as an integer; any, if it is a NaN."""
        made = self.code.new(f"fptosi float {a} to i32")
        return self.code.new(f"freeze i32 {made}")

    def power_of_2(self, exponent: str) -> str:
        """Return 2 to an integer from -126 to 127."""
        biased = self.code.new(f"add i32 {exponent}, 127")
        bits = self.code.new(f"shl i32 {biased}, 23")
        return self.code.new(f"bitcast i32 {bits} to float")

    def signed(self, magnitude: str, sign: str) -> str:
        return self.call("llvm.copysign.f32", magnitude, sign)

    def text(self, name: str, result: str) -> str:
        lines = "\n  ".join(self.code.lines)
        head = f"define internal float @{name}(float %x) alwaysinline nounwind"
        return f"{head} {{\n  {lines}\n  ret float {result}\n}}\n"


def number(value: float) -> str:
    """Return a constant of float32."""
    return literal(value, "float")


def _exp() -> str:
    """exp(x) = 2^n exp(r), n the integer nearest to x / ln 2; the power in two factors, for denormal results."""
    f = _Function()
    x = f.choose("olt", "%x", number(_EXP_LEAST), number(0), "%x")  # not the bound: results that vanish take long
    x = f.choose("ogt", x, number(_EXP_MOST), number(_EXP_MOST), x)
    n = f.call("llvm.roundeven.f32", f.mul(x, number(_LOG2_E)))
    r = f.fma(n, number(-_LN2_HIGH), x)
    r = f.fma(n, number(_LN2_HIGH - _LN2), r)
    made = f.polynomial(r, _EXP)
    exponent = f.integer(n)
    half = f.code.new(f"ashr i32 {exponent}, 1")
    rest = f.code.new(f"sub i32 {exponent}, {half}")
    made = f.mul(f.mul(made, f.power_of_2(half)), f.power_of_2(rest))
    return f.text("exp", f.choose("olt", "%x", number(_EXP_LEAST), number(0), made))


def _exp_within() -> str:
    """exp(x) for x from -87.3 to 88, whose results are neither denormal nor infinite: half the instructions of `_exp`.

    From there down to -88 it is a tiny number, and of a NaN any.
    """
    f = _Function()
    n = f.call("llvm.roundeven.f32", f.mul("%x", number(_LOG2_E)))
    r = f.fma(n, number(-_LN2_HIGH), "%x")
    r = f.fma(n, number(_LN2_HIGH - _LN2), r)
    bits = f.code.new(f"bitcast float {f.polynomial(r, _EXP)} to i32")
    bits = f.code.new(f"add i32 {bits}, {f.code.new(f'shl i32 {f.integer(n)}, 23')}")
    return f.text("exp_within", f.code.new(f"bitcast i32 {bits} to float"))


def _log() -> str:
    """log(x) = n ln 2 + log(1 + m), m from sqrt(1/2) - 1 to sqrt(2) - 1."""
    f = _Function()
    tiny = number(2.0**-126)
    x = f.choose("olt", "%x", tiny, f.mul("%x", number(2.0**23)), "%x")
    shift = f.choose("olt", "%x", tiny, number(-23), number(0))
    bits = f.code.new(f"bitcast float {x} to i32")
    above = f.code.new(f"sub i32 {bits}, {0x3F3504F3}")  # of sqrt(1/2)
    exponent = f.code.new(f"ashr i32 {above}, 23")
    shifted = f.code.new(f"shl i32 {exponent}, 23")
    rest = f.code.new(f"sub i32 {bits}, {shifted}")
    m = f.sub(f.code.new(f"bitcast i32 {rest} to float"), number(1))
    n = f.add(f.code.new(f"sitofp i32 {exponent} to float"), shift)
    square = f.mul(m, m)
    made = f.mul(f.mul(square, m), f.polynomial(m, _LOG))
    made = f.fma(n, number(_LN2 - _LN2_HIGH), made)
    made = f.fma(square, number(-0.5), made)
    made = f.fma(n, number(_LN2_HIGH), f.add(m, made))
    made = f.choose("oeq", "%x", number(float("inf")), "%x", made)
    made = f.choose("oeq", "%x", number(0), number(float("-inf")), made)
    made = f.choose("olt", "%x", number(0), number(float("nan")), made)
    return f.text("log", f.choose("uno", "%x", "%x", "%x", made))


def _tanh() -> str:
    """tanh(x) = x P(x^2) / Q(x^2): the ratio of two polynomials, as exact as ONNX Runtime's, and never above 1."""
    f = _Function()
    x = f.between(-_TANH_FAR, "%x", _TANH_FAR)
    square = f.mul(x, x)
    above, below = f.polynomial(square, _TANH_ABOVE), f.polynomial(square, _TANH_BELOW)
    return f.text("tanh", f.between(-1, f.div(f.mul(x, above), below), 1))


def _erf() -> str:
    """erf(x) = 1 - exp(log(erfc(x))) with a polynomial for the logarithm, near 0 a polynomial."""
    f = _Function()
    size = f.magnitude("%x")
    square = f.mul("%x", "%x")
    near = f.fma(size, f.polynomial(square, _ERF), size)
    bounded = f.choose("ogt", size, number(_ERF_FAR), number(_ERF_FAR), size)
    far = f.sub(number(1), f.call("exp_within", f.polynomial(bounded, _ERFC)))
    return f.text("erf", f.signed(f.choose("ult", size, number(_ERF_NEAR), near, far), "%x"))


def _sigmoid() -> str:
    """1 / (1 + exp(-x)); 0 where that is denormal."""
    f = _Function()
    x = f.between(-_SIGMOID_FAR, "%x", _SIGMOID_FAR)
    made = f.call("exp_within", f.code.new(f"fneg float {x}"))
    grown = f.add(f.fma(x, number(0), made), number(1))  # a NaN stays one
    return f.text("sigmoid", f.choose("olt", "%x", number(-_SIGMOID_FAR), number(0), f.div(number(1), grown)))


def _power() -> str:
    """b^x in float64 for a constant b = exp(high + low): 2^n exp(r), n the integer nearest to x log2(b).

    The product of x and log(b) has twice the digits of float64: its rounding would be that of the result times the
    size of the exponent. The polynomial is Taylor's.
    """
    code = Code([0])

    def binary(op: str, a: str, b: str) -> str:
        return code.new(f"{op} double {a}, {b}")

    def call(name: str, *arguments: str) -> str:
        return code.new(f"call double @llvm.{name}.f64({', '.join(f'double {each}' for each in arguments)})")

    def wide(value: float) -> str:
        return literal(value, "double")

    def at_most(a: str, bound: float, order: str) -> str:
        beyond = code.new(f"fcmp {order} double {a}, {wide(bound)}")
        return code.new(f"select i1 {beyond}, double {wide(bound)}, double {a}")

    def power_of_2(exponent: str) -> str:
        bits = code.new(f"shl i64 {code.new(f'add i64 {exponent}, 1023')}, 52")
        return code.new(f"bitcast i64 {bits} to double")

    y = at_most(at_most(binary("fmul", "%x", "%high"), _POWER_LEAST, "olt"), _POWER_MOST, "ogt")
    lost = call("fma", "%x", "%high", code.new(f"fneg double {y}"))
    small = (at_most(at_most(each, -1, "olt"), 1, "ogt") for each in (lost, binary("fmul", "%x", "%low")))
    rest = binary("fadd", *small)  # bounded, as both are infinite where the result is
    n = call("roundeven", binary("fmul", y, wide(_LOG2_E)))
    r = call("fma", n, wide(-_LN2), y)
    r = binary("fadd", call("fma", n, wide(-_LN2_REST), r), rest)
    made = wide(1 / math.factorial(_TERMS))
    for term in reversed(range(_TERMS)):
        made = call("fma", made, r, wide(1 / math.factorial(term)))
    exponent = code.new(f"freeze i64 {code.new(f'fptosi double {n} to i64')}")
    half = code.new(f"ashr i64 {exponent}, 1")
    whole = binary("fmul", made, power_of_2(half))
    result = binary("fmul", whole, power_of_2(code.new(f"sub i64 {exponent}, {half}")))
    lines = "\n  ".join(code.lines)
    head = "define internal double @power(double %high, double %low, double %x) alwaysinline nounwind"
    return f"{head} {{\n  {lines}\n  ret double {result}\n}}\n"


def logarithm(base: float) -> tuple[float, float]:
    """Return the natural logarithm of a positive number as the sum of two of float64."""
    with decimal.localcontext(prec=50):
        exact = decimal.Decimal(base).ln()
        return float(exact), float(exact - decimal.Decimal(float(exact))) or 1e-300  # infinity times 0 is a NaN


TEXTS: Final[Mapping[str, str]] = {
    "exp": _exp(), "exp_within": _exp_within(), "log": _log(), "tanh": _tanh(), "erf": _erf(), "sigmoid": _sigmoid(),
    "power": _power(),
}  # fmt: skip
"""By the function's name."""


def called(lines: Sequence[str]) -> str:
    """Return the definitions of the functions that some instructions call."""
    text = "\n".join(lines)
    found = [name for name in TEXTS if f"@{name}(" in text]
    if set(found) & {"erf", "sigmoid"}:
        found.insert(0, "exp_within")
    if not found:
        return ""
    declared = "declare float @llvm.fma.f32(float, float, float)\ndeclare float @llvm.copysign.f32(float, float)\n"
    if "power" in found:
        declared += "declare double @llvm.fma.f64(double, double, double)\n"
    return declared + "".join(TEXTS[name] for name in found)
