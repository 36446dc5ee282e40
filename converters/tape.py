"""`Tape`: an emitter that knows the shapes of its values, with the arithmetic for gradient rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from onnx_remat.errors import ConversionError
from onnx_remat.messages import Setting

from .dims import Dim, Dims, broadcast, dims, is_static, reduced_axes, size
from .emit import Attribute, Emitter, Phase


class Tape(Emitter):
    """Append backward nodes to a graph.

    An adjoint may be narrower than its value if it broadcasts to the value's shape. For example, the gradient of a mean
    stays a scalar until an op needs its full shape.

    Parameters
    ----------
    graph : onnx_ir.Graph
        A graph whose values have shapes; their unknown sizes are symbols.
    within : Tape, optional
        The tape of the enclosing graph.
    """

    def __init__(self, graph: ir.Graph, within: Tape | None = None) -> None:
        super().__init__(graph, "backward", within)
        self._sources: dict[str, tuple[ir.Value, int]] = {}
        for value in (*graph.inputs, *(v for node in graph for v in node.outputs)):
            for axis, dim in enumerate(dims(value) if value.shape is not None else ()):
                if isinstance(dim, str):
                    self._sources.setdefault(dim, (value, axis))
        self._lengths: dict[str, ir.Value] = {}
        self._before: ir.Node | None = None
        self._products: dict[str, Dims] = {}

    def with_bodies(self) -> Iterator[Tape]:
        """Yield this tape, and one for every body inside its graph."""
        yield self
        for attribute in (a for node in self.graph for a in node.attributes.values()):
            if attribute.type == ir.AttributeType.GRAPH:
                yield from Tape(attribute.as_graph(), self).with_bodies()

    def op(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        shape: Dims,
        dtype: ir.DataType | None = None,
        **attributes: Any,
    ) -> ir.Value:
        """Append a node with one output of this shape; by default the output has the dtype of the first input."""
        (output,) = self.many(op_type, *inputs, outputs=1, **attributes)
        if dtype is None:
            assert inputs[0] is not None
            dtype = inputs[0].dtype
        assert dtype is not None, op_type
        output.shape, output.type = ir.Shape(shape), ir.TensorType(dtype)
        return output

    @contextmanager
    def ahead_of(self, node: ir.Node, phase: Phase = "forward") -> Iterator[None]:
        """Insert the nodes emitted inside the context before `node`, in a phase."""
        with self.labelled(phase):
            outer, self._before = self._before, node
            try:
                yield
            finally:
                self._before = outer

    def many(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        outputs: int,
        name: str | None = None,
        **attributes: Attribute,
    ) -> tuple[ir.Value, ...]:
        made = super().many(op_type, *inputs, outputs=outputs, name=name, **attributes)
        node = made[0].producer()
        if self._before is not None and node is not None:
            self.graph.remove(node)
            self.graph.insert_before(self._before, node)
        return made

    # Arithmetic.

    def add(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self._binary("Add", a, b)

    def sub(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self._binary("Sub", a, b)

    def mul(self, a: ir.Value, b: ir.Value | float) -> ir.Value:
        """Append a product; the product of two scalar constants is a constant."""
        if not isinstance(b, ir.Value):
            b = self.scalar(b, a)
        x, y = number(a), number(b)
        if x is not None and y is not None:
            return self.scalar(x * y, a)
        if x == 1.0:
            return b
        if y == 1.0:
            return a
        if x == -1.0:
            return self.unary("Neg", b)
        if y == -1.0:
            return self.unary("Neg", a)
        return self._binary("Mul", a, b)

    def div(self, a: ir.Value, b: ir.Value | float) -> ir.Value:
        """Append a quotient; by a constant, a product with its reciprocal if the type holds that to its precision."""
        known = number(b) if isinstance(b, ir.Value) else b
        if known and a.dtype is not None and _is_normal(1.0 / known, a.dtype):
            return self.mul(a, 1.0 / known)
        return self._binary("Div", a, b if isinstance(b, ir.Value) else self.scalar(b, a))

    def unary(self, op_type: str, x: ir.Value, **attributes: Any) -> ir.Value:
        """Append an elementwise op, or any op that keeps shape and dtype."""
        return self.op(op_type, x, shape=dims(x), **attributes)

    def neg(self, x: ir.Value) -> ir.Value:
        return self.mul(x, -1.0)

    def _binary(self, op_type: str, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.op(op_type, a, b, shape=broadcast(dims(a), dims(b)))

    def compare(self, op_type: str, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.op(op_type, a, b, shape=broadcast(dims(a), dims(b)), dtype=ir.DataType.BOOL)

    def select(self, condition: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
        """Append a Where: `a` where the condition holds, else `b`."""
        shape = broadcast(dims(condition), broadcast(dims(a), dims(b)))
        return self.op("Where", condition, a, b, shape=shape, dtype=a.dtype)

    def cast(self, x: ir.Value, dtype: ir.DataType) -> ir.Value:
        if x.dtype == dtype:
            return x
        if (known := number(x)) is not None:
            return self.constant(np.asarray(known, dtype.numpy()).reshape(dims_of_constant(x)))
        return self.op("Cast", x, shape=dims(x), dtype=dtype, to=int(dtype))

    # Reductions and shapes.

    def ints(self, *values: int) -> ir.Value:
        """Return a constant vector of int64."""
        return self.constant(np.asarray(values, np.int64))

    def reduce(self, op_type: str, x: ir.Value, axes: Sequence[int], keepdims: bool = True) -> ir.Value:
        """Append a reduction (ReduceSum, ReduceMean, ...) over `axes`; return `x` if there are no axes."""
        if not axes:
            return x
        shape = dims(x)
        axes = sorted(axis % len(shape) for axis in axes)
        left = tuple(1 if i in axes else d for i, d in enumerate(shape) if keepdims or i not in axes)
        return self.op(op_type, x, self.ints(*axes), shape=left, keepdims=int(keepdims))

    def sum(self, x: ir.Value, axes: Sequence[int], keepdims: bool = True) -> ir.Value:
        return self.reduce("ReduceSum", x, axes, keepdims)

    def shape_vector(self, shape: Dims) -> ir.Value:
        """Return a shape as an int64 vector; symbols are read from the shapes of the graph's inputs if they occur
        there."""
        if is_static(shape):
            return self.ints(*(int(d) for d in shape))
        parts: list[ir.Value] = []
        known: list[int] = []
        for dim in shape:
            if isinstance(dim, int):
                known.append(dim)
                continue
            if known:
                parts.append(self.ints(*known))
                known = []
            parts.append(self.length(dim))
        if known:
            parts.append(self.ints(*known))
        if len(parts) == 1:
            return parts[0]
        return self.op("Concat", *parts, shape=(len(shape),), axis=0)

    def product(self, shape: Sequence[Dim]) -> Dim:
        """Return the product of sizes; a symbol if one of them is a symbol."""
        known = size(tuple(shape))
        if known is not None:
            return known
        factors = tuple(dim for dim in shape if dim != 1)
        if len(factors) == 1:
            return factors[0]
        symbol = "*".join(map(str, factors))
        self._products[symbol] = factors
        return symbol

    def length(self, symbol: str) -> ir.Value:
        """Return the size that a symbol stands for, as an int64 vector of one entry."""
        if symbol in self._products and symbol not in self._lengths:
            with self.labelled("forward"):
                factors = self.shape_vector(self._products[symbol])
                self._lengths[symbol] = self.op("ReduceProd", factors, shape=(1,), keepdims=1)
        if symbol not in self._lengths:
            if symbol not in self._sources:
                fix = "the size {!r} cannot be computed during a run: fix symbolic sizes with {}"
                raise ConversionError(fix, symbol, Setting("dims"))
            value, axis = self._sources[symbol]
            with self.labelled("forward"):
                self._lengths[symbol] = self.op(
                    "Shape", value, shape=(1,), dtype=ir.DataType.INT64, start=axis, end=axis + 1
                )
        return self._lengths[symbol]

    def count(self, shape: Sequence[Dim], like: ir.Value) -> ir.Value:
        """Return the product of sizes as a scalar with the dtype of `like`."""
        known = size(tuple(shape))
        if known is not None:
            return self.scalar(known, like)
        assert like.dtype is not None
        total = 1
        made: ir.Value | None = None
        for dim in shape:
            if isinstance(dim, int):
                total *= dim
                continue
            length = self.cast(self.op("Squeeze", self.length(dim), shape=()), like.dtype)
            made = length if made is None else self.mul(made, length)
        assert made is not None
        return self.mul(made, float(total))

    def over_count(self, x: ir.Value, shape: Sequence[Dim]) -> ir.Value:
        """Append the quotient of a value and a product of sizes."""
        return self._by_count(self.div, x, shape)

    def _by_count(self, op: Callable[[ir.Value, ir.Value], ir.Value], x: ir.Value, shape: Sequence[Dim]) -> ir.Value:
        """Append `op` of a value and a product of sizes, in float32 where x's dtype may not hold that exactly."""
        assert x.dtype is not None
        known = size(tuple(shape))
        if x.dtype.bitwidth == 16 and (known is None or not _is_held(known, x.dtype)):
            wide = self.cast(x, ir.DataType.FLOAT)
            return self.cast(op(wide, self.count(shape, wide)), x.dtype)
        return op(x, self.count(shape, x))

    def reshape(self, x: ir.Value, shape: Dims) -> ir.Value:
        """Append a Reshape to sizes and symbols; with at most one new symbol it needs no shape computed in the run."""
        old = dims(x)
        if old == shape:
            return x
        unknown = [i for i, d in enumerate(shape) if isinstance(d, str)]
        kept = {i for i in unknown if i < len(old) and old[i] == shape[i]}
        if 0 in shape:  # or it would mean the size that x has there
            return self.op("Reshape", x, self.shape_vector(shape), shape=shape, allowzero=1)
        if len(set(unknown) - kept) <= 1:
            target = self.ints(*(0 if i in kept else d if isinstance(d, int) else -1 for i, d in enumerate(shape)))
        else:
            target = self.shape_vector(shape)
        return self.op("Reshape", x, target, shape=shape)

    def expand(self, x: ir.Value, shape: Dims) -> ir.Value:
        """Broadcast to a shape; return `x` if it has that shape already."""
        return x if dims(x) == shape else self.op("Expand", x, self.shape_vector(shape), shape=shape)

    def transpose(self, x: ir.Value, perm: Sequence[int]) -> ir.Value:
        if list(perm) == list(range(len(perm))):
            return x
        shape = dims(x)
        return self.op("Transpose", x, shape=tuple(shape[p] for p in perm), perm=list(perm))

    def swap_last(self, x: ir.Value) -> ir.Value:
        """Swap the last two axes."""
        rank = len(dims(x))
        return self.transpose(x, [*range(rank - 2), rank - 1, rank - 2])

    def unsqueeze(self, x: ir.Value, axes: Sequence[int]) -> ir.Value:
        """Insert axes of size 1 at these positions of the result."""
        if not axes:
            return x
        shape = list(dims(x))
        for axis in sorted(axes):
            shape.insert(axis, 1)
        return self.op("Unsqueeze", x, self.ints(*sorted(axes)), shape=tuple(shape))

    def zeros(self, shape: Dims, dtype: ir.DataType) -> ir.Value:
        value = ir.tensor(np.zeros(1, dtype.numpy()))
        return self.op("ConstantOfShape", self.shape_vector(shape), shape=shape, dtype=dtype, value=value)

    def slice(self, x: ir.Value, axis: int, start: int, length: int) -> ir.Value:
        """Return `length` entries of one axis from `start` on."""
        shape = dims(x)
        if shape[axis] == length:
            return x
        made = (*shape[:axis], length, *shape[axis + 1 :])
        return self.op("Slice", x, self.ints(start), self.ints(start + length), self.ints(axis), shape=made)

    def unbroadcast(self, g: ir.Value, wide: Dims, narrow: Dims) -> ir.Value:
        """Return the adjoint of an operand of shape `narrow` from `g`, which broadcasts to the result's shape
        `wide`."""
        if wide == narrow:
            return g
        axes = reduced_axes(wide, narrow)
        if axes is None:
            return self._unbroadcast_at_run_time(self.expand(g, wide), narrow)
        lead, missing = len(wide) - len(narrow), len(wide) - len(dims(g))
        have = (1,) * missing + dims(g)
        # Along axes on which g has size 1, the sum is a multiplication by the length.
        repeats = [wide[axis] for axis in axes if have[axis] == 1 and wide[axis] != 1]
        if repeats:
            g = self._by_count(self.mul, g, repeats)
        rest = [axis - missing for axis in axes if have[axis] != 1]
        g = self.sum(g, rest)
        target = tuple(have[i] if i not in axes else 1 for i in range(lead, len(wide)))
        return g if len(dims(g)) <= len(narrow) else self.reshape(g, target)

    def _unbroadcast_at_run_time(self, g: ir.Value, narrow: Dims) -> ir.Value:
        """Sum over the axes on which `narrow` has size 1 in the run."""
        rank, i64 = len(dims(g)), ir.DataType.INT64
        lead = rank - len(narrow)
        target = self.shape_vector((1,) * lead + narrow)
        ones = self.compare("Equal", target, self.ints(1))
        axes = self.op("NonZero", ones, shape=(1, f"axes.{self.fresh('unbroadcast')}"), dtype=i64)
        flat = self.op("Reshape", axes, self.ints(-1), shape=dims(axes)[1:])
        summed = self.op("ReduceSum", g, flat, shape=(1,) * lead + narrow, keepdims=1, noop_with_empty_axes=1)
        return self.op("Reshape", summed, self.shape_vector(narrow), shape=narrow) if lead else summed


_MOST_OF_HALF = 1 << 14
"""Largest number with a reciprocal that float16 holds to its full precision."""


def _is_held(count: int, dtype: ir.DataType) -> bool:
    """Return whether a type of 16 bits holds a number exactly, and its reciprocal to its full precision."""
    return count <= _MOST_OF_HALF and float(np.asarray(count).astype(dtype.numpy())) == count


def _is_normal(value: float, dtype: ir.DataType) -> bool:
    """Return whether a type holds a number to its full precision.

    >>> [_is_normal(value, ir.DataType.FLOAT16) for value in (1e5, 1e-5, 0.1)]
    [False, False, True]
    """
    limits = ml_dtypes.finfo(dtype.numpy())  # type: ignore[no-untyped-call]
    return bool(float(limits.smallest_normal) <= abs(value) <= float(limits.max))


def number(value: ir.Value) -> float | None:
    """Return the number in a scalar constant; None for any other value."""
    constant = value.const_value
    if constant is None or value.is_graph_input() or constant.size != 1 or len(constant.shape) != 0:
        return None
    return float(constant.numpy())


def dims_of_constant(value: ir.Value) -> tuple[int, ...]:
    assert value.const_value is not None
    return tuple(value.const_value.shape.numpy())
