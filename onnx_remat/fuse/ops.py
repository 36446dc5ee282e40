"""Table of the elementwise operators that kernels compute: their types and instructions.

Each exact one gives ONNX Runtime's results to the bit, also for NaNs, infinities, denormal numbers and signed zeros;
comments at an entry explain a deviation from the obvious instruction. The others call one of `functions`; their results
are within rounding. ``tests/fuse/test_ops.py`` compares every entry with ONNX Runtime.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeGuard

import numpy as np
import onnx

from onnx_remat.fuse.code import BFLOAT, BOOL, DOUBLE, FLOAT, HALF, INT, KINDS, LONG, UINT, Code, literal
from onnx_remat.fuse.functions import logarithm
from onnx_remat.fuse.moves import MOVES
from onnx_remat.fuse.rows import ROWS
from onnx_remat.ir.opsets import STANDARD_DOMAINS, is_op

_STANDARD: Final = frozenset(STANDARD_DOMAINS)

FLOATS: Final = frozenset({FLOAT, DOUBLE, HALF, BFLOAT})
NUMBERS: Final = FLOATS | {INT, LONG}
LOGIC: Final = frozenset({BOOL})
WORDS: Final = frozenset({INT, LONG, UINT})
BITS: Final = NUMBERS | {UINT}  # of ops whose bits are those of signed numbers

Attributes: TypeAlias = Mapping[str, float]
Emit: TypeAlias = "Callable[[Code, str, list[str], Call], str]"


@dataclass(frozen=True, slots=True)
class Call:
    """A node to be compiled to instructions.

    Attributes
    ----------
    op : str
        Standard operator.
    attributes : mapping of str to float
        Numeric attributes only.
    dtype, made : int
        Element types of its computation and of its result (``onnx.TensorProto``).
    exponent : float
        Exponent of a Pow.
    base : float
        Number that an Exp raises to a power; 0 for e.
    """

    op: str
    attributes: Attributes
    dtype: int
    made: int
    exponent: float = 0
    base: float = 0


@dataclass(frozen=True, slots=True)
class Op:
    """One operator.

    Attributes
    ----------
    types : frozenset of int
        Element types that it computes with.
    emit : callable
        Appends its instructions to code, given the register type and the arguments' registers ("" for an absent one),
        and returns the result's register.
    inputs : tuple of int
        Minimum and maximum number of inputs.
    data : int
        The input that determines the type of the computation.
    attributes : frozenset of str
        Supported attributes; a node with any other one is not fused.
    logical : bool
        Whether its result is boolean for all types.
    exact : bool
        Whether its results are ONNX Runtime's to the bit. Of any other op every node becomes a kernel, also a single
        one: so a value has the same bits wherever it is computed.
    domains : frozenset of str
        Domains of the operator.
    """

    types: frozenset[int]
    emit: Emit
    inputs: tuple[int, int] = (1, 1)
    data: int = 0
    attributes: frozenset[str] = frozenset()
    logical: bool = False
    exact: bool = True
    domains: frozenset[str] = _STANDARD


def _is_float(register: str) -> bool:
    return register in ("float", "double")


def _suffix(register: str) -> str:
    return {"float": "f32", "double": "f64"}.get(register, register)


def _binary(floating: str, integer: str) -> Emit:
    def emit(code: Code, kind: str, a: list[str], _: Call) -> str:
        return code.new(f"{floating if _is_float(kind) else integer} {kind} {a[0]}, {a[1]}")

    return emit


def _intrinsic(name: str) -> Emit:
    def emit(code: Code, kind: str, a: list[str], _: Call) -> str:
        return code.new(f"call {kind} @llvm.{name}.{_suffix(kind)}({kind} {a[0]})")

    return emit


def _compare(name: str) -> Emit:
    def emit(code: Code, kind: str, a: list[str], _: Call) -> str:
        if _is_float(kind):
            return code.new(f"fcmp o{name} {kind} {a[0]}, {a[1]}")
        return code.new(f"icmp {'eq' if name == 'eq' else 's' + name} {kind} {a[0]}, {a[1]}")

    return emit


def _logic(name: str) -> Emit:
    def emit(code: Code, _: str, a: list[str], __: Call) -> str:
        return code.new(f"{name} i1 {a[0]}, {a[1]}")

    return emit


def _beyond(code: Code, kind: str, a: str, b: str, order: str) -> str:
    """Select `b` if it is greater (``gt``) or less (``lt``) than `a`, and `a` if they are equal or one is a NaN."""
    more = code.new(f"fcmp o{order} {kind} {b}, {a}" if _is_float(kind) else f"icmp s{order} {kind} {b}, {a}")
    return code.new(f"select i1 {more}, {kind} {b}, {kind} {a}")


def _extreme(order: str) -> Emit:
    """Compile Max or Min: the result is NaN if any input is.

    Which of two signed zeros ONNX Runtime returns depends on their place in the array: floats are not fused unless one
    input is known to be nonzero (`call_of`).
    """

    def emit(code: Code, kind: str, a: list[str], _: Call) -> str:
        made, *others = a
        for other in others:
            if _is_float(kind):
                more = code.new(f"fcmp u{order} {kind} {made}, {other}")
                got = code.new(f"select i1 {more}, {kind} {made}, {kind} {other}")
                odd = code.new(f"fcmp uno {kind} {other}, {other}")
                made = code.new(f"select i1 {odd}, {kind} {other}, {kind} {got}")
            else:
                made = _beyond(code, kind, made, other, order)
        return made

    return emit


def _sum(code: Code, kind: str, a: list[str], _: Call) -> str:
    made = a[0]
    for other in a[1:]:
        made = code.new(f"{'fadd' if _is_float(kind) else 'add'} {kind} {made}, {other}")
    return made


_ENDS: Final[Mapping[int, tuple[float, float]]] = {
    FLOAT: (float(np.finfo(np.float32).min), float(np.finfo(np.float32).max)),
    DOUBLE: (float(np.finfo(np.float64).min), float(np.finfo(np.float64).max)),
    INT: (-(2**31), 2**31 - 1),
    LONG: (-(2**63), 2**63 - 1),
}  # per type, the smallest and the largest finite number


def _clip(code: Code, kind: str, a: list[str], call: Call) -> str:
    """Compile Clip; absent bounds are the type's extreme finite numbers: infinities are clipped to them."""
    low, high = (*a[1:], "", "")[:2]
    least, most = _ENDS[call.dtype]
    made = _beyond(code, kind, a[0], low or literal(least, kind), "gt")
    return _beyond(code, kind, made, high or literal(most, kind), "lt")


