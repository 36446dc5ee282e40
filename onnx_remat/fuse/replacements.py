"""Single nodes and small patterns replaced by specialised kernels: products, convolutions, pools, sums of rows, Pads.

A kernel's scratch memory must not raise what a step takes: a convolution whose scratch memory, with all that is live
where it runs, exceeds the step's peak and the scratch memory that ONNX Runtime no longer needs, stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import onnx

from onnx_remat.fuse import convolutions, depthwise, pads, pools, products, scatters
from onnx_remat.fuse.convolution_forms import Found
from onnx_remat.fuse.groups import live_bytes
from onnx_remat.fuse.kernel import Kernel
from onnx_remat.fuse.ordered import OrderedStep, Runs
from onnx_remat.fuse.shim import DEVICE_OP, DOMAIN, OP
from onnx_remat.ir.shapes import Tensor


@dataclass(frozen=True)
class LibraryNode:
    """A node that calls a library, or is one of `pools` or `scatters`.

    Attributes
    ----------
    node : onnx.NodeProto
    members : tuple of int
        Places of the nodes that it replaces.
    plain : frozenset of int
        Input slots that its output may overwrite.
    """

    node: onnx.NodeProto
    members: tuple[int, ...]
    plain: frozenset[int] = frozenset()
    captured: tuple[str, ...] = ()

    @cached_property
    def reads(self) -> tuple[str, ...]:
        return tuple(self.node.input)

    @cached_property
    def writes(self) -> tuple[str, ...]:
        return tuple(self.node.output)


@dataclass(frozen=True, slots=True)
class Replaced:
    """A step with such nodes.

    Attributes
    ----------
    ordered : OrderedStep
    places : tuple of int
        For each of its nodes the place that it had before, -1 for a new one.
    kernels : tuple of Kernel
        Indexed by the new nodes' handles.
    scratch : mapping of str to Tensor
        Values that only these kernels use, while they run.
    """

    ordered: OrderedStep
    places: tuple[int, ...]
    kernels: tuple[Kernel, ...]
    scratch: Mapping[str, Tensor]


def convolved(ordered: OrderedStep) -> tuple[list[Found], list[Found]]:
    """Return the gradients that `depthwise` computes, and the other convolutions that oneDNN computes faster."""
    here = depthwise.find(ordered)
    taken = {place for each in here for place in each.members}
    return here, [each for each in convolutions.find(ordered) if taken.isdisjoint(each.members)]


def replaced(ordered: OrderedStep, secret: int) -> Replaced:
    """Replace nodes that libraries compute faster; new nodes name their kernels by `secret` and handle.

    On a device ONNX Runtime's own kernels call libraries, so that only Pads are replaced.
    """
    if ordered.device:
        return _with(ordered, [], [], secret)
    gradients, found = convolved(ordered) if ordered.convolutions else (depthwise.find(ordered), [])
    peak = int(live_bytes(ordered).max(initial=0)) if found else 0
    before = ordered.workspace(range(len(ordered.steps)))
    while True:
        made = _with(ordered, gradients, found, secret)
        left = ordered.workspace([place for place in made.places if place >= 0])
        live = live_bytes(made.ordered) if found else ()
        tall = {
            step.writes[0]
            for step, nbytes in zip(made.ordered.steps, live, strict=False)
            if step.writes and step.writes[-1] in made.scratch and nbytes > peak + before - left
        }
        if not tall:
            return made
        found = [each for each in found if each.makes not in tall]


def _in_order(nodes: Sequence[LibraryNode]) -> list[LibraryNode]:
    """Return nodes in their order, but each behind those that make what it reads."""
    found: list[LibraryNode] = []
    left = list(nodes)
    while left:
        made = {name for node in left for name in node.writes}
        found.append(next(node for node in left if made.isdisjoint(node.reads)))
        left.remove(found[-1])
    return found


def _with(ordered: OrderedStep, gradients: Sequence[Found], found: Sequence[Found], secret: int) -> Replaced:
    kernels: list[Kernel] = []
    new: dict[int, list[LibraryNode]] = {}
    scratch: dict[str, Tensor] = {}

    def add(
        place: int, kernel: Kernel, kind: str, reads: Sequence[str], makes: Sequence[str], members: tuple[int, ...],
        *plain: int,
    ) -> None:  # fmt: skip
        handle = len(kernels)
        name = f"kernel {handle}: {kind}"
        op = DEVICE_OP if ordered.device else OP
        node = onnx.helper.make_node(op, reads, makes, name, domain=DOMAIN, secret=secret, handle=handle)
        new.setdefault(place, []).append(LibraryNode(node, members, frozenset(plain)))
        kernels.append(kernel)

    gone = {place for each in (*gradients, *found) for place in each.members}
    for each in gradients:
        kernel = depthwise.kernel_of(each, ordered)
        add(each.place, kernel, "depthwise weights", each.reads, (each.makes,), each.members)
    for each in found:
        kernel = convolutions.kernel_of(each, ordered)
        dtype, shape = kernel.outputs[1]
        name = f"{each.makes}/scratch"
        while name in ordered.tensors or name in scratch:
            name += "/scratch"
        scratch[name] = Tensor(dtype, shape, 4 * prod(shape), shape)
        add(each.place, kernel, f"convolution, {each.convolution.kind}", each.reads, (each.makes, name), each.members)
    for pad in pads.find(ordered) if ordered.device else ():
        add(pad.place, pads.kernel_of(pad), "Pad", (pad.reads,), (pad.makes,), (pad.place,))
        gone.add(pad.place)
    for rows in () if ordered.device else scatters.find(ordered):
        if gone.isdisjoint(rows.members):
            add(rows.place, scatters.kernel_of(rows), "sum of rows", rows.reads, (rows.makes,), rows.members, 0)
            gone.update(rows.members)
    maxima, sums = ([], []) if ordered.device else pools.find(ordered)
    for pool in maxima:
        add(pool.place, pools.kernel_of_pool(pool), "MaxPool", (pool.reads,), pool.makes, (pool.place,))
        gone.add(pool.place)
    for total in sums:
        if gone.isdisjoint(total.members):
            add(total.place, pools.kernel_of_sum(total), "sum", total.reads, (total.makes,), total.members)
            gone.update(total.members)
    for i, step in enumerate(ordered.steps):
        product = products.product_of(step.node, ordered.tensors) if ordered.products and i not in gone else None
        if product is not None:
            reads = [name for name in step.node.input if name]
            kind = f"product, {step.node.op_type}"
            add(i, products.kernel_of(product), kind, reads, step.node.output, (i,))
            gone.add(i)
    steps: list[Runs] = []
    places: list[int] = []
    for i, step in enumerate(ordered.steps):
        if i not in gone:
            steps.append(step)
            places.append(i)
        steps += _in_order(new.get(i, []))
        places += [-1] * len(new.get(i, []))

    def overwrites(at: int, made: str, old: str) -> bool:
        step = steps[at]
        if isinstance(step, LibraryNode):
            return any(step.node.input[slot] == old for slot in step.plain)
        return ordered.overwrites(places[at], made, old)

    def workspace(at: Sequence[int]) -> int:
        return ordered.workspace([places[i] for i in at if places[i] >= 0])

    tensors = {**ordered.tensors, **scratch}
    counted = {**ordered.counted, **{name: tensor.nbytes for name, tensor in scratch.items()}}
    made = replace(ordered, steps=steps, tensors=tensors, counted=counted, overwrites=overwrites, workspace=workspace)
    return Replaced(made, tuple(places), tuple(kernels), scratch)
