"""A step as fusion sees it: nodes in execution order, values in the slab, and who makes, reads and shares them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import onnx

from onnx_remat.fuse.ops import VIEWS
from onnx_remat.ir.opsets import is_op
from onnx_remat.ir.shapes import Tensor


class Runs(Protocol):
    """A node as it will run, see `session.lean_graph.LeanNode`."""

    @property
    def node(self) -> onnx.NodeProto: ...

    @property
    def captured(self) -> tuple[str, ...]: ...

    @property
    def reads(self) -> tuple[str, ...]: ...

    @property
    def writes(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, eq=False)
class OrderedStep:
    """A step's nodes in execution order, and the values in its slab.

    Attributes
    ----------
    steps : sequence of Runs
        In execution order.
    tensors : mapping of str to Tensor
    outputs : collection of str
        Graph outputs.
    root : mapping of str to str
        Value in whose memory each view lies; other values are absent.
    counted : mapping of str to int
        Bytes of each value in the slab.
    apart, slack : int
        Size in bytes below which values lie apart from all others, so that each of the two has a peak, and bytes by
        which groups may raise that of small values.
    renewed : mapping of str to str
        Input in whose memory an output lies.
    constants : mapping of str to float
        Values known to be a single number.
    overwrites : callable
        Whether the node at a place may write one value over another that it reads.
    integers : mapping of str to tuple of int
        Values known to be a vector of integers.
    device : bool
        Whether kernels run on a CUDA device, see `cuda`.
    on_host : frozenset of str
        Values in host memory, although the step runs on a device.
    products, convolutions : bool
        Whether large matrix products, and convolutions, become kernels, see `products` and `convolutions`.
    maxima : bool
        Whether MaxPool becomes a kernel, see `pools`.
    workspace : callable
        Bytes of scratch memory of ONNX Runtime for the nodes at some places.
    """

    steps: Sequence[Runs]
    tensors: Mapping[str, Tensor]
    outputs: Collection[str]
    root: Mapping[str, str]
    counted: Mapping[str, int]
    renewed: Mapping[str, str]
    constants: Mapping[str, float]
    overwrites: Callable[[int, str, str], bool]
    integers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    device: bool = False
    on_host: frozenset[str] = frozenset()
    products: bool = False
    convolutions: bool = False
    maxima: bool = True
    workspace: Callable[[Sequence[int]], int] = lambda places: 0
    apart: int = 0
    slack: int = 0

    def knows_arguments(self, node: onnx.NodeProto) -> bool:
        """Whether all inputs of a node but the first are known vectors of integers.

        Where they are computed or fed, the shape of the result is only what the model states.
        """
        return all(name in self.integers for name in node.input[1:] if name)

    @cached_property
    def uses(self) -> Uses:
        """Which nodes make and read each value."""
        return Uses(self)


def views(ordered: OrderedStep) -> frozenset[str]:
    """Return the values that are others in another known shape; any other in foreign memory may be written there."""
    found: set[str] = set()
    for step in ordered.steps:
        if is_op(step.node, *VIEWS) and step.node.output[0] in ordered.root and ordered.knows_arguments(step.node):
            viewed = step.node.input[0]
            if viewed not in ordered.root or viewed in found:
                found.add(step.node.output[0])
    return frozenset(found)


class Uses:
    """Which nodes make and read each value of a step, and which values lie in memory of their own.

    Views count as the value in whose memory they lie, not as readers of it.
    """

    def __init__(self, ordered: OrderedStep) -> None:
        self.ordered = ordered
        self.viewed = views(ordered)
        self.shared = {owner for name, owner in ordered.root.items() if name not in self.viewed}
        self.maker = {name: i for i, step in enumerate(ordered.steps) for name in step.writes}
        self.users: defaultdict[str, list[int]] = defaultdict(list)
        for i, step in enumerate(ordered.steps):
            if not self.is_view(step):
                for name in dict.fromkeys(self.root(name) for name in step.reads):
                    self.users[name].append(i)
        self.kept = frozenset(self.root(name) for name in ordered.outputs)

    def root(self, name: str) -> str:
        """Return the value in whose memory one lies."""
        return self.ordered.root.get(name, name)

    def is_view(self, step: Runs) -> bool:
        """Whether a node only makes views."""
        return bool(step.writes) and all(name in self.viewed for name in step.writes)

    def is_own(self, name: str) -> bool:
        """Whether no other node writes into a value's memory."""
        return (name not in self.ordered.root or name in self.viewed) and self.root(name) not in self.shared

    def only_for(self, name: str, place: int) -> bool:
        """Whether only the node at a place reads a value."""
        return self.users[self.root(name)] == [place] and self.root(name) not in self.kept

    def made_by(self, name: str, op: str) -> int:
        """Return the place of the node with this operator that makes a value, -1 if there is none."""
        place = self.maker.get(self.root(name), -1)
        return place if place >= 0 and is_op(self.ordered.steps[place].node, op) else -1
