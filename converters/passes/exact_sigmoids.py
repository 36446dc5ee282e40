"""Sigmoids whose logarithm a step takes, in a form that is exact where they are small.

ONNX Runtime's CPU kernel for Sigmoid in float32 is off by half at -16 and returns 0 from -18 on, of which the logarithm
is infinite.
"""

from __future__ import annotations

import onnx_ir as ir

from ..tape import Tape
from ..values import replace
from .base import Fact, rewrite

_SENSITIVE = {("Log", 0), ("Reciprocal", 0), ("Div", 1)}
"""Operators, and numbers of their inputs, that make a small absolute error of a small input a large one."""


@rewrite(requires=[Fact.SHAPES], breaks=[Fact.LEAN])
def exact_sigmoids(model: ir.Model) -> None:
    """Rewrite, in place, every Sigmoid in float32 whose logarithm or inverse is read, as ``1 / (1 + exp(-x))``.

    All readers read the new form, because a gradient multiplies the inverse by the Sigmoid again. A forward model is
    rewritten with its backward pass, not before: the gradient of this form overflows where the Sigmoid's does not.
    """
    for tape in list(Tape(model.graph).with_bodies()):
        for node in list(tape.graph):
            if node.op_type == "Sigmoid" and not node.domain and _is_sensitive(node.outputs[0]):
                _rewrite(tape, node)


def _is_sensitive(value: ir.Value) -> bool:
    readers = ((user.op_type, number) for user, number in value.uses() if not user.domain)
    return value.dtype == ir.DataType.FLOAT and any(reader in _SENSITIVE for reader in readers)


def _rewrite(tape: Tape, node: ir.Node) -> None:
    (x,) = node.inputs
    assert x is not None
    with tape.ahead_of(node, node.metadata_props.get("phase", "forward")):  # type: ignore[arg-type]
        grown = tape.unary("Exp", tape.neg(x))
        made = tape.unary("Reciprocal", tape.add(grown, tape.scalar(1.0, x)))
    replace(node.outputs[0], made)
    tape.graph.remove(node, safe=True)
