"""`Emitter`: append standard ONNX nodes to an `onnx_ir` graph, labelled with their phase."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias

import numpy as np
import onnx_ir as ir

Phase: TypeAlias = Literal["forward", "backward", "optimizer"]
Attribute: TypeAlias = int | float | str | list[int] | list[float] | ir.DataType | ir.TensorProtocol | ir.Graph


class Emitter:
    """Append nodes, and constants shared by content, to the end of a graph.

    Parameters
    ----------
    graph : onnx_ir.Graph
        The graph, which grows in place.
    phase : str
        Phase of the appended nodes; see `labelled`.
    within : Emitter, optional
        The emitter of the enclosing graph, if this graph is the body of a control-flow operator. Names are unique in
        both; constants belong to the outermost graph.

    Examples
    --------
    >>> import numpy as np, onnx_ir as ir
    >>> x = ir.Value(name="x", shape=ir.Shape([3]), type=ir.TensorType(ir.DataType.FLOAT))
    >>> graph = ir.Graph([x], [], nodes=[], opset_imports={"": 20})
    >>> emit = Emitter(graph, "backward")
    >>> y = emit("Mul", x, emit.constant(np.float32(2)), like=x)
    >>> y.shape, y.producer().metadata_props
    (Shape([3]), {'phase': 'backward'})
    """

    def __init__(self, graph: ir.Graph, phase: Phase, within: Emitter | None = None) -> None:
        self.graph = graph
        self.phase: Phase = phase
        self._root: Emitter = self if within is None else within._root
        self._constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}
        self._taken: set[str | None] = set() if within is None else self._root._taken
        self._taken.update(value.name for node in graph for value in node.outputs)
        self._taken.update(node.name for node in graph)
        self._taken.update(value.name for value in graph.inputs)
        self._taken.update(graph.initializers)
        self._next = 0

    @contextmanager
    def labelled(self, phase: Phase) -> Iterator[None]:
        """Give the nodes appended inside the context another phase."""
        outer, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = outer

    def __call__(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        like: ir.Value | None = None,
        name: str | None = None,
        **attributes: Attribute,
    ) -> ir.Value:
        """Append a node with one output, which takes shape and dtype, if known, from `like`."""
        (output,) = self.many(op_type, *inputs, outputs=1, name=name, **attributes)
        if like is not None:
            output.shape, output.type = like.shape, like.type
        return output

    def many(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        outputs: int,
        name: str | None = None,
        **attributes: Attribute,
    ) -> tuple[ir.Value, ...]:
        """Append a node with several outputs; attributes are keywords, and an input of None is absent."""
        node = ir.node(op_type, inputs, attributes or None, num_outputs=outputs, metadata_props={"phase": self.phase})
        for index, value in enumerate(node.outputs):
            value.name = (
                self.fresh(name or f"{self.phase}.{op_type}")
                if index == 0 or name is None
                else self.fresh(f"{name}.{index}")
            )
        node.name = f"node.{node.outputs[0].name}"
        self.graph.append(node)
        return tuple(node.outputs)

    def constant(self, value: np.ndarray | np.generic) -> ir.Value:
        """Return an initializer; equal constants share one."""
        if self._root is not self:
            return self._root.constant(value)
        array = np.asarray(value)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            made = ir.Value(name=self.fresh("const"), const_value=ir.tensor(array))
            assert made.const_value is not None
            made.shape, made.type = ir.Shape(array.shape), ir.TensorType(made.const_value.dtype)
            self.graph.register_initializer(made)
            self._constants[key] = made
        return self._constants[key]

    def scalar(self, value: float, like: ir.Value) -> ir.Value:
        """Return a scalar constant with the dtype of `like`."""
        assert like.dtype is not None, like.name
        return self.constant(np.asarray(value, like.dtype.numpy()))

    def fresh(self, name: str) -> str:
        """Return `name`, or a numbered variant of it that is unused."""
        if self._root is not self:
            return self._root.fresh(name)
        made = name
        while made in self._taken or f"node.{made}" in self._taken:
            self._next += 1
            made = f"{name}.{self._next}"
        self._taken.add(made)
        return made