def _sign(code: Code, kind: str, a: list[str], _: Call) -> str:
    """Compile Sign; the sign of a NaN is that NaN."""
    if not _is_float(kind):
        up, down = code.new(f"icmp sgt {kind} {a[0]}, 0"), code.new(f"icmp slt {kind} {a[0]}, 0")
        low = code.new(f"select i1 {down}, {kind} -1, {kind} 0")
        return code.new(f"select i1 {up}, {kind} 1, {kind} {low}")
    up, down = code.new(f"fcmp ogt {kind} {a[0]}, 0.0"), code.new(f"fcmp olt {kind} {a[0]}, 0.0")
    low = code.new(f"select i1 {down}, {kind} -1.0, {kind} 0.0")
    made = code.new(f"select i1 {up}, {kind} 1.0, {kind} {low}")
    odd = code.new(f"fcmp uno {kind} {a[0]}, {a[0]}")
    return code.new(f"select i1 {odd}, {kind} {a[0]}, {kind} {made}")


def _where(code: Code, kind: str, a: list[str], _: Call) -> str:
    """Compile Where; like ONNX Runtime, it turns a -0.0 from the second input into 0.0."""
    chosen = a[1]
    if _is_float(kind):
        zero = code.new(f"fcmp oeq {kind} {chosen}, 0.0")
        chosen = code.new(f"select i1 {zero}, {kind} 0.0, {kind} {chosen}")
    return code.new(f"select i1 {a[0]}, {kind} {chosen}, {kind} {a[2]}")


def _negative(code: Code, kind: str, a: list[str], _: Call) -> str:
    return code.new(f"fneg {kind} {a[0]}" if _is_float(kind) else f"sub {kind} 0, {a[0]}")


