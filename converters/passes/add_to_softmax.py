"""The gradient of cross entropy, through the softmax, without a matrix of zeros."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from ..dims import Dims, broadcast, dims
from ..values import replace
from .after_loss import AfterLoss
from .base import Fact, rewrite


@dataclass(frozen=True, slots=True)
class _Scattered:
    """A tensor that is zero except for one entry in each row along an axis.

    Attributes
    ----------
    axis : int
    places : onnx_ir.Value
        Positions of the entries along the axis; size 1 on that axis. On other axes, axes of size 1 may be added or
        missing.
    entries : onnx_ir.Value
        Values of the entries.
    factor : onnx_ir.Value or None
        Factor of the whole tensor, one number for each row.
    """

    axis: int
    places: ir.Value
    entries: ir.Value
    factor: ir.Value | None


@rewrite(requires=[Fact.SHAPES, Fact.STATED], ensures=[Fact.SOFTMAX])
def add_to_softmax(model: ir.Model) -> None:
    """Scatter, in place, the one nonzero entry of each row of `m` into the rest of ``m - p * sum(m)`` or ``m + p``.

    Frameworks write the gradient of cross entropy in this form: `m` is the gradient of the log-probabilities, `p` the
    probabilities. A matrix of zeros, `m` and the difference are each as large as the logits, and ONNX Runtime computes
    the zeros when it loads the file and keeps them allocated. ``sum(m)`` has one term, so the result stays the same to
    the last bit.

    The gradient waits for the loss. Otherwise ONNX Runtime computes the loss at the end of the step, because no node
    reads it, and the logarithms stay allocated until then.
    """
    if model.graph.opset_imports.get("", 0) < _ADDS:
        return
    after = AfterLoss(model.graph)
    tape, late, known = after.tape, set(after.nodes), dict[ir.Value | None, _Scattered]()
    for node in list(model.graph):
        if (scattered := _scattered(node, known)) is not None:
            known[node.outputs[0]] = scattered
        for m, rest, p in _differences(node) if node in late else ():
            found = known.get(m)
            if (
                found is None
                or m.dtype not in _KINDS
                or dims(rest) != dims(m)
                or (p is not None and not _sums(p, m, found.axis))
            ):
                continue
            never = after.never()
            with tape.ahead_of(node, "backward"):
                alone = found.entries if found.factor is None else tape.mul(found.entries, found.factor)
                one = (*dims(m)[: found.axis], 1, *dims(m)[found.axis + 1 :])
                places, alone = tape.reshape(found.places, one), tape.reshape(alone, one)
                alone = tape.select(never, alone, alone)
                onto = rest if p is None else tape.mul(rest, tape.neg(alone))
                made = tape.op("ScatterElements", onto, places, alone, shape=dims(m), axis=found.axis, reduction="add")
            replace(node.outputs[0], made)
            break
    common.RemoveUnusedNodesPass()(model)


_ADDS = 16
"""First opset in which ScatterElements can add."""

_KINDS = (ir.DataType.FLOAT, ir.DataType.DOUBLE)
"""Types for which ONNX Runtime's CPU kernel of ScatterElements can add."""


def _differences(node: ir.Node) -> Iterator[tuple[ir.Value, ir.Value, ir.Value | None]]:
    """Yield (m, rest, p) for each reading of a node as ``m - rest * p``, or with p None as ``m + rest``."""
    if node.domain or node.op_type not in ("Sub", "Add"):
        return
    a, b = node.inputs
    if a is None or b is None or a.shape is None or b.shape is None:
        return
    if node.op_type == "Sub":
        yield from ((a, rest, p) for rest, p in _factors(b))
    else:
        yield from ((a, b, None), (b, a, None))


def _factors(product: ir.Value | None) -> Iterator[tuple[ir.Value, ir.Value]]:
    node = product.producer() if product is not None else None
    if node is None or node.domain or node.op_type != "Mul":
        return
    a, b = node.inputs
    if a is not None and b is not None and a.shape is not None and b.shape is not None:
        yield from ((a, b), (b, a))


_Known: TypeAlias = Mapping[ir.Value | None, _Scattered]


def _scattered(node: ir.Node, known: _Known) -> _Scattered | None:
    """Return a node's output as `_Scattered`; None if it is not zero except for one entry in each row.

    `known` has those outputs of the nodes before it that are.
    """
    value = node.outputs[0]
    if node.domain or value.shape is None:
        return None
    if node.op_type == "Mul":
        for inner, factor in _factors(value):
            found = known.get(inner)
            if found is not None and found.factor is None and dims(inner) == dims(value):
                one = (*dims(value)[: found.axis], 1, *dims(value)[found.axis + 1 :])
                entries = dims(found.entries)
                if set(dims(factor)) <= {1} or (entries == one and _broadcasts(dims(factor), one)):
                    return _Scattered(found.axis, found.places, found.entries, factor)
        return None
    if node.op_type in ("Reshape", "Squeeze", "Unsqueeze"):
        return _reshaped(node.inputs[0], dims(value), known)
    if node.op_type != "ScatterElements":
        return None
    zeros, places, filling = node.inputs
    if zeros is None or places is None or filling is None or places.shape is None or filling.shape is None:
        return None
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
    axis %= len(dims(value))
    one = (*dims(value)[:axis], 1, *dims(value)[axis + 1 :])
    reduction = node.attributes["reduction"].as_string() if "reduction" in node.attributes else "none"
    if reduction not in ("none", "add") or dims(places) != one or dims(filling) != one or not is_zero(zeros):
        return None
    return _Scattered(axis, places, filling, None)


def _reshaped(source: ir.Value | None, shape: Dims, known: _Known) -> _Scattered | None:
    """Return a reshaped value as `_Scattered`, if only axes of size 1 were added or removed; None otherwise."""
    found = known.get(source)
    if source is None or found is None or dims(source)[found.axis] == 1:
        return None
    before, after = ([i for i, d in enumerate(each) if d != 1] for each in (dims(source), shape))
    if [dims(source)[i] for i in before] != [shape[i] for i in after]:
        return None
    return dataclasses.replace(found, axis=after[before.index(found.axis)])


def _broadcasts(narrow: Dims, wide: Dims) -> bool:
    return len(narrow) <= len(wide) and broadcast(narrow, wide) == wide


def is_zero(value: ir.Value) -> bool:
    """Return whether a value is known to be zero everywhere."""
    known = value.const_value if not value.is_graph_input() else None
    if known is not None:
        return not np.any(known.numpy())
    node = value.producer()
    if node is None or node.domain or node.op_type not in ("Expand", "ConstantOfShape", "Cast", "Sub"):
        return False
    if node.op_type == "Sub":  # x - x is 0 for an integer, which is never NaN: see `jax.lower`
        return node.inputs[0] is node.inputs[1] and value.dtype is not None and value.dtype.is_integer()
    if node.op_type != "ConstantOfShape":
        return node.inputs[0] is not None and is_zero(node.inputs[0])
    return "value" not in node.attributes or not np.any(node.attributes["value"].as_tensor().numpy())


def _sums(value: ir.Value, m: ir.Value, axis: int) -> bool:
    """Return whether a value is the sum of `m` along an axis, kept as an axis of size 1."""
    node = value.producer()
    if node is None or node.domain or node.op_type != "ReduceSum" or node.inputs[0] is not m:
        return False
    shape = dims(m)
    axes = node.inputs[1].const_value if len(node.inputs) > 1 and node.inputs[1] is not None else None
    if axes is None or [int(a) % len(shape) for a in axes.numpy()] != [axis]:
        return False
    return dims(value) == (*shape[:axis], 1, *shape[axis + 1 :])
