"""Losses for files without one, and the gradient rules of ONNX's loss ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnx_remat.errors import ConversionError, UsageError

from ..dims import Dims, dims
from ..tape import Tape
from .parts import add_at
from .registry import Grads, RuleInput, rule


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """Mean cross-entropy between an output and class numbers, the new input `target` (int64).

    Attributes
    ----------
    output : str, optional
        Name of the logits; by default the first output. If a Softmax or LogSoftmax over the classes makes it, the
        logits are that op's input.
    axis : int, optional
        Axis of the classes; by default axis 1 of outputs with four axes or more (images), the last axis otherwise.
    ignore_index : int, optional
        Class number of targets to ignore.
    target : str
    """

    output: str | None = None
    axis: int | None = None
    ignore_index: int | None = None
    target: str = "target"

    def append(self, t: Tape, graph: ir.Graph) -> tuple[ir.Value, ir.Value]:
        """The loss and the target's input."""
        scores = _output(graph, self.output)
        rank = len(dims(scores))
        if rank < 2:
            raise ConversionError(
                f"output {scores.name!r} has rank {rank} and no axis of classes for cross-entropy: name another output"
            )
        axis = (self.axis if self.axis is not None else 1 if rank >= 4 else -1) % rank
        scores = _logits(scores, axis)
        _check_no_softmax(scores, axis)
        shape = dims(scores)
        kept = (*shape[:axis], *shape[axis + 1 :])
        target = _input(t, self.target, kept, ir.DataType.INT64)
        labels = target
        if axis != 1:
            # The op needs classes on axis 1: rows of classes need no copy if the classes are on the last axis.
            scores = t.transpose(scores, [*(i for i in range(rank) if i != axis), axis])
            rows = t.product(kept)
            scores = t.reshape(scores, (rows, shape[axis]))
            labels = t.reshape(labels, (rows,))
        chosen: dict[str, Any] = {} if self.ignore_index is None else {"ignore_index": self.ignore_index}
        return t.op("SoftmaxCrossEntropyLoss", scores, labels, shape=(), **chosen), target


def _logits(scores: ir.Value, axis: int) -> ir.Value:
    """Return the input of a Softmax along the axis, or over rows (opsets before 13) if all other axes have size 1."""
    shape, node = dims(scores), scores.producer()
    flat = node is not None and node.op_type == "Reshape" and all(d == 1 for d in shape[2:]) and axis == 1
    if flat and node is not None and node.inputs[0] is not None:
        node, shape = node.inputs[0].producer(), shape[:2]
    if node is None or node.op_type not in ("Softmax", "LogSoftmax") or node.inputs[0] is None:
        return scores
    along = node.attributes["axis"].as_int() if "axis" in node.attributes else -1
    made = node.inputs[0]
    if along % len(shape) != axis or dims(made) != shape:
        return scores
    if flat:
        before = made.producer()
        source = before.inputs[0] if before is not None and before.op_type in ("Reshape", "Flatten") else None
        return source if source is not None and dims(source) == dims(scores) else scores
    return made


