"""What the kernels of one execution provider do with memory: one frozen record of tables per provider.

Every stage that depends on the provider takes the record (`registry.kernels_of` gives it by name), so that a new
provider is one new file of facts. What ONNX says of an operator, whoever executes it, stands in `ir.op_semantics`.
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
        Of a reduction, where they are stated by value; None where they are not, or there are none.
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
        """An integer-list attribute."""
        value = cast("Sequence[int]", self.attributes.get(name) or default)
        return [int(v) for v in value]

    def number(self, name: str, default: int) -> int:
        """An integer attribute."""
        return int(cast("int", self.attributes.get(name, default)))

    def text(self, name: str, default: str) -> str:
        """A string attribute."""
        value = self.attributes.get(name, default)
        return value.decode() if isinstance(value, bytes) else str(value)

    def has(self, slot: int) -> bool:
        """Is the input there?"""
        return slot < len(self.inputs) and self.inputs[slot] is not None

    def input(self, slot: int) -> Shape:
        """The shape of an input that must be there."""
        shape = self.inputs[slot]
        if shape is None:
            raise ValueError(f"input {slot} has no known shape")
        return shape

    def output_bytes(self) -> int:
        """Bytes of the first output."""
        return numel(self.outputs[0]) * self.out_sizes[0]

    def input_bytes(self) -> int:
        """Bytes of all inputs."""
        return sum(numel(s) * size for s, size in zip(self.inputs, self.in_sizes, strict=True))


Rule: TypeAlias = Callable[[Call], int | tuple[int, ...]]
"""Bytes of the scratch buffers that a kernel holds at its peak; one figure where only their sum is known."""


@dataclass(frozen=True, slots=True, eq=False)
class Kernels:
    """The facts about one execution provider's kernels. Operators in no table alias nothing and take no workspace.

    Attributes
    ----------
    name : str
        What users call the provider: "cpu".
    execution_providers : tuple of str
        ONNX Runtime's names, the preferred first, to make a session with.
    device : str
        Where the provider's tensors lie, as ``OrtValue`` names it.
    threads : int
        Threads per op that workspace is computed for: a fixed figure, so that every machine writes the same file.
    alias : mapping of OpKey to Pairs
        Outputs that always share an input's buffer. A node output that is a graph output is the exception: ONNX
        Runtime allocates it and copies.
    inplace : mapping of OpKey to Pairs
        Outputs that may take an input's buffer, in the order ONNX Runtime tries them, where nothing else needs that
        buffer any more, and shape and element size agree.
    not_inplace : frozenset of (OpKey, int)
        Exceptions to `inplace` by the element type (``onnx.TensorProto``) of the first input.
    workspace : mapping of OpKey to Rule
        Scratch memory of a kernel while it runs.
    asks_first : frozenset of OpKey
        Kernels that ask for workspace before they ask for their outputs; all others do so after.
    by_malloc : frozenset of OpKey
        Kernels that take their workspace behind the allocator's back, so that no arena holds it.
    host_inputs, host_outputs : mapping of OpKey to tuple of int
        Slots that lie in host memory although the kernel runs on the device; empty where the device is the host.
    absorbs_transpose : frozenset of OpKey
        Operators that a Transpose of the last two axes, read by nothing else, becomes a part of.
    races : mapping of OpKey to str
        Kernels whose results depend on how threads interleave, and why.
    no_kernel : frozenset of OpKey
        Standard operators that are replaced by their definitions, since the provider has no kernel: see `ir.expand`.
    device_types : mapping of OpKey to frozenset of int
        Element types (``onnx.TensorProto``) of the first input for which there is a kernel on the device; nodes of
        others run on the host, and their tensors are copied. Operators that are not listed run on the device.
    device_until : mapping of OpKey to int
        Opset from which on there is no kernel on the device.
    not_on_device : callable
        Whether the device's kernel cannot do this node, for its attributes.
    host_fusions : tuple of str
        ONNX Runtime's names of the optimisations that it makes for its host provider alone; empty where that is this.
    library_workspace : int
        Bytes allowed for what a vendor's library takes in a convolution: what cannot be known without the device.
    off_stream : frozenset of OpKey
        Kernels that ask for workspace without the device's stream: an arena gives them nothing that this has used.
    costs : str
        The preset of `costs.PRESETS` that seconds are estimated with by default.
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
    library_workspace: int = 0
    off_stream: frozenset[OpKey] = frozenset()
    costs: str = "cpu"

    def on_host(self, node: onnx.NodeProto, dtype: int, opset: int) -> bool:
        """Whether a node runs on the host though it was to run on the device, given its first input's element type."""
        op = key(node)
        types = self.device_types.get(op)
        missing = (types is not None and dtype not in types) or opset >= self.device_until.get(op, opset + 1)
        return missing or self.not_on_device(node)

    def host_slots(self, node: onnx.NodeProto) -> tuple[int, ...]:
        """Input slots of a node that its kernel reads in host memory although it runs on the device."""
        return self.host_inputs.get(key(node), ())

    def aliases(self, node: onnx.NodeProto) -> Pairs:
        """Outputs of a node that share an input's buffer."""
        return self.alias.get(key(node), ())

    def may_inplace(self, node: onnx.NodeProto, dtype: int) -> Pairs:
        """Outputs of a node that may take an input's buffer, given the element type of its first input."""
        return () if (key(node), dtype) in self.not_inplace else self.inplace.get(key(node), ())

    def blocks(self, op: OpKey, call: Call) -> tuple[int, ...]:
        """Bytes of each scratch buffer that a kernel holds at its peak.

        Alignment of a buffer (up to 256 bytes) is not added.
        """
        if (rule := self.workspace.get(op)) is None:
            return ()
        taken = rule(call)
        return tuple(size for size in ((taken,) if isinstance(taken, int) else taken) if size)


def key(node: onnx.NodeProto) -> OpKey:
    """What the tables look a node up by."""
    return canonical(node.domain), node.op_type


def numel(shape: Shape | None) -> int:
    """Elements of a tensor, 0 of an absent one."""
    return 0 if shape is None else prod(shape)


@cache
def itemsize(dtype: int | None) -> int:
    """Bytes of an element (``onnx.TensorProto`` type), 0 of what has no fixed size."""
    if dtype in (None, onnx.TensorProto.UNDEFINED, onnx.TensorProto.STRING):
        return 0
    return int(np.dtype(onnx.helper.tensor_dtype_to_np_dtype(dtype)).itemsize)