def _absolute(code: Code, kind: str, a: list[str], _: Call) -> str:
    if _is_float(kind):
        return code.new(f"call {kind} @llvm.fabs.{_suffix(kind)}({kind} {a[0]})")
    return code.new(f"call {kind} @llvm.abs.{kind}({kind} {a[0]}, i1 false)")


def _reciprocal(code: Code, kind: str, a: list[str], _: Call) -> str:
    return code.new(f"fdiv {kind} 1.0, {a[0]}")


def _relu(code: Code, kind: str, a: list[str], _: Call) -> str:
    return _beyond(code, kind, a[0], literal(0, kind), "gt")


def _leaky_relu(code: Code, kind: str, a: list[str], call: Call) -> str:
    alpha = literal(call.attributes.get("alpha", 0.01), kind)
    positive = code.new(f"fcmp oge {kind} {a[0]}, 0.0")
    scaled = code.new(f"fmul {kind} {alpha}, {a[0]}")
    return code.new(f"select i1 {positive}, {kind} {a[0]}, {kind} {scaled}")


def _power(code: Code, kind: str, a: list[str], call: Call) -> str:
    square = code.new(f"fmul {kind} {a[0]}, {a[0]}")
    return square if call.exponent == 2 else code.new(f"fmul {kind} {square}, {a[0]}")


def _word(name: str) -> Emit:
    def emit(code: Code, kind: str, a: list[str], _: Call) -> str:
        return code.new(f"{name} {kind} {a[0]}, {a[1]}")

    return emit


def _shift(code: Code, kind: str, a: list[str], call: Call) -> str:
    """Compile BitShift by a constant less than the number of bits (`call_of`)."""
    return code.new(f"{'shl' if call.attributes['direction'] else 'lshr'} {kind} {a[0]}, {a[1]}")


def _not(code: Code, _: str, a: list[str], __: Call) -> str:
    return code.new(f"xor i1 {a[0]}, true")


def _is_nan(code: Code, kind: str, a: list[str], _: Call) -> str:
    return code.new(f"fcmp uno {kind} {a[0]}, {a[0]}")


def _identity(_: Code, __: str, a: list[str], ___: Call) -> str:
    return a[0]


def _cast(code: Code, kind: str, a: list[str], call: Call) -> str:
    """Compile Cast; `Code.rounded` rounds results to half precision, from float64 via float32, as ONNX Runtime does."""
    to = KINDS[call.made].register
    if kind == to:
        return a[0]
    if to == "i1":
        return code.new(f"fcmp une {kind} {a[0]}, 0.0" if _is_float(kind) else f"icmp ne {kind} {a[0]}, 0")
    if _is_float(kind) and _is_float(to):
        return code.new(f"{'fpext' if to == 'double' else 'fptrunc'} {kind} {a[0]} to {to}")
    unsigned = kind == "i1" or call.dtype == UINT
    if _is_float(to):
        return code.new(f"{'uitofp' if unsigned else 'sitofp'} {kind} {a[0]} to {to}")
    if _is_float(kind):  # out of range, ONNX Runtime is undefined too; `freeze` keeps LLVM from exploiting poison
        made = code.new(f"fptosi {kind} {a[0]} to {to}")
        return code.new(f"freeze {to} {made}")
    return code.new(f"{'trunc' if kind == 'i64' else 'zext' if unsigned else 'sext'} {kind} {a[0]} to {to}")


def _function(name: str) -> Emit:
    def emit(code: Code, kind: str, a: list[str], _: Call) -> str:
        return code.new(f"call {kind} @{name}({kind} {a[0]})")

    return emit


def _exp(code: Code, kind: str, a: list[str], call: Call) -> str:
    if call.base:
        high, low = (literal(each, "double") for each in logarithm(call.base))
        wide = code.new(f"fpext float {a[0]} to double") if kind == "float" else a[0]
        made = code.new(f"call double @power(double {high}, double {low}, double {wide})")
        return code.new(f"fptrunc double {made} to float") if kind == "float" else made
    return code.new(f"call {kind} @exp({kind} {a[0]})")