_REARRANGES = frozenset({"Cast", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Identity"})


def _check_no_softmax(scores: ir.Value, axis: int) -> None:
    """Raise ConversionError where scores are probabilities: their cross-entropy would apply a second Softmax."""
    node = scores.producer()
    while node is not None and node.op_type in _REARRANGES and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    if node is not None and node.op_type == "Softmax":
        along = node.attributes["axis"].as_int() if "axis" in node.attributes else -1
        raise ConversionError(
            f"{scores.name!r} is made of a Softmax over axis {along}, and cross-entropy needs its input: make the "
            f"logits an output and name it, or name the axis of the classes, which is taken to be {axis}"
        )


@dataclass(frozen=True, slots=True)
class MeanSquaredError:
    """Mean of squared differences between an output and the input `target` of its shape and dtype."""

    output: str | None = None
    target: str = "target"

    def append(self, t: Tape, graph: ir.Graph) -> tuple[ir.Value, ir.Value]:
        """The loss and the target's input."""
        made = _output(graph, self.output)
        assert made.dtype is not None
        target = _input(t, self.target, dims(made), made.dtype)
        difference = t.sub(made, target)
        return t.op("ReduceMean", t.mul(difference, difference), shape=(), keepdims=0), target


Loss = CrossEntropy | MeanSquaredError
NAMED: dict[str, Loss] = {"cross_entropy": CrossEntropy(), "mse": MeanSquaredError()}


def _output(graph: ir.Graph, name: str | None) -> ir.Value:
    outputs = {str(value.name): value for value in graph.outputs}
    found = outputs.get(name) if name else next(iter(outputs.values()), None)
    if found is None:
        raise UsageError(f"the model has no output {name!r} for the loss: use one of {', '.join(outputs)}")
    if found.dtype is None or not found.dtype.is_floating_point():
        raise ConversionError(f"output {found.name!r} is {found.dtype}: choose a floating-point output for the loss")
    return found


def _input(t: Tape, name: str, shape: Dims, dtype: ir.DataType) -> ir.Value:
    return ir.Value(name=t.fresh(name), shape=ir.Shape(shape), type=ir.TensorType(dtype))


@dataclass(frozen=True, slots=True)
class _Picked:
    """Parts of a classification loss.

    Attributes
    ----------
    rows : Value
        Class numbers, with an axis of size 1 for the classes; 0 for ignored targets.
    weight : Value or None
        Weight of each target; None if all are 1.
    total : Value or Dims
        Divisor of the sum: for 'mean' the sum of weights, or sizes whose product it is; else none.
    loss : Value
    """

    rows: ir.Value
    weight: ir.Value | None
    total: ir.Value | Dims
    loss: ir.Value


def _pick(s: RuleInput, log_probability: ir.Value) -> _Picked:
    """Append the loss: minus the weighted mean, the sum, or each of the log-probabilities of the targets."""
    t, labels, reduction = s.t, s.x(1), s.attribute("reduction")
    shape, counts, counted = dims(labels), None, None
    ignored = s.attribute("ignore_index")
    if ignored is not None:
        counts = t.op("Not", t.compare("Equal", labels, t.scalar(ignored, labels)), shape=shape)
        labels = t.select(counts, labels, t.scalar(0, labels))
        counted = t.cast(counts, s.dtype())
    rows = t.unsqueeze(labels, [1])
    picked = t.op("GatherElements", log_probability, rows, shape=dims(rows), axis=1)
    picked = t.op("Squeeze", picked, t.ints(1), shape=shape)
    if counts is not None:  # the class in an ignored target's place may have no probability: -inf times 0 is NaN
        picked = t.select(counts, picked, t.scalar(0, picked))
    weight, weighted = counted, picked
    if s.has(2):
        weight = t.op("Gather", s.x(2), labels, shape=shape)
        weight = weight if counted is None else t.mul(weight, counted)
        weighted = t.mul(weight, picked)
    if reduction == "none":
        return _Picked(rows, weight, (), t.neg(weighted))
    if reduction == "mean" and weight is None:
        return _Picked(rows, weight, shape, t.neg(t.op("ReduceMean", picked, shape=(), keepdims=0)))
    summed = t.op("ReduceSum", weighted, shape=(), keepdims=0)
    if reduction == "sum":
        return _Picked(rows, weight, (), t.neg(summed))
    total = t.op("ReduceSum", weight, shape=(), keepdims=0)
    return _Picked(rows, weight, total, t.neg(t.div(summed, total)))


def _rate(s: RuleInput, parts: _Picked) -> ir.Value:
    """Return the adjoint of minus each target's log-probability, with the axis of classes; it may be a scalar."""
    t = s.t
    rate, total = s.full if dims(s.g) else s.g, parts.total
    rate = t.div(rate, total) if isinstance(total, ir.Value) else t.over_count(rate, total)
    if parts.weight is not None:
        rate = t.mul(rate, parts.weight)
    return t.unsqueeze(rate, [1]) if dims(rate) else rate


@rule("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy(s: RuleInput) -> Grads:
    """Divide the op into simpler ones: ONNX Runtime would run it as a function with copies of its own."""
    t = s.t
    if len(s.adjoints) > 1 and s.adjoints[1] is not None:
        s.refuse("the loss depends on its second output, the log-probabilities, too")

    def gradient() -> ir.Value:
        with t.ahead_of(s.node):
            log_probability = t.op("LogSoftmax", s.x(), shape=s.shape(), axis=1)
            parts = _pick(s, log_probability)
        s.y.replace_all_uses_with(parts.loss, replace_graph_outputs=True)
        minus = t.expand(t.scalar(-1, s.x()), dims(parts.rows))
        # softmax - one-hot
        rest = add_at(t, t.unary("Exp", log_probability), parts.rows, minus, axis=1)
        return t.mul(rest, _rate(s, parts))

    return {0: gradient}


@rule("NegativeLogLikelihoodLoss")
def negative_log_likelihood(s: RuleInput) -> Grads:
    t = s.t

    def gradient() -> ir.Value:
        with t.ahead_of(s.node):
            parts = _pick(s, s.x())
        s.y.replace_all_uses_with(parts.loss, replace_graph_outputs=True)
        minus = t.expand(t.neg(_rate(s, parts)), dims(parts.rows))
        zeros = t.zeros(s.shape(), s.dtype())
        return t.op("ScatterElements", zeros, parts.rows, minus, shape=s.shape(), axis=1)

    return {0: gradient}
