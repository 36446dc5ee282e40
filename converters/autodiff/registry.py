"""Gradient rules by op, their argument `RuleInput`, and `differentiate`, which applies them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeAlias

import numpy as np
import onnx
import onnx_ir as ir

from onnx_remat.errors import ConversionError
from onnx_remat.messages import Message, Setting

from ..constants import static
from ..dims import Dims, dims
from ..tape import Tape
from .parts import accumulate

Grads: TypeAlias = dict[int, Callable[[], ir.Value | None]]
"""Function that appends the adjoint of each input, by slot; called only if needed, and None for a zero adjoint."""

NO_GRADIENT = frozenset(
    {
        "And", "ArgMax", "ArgMin", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "Ceil",
        "Constant", "ConstantOfShape", "Equal", "EyeLike", "Floor", "Greater", "GreaterOrEqual", "Hardmax", "IsInf",
        "IsNaN", "Less", "LessOrEqual", "NonZero", "Not", "Or", "RandomNormal", "RandomNormalLike", "RandomUniform",
        "RandomUniformLike", "Round", "Shape", "Sign", "Size", "Xor",
    }
)  # fmt: skip
"""Ops whose derivative is zero or does not exist; they pass no gradient on."""

Convention: TypeAlias = Literal["torch", "tensorflow"]
"""The framework whose derivatives hold where mathematics has none or several: at ties and at poles."""

STOPPED = "onnx_remat.stopped"
"""Start of the name of a Mean of one input, which is that input, through which no gradient flows."""


def is_stopped(node: ir.Node) -> bool:
    """Return whether a node passes its input on, but no gradient; see `STOPPED`."""
    return (node.name or "").startswith(STOPPED)


@dataclass(frozen=True, slots=True)
class RuleInput:
    """A node and the adjoints of its outputs, from which a rule computes the adjoints of its inputs.

    Attributes
    ----------
    t : Tape
    node : onnx_ir.Node
    adjoints : tuple of Value or None
        One for each output of the node; None if the loss does not depend on it.
    wanted : tuple of bool
        Whether each input needs an adjoint.
    opset : int
    convention : str
    """

    t: Tape
    node: ir.Node
    adjoints: tuple[ir.Value | None, ...]
    wanted: tuple[bool, ...]
    opset: int
    convention: Convention = "torch"

    @property
    def g(self) -> ir.Value:
        """The adjoint of the first output, which may be narrower than the output; see `Tape`."""
        if self.adjoints[0] is None:
            self.refuse("the loss depends on an output other than the first")
        return self.adjoints[0]

    @property
    def full(self) -> ir.Value:
        """Return the adjoint of the first output, in that output's shape."""
        return self.t.expand(self.g, dims(self.y))

    @property
    def y(self) -> ir.Value:
        return self.node.outputs[0]

    def x(self, slot: int = 0) -> ir.Value:
        """Return an input that is present."""
        value = self.node.inputs[slot]
        assert value is not None, (self.node.op_type, slot)
        return value

    def has(self, slot: int) -> bool:
        return slot < len(self.node.inputs) and self.node.inputs[slot] is not None

    def shape(self, slot: int = 0) -> Dims:
        return dims(self.x(slot))

    def dtype(self, slot: int = 0) -> ir.DataType:
        dtype = self.x(slot).dtype
        assert dtype is not None
        return dtype

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return an attribute, its default in the operator's schema, or `default`."""
        if name in self.node.attributes:
            return self.node.attributes[name].value
        schema = onnx.defs.get_schema(self.node.op_type, self.opset, self.node.domain)
        declared = schema.attributes[name].default_value if name in schema.attributes else None
        if declared is None or declared.type == onnx.AttributeProto.UNDEFINED:
            return default
        value = onnx.helper.get_attribute_value(declared)
        return value.decode() if isinstance(value, bytes) else value

    def known(self, slot: int, what: str) -> np.ndarray:
        """Return the array of an input, which must be known before the run."""
        found = static(self.x(slot))
        if found is None:
            self.refuse(f"its {what} is not a constant")
        return found

    def known_shape(self, slot: int = 0) -> tuple[int, ...]:
        """Return the shape of an input, which must be known before the run."""
        shape = self.shape(slot)
        if symbols := [d for d in shape if isinstance(d, str)]:
            fix = Setting("dims")
            self.refuse(Message("the size {!r} of input {} must be known: fix it with {}", symbols[0], slot, fix))
        return tuple(int(d) for d in shape)

    def axis(self, name: str = "axis", rank: int | None = None) -> int:
        """Return an axis attribute as a non-negative number."""
        value: int = self.attribute(name)
        return value % (len(self.shape()) if rank is None else rank)

    def refuse(self, why: str | Message) -> NoReturn:
        raise ConversionError("no gradient for {} node {!r}: {}", self.node.op_type, self.node.name, why)