def _gelu(code: Code, kind: str, a: list[str], call: Call) -> str:
    """Compile Gelu: x (1 + erf(x / sqrt 2)) / 2, or with tanh for erf, see the standard's formula."""
    if call.attributes.get("approximate"):
        square = code.new(f"fmul {kind} {a[0]}, {a[0]}")
        slope = code.new(f"fmul {kind} {square}, {literal(0.044715, kind)}")
        slope = code.new(f"fadd {kind} {slope}, 1.0")
        scaled = code.new(f"fmul {kind} {a[0]}, {literal((2 / math.pi) ** 0.5, kind)}")
        scaled = code.new(f"fmul {kind} {scaled}, {slope}")
        share = code.new(f"call {kind} @tanh({kind} {scaled})")
    else:
        scaled = code.new(f"fmul {kind} {a[0]}, {literal(0.5**0.5, kind)}")
        share = code.new(f"call {kind} @erf({kind} {scaled})")
    grown = code.new(f"fadd {kind} {share}, 1.0")
    half = code.new(f"fmul {kind} {a[0]}, 0.5")
    return code.new(f"fmul {kind} {half}, {grown}")


def _quick_gelu(code: Code, kind: str, a: list[str], call: Call) -> str:
    """Compile QuickGelu: x times the logistic function of alpha x."""
    scaled = code.new(f"fmul {kind} {a[0]}, {literal(call.attributes.get('alpha', 1.702), kind)}")
    grown = code.new(f"call {kind} @sigmoid({kind} {scaled})")
    return code.new(f"fmul {kind} {a[0]}, {grown}")


def _inexact(emit: Emit, attribute: str = "", domains: frozenset[str] = _STANDARD) -> Op:
    attributes = frozenset({attribute} if attribute else ())
    return Op(frozenset({FLOAT}), emit, attributes=attributes, exact=False, domains=domains)


_SEVERAL: Final = (1, 16)

OPS: Final[Mapping[str, Op]] = {
    "Abs": Op(NUMBERS, _absolute),
    "Add": Op(BITS, _binary("fadd", "add"), (2, 2)),
    "And": Op(LOGIC, _logic("and"), (2, 2)),
    "BitShift": Op(frozenset({UINT}), _shift, (2, 2), attributes=frozenset({"direction"})),
    "BitwiseAnd": Op(WORDS, _word("and"), (2, 2)),
    "BitwiseOr": Op(WORDS, _word("or"), (2, 2)),
    "BitwiseXor": Op(WORDS, _word("xor"), (2, 2)),
    "Cast": Op(BITS | LOGIC, _cast, attributes=frozenset({"to", "saturate", "round_mode"})),
    "Ceil": Op(FLOATS, _intrinsic("ceil")),
    "Clip": Op(frozenset({FLOAT, DOUBLE, INT, LONG}), _clip, (1, 3)),
    "Div": Op(FLOATS, _binary("fdiv", ""), (2, 2)),  # not integers: division by zero would end the process
    "Equal": Op(BITS | LOGIC, _compare("eq"), (2, 2), logical=True),
    "Erf": _inexact(_function("erf")),
    "Exp": _inexact(_exp),
    "Floor": Op(FLOATS, _intrinsic("floor")),
    "Gelu": _inexact(_gelu, "approximate", _STANDARD | {"com.microsoft"}),
    "Greater": Op(NUMBERS, _compare("gt"), (2, 2), logical=True),
    "GreaterOrEqual": Op(NUMBERS, _compare("ge"), (2, 2), logical=True),
    "Identity": Op(BITS | LOGIC, _identity),
    "IsNaN": Op(FLOATS, _is_nan, logical=True),
    "LeakyRelu": Op(frozenset({FLOAT}), _leaky_relu, attributes=frozenset({"alpha"})),
    "Less": Op(NUMBERS, _compare("lt"), (2, 2), logical=True),
    "LessOrEqual": Op(NUMBERS, _compare("le"), (2, 2), logical=True),
    "Log": _inexact(_function("log")),
    "Max": Op(NUMBERS, _extreme("gt"), (2, 2)),
    "Min": Op(NUMBERS, _extreme("lt"), (2, 2)),
    "Mul": Op(BITS, _binary("fmul", "mul"), (2, 2)),
    "Neg": Op(NUMBERS, _negative),
    "Not": Op(LOGIC, _not),
    "Or": Op(LOGIC, _logic("or"), (2, 2)),
    "Pow": Op(frozenset({FLOAT, DOUBLE}), _power, (2, 2)),  # by a constant 2 or 3; of a constant, it is an Exp
    "QuickGelu": _inexact(_quick_gelu, "alpha", frozenset({"com.microsoft"})),
    "Reciprocal": Op(FLOATS, _reciprocal),
    "Relu": Op(FLOATS | {INT}, _relu),
    "Round": Op(FLOATS, _intrinsic("roundeven")),
    "Sigmoid": _inexact(_function("sigmoid")),
    "Sign": Op(NUMBERS, _sign),
    "Sqrt": Op(FLOATS, _intrinsic("sqrt")),
    "Sub": Op(BITS, _binary("fsub", "sub"), (2, 2)),
    "Sum": Op(FLOATS, _sum, _SEVERAL),
    "Tanh": _inexact(_function("tanh")),
    "Where": Op(BITS, _where, (3, 3), data=1),
    "Xor": Op(LOGIC, _logic("xor"), (2, 2)),
}
"""Ops by the name of the standard operator."""

