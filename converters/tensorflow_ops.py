"""What tf2onnx drops or cannot convert of a graph of TensorFlow: ops to refuse, to hand over and to write out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx

from onnx_remat.errors import ConversionError
from onnx_remat.messages import Setting

from .autodiff.registry import STOPPED

_DRAWING = {
    "StatelessRandomGetKeyCounter": 0, "StatelessRandomNormal": 1, "StatelessRandomUniform": 1,
    "StatelessRandomUniformInt": 1, "StatelessTruncatedNormal": 1, "StatelessMultinomial": 2,
}  # fmt: skip
"""Ops that draw by a seed, and which input that is: tf2onnx makes constants of their results."""

_EXACT = ("tensorflow.python.ops.nn_impl", "tensorflow.python.ops.ctc_ops")
"""Modules of TensorFlow whose own gradients save memory and are the derivatives."""


def check_ops(graph: Any, training: bool) -> None:
    """Raise ConversionError for an op whose gradient or whose randomness tf2onnx drops."""
    operations = [(op.name, op.node_def, op) for op in graph.get_operations() if op.type != "Const"]
    library = graph.as_graph_def().library.function
    inner = [(f"{each.signature.name}/{node.name}", node, None) for each in library for node in each.node_def]
    for name, node, op in (*operations, *inner):
        if node.op == "PreventGradient":
            raise ConversionError(f"{name!r} prevents the gradient: leave that op out of the model")
        gradient = node.attr["_gradient_op_type"].s.decode() if "_gradient_op_type" in node.attr else ""
        if gradient and "PartitionedCall" not in gradient and not _is_exact(gradient):
            raise ConversionError(
                f"{name!r} has a custom gradient, which would be lost: write it with ops that have that gradient"
            )
        if node.op not in _DRAWING:
            continue
        if op is None or not _is_constant(op.inputs[_DRAWING[node.op]]):
            if training:
                raise ConversionError(
                    "random layers are not supported in training mode ({!r}): pass {}", name, Setting("training", False)
                )
            raise ConversionError(f"{name!r} draws random numbers, the same in every step: pass them as an input")


def _is_constant(tensor: Any) -> bool:
    """Return whether a tensor follows from constants alone."""
    op = tensor.op
    return op.type == "Const" or (bool(op.inputs) and all(_is_constant(each) for each in op.inputs))


@contextmanager
def inlined(graph: Any) -> Iterator[None]:
    """Let tf2onnx inline functions that are compiled by XLA, as Keras' grouped convolutions are."""
    from tensorflow.core.framework import attr_value_pb2

    calls = [op for op in graph.get_operations() if op.type in ("PartitionedCall", "StatefulPartitionedCall")]
    compiled = [op for op in calls if op.node_def.attr["_XlaMustCompile"].b]
    for op in compiled:
        op._set_attr("_XlaMustCompile", attr_value_pb2.AttrValue(b=False))
    try:
        yield
    finally:
        for op in compiled:  # TensorFlow has no kernel for their gradients outside XLA
            op._set_attr("_XlaMustCompile", attr_value_pb2.AttrValue(b=True))


@contextmanager
def unmerged() -> Iterator[None]:
    """Keep tf2onnx from merging equal nodes: which of them, and so which layer's name, is left depends on the run."""
    from tf2onnx import optimizer

    merging = optimizer._optimizers
    optimizer._optimizers = type(merging)((name, made) for name, made in merging.items() if name != "merge_duplication")
    try:
        yield
    finally:
        optimizer._optimizers = merging


def _is_exact(gradient: str) -> bool:
    """Return whether a registered gradient is one of TensorFlow's own that are the derivatives of their ops."""
    from tensorflow.python.framework import ops

    pending, seen = [ops.gradient_registry.lookup(gradient)], 0
    while pending and seen < 16:  # the gradient lies in a closure of a closure
        function, seen = pending.pop(), seen + 1
        if function.__module__ in _EXACT or function.__qualname__.startswith("recompute_grad."):
            return True
        cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
        pending += [each for each in cells if callable(each) and hasattr(each, "__qualname__")]
    return False


