"""Memory facts about the kernels of one execution provider: one frozen record of tables per provider.

Every stage that depends on the provider takes the record (`registry.kernels_of` returns it by name), so that a new
provider is one new file of facts. Facts of ONNX's definition of an operator are in `ir.op_semantics`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import TypeAlias, cast

import numpy as np
import onnx

from onnx_remat.ir.opsets import canonical

OpKey: TypeAlias = tuple[str, str]
"""Domain (the standard one is ``""``) and name of an operator."""

Pairs: TypeAlias = tuple[tuple[int, int], ...]
"""``(input slot, output slot)`` pairs."""

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One kernel execution.

    Attributes
    ----------
    attributes : mapping
        The node's attributes as Python values.
    inputs, outputs : sequence of tuple of int or None
        Shapes by slot; None is an absent input.
    in_sizes, out_sizes : sequence of int
        Bytes of an element by slot, see `itemsize`.
    threads : int
        ``intra_op_num_threads`` in effect, at least 1.
    opset : int
        Version of the operator's domain.
    axes : tuple of int or None
        Axes of a reduction, if stated by value; otherwise None.
    """

    attributes: Mapping[str, object]
    inputs: Sequence[Shape | None]
    in_sizes: Sequence[int]
    outputs: Sequence[Shape | None]
    out_sizes: Sequence[int]
    threads: int
    opset: int = 20
    axes: tuple[int, ...] | None = None

    def ints(self, name: str, default: Sequence[int]) -> list[int]:
        """Return an integer-list attribute."""
        value = cast("Sequence[int]", self.attributes.get(name) or default)
        return [int(v) for v in value]

    def number(self, name: str, default: int) -> int:
        """Return an integer attribute."""
        return int(cast("int", self.attributes.get(name, default)))

    def text(self, name: str, default: str) -> str:
        """Return a string attribute."""
        value = self.attributes.get(name, default)
        return value.decode() if isinstance(value, bytes) else str(value)

    def has(self, slot: int) -> bool:
        """Whether the input is present."""
        return slot < len(self.inputs) and self.inputs[slot] is not None

    def input(self, slot: int) -> Shape:
        """Return the shape of an input that must be present."""
        shape = self.inputs[slot]
        if shape is None:
            raise ValueError(f"input {slot} has no known shape")
        return shape

    def output_bytes(self) -> int:
        """Return the bytes of the first output."""
        return numel(self.outputs[0]) * self.out_sizes[0]

    def input_bytes(self) -> int:
        """Return the bytes of all inputs."""
        return sum(numel(s) * size for s, size in zip(self.inputs, self.in_sizes, strict=True))


Rule: TypeAlias = Callable[[Call], int | tuple[int, ...]]
"""Bytes of the scratch buffers that a kernel has allocated at its peak; one figure if only their sum is known."""


