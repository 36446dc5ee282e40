"""`TrainingGraph`: a whole training step under construction, on top of GraphSurgeon's layer API.

Layers (see `sample_models.layers`) emit their forward nodes and put a *pullback* on the tape: a closure that,
given the gradient of the layer's output, emits the gradients of its inputs. `TrainingGraph.finish` replays
the tape backwards, updates every parameter by SGD, and exports the model, with every node's phase and every
value's shape in the file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from numpy.typing import DTypeLike

OPSET = 20
IR_VERSION = 10

Shape = tuple[int, ...]
Pullback = Callable[[gs.Variable], Sequence[gs.Variable | None]]


@dataclass(frozen=True, slots=True)
class TapeEntry:
    """One differentiable layer: where it was built, what it read and made, and how to go back through it."""

    scope: str
    inputs: tuple[gs.Tensor, ...]
    output: gs.Variable
    pullback: Pullback


class TrainingGraph(gs.Graph):  # type: ignore[misc]
    """A GraphSurgeon graph that knows its parameters, its tape and the phase being built.

    Parameters
    ----------
    name : str
        Name of the ONNX graph.

    Examples
    --------
    >>> import sample_models.layers
    >>> graph = TrainingGraph("tiny")
    >>> x = graph.batch_input(0, (4, 3))
    >>> labels = graph.batch_input(1, (4,), below=2)
    >>> loss = graph.cross_entropy(graph.linear(x, "head", 2), labels)
    >>> model = graph.finish(loss, learning_rate=0.1)
    >>> [value.name for value in model.graph.output]
    ['loss', 'new.head.weight', 'new.head.bias']
    """

    def __init__(self, name: str) -> None:
        super().__init__(name=name, opset=OPSET, ir_version=IR_VERSION, producer_name="sample_models")
        self.inputs: list[gs.Variable]
        self.outputs: list[gs.Variable]
        self.phase = "forward"
        self.module = ""
        self.parameters: list[gs.Variable] = []
        self.tape: list[TapeEntry] = []
        self.constants: dict[str, gs.Constant] = {}
        self.labels: dict[str, dict[str, str]] = {}
        self.integer_limits: dict[str, int] = {}
        self.op_counts: Counter[str] = Counter()

    # Inputs and constants

    def batch_input(self, index: int, shape: Shape, below: int | None = None) -> gs.Variable:
        """Declare `input.<index>`: float data or, when `below` is given, integers in ``[0, below)``."""
        name = f"input.{index}"
        value = gs.Variable(name, np.float32 if below is None else np.int64, shape)
        if below is not None:
            self.integer_limits[name] = below
        self.inputs.append(value)
        return value

    def parameter(self, name: str, shape: Shape) -> gs.Variable:
        """Declare a trained weight, named relative to the module being built."""
        value = gs.Variable(f"{self.module}.{name}".lstrip("."), np.float32, shape)
        self.parameters.append(value)
        return value

    def constant(self, values: np.ndarray, name: str) -> gs.Constant:
        """The constant of that name, made at its first use."""
        return self.constants.setdefault(name, gs.Constant(name, values))

    def scalar(self, value: float) -> gs.Constant:
        """A float32 scalar constant."""
        return self.constant(np.array(value, np.float32), f"const.{value:.9g}")

    def indices(self, values: Sequence[int]) -> gs.Constant:
        """An int64 vector constant: axes, a shape, slice bounds."""
        return self.constant(np.array(values, np.int64), "const." + str(list(values)).replace(" ", ""))

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Name what is built inside after the module ``<outer>.<name>``."""
        outer = self.module
        self.module = f"{outer}.{name}".lstrip(".")
        try:
            yield
        finally:
            self.module = outer

    # Nodes

    def emit(
        self,
        op: str,
        *inputs: gs.Tensor,
        shape: Shape,
        dtype: DTypeLike = np.float32,
        result: str | None = None,
        **attrs: object,
    ) -> gs.Variable:
        """Add one labelled node of one output and return that output.

        `result` names the output; without it, the name follows from phase, module and operator.
        """
        stem = f"{self.phase}/{self.module}/{op}".replace("//", "/")
        node_name = f"{stem}.{self.op_counts[stem]}"
        self.op_counts[stem] += 1
        self.labels[node_name] = {"phase": self.phase, "module": self.module}
        output = gs.Variable(result or f"{node_name}.out", dtype, shape)
        # `Graph.layer` would list all tensors of the graph each time.
        self.nodes.append(gs.Node(op=op, name=node_name, attrs=attrs, inputs=list(inputs), outputs=[output]))
        return output

    def pointwise(self, op: str, *inputs: gs.Tensor) -> gs.Variable:
        """An elementwise operator with broadcasting; comparisons give booleans."""
        shape = np.broadcast_shapes(*(tuple(value.shape) for value in inputs))
        return self.emit(op, *inputs, shape=shape, dtype=bool if op == "Greater" else np.float32)

    def reduce(self, op: str, x: gs.Variable, axes: Sequence[int], keepdims: bool = True) -> gs.Variable:
        """`ReduceSum`, `ReduceMean`, ... over `axes` (counted from zero)."""
        shape = tuple(1 if axis in axes else size for axis, size in enumerate(x.shape) if keepdims or axis not in axes)
        return self.emit(op, x, self.indices(axes), shape=shape, keepdims=int(keepdims))

    def reduce_to(self, x: gs.Variable, shape: Shape) -> gs.Variable:
        """Sum `x` down to a shape that broadcasts to it, by ones or by fewer axes."""
        padded = (1,) * (len(x.shape) - len(shape)) + tuple(shape)
        axes = [axis for axis, (size, kept) in enumerate(zip(x.shape, padded, strict=True)) if size != kept]
        return self.reduce("ReduceSum", x, axes, keepdims=len(shape) == len(x.shape))

    def reshaped(self, x: gs.Variable, shape: Shape) -> gs.Variable:
        """`Reshape` to a static shape."""
        return self.emit("Reshape", x, self.indices(shape), shape=tuple(shape), dtype=x.dtype)

    def transposed(self, x: gs.Variable, perm: Sequence[int]) -> gs.Variable:
        """`Transpose` by a permutation."""
        return self.emit("Transpose", x, shape=tuple(x.shape[axis] for axis in perm), perm=list(perm))

    def product(self, a: gs.Variable, b: gs.Variable) -> gs.Variable:
        """`MatMul` of two stacks of matrices with equal leading dimensions."""
        return self.emit("MatMul", a, b, shape=(*a.shape[:-1], b.shape[-1]))

    def gemm(self, a: gs.Variable, b: gs.Variable, *bias: gs.Variable, trans: str = "NN") -> gs.Variable:
        """`Gemm` of two matrices; `trans` says of each whether it is taken transposed (T) or not (N)."""
        trans_a, trans_b = (int(flag == "T") for flag in trans)
        shape = (a.shape[trans_a], b.shape[1 - trans_b])
        return self.emit("Gemm", a, b, *bias, shape=shape, transA=trans_a, transB=trans_b)

    def one_hot(self, ids: gs.Variable, depth: int) -> gs.Variable:
        """One float row of `depth` columns per id."""
        depth_value = self.constant(np.array(depth, np.int64), f"depth.{depth}")
        off_on = self.constant(np.array([0, 1], np.float32), "const.off_on")
        return self.emit("OneHot", ids, depth_value, off_on, shape=(*ids.shape, depth))

    # The tape

    def record(self, output: gs.Variable, inputs: Sequence[gs.Tensor], pullback: Pullback) -> gs.Variable:
        """Put a layer on the tape and return its output."""
        self.tape.append(TapeEntry(self.module, tuple(inputs), output, pullback))
        return output

    def backward(self, loss: gs.Variable) -> dict[str, gs.Variable]:
        """Replay the tape backwards from the loss; returns gradients by value name."""
        self.phase = "backward"
        grads = {loss.name: loss}  # In place of a one: loss layers ignore the gradient they are given.
        for entry in reversed(self.tape):
            self.module = entry.scope
            for value, grad in zip(entry.inputs, entry.pullback(grads.pop(entry.output.name)), strict=True):
                if grad is not None:
                    known = grads.get(value.name)
                    grads[value.name] = grad if known is None else self.pointwise("Add", known, grad)
        return grads

    def sgd(self, parameter: gs.Variable, grad: gs.Variable, learning_rate: float) -> gs.Variable:
        """``new = parameter - learning_rate * gradient``."""
        self.phase, self.module = "optimizer", parameter.name
        rate = self.constant(np.array(learning_rate, np.float32), "learning_rate")
        step = self.pointwise("Mul", grad, rate)
        return self.emit("Sub", parameter, step, shape=tuple(parameter.shape), result=f"new.{parameter.name}")

    def finish(self, loss: gs.Variable, learning_rate: float, last_first: bool = False) -> onnx.ModelProto:
        """Append backward and optimizer, and export; outputs are `loss`, then every `new.<parameter>`.

        Updates follow one another as the parameters were declared, or in reverse with `last_first`. That is a
        matter of file order alone, but runtimes derive the order of execution, and so the peak, from it.
        """
        grads = self.backward(loss)
        order = self.parameters[::-1] if last_first else self.parameters
        updated = {value.name: self.sgd(value, grads[value.name], learning_rate) for value in order}
        self.inputs = self.parameters + self.inputs
        self.outputs = [loss, *(updated[value.name] for value in self.parameters)]
        self.cleanup()  # Gradients of the batch inputs, which nobody reads.
        return self._labelled(gs.export_onnx(self))

    def _labelled(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """Check the model and add what GraphSurgeon drops: node labels, ranges of integer inputs."""
        model = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
        for node in model.graph.node:
            _set_metadata(node, self.labels[node.name])
        for value in model.graph.input:
            if value.name in self.integer_limits:
                _set_metadata(value, {"below": str(self.integer_limits[value.name])})
        onnx.checker.check_model(model, full_check=True)
        return model


def _set_metadata(proto: onnx.NodeProto | onnx.ValueInfoProto, entries: dict[str, str]) -> None:
    """Append `metadata_props` entries to a node or a value."""
    for key, value in entries.items():
        proto.metadata_props.add(key=key, value=value)