Rule: TypeAlias = Callable[[RuleInput], Grads]
RULES: dict[str, Rule] = {}


def rule(*op_types: str) -> Callable[[Rule], Rule]:
    """Register a function as the gradient rule of standard ops."""

    def register(function: Rule) -> Rule:
        for op_type in op_types:
            assert op_type not in RULES, op_type
            RULES[op_type] = function
        return function

    return register


def differentiate(
    graph: ir.Graph,
    tape: Tape,
    loss: ir.Value,
    parameters: Sequence[ir.Value],
    convention: Convention = "torch",
) -> dict[ir.Value, ir.Value]:
    """Append the backward pass of a loss.

    Parameters
    ----------
    graph : onnx_ir.Graph
        The forward graph, with nodes in topological order.
    tape : Tape
        The tape of this graph.
    loss : Value
        A scalar.
    parameters : sequence of Value
        Values to differentiate by.
    convention : str
        Whose derivatives hold at ties and at poles.

    Returns
    -------
    dict of Value to Value
        The adjoint of each parameter, which may be narrower than it; parameters without influence are absent.

    Raises
    ------
    ConversionError
        A node between a parameter and the loss has no rule, or its rule refuses it.
    """
    nodes = list(graph)
    active = influenced(nodes, parameters)
    adjoints = {loss: tape.scalar(1.0, loss)}
    for node in reversed(nodes):
        incoming = tuple(adjoints.pop(v, None) if v in active else None for v in node.outputs)
        if all(g is None for g in incoming):
            continue
        for slot, gradient in _through(tape, node, incoming, active, graph.opset_imports[""], convention):
            value = node.inputs[slot]
            assert value is not None
            adjoints[value] = accumulate(tape, adjoints[value], gradient) if value in adjoints else gradient
    return {p: adjoints[p] for p in parameters if p in adjoints}


def influenced(nodes: Sequence[ir.Node], parameters: Sequence[ir.Value]) -> set[ir.Value]:
    """Return the parameters and the floating-point values that depend on them through ops with derivatives."""
    active = set(parameters)
    for node in nodes:
        passes_on = node.op_type not in NO_GRADIENT and not is_stopped(node)
        if passes_on and any(v in active for v in _reads(node)):
            active.update(v for v in node.outputs if v.dtype is not None and v.dtype.is_floating_point())
    return active


def _reads(node: ir.Node) -> Iterator[ir.Value]:
    """Yield the inputs of a node, and the values captured by its bodies."""
    yield from (v for v in node.inputs if v is not None)
    for attribute in node.attributes.values():
        bodies = {ir.AttributeType.GRAPH: [attribute.value], ir.AttributeType.GRAPHS: attribute.value}
        for body in bodies.get(attribute.type, ()):
            for inner in body:
                yield from _reads(inner)


def _through(
    tape: Tape,
    node: ir.Node,
    incoming: tuple[ir.Value | None, ...],
    active: set[ir.Value],
    opset: int,
    convention: Convention,
) -> list[tuple[int, ir.Value]]:
    if node.op_type not in RULES or node.domain:
        domain = f"{node.domain}." if node.domain else ""
        raise ConversionError(f"no gradient rule for op {domain}{node.op_type} (node {node.name!r})")
    wanted = tuple(v is not None and v in active for v in node.inputs)
    step = RuleInput(tape, node, incoming, wanted, opset, convention)
    grads = RULES[node.op_type](step)
    made = []
    for slot in (slot for slot, wants in enumerate(wanted) if wants):
        if slot not in grads:
            why = "its input {} ({!r}) depends on a parameter, and the rule has no gradient by it: freeze it with {}"
            step.refuse(Message(why, slot, step.x(slot).name, Setting("frozen")))
        gradient = grads[slot]()
        if gradient is not None:
            made.append((slot, gradient))
    return made