@dataclass(frozen=True, slots=True, eq=False)
class Kernels:
    """Facts about one execution provider's kernels. Operators in no table alias nothing and take no workspace.

    Attributes
    ----------
    name : str
        Users' name of the provider: "cpu".
    execution_providers : tuple of str
        ONNX Runtime's names of the providers for a session, the preferred first.
    device : str
        Device of the provider's tensors, as ``OrtValue`` names it.
    threads : int
        Threads per op assumed for workspace: fixed, so that every machine writes the same file.
    alias : mapping of OpKey to Pairs
        Outputs that always share an input's buffer, except graph outputs: ONNX Runtime allocates these and copies.
    inplace : mapping of OpKey to Pairs
        Outputs that may reuse an input's buffer, in the order ONNX Runtime tries them, if the input dies there and
        shape and element size agree.
    not_inplace : frozenset of (OpKey, int)
        Exceptions to `inplace` by the element type (``onnx.TensorProto``) of the first input.
    workspace : mapping of OpKey to Rule
        Scratch memory of a kernel while it runs.
    asks_first : frozenset of OpKey
        Kernels that allocate workspace before their outputs; all others do so afterwards.
    by_malloc : frozenset of OpKey
        Kernels that take their workspace with malloc, outside the arena.
    host_inputs, host_outputs : mapping of OpKey to tuple of int
        Slots in host memory although the kernel runs on the device; empty if the device is the host.
    absorbs_transpose : frozenset of OpKey
        Operators into which ONNX Runtime merges a Transpose of the last two axes that they alone read.
    races : mapping of OpKey to str
        Kernels whose results depend on how threads interleave, and why.
    no_kernel : frozenset of OpKey
        Standard operators that are replaced by their definitions, as the provider has no kernel, or a slow one for some
        nodes: see `ir.expand`.
    device_types : mapping of OpKey to frozenset of int
        Element types (``onnx.TensorProto``) of the first input for which there is a kernel on the device; nodes of
        other types run on the host, and their tensors are copied. Operators not listed run on the device.
    device_until : mapping of OpKey to int
        Opset from which on there is no kernel on the device.
    not_on_device : callable
        Whether the device's kernel does not support a node's attributes.
    host_fusions : tuple of str
        ONNX Runtime's names of the optimisations for its host provider alone; empty for the host provider itself.
    device_fusions : tuple of str
        Those for the device's provider alone, which a query without the device does not show. A `Session` leaves them
        out: the nodes that they join are members of its fused kernels, and it runs what was planned.
    library_workspace : int
        Bytes allowed for a vendor library's workspace in a convolution, which is unknown without the device.
    off_stream : frozenset of OpKey
        Kernels that allocate workspace without the device's stream: an arena gives them no memory used on the stream.
    costs : str
        Default preset of `costs.PRESETS` for estimating seconds.
    """

    name: str
    execution_providers: tuple[str, ...]
    device: str
    threads: int
    alias: Mapping[OpKey, Pairs]
    inplace: Mapping[OpKey, Pairs]
    not_inplace: frozenset[tuple[OpKey, int]]
    workspace: Mapping[OpKey, Rule]
    asks_first: frozenset[OpKey]
    by_malloc: frozenset[OpKey]
    host_inputs: Mapping[OpKey, tuple[int, ...]]
    host_outputs: Mapping[OpKey, tuple[int, ...]]
    absorbs_transpose: frozenset[OpKey]
    races: Mapping[OpKey, str]
    no_kernel: frozenset[OpKey]
    device_types: Mapping[OpKey, frozenset[int]] = field(default_factory=dict)
    device_until: Mapping[OpKey, int] = field(default_factory=dict)
    not_on_device: Callable[[onnx.NodeProto], bool] = lambda _: False
    host_fusions: tuple[str, ...] = ()
    device_fusions: tuple[str, ...] = ()
    library_workspace: int = 0
    off_stream: frozenset[OpKey] = frozenset()
    costs: str = "cpu"

    def on_host(self, node: onnx.NodeProto, dtype: int, opset: int) -> bool:
        """Whether a node falls back to the host for lack of a device kernel, given its first input's element type."""
        op = key(node)
        types = self.device_types.get(op)
        missing = (types is not None and dtype not in types) or opset >= self.device_until.get(op, opset + 1)
        return missing or self.not_on_device(node)

    def host_slots(self, node: onnx.NodeProto) -> tuple[int, ...]:
        """Return the input slots that a node's kernel reads in host memory although it runs on the device."""
        return self.host_inputs.get(key(node), ())

    def aliases(self, node: onnx.NodeProto) -> Pairs:
        """Return the outputs of a node that share an input's buffer."""
        return self.alias.get(key(node), ())

    def may_inplace(self, node: onnx.NodeProto, dtype: int) -> Pairs:
        """Return the outputs of a node that may reuse an input's buffer, given its first input's element type."""
        return () if (key(node), dtype) in self.not_inplace else self.inplace.get(key(node), ())

    def blocks(self, op: OpKey, call: Call) -> tuple[int, ...]:
        """Return the bytes of each scratch buffer that a kernel has allocated at its peak.

        Alignment of a buffer (up to 256 bytes) is not added.
        """
        if (rule := self.workspace.get(op)) is None:
            return ()
        taken = rule(call)
        return tuple(size for size in ((taken,) if isinstance(taken, int) else taken) if size)


def key(node: onnx.NodeProto) -> OpKey:
    """Return a node's key in the tables."""
    return canonical(node.domain), node.op_type


def numel(shape: Shape | None) -> int:
    """Return the number of elements of a tensor, 0 for an absent one."""
    return 0 if shape is None else prod(shape)


@cache
def itemsize(dtype: int | None) -> int:
    """Return the bytes of an element (``onnx.TensorProto`` type), 0 for types without a fixed size."""
    if dtype in (None, onnx.TensorProto.UNDEFINED, onnx.TensorProto.STRING):
        return 0
    return int(np.dtype(onnx.helper.tensor_dtype_to_np_dtype(dtype)).itemsize)


def softmax_workspace(call: Call) -> tuple[int, ...]:
    """Return a transposed input and a transposed output, over any axis but the last; before opset 13 none."""
    rank = len(call.input(0))
    axis = call.number("axis", -1 if call.opset >= 13 else 1) % max(rank, 1)
    return () if call.opset < 13 or axis == rank - 1 else (call.output_bytes(),) * 2


def einsum_workspace(call: Call) -> int:
    """Return an upper bound from two operands on: transposed operands, the product, the product transposed.

    The kernel skips transposes it does not need; it takes between half and all of this.
    """
    if len(call.inputs) == 1:
        return call.output_bytes()
    return call.input_bytes() + 2 * call.output_bytes() * (len(call.inputs) - 1)
