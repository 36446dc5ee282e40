"""Walk a jaxpr and append ONNX nodes, with one small lowering for each JAX primitive.

A `Tensor` represents a JAX array: an ONNX value whose axes have the array's axis numbers as labels. Transposes,
broadcasts and unit axes are therefore free until an operator needs the axes in a certain order, and channels-last
models run channels-first convolutions without transposes in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
from jax.extend import core

from onnx_remat.errors import ConversionError

from ..emit import Attribute, Emitter, Phase
from . import kernels

OPTIMIZER_SCOPE = "onnx_remat.optimizer"
"""Name of the `jax.named_scope` around the optimizer's part of a step."""


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """An ONNX value with labelled axes that represents a JAX array.

    Attributes
    ----------
    value : onnx_ir.Value
    axes : tuple of int
        Axis j of the value is axis ``axes[j]`` of the array. Along the array's other axes all elements are equal;
        likewise where an axis of the value has size 1 and the array's has not.
    shape : tuple of int
        Shape of the array.
    dtype : numpy.dtype
    """

    value: ir.Value
    axes: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def physical(self) -> tuple[int, ...]:
        """The shape of the value."""
        return shape_of(self.value)

    @property
    def constant(self) -> np.ndarray | None:
        """The value as an array if it is a constant, else None."""
        return None if self.value.const_value is None else self.value.const_value.numpy()

    def relabelled(self, axes: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return the same value as another array."""
        return Tensor(self.value, tuple(int(a) for a in axes), tuple(int(n) for n in shape), self.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """Arrays of equal shape stacked along a new first axis, but not yet concatenated."""

    items: tuple[Tensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.items), *self.items[0].shape)


Array: TypeAlias = Tensor | Stack
Lowered: TypeAlias = Array | Sequence[Array]
Rule: TypeAlias = Callable[..., Lowered]

_RULES: dict[str, Rule] = {}
TAKES_STACKS: set[str] = set()
"""Primitives whose lowerings take `Stack` operands; all others receive tensors."""


def lowering(*primitives: str, stacks: bool = False) -> Callable[[Rule], Rule]:
    """Register ``rule(low, eqn, *operands)``, which returns one array or all results, as the lowering of primitives."""

    def register(rule: Rule) -> Rule:
        for primitive in primitives:
            _RULES[primitive] = rule
            if stacks:
                TAKES_STACKS.add(primitive)
        return rule

    return register


def primitives() -> tuple[str, ...]:
    """Return the names of all primitives that have a lowering."""
    return tuple(sorted(_RULES))


def _readers(jaxpr: core.Jaxpr) -> dict[core.Var, list[core.JaxprEqn | None]]:
    """Return the equations that read each variable; None stands for the jaxpr's results."""
    readers: dict[core.Var, list[core.JaxprEqn | None]] = {}
    for reader, atoms in [*((eqn, eqn.invars) for eqn in jaxpr.eqns), (None, jaxpr.outvars)]:
        for atom in atoms:
            if isinstance(atom, core.Var):
                readers.setdefault(atom, []).append(reader)
    return readers


def shape_of(value: ir.Value) -> tuple[int, ...]:
    assert value.shape is not None, value.name
    return tuple(int(n) for n in value.shape.numpy())


def dtype_of(value: ir.Value) -> np.dtype[Any]:
    assert value.dtype is not None, value.name
    return value.dtype.numpy()


class Lowering:
    """The writer for lowerings: typed nodes, constants, and tensors with axes in the order that an operator needs.

    Parameters
    ----------
    emit : Emitter
        The emitter of the graph.
    unroll : int
        Largest number of steps of a scan that is unrolled.
    halves : bool
        Keep half precision that the CPU has no kernels for.
    outer : Lowering, optional
        In the body of a control-flow operator, the lowering of the enclosing graph, whose values may be read.

    Attributes
    ----------
    counts : dict
        Parts of large counts for random numbers, of which they are the sum; labels are axes of the value.
    outside : dict
        What happened at indices that may lie outside an array: a gather stops the run, a scatter drops what it writes.
        A body does what the graph around it did, but nobody knows whether the body runs.
    """

    def __init__(self, emit: Emitter, unroll: int, halves: bool = False, outer: Lowering | None = None) -> None:
        self.emit = emit
        self.unroll = unroll
        self.halves = halves
        self.outer = outer
        self.reversed: dict[ir.Value, tuple[ir.Value, frozenset[int]]] = {} if outer is None else outer.reversed
        self.counts: dict[ir.Value, tuple[Tensor, ...]] = {} if outer is None else outer.counts
        self.outside: dict[tuple[object, ...], str] = {} if outer is None else dict(outer.outside)
        self._made: dict[tuple[object, ...], tuple[ir.Value, ...]] = {}
        self._readers: dict[core.Var, list[core.JaxprEqn | None]] = {}

    # Walking

    def run(self, jaxpr: core.Jaxpr, constants: Sequence[Array], operands: Sequence[Array]) -> list[Array]:
        """Lower a jaxpr applied to operands, and return its results.

        Raises
        ------
        ConversionError
            A primitive has no lowering; the message names it.
        """
        env: dict[core.Var, Array] = dict(zip(jaxpr.constvars, constants, strict=True))
        env.update(zip(jaxpr.invars, operands, strict=True))
        around, self._readers = self._readers, _readers(jaxpr)
        for eqn in jaxpr.eqns:
            with self.emit.labelled(self._phase(eqn)):
                results = self._apply(eqn, [self._read(env, atom) for atom in eqn.invars])
            env.update(zip(eqn.outvars, results, strict=True))
        self._readers = around
        return [self._read(env, atom) for atom in jaxpr.outvars]

    def run_closed(self, closed: core.ClosedJaxpr, operands: Sequence[Array]) -> list[Array]:
        """Lower a closed jaxpr applied to operands."""
        return self.run(closed.jaxpr, [self.array(value) for value in closed.consts], operands)

    def only_reader(self, var: object) -> core.JaxprEqn | None:
        """Return the only equation that reads a variable of the current jaxpr; None if several do, or it is a
        result."""
        readers = self._readers.get(var, [])  # type: ignore[call-overload]
        return readers[0] if len(readers) == 1 else None

    def _read(self, env: dict[core.Var, Array], atom: object) -> Array:
        if isinstance(atom, core.Literal):
            aval: Any = atom.aval
            return self.array(np.asarray(atom.val, aval.dtype))
        return env[atom]  # type: ignore[index]

    def _phase(self, eqn: core.JaxprEqn) -> Phase:
        scope = str(eqn.source_info.name_stack)
        if OPTIMIZER_SCOPE in scope:
            return "optimizer"
        return "backward" if "transpose(" in scope and self.emit.phase == "forward" else self.emit.phase

    def _apply(self, eqn: core.JaxprEqn, operands: Sequence[Array]) -> list[Array]:
        name = eqn.primitive.name
        if name not in _RULES:
            where = str(eqn.source_info.name_stack)
            raise ConversionError(
                f"JAX primitive {name!r} has no lowering to ONNX" + (f" (in {where})" if where else "") + ": write the "
                "model without it, or register one with onnx_remat.converters.jax.lower.lowering"
            )
        if name not in TAKES_STACKS:
            operands = [self.tensor(operand) for operand in operands]
        made = _RULES[name](self, eqn, *operands)
        results = [made] if isinstance(made, Tensor | Stack) else list(made)
        for result, var in zip(results, eqn.outvars, strict=True):
            aval: Any = var.aval
            assert result.shape == tuple(aval.shape), (name, result.shape, aval)
        return results

    # Constants and arrays

    def array(self, value: object) -> Tensor:
        """Return a constant; one with equal elements is stored as a single element."""
        array = kernels.packed(value)
        shape = array.shape
        if array.size and (array == array.flat[0]).all():
            return Tensor(self.emit.constant(array.flat[0]), (), shape, array.dtype)
        return Tensor(self.emit.constant(array), tuple(range(array.ndim)), shape, array.dtype)

    def scalar(self, value: float, like: Tensor) -> Tensor:
        """Return a scalar constant with the dtype of `like`."""
        return self.array(np.asarray(value, like.dtype))

    def ints(self, values: Sequence[int]) -> ir.Value:
        """Return a constant vector of int64."""
        return self.emit.constant(np.asarray(values, np.int64))

    def tensor(self, array: Array) -> Tensor:
        """Return the array as one value; a stack is concatenated."""
        if isinstance(array, Tensor):
            return array
        items = [self.reshape(self.full(item), (1, *item.shape)) for item in array.items]
        shape = array.shape
        joined = items[0] if len(items) == 1 else self.op("Concat", *items, shape=shape, axis=0)
        return Tensor(joined, tuple(range(len(shape))), shape, array.items[0].dtype)

    # Nodes

    def op(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        shape: Sequence[int],
        dtype: Any = None,
        **attributes: Attribute,
    ) -> ir.Value:
        """Append a node with one output, by default of the first input's dtype; equal nodes are shared.

        The node computes in a wider dtype if ONNX Runtime's CPU provider has no kernel for this one. If all inputs are
        small constants, the result is a constant.
        """
        first = kernels.deciding(op_type)
        given = inputs[first]
        assert given is not None
        narrow, dtype = dtype_of(given), np.dtype(dtype or dtype_of(given))
        wide = self.wider(op_type, narrow, attributes.get("reduction", "none"))
        if wide is not None:
            inputs = tuple(
                v if v is None or i < first or dtype_of(v) != narrow else self.cast(v, wide)
                for i, v in enumerate(inputs)
            )
            made = self.op(op_type, *inputs, shape=shape, dtype=wide if dtype == narrow else dtype, **attributes)
            return self.cast(made, dtype)
        folded = kernels.fold(op_type, inputs, attributes, shape)
        if folded is not None:
            return self.emit.constant(np.asarray(folded, dtype))
        (made,) = self.nodes(op_type, *inputs, results=[(tuple(shape), dtype)], **attributes)
        return made

    def wider(self, op_type: str, dtype: np.dtype[Any], reduction: object = "none") -> np.dtype[Any] | None:
        """Return the dtype to compute in where the CPU has no kernel for `dtype`, else None; see `kernels.wider`."""
        kept = self.halves and dtype in (np.float16, kernels.BFLOAT16)
        return None if kept else kernels.wider(op_type, dtype, reduction)

    def nodes(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        results: Sequence[tuple[Sequence[int], Any]],
        **attributes: Attribute,
    ) -> tuple[ir.Value, ...]:
        """Append a node with outputs of these shapes and dtypes; equal nodes without bodies are shared."""
        key: tuple[object, ...] | None = None
        if not any(isinstance(v, ir.Graph) for v in attributes.values()):
            plain = tuple((k, str(v)) for k, v in sorted(attributes.items()))
            key = (op_type, tuple(id(value) for value in inputs), plain, len(results))
            if (known := self._lookup(key)) is not None:
                return known
        made = self.emit.many(op_type, *inputs, outputs=len(results), **attributes)  # type: ignore[arg-type]
        for value, (shape, dtype) in zip(made, results, strict=True):
            value.shape = ir.Shape([int(n) for n in shape])
            value.type = ir.TensorType(ir.DataType.from_numpy(np.dtype(dtype)))
        if key is not None:
            self._made[key] = made
        return made

    def _lookup(self, key: tuple[object, ...]) -> tuple[ir.Value, ...] | None:
        known = self._made.get(key)
        return known if known is not None or self.outer is None else self.outer._lookup(key)

    def cast(self, value: ir.Value, dtype: Any) -> ir.Value:
        """Return `value` in another dtype."""
        if dtype_of(value) == np.dtype(dtype):
            return value
        producer = value.producer()
        if np.dtype(dtype) == np.bool_ and producer is not None and producer.op_type == "Cast":
            (source,) = producer.inputs
            if source is not None and source.dtype == ir.DataType.BOOL:
                return source
        to = int(ir.DataType.from_numpy(np.dtype(dtype)))
        return self.op("Cast", value, shape=shape_of(value), dtype=dtype, to=to)

    def reshape(self, value: ir.Value, shape: Sequence[int]) -> ir.Value:
        """Return `value` in another shape with as many elements."""
        shape = tuple(int(n) for n in shape)
        if shape_of(value) == shape:
            return value
        producer = value.producer()
        if producer is not None and producer.op_type == "Reshape":
            assert producer.inputs[0] is not None
            return self.reshape(producer.inputs[0], shape)
        return self.op("Reshape", value, self.ints(shape), shape=shape, allowzero=int(0 in shape))

    def transpose(self, value: ir.Value, order: Sequence[int]) -> ir.Value:
        """Return `value` with axis ``order[j]`` as axis j, by a Reshape if only unit axes move."""
        order = tuple(order)
        old = shape_of(value)
        shape = tuple(old[j] for j in order)
        moving = [j for j in order if old[j] != 1]
        if moving == sorted(moving):
            return self.reshape(value, shape)
        producer = value.producer()
        if producer is not None and producer.op_type == "Transpose":
            first = producer.attributes["perm"].as_ints()
            assert producer.inputs[0] is not None
            return self.transpose(producer.inputs[0], [first[j] for j in order])
        return self.op("Transpose", value, shape=shape, perm=list(order))

    # Arranging

    def arranged(self, x: Tensor, order: Sequence[int]) -> ir.Value:
        """Return the value with one axis for each entry of `order`, of size 1 where all elements are equal."""
        present = [axis for axis in order if axis in x.axes]
        value = self.transpose(x.value, [x.axes.index(axis) for axis in present])
        sizes = dict(zip(present, shape_of(value), strict=True))
        return self.reshape(value, [sizes.get(axis, 1) for axis in order])

    def full(self, x: Tensor, order: Sequence[int] | None = None) -> ir.Value:
        """Return the value with exactly these axes of the array (by default all, in order), each in its full size."""
        order = tuple(range(len(x.shape)) if order is None else order)
        value, shape = self.arranged(x, order), tuple(x.shape[axis] for axis in order)
        return value if shape_of(value) == shape else self.op("Expand", value, self.ints(shape), shape=shape)

    def filled(self, x: Tensor, order: Sequence[int], after: ir.Value) -> ir.Value:
        """Return the value as `full` does, but compute a large constant of equal elements in the run, from integers
        `after`.

        ONNX Runtime would compute an Expand of constants when it loads the file, and keep the result for the whole
        session.
        """
        if x.axes or x.constant is None or prod(x.shape) <= kernels.FOLDED:
            return self.full(x, order)
        count, shape = prod(shape_of(after)), tuple(x.shape[axis] for axis in order)
        first = self.op("Gather", self.reshape(after, (count,)), self.emit.constant(np.int64(0)), shape=(), axis=0)
        zero = self.cast(self.op("Sub", first, first, shape=()), x.dtype)
        start = zero if x.constant == 0 else self.op("Add", zero, x.value, shape=())
        return self.op("Expand", start, self.ints(shape), shape=shape)

    def whole(self, x: Tensor) -> Tensor:
        """Return `x` with every axis in its full size; axes keep their order if all are present."""
        order = x.axes if sorted(x.axes) == list(range(len(x.shape))) else tuple(range(len(x.shape)))
        return Tensor(self.full(x, order), order, x.shape, x.dtype)

    def aligned(self, xs: Sequence[Tensor]) -> tuple[list[ir.Value], tuple[int, ...]]:
        """Return values that broadcast against each other, and the axes of an elementwise operator's result.

        The largest operand keeps its order of axes.
        """
        base = max(xs, key=lambda x: prod(x.physical))
        union = sorted({axis for x in xs for axis in x.axes})
        if list(base.axes) == sorted(base.axes):
            order = union
        else:
            order = [axis for axis in union if axis not in base.axes] + list(base.axes)
        return [self._broadcastable(x, order) for x in xs], tuple(order)

    def _broadcastable(self, x: Tensor, order: Sequence[int]) -> ir.Value:
        first = min((order.index(axis) for axis in x.axes), default=len(order))
        return self.arranged(x, order[first:])

    def elementwise(
        self, op_type: str, *xs: Tensor, shape: Sequence[int] | None = None, dtype: Any = None, **attributes: Attribute
    ) -> Tensor:
        """Append an elementwise operator on broadcast operands."""
        values, axes = self.aligned(xs)
        physical = np.broadcast_shapes(*(shape_of(value) for value in values))
        dtype = np.dtype(dtype or xs[0].dtype)
        made = self.op(op_type, *values, shape=physical, dtype=dtype, **attributes)
        shape = np.broadcast_shapes(*(x.shape for x in xs)) if shape is None else tuple(shape)
        return Tensor(made, axes, shape, dtype)

    # Control flow

    @contextmanager
    def body(self, name: str) -> Iterator[Lowering]:
        """Yield a lowering that writes into a new graph, for an attribute of a control-flow operator."""
        graph = ir.Graph([], [], nodes=[], name=name)
        yield Lowering(Emitter(graph, self.emit.phase, within=self.emit), self.unroll, self.halves, self)
