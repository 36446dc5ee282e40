"""Gradient rules of matrix products and attention's softmax."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from string import ascii_letters

import onnx_ir as ir

from ..checks.exact_ops import affine_points
from ..dims import Dim, Dims, broadcast, dims
from ..tape import Tape
from .registry import Grads, RuleInput, rule


@rule("MatMul")
def matmul(s: RuleInput) -> Grads:
    t, a, b = s.t, s.x(0), s.x(1)
    left, right = len(dims(a)) == 1, len(dims(b)) == 1
    # As in numpy, a vector on the left is a row, and one on the right a column.
    row = t.unsqueeze(a, [0]) if left else a
    column = t.unsqueeze(b, [1]) if right else b
    g = s.full
    if right:
        g = t.unsqueeze(g, [len(dims(g))])
    if left:
        g = t.unsqueeze(g, [len(dims(g)) - 1])
    plain = len(dims(column)) == 2

    def to_a() -> ir.Value:
        if plain and len(dims(row)) == 2:
            made = t.op("Gemm", g, column, shape=dims(row), transB=1)
        else:
            made = _product(t, g, t.swap_last(column))
            made = t.unbroadcast(made, dims(made), dims(row))
        return t.reshape(made, dims(a))

    def to_b() -> ir.Value:
        if plain:
            made = t.op("Gemm", _rows(t, row), _rows(t, g), shape=dims(column), transA=1)
        else:
            made = _product(t, t.swap_last(row), g)
            made = t.unbroadcast(made, dims(made), dims(column))
        return t.reshape(made, dims(b))

    return {0: to_a, 1: to_b}


def _rows(t: Tape, x: ir.Value) -> ir.Value:
    """Return a value as a matrix whose rows are the vectors of the last axis."""
    shape = dims(x)
    return t.reshape(x, (t.product(shape[:-1]), shape[-1]))


def _product(t: Tape, a: ir.Value, b: ir.Value) -> ir.Value:
    x, y = dims(a), dims(b)
    return t.op("MatMul", a, b, shape=(*broadcast(x[:-2], y[:-2]), x[-2], y[-1]))


@rule("Gemm")
def gemm(s: RuleInput) -> Grads:
    t, a, b = s.t, s.x(0), s.x(1)
    alpha, beta = s.attribute("alpha", 1.0), s.attribute("beta", 1.0)
    flip_a, flip_b = s.attribute("transA", 0), s.attribute("transB", 0)
    g = s.full

    def product(x: ir.Value, y: ir.Value, flip_x: int, flip_y: int, shape: Dims) -> ir.Value:
        return t.op("Gemm", x, y, shape=shape, alpha=alpha, transA=flip_x, transB=flip_y)

    return {
        0: lambda: product(b, g, flip_b, 1, dims(a)) if flip_a else product(g, b, 0, 1 - flip_b, dims(a)),
        1: lambda: product(g, a, 1, flip_a, dims(b)) if flip_b else product(a, g, 1 - flip_a, 0, dims(b)),
        2: lambda: t.mul(t.unbroadcast(s.g, dims(s.y), s.shape(2)), beta),
    }


@rule("Einsum")
def einsum(s: RuleInput) -> Grads:
    """Return the adjoints of Einsum: that of an operand is the einsum of the output's adjoint and the other
    operands."""
    t = s.t
    equation = s.attribute("equation").replace(" ", "")
    left, arrow, result = equation.partition("->")
    terms = left.split(",")
    if not arrow:
        letters = left.replace(",", "").replace(".", "")
        result = "..." * ("." in left) + "".join(sorted(c for c in letters if letters.count(c) == 1))
    terms, result = _without_ellipsis(terms, result, [len(s.shape(i)) for i in range(len(terms))])
    if any(len(set(term)) < len(term) for term in terms):
        s.refuse(f"the diagonal in equation {equation!r} is not supported")

    def gradient(slot: int) -> ir.Value:
        others = [(term, s.x(i)) for i, term in enumerate(terms) if i != slot]
        given = [(result, s.full), *others]
        have = "".join(term for term, _ in given)
        wanted = "".join(c for c in terms[slot] if c in have)
        formula = ",".join(term for term, _ in given) + "->" + wanted
        lengths: dict[str, Dim] = {}
        for term, value in given:
            lengths |= {c: d for c, d in zip(term, dims(value), strict=True) if lengths.get(c, 1) == 1}
        made = t.op("Einsum", *(v for _, v in given), shape=tuple(lengths[c] for c in wanted), equation=formula)
        own = dict(zip(terms[slot], s.shape(slot), strict=True))
        if repeated := [i for i, c in enumerate(wanted) if own[c] == 1 and lengths[c] != 1]:
            made = t.sum(made, repeated)
        # Letters that only this operand has were summed over: its adjoint is constant along them.
        return t.unsqueeze(made, [i for i, c in enumerate(terms[slot]) if c not in have])

    return {slot: partial(gradient, slot) for slot in range(len(terms))}


def _without_ellipsis(terms: Sequence[str], result: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """Replace each ellipsis by letters that the equation does not have; the last of them is the last axis."""
    counts = [rank - len(term) + 3 if "." in term else 0 for term, rank in zip(terms, ranks, strict=True)]
    most = max(counts)
    free = "".join(c for c in ascii_letters if c not in {*"".join(terms), *result})[:most]
    named = [term.replace("...", free[most - n :]) for term, n in zip(terms, counts, strict=True)]
    return named, result.replace("...", free)


@rule("AffineGrid")
def affine_grid(s: RuleInput) -> Grads:
    """Return the adjoint of AffineGrid, a product of the parameters and constant points."""
    t = s.t

    def gradient() -> ir.Value:
        lengths = [int(n) for n in s.known(1, "size")[2:]]
        points = affine_points(lengths, s.attribute("align_corners")).reshape(-1, len(lengths) + 1)
        batch = dims(s.y)[0]
        g = t.reshape(s.full, (batch, len(points), len(lengths)))
        return _product(t, t.swap_last(g), t.constant(points.astype(s.dtype().numpy())))

    return {0: gradient}


@rule("Softmax")
def softmax(s: RuleInput) -> Grads:
    t, y = s.t, s.y

    def gradient() -> ir.Value:
        weighted = t.mul(s.g, y)
        return t.sub(weighted, t.mul(y, t.sum(weighted, [s.axis()])))

    return {0: gradient}


@rule("LogSoftmax")
def log_softmax(s: RuleInput) -> Grads:
    t = s.t
    return {0: lambda: t.sub(s.full, t.mul(t.unary("Exp", s.y), t.sum(s.full, [s.axis()])))}