def _write_stopped(ctx: Any, node: Any, name: str, arguments: Any) -> None:
    """Write a StopGradient as the op that `autodiff` takes for one; a handler of tf2onnx."""
    shapes, dtypes, inputs, outputs = node.output_shapes, node.output_dtypes, list(node.input), list(node.output)
    ctx.remove_node(name)
    kind = "Mean" if dtypes[0] in _FLOATS else "Identity"
    ctx.make_node(kind, inputs, outputs=outputs, name=f"{STOPPED}.{name}", shapes=shapes, dtypes=dtypes)


def _leave(ctx: Any, node: Any, name: str, arguments: Any) -> None:
    """Leave an op to `write_out`, without tf2onnx's message that it is not supported; a handler of tf2onnx."""


_FLOATS = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE)


def write_out(model: onnx.ModelProto) -> None:
    """Replace Erfc, Log1p and Expm1, which tf2onnx writes but ONNX does not have."""
    nodes = []
    for node in model.graph.node:
        if node.op_type not in _WRITTEN_OUT:
            nodes.append(node)
            continue
        nodes += _WRITTEN_OUT[node.op_type](node)
        if all(tensor.name != _ONE for tensor in model.graph.initializer):
            model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(1, np.float32), _ONE))
    del model.graph.node[:]
    model.graph.node.extend(nodes)


_ONE = "onnx_remat.one"


class _Written:
    """Nodes in place of one, named after it."""

    def __init__(self, node: onnx.NodeProto) -> None:
        self.node, self.made = node, list[onnx.NodeProto]()
        self.x = node.input[0]
        self.one = self.op("CastLike", "one", _ONE, self.x)

    def op(self, kind: str, name: str, *inputs: str) -> str:
        """Append a node and return its output."""
        self.made.append(onnx.helper.make_node(kind, inputs, [f"{self.node.output[0]}.{name}"]))
        self.made[-1].name = f"{self.node.name}.{name}"
        return str(self.made[-1].output[0])

    def finished(self) -> list[onnx.NodeProto]:
        """Return the nodes, the last of which has the name and output of the one replaced."""
        self.made[-1].output[0], self.made[-1].name = self.node.output[0], self.node.name
        return self.made


def _erfc(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Return nodes for 1 - Erf."""
    w = _Written(node)
    w.op("Sub", "rest", w.one, w.op("Erf", "erf", w.x))
    return w.finished()


def _log1p(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Return nodes for log(u) + (x - (u - 1)) / u with u = 1 + x rounded, which is accurate near zero."""
    w = _Written(node)
    u = w.op("Add", "sum", w.x, w.one)
    rounded = w.op("Sub", "rounded", u, w.one)
    log = w.op("Log", "log", u)
    rest = w.op("Div", "rest", w.op("Sub", "lost", w.x, rounded), u)
    exact = w.op("Equal", "exact", w.x, rounded)  # also where x is -1 or infinite
    w.op("Where", "chosen", exact, log, w.op("Add", "mended", log, rest))
    return w.finished()


def _expm1(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Return nodes for tanh(x / 2) (exp(x) + 1), which is accurate near zero."""
    w = _Written(node)
    half = w.op("Div", "half", w.x, w.op("Add", "two", w.one, w.one))
    w.op("Mul", "product", w.op("Tanh", "tanh", half), w.op("Add", "above", w.op("Exp", "exp", w.x), w.one))
    return w.finished()


_WRITTEN_OUT = {"Erfc": _erfc, "Log1p": _log1p, "Expm1": _expm1}

HANDLERS: dict[str, tuple[Callable[..., None], list[str]]] = {
    "StopGradient": (_write_stopped, []),
    **{kind: (_leave, []) for kind in _WRITTEN_OUT},
}
