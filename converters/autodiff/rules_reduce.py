"""Gradient rules of reductions."""

from __future__ import annotations

import onnx_ir as ir

from ..dims import dims
from .registry import Grads, RuleInput, rule


def _axes(s: RuleInput) -> list[int]:
    """Return the axes of a Reduce op as non-negative numbers."""
    rank = len(s.shape())
    axes = s.known(1, "list of axes").reshape(-1).tolist() if s.has(1) else s.attribute("axes")
    if not axes:
        return [] if s.attribute("noop_with_empty_axes") else list(range(rank))
    return sorted(a % rank for a in axes)


def _spread(s: RuleInput, value: ir.Value, axes: list[int]) -> ir.Value:
    """Reshape a value of the output's shape so that it broadcasts to the input."""
    if s.attribute("keepdims") or not dims(value):
        return value
    return s.t.unsqueeze(s.t.expand(value, dims(s.y)), axes)


@rule("ReduceSum")
def reduce_sum(s: RuleInput) -> Grads:
    return {0: lambda: _spread(s, s.g, _axes(s))}


@rule("ReduceMean")
def reduce_mean(s: RuleInput) -> Grads:
    def gradient() -> ir.Value:
        axes = _axes(s)
        return _spread(s, s.t.over_count(s.g, [s.shape()[a] for a in axes]), axes)

    return {0: gradient}


@rule("ReduceMax", "ReduceMin")
def reduce_extremum(s: RuleInput) -> Grads:
    """Return the adjoint of ReduceMax and ReduceMin; ties share the gradient evenly, as in torch.amax."""
    t = s.t

    def gradient() -> ir.Value:
        axes = _axes(s)
        hits = t.cast(t.compare("Equal", s.x(), _spread(s, s.y, axes)), s.dtype())
        return t.mul(hits, t.div(_spread(s, s.g, axes), t.sum(hits, axes)))

    return {0: gradient}


@rule("ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp")
def reduce_norm(s: RuleInput) -> Grads:
    t, x = s.t, s.x()

    def gradient() -> ir.Value:
        axes = _axes(s)
        g, y, zero = _spread(s, s.g, axes), _spread(s, s.y, axes), t.scalar(0, x)
        return {
            "ReduceL1": lambda: t.mul(t.unary("Sign", x), g),
            # 0 for a row of zeros, as in PyTorch.
            "ReduceL2": lambda: t.mul(x, t.select(t.compare("Equal", y, zero), zero, t.div(g, y))),
            "ReduceSumSquare": lambda: t.mul(x, t.mul(g, 2.0)),
            "ReduceLogSum": lambda: t.expand(t.div(g, t.unary("Exp", y)), dims(x)),
            "ReduceLogSumExp": lambda: t.mul(t.unary("Exp", t.sub(x, y)), g),
        }[s.node.op_type]()

    return {0: gradient}


@rule("ReduceProd")
def reduce_product(s: RuleInput) -> Grads:
    """Return the adjoint of ReduceProd: the product of the other elements, also where some are zero."""
    t, x = s.t, s.x()

    def gradient() -> ir.Value:
        axes = _axes(s)
        zero, one = t.scalar(0, x), t.scalar(1, x)
        is_zero = t.compare("Equal", x, zero)
        product = t.reduce("ReduceProd", t.select(is_zero, one, x), axes)
        zeros = t.sum(t.cast(is_zero, s.dtype()), axes)
        alone = t.select(t.compare("Equal", zeros, one), product, zero)
        others = t.select(is_zero, alone, t.select(t.compare("Equal", zeros, zero), t.div(product, x), zero))
        return t.mul(_spread(s, s.g, axes), others)

    return {0: gradient}


@rule("CumSum")
def cumulative_sum(s: RuleInput) -> Grads:
    """Return the adjoint of CumSum: a CumSum from the other end."""
    exclusive, reverse = s.attribute("exclusive"), 1 - s.attribute("reverse")
    return {0: lambda: s.t.op("CumSum", s.full, s.x(1), shape=s.shape(), exclusive=exclusive, reverse=reverse)}
