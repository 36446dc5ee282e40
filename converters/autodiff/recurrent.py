"""LSTM, GRU and RNN unrolled over time into ops that have gradient rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_remat.errors import ConversionError
from onnx_remat.messages import Message, Setting

from ..constants import static
from ..dims import Dims, dims
from ..tape import Tape
from ..values import replace
from .registry import influenced

_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
_ACTIVATIONS = {"RNN": ("Tanh",), "GRU": ("Sigmoid", "Tanh"), "LSTM": ("Sigmoid", "Tanh", "Tanh")}


def unroll(t: Tape, graph: ir.Graph, parameters: Sequence[ir.Value]) -> None:
    """Unroll every recurrent node that depends on a parameter, in place, by ONNX's definition; all sequences have the
    length of the input.

    Raises
    ------
    ConversionError
        The length is unknown, or the node uses an unsupported option.
    """
    nodes = list(graph)
    active = influenced(nodes, parameters)
    for node in nodes:
        if node.op_type in _GATES and not node.domain and any(v in active for v in node.outputs):
            with t.ahead_of(node):
                _unroll(t, node)
            graph.remove(node, safe=True)


@dataclass(frozen=True, slots=True)
class _Cell:
    """One direction of a recurrent node.

    Attributes
    ----------
    t : Tape
    inputs : list of Value
        By time step, the input's contribution to all gates, [batch, gates * hidden], biases included.
    r, bias : Value
        Weights of the state, [gates * hidden, hidden], and their bias, [gates * hidden].
    hidden : int
    activation : str
        Activation of RNN.
    after_reset : bool
        GRU's linear_before_reset: the product of the state precedes its reset.
    """

    t: Tape
    inputs: list[ir.Value]
    r: ir.Value
    bias: ir.Value | None
    hidden: int
    activation: str
    after_reset: bool

    def gates(self, x: ir.Value, count: int) -> tuple[ir.Value, ...]:
        """Split a value into `count` equal parts of its last axis."""
        t, shape = self.t, dims(x)
        made = t.many("Split", x, t.ints(*[self.hidden] * count), outputs=count, axis=len(shape) - 1)
        for value in made:
            value.shape, value.type = ir.Shape((*shape[:-1], self.hidden)), x.type
        return made

    def product(self, h: ir.Value, r: ir.Value, add: ir.Value | None) -> ir.Value:
        given = (h, r) if add is None else (h, r, add)
        return self.t.op("Gemm", *given, shape=(dims(h)[0], dims(r)[0]), transB=1)


def _rnn(cell: _Cell, x: ir.Value, h: ir.Value, c: ir.Value) -> tuple[ir.Value, ir.Value]:
    return cell.t.unary(cell.activation, cell.product(h, cell.r, x)), c


def _lstm(cell: _Cell, x: ir.Value, h: ir.Value, c: ir.Value) -> tuple[ir.Value, ir.Value]:
    t = cell.t
    into, out, keep, new = cell.gates(cell.product(h, cell.r, x), 4)
    into, out, keep = (t.unary("Sigmoid", gate) for gate in (into, out, keep))
    c = t.add(t.mul(keep, c), t.mul(into, t.unary("Tanh", new)))
    return t.mul(out, t.unary("Tanh", c)), c


def _gru(cell: _Cell, x: ir.Value, h: ir.Value, c: ir.Value) -> tuple[ir.Value, ir.Value]:
    t, n = cell.t, cell.hidden
    xz, xr, xh = cell.gates(x, 3)
    if cell.after_reset:
        hz, hr, hh = cell.gates(cell.product(h, cell.r, cell.bias), 3)
        z, r = (t.unary("Sigmoid", t.add(a, b)) for a, b in ((xz, hz), (xr, hr)))
        new = t.unary("Tanh", t.add(xh, t.mul(r, hh)))
    else:
        first, last = t.slice(cell.r, 0, 0, 2 * n), t.slice(cell.r, 0, 2 * n, n)
        hz, hr = cell.gates(cell.product(h, first, None), 2)
        z, r = (t.unary("Sigmoid", t.add(a, b)) for a, b in ((xz, hz), (xr, hr)))
        new = t.unary("Tanh", cell.product(t.mul(r, h), last, xh))
    return t.add(new, t.mul(z, t.sub(h, new))), c  # (1 - z) new + z h


_STEPS: dict[str, Callable[[_Cell, ir.Value, ir.Value, ir.Value], tuple[ir.Value, ir.Value]]] = {
    "RNN": _rnn, "GRU": _gru, "LSTM": _lstm,
}  # fmt: skip


def _unroll(t: Tape, node: ir.Node) -> None:
    options: dict[str, Any] = {name: attribute.value for name, attribute in node.attributes.items()}
    x = node.inputs[0]
    assert x is not None
    length, batch, _ = dims(x)
    w, r, b, lengths, h0, c0, peepholes = (*node.inputs, *[None] * 7)[1:8]
    ends = static(lengths) if lengths is not None else None
    whole = lengths is None or (ends is not None and bool((ends == length).all()))
    directions = {"forward": [1], "reverse": [-1], "bidirectional": [1, -1]}[options.get("direction", "forward")]
    wanted = list(_ACTIVATIONS[node.op_type]) * len(directions)
    given = list(options.get("activations", wanted))
    known = given == wanted or (node.op_type == "RNN" and all(name in ("Tanh", "Relu", "Sigmoid") for name in given))
    rare = {
        Message("its length must be known: fix it with {}", Setting("dims")): not isinstance(length, int),
        "its sequences are empty": length == 0,
        "it has no attribute hidden_size": "hidden_size" not in options and (r is None or isinstance(dims(r)[2], str)),
        "sequences of different lengths are not supported": not whole,
        "peepholes are not supported": peepholes is not None,
        "clipping is not supported": "clip" in options,
        "layout 1 is not supported": bool(options.get("layout", 0)),
        "coupled gates are not supported": bool(options.get("input_forget", 0)),
        f"activations {given} are not supported": not known,
    }
    for why in (why for why, found in rare.items() if found):
        raise ConversionError("no gradient for {} node {!r}: {}", node.op_type, node.name, why)
    assert isinstance(length, int) and w is not None and r is not None
    hidden, count = int(options.get("hidden_size", dims(r)[2])), _GATES[node.op_type]
    sequences, lasts, cells = [], [], []
    for index, direction in enumerate(directions):
        pick = partial(_pick, t, index)
        state = (batch, hidden)
        h, c = (t.expand(t.scalar(0, x), state) if v is None else pick(v) for v in (h0, c0))
        biases = list(t.many("Split", pick(b), t.ints(*[count * hidden] * 2), outputs=2, axis=0)) if b else []
        for part in biases:
            part.shape, part.type = ir.Shape((count * hidden,)), x.type
        after = bool(options.get("linear_before_reset", 0))
        bias = None if not biases else biases[0] if after else t.add(*biases)
        inputs = _projected(t, x, pick(w), bias)
        cell = _Cell(t, inputs, pick(r), biases[1] if biases else None, hidden, given[index], after)
        states = []
        for step in cell.inputs[::direction]:
            h, c = _STEPS[node.op_type](cell, step, h, c)
            states.append(h)
        lasts.append(t.unsqueeze(h, [0]))
        cells.append(t.unsqueeze(c, [0]))
        steps = [t.unsqueeze(state, [0, 1]) for state in states[::direction]]
        sequences.append(_joined(t, steps, (length, 1, batch, hidden), 0))
    made = [
        _joined(t, sequences, (length, len(directions), batch, hidden), 1),
        *(_joined(t, parts, (len(directions), batch, hidden), 0) for parts in (lasts, cells)),
    ]
    for old, new in zip(node.outputs, made, strict=False):
        replace(old, new)


def _pick(t: Tape, index: int, value: ir.Value) -> ir.Value:
    """Return the part of a value for one direction, an entry of the first axis."""
    shape = dims(value)
    if shape[0] == 1:
        return t.reshape(value, shape[1:])
    return t.op("Gather", value, t.constant(np.int64(index)), shape=shape[1:], axis=0)


def _projected(t: Tape, x: ir.Value, w: ir.Value, bias: ir.Value | None) -> list[ir.Value]:
    """Return the product of the input and its weights by time step, computed for all steps at once."""
    length, batch, features = dims(x)
    assert isinstance(length, int)
    rows, wide = t.product((length, batch)), dims(w)[0]
    given = (t.reshape(x, (rows, features)), w)
    made = t.op("Gemm", *given, *(() if bias is None else (bias,)), shape=(rows, wide), transB=1)
    made = t.reshape(made, (length, batch, wide))
    if length == 1:
        return [t.reshape(made, (batch, wide))]
    parts = t.many("Split", made, t.ints(*[1] * length), outputs=length, axis=0)
    for part in parts:
        part.shape, part.type = ir.Shape((1, batch, wide)), x.type
    return [t.op("Squeeze", part, t.ints(0), shape=(batch, wide)) for part in parts]


def _joined(t: Tape, parts: Sequence[ir.Value], shape: Dims, axis: int) -> ir.Value:
    return parts[0] if len(parts) == 1 else t.op("Concat", *parts, shape=shape, axis=axis)