VIEWS: Final = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
"""Operators that return their first input in another shape."""


def may_fuse(node: onnx.NodeProto) -> bool:
    """Return whether a node may be part of a kernel, its types and shapes aside."""
    op = OPS.get(node.op_type)
    return node.domain in op.domains if op else is_op(node, *ROWS, *MOVES)


def is_exact(node: onnx.NodeProto) -> bool:
    """Return whether a kernel gives ONNX Runtime's bits for a node that may be part of it."""
    return node.op_type in MOVES or (node.op_type in OPS and OPS[node.op_type].exact)


def _raises(base: float | None) -> TypeGuard[float]:
    """Return whether a number is a base whose powers are those of an exponential."""
    return base is not None and 0 < base < math.inf and base != 1


def call_of(
    node: onnx.NodeProto, types: Sequence[int | None], made: int, constant: Callable[[str], float | None]
) -> Call | None:
    """Return a node as a `Call`; None if kernels cannot compute it.

    Parameters
    ----------
    node : onnx.NodeProto
    types : sequence of int or None
        Element types of its inputs, None for absent ones.
    made : int
        Element type of its output.
    constant : callable
        Returns the known number in a value, by its name.
    """
    op = OPS.get(node.op_type)
    if op is None or not may_fuse(node) or not op.inputs[0] <= len(types) <= op.inputs[1] or len(node.output) != 1:
        return None
    if any(each.name not in op.attributes for each in node.attribute):
        return None
    absent = [slot for slot, dtype in enumerate(types) if dtype is None]
    if absent and not (node.op_type == "Clip" and 0 not in absent):
        return None
    dtype = types[op.data]
    if dtype not in op.types or made not in KINDS or dtype is None:
        return None
    exponent = 0.0
    if node.op_type in ("Max", "Min") and dtype in FLOATS and not any(constant(name) for name in node.input):
        return None
    if node.op_type == "Pow" and _raises(base := constant(node.input[0])) and types in ([FLOAT] * 2, [DOUBLE] * 2):
        return Call("Exp", {}, made, made, base=base) if made == types[1] else None
    if node.op_type == "Pow":
        exponent = constant(node.input[1]) or 0.0
        if exponent not in (2, 3):
            return None
        types = types[:1]
    wanted = [BOOL, dtype, dtype] if node.op_type == "Where" else [dtype] * len(types)
    if any(found not in (want, None) for found, want in zip(types, wanted, strict=True)):
        return None
    if node.op_type == "BitShift":
        by = constant(node.input[1])
        if by is None or not 0 <= by < 8 * KINDS[dtype].nbytes:
            return None
    if node.op_type == "Cast" and made == UINT and dtype in FLOATS:  # negative numbers wrap in ONNX Runtime
        return None
    result = BOOL if op.logical else made if node.op_type == "Cast" else dtype
    if result != made:
        return None
    numbers = {each.name: each.f for each in node.attribute if each.type == onnx.AttributeProto.FLOAT}
    for each in node.attribute:
        if each.name == "approximate":
            numbers[each.name] = float(each.s == b"tanh")
        if each.name == "direction":
            numbers[each.name] = float(each.s == b"LEFT")
    return Call(node.op_type, numbers, dtype, made, exponent)
