"""Single nodes and small patterns replaced by specialised kernels: products, convolutions, pools, sums of rows, Pads.

A kernel's scratch memory must not raise what a step takes: a convolution whose scratch memory, with all that is live
where it runs, exceeds the step's peak and the scratch memory that ONNX Runtime no longer needs, stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import onnx

from onnx_remat.fuse import columns, convolution_forms, convolutions, depthwise, pads, pools, products, scatters
from onnx_remat.fuse.code import KINDS
from onnx_remat.fuse.convolution_forms import Found
from onnx_remat.fuse.kernel import FusedNode, Kernel, Replacement
from onnx_remat.fuse.live import live_bytes
from onnx_remat.fuse.ordered import OrderedStep, Runs
from onnx_remat.fuse.shim import DEVICE_OP, DOMAIN, OP
from onnx_remat.ir.shapes import Tensor


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
    every = convolution_forms.find(ordered)
    here = depthwise.find(every)
    taken = {place for each in here for place in each.members}
    return here, convolutions.find(each for each in every if taken.isdisjoint(each.members))


def candidates(ordered: OrderedStep) -> list[Replacement]:
    """Return the nodes that such kernels can replace; of those that share nodes, the first ones are preferred.

    On a device ONNX Runtime's own kernels call libraries, so that only Pads and Concats of slices are replaced.
    """
    if ordered.device:
        return [*pads.find(ordered), *columns.find(ordered)]
    gradients, others = convolved(ordered)
    found = [_replacement(each, "depthwise weights", depthwise.kernel_of(each, ordered)) for each in gradients]
    for each in others if ordered.convolutions else ():
        kind = f"convolution, {each.convolution.kind}"
        found.append(_replacement(each, kind, convolutions.kernel_of(each, ordered)))
    found += [*scatters.find(ordered), *pools.find(ordered)]
    return [*found, *products.find(ordered)] if ordered.products else found


def _replacement(found: Found, kind: str, kernel: Kernel) -> Replacement:
    return Replacement(found.place, found.members, found.reads, (found.makes,), kind, kernel)


def replaced(ordered: OrderedStep, secret: int) -> Replaced:
    """Replace nodes that such kernels compute faster; new nodes name their kernels by `secret` and handle."""
    found = candidates(ordered)
    peak = int(live_bytes(ordered).max(initial=0)) if any(each.scratch_outputs for each in found) else 0
    while True:
        made = _with(ordered, found, secret)
        if not made.scratch:
            return made
        gone = ordered.workspace(range(len(ordered.steps)))
        gone -= ordered.workspace([place for place in made.places if place >= 0])
        tall = {
            step.writes[0]
            for step, nbytes in zip(made.ordered.steps, live_bytes(made.ordered), strict=True)
            if step.writes and step.writes[-1] in made.scratch and nbytes > peak + gone
        }
        if not tall:
            return made
        found = [each for each in found if not (each.scratch_outputs and each.makes[0] in tall)]


def _in_order(nodes: Sequence[FusedNode]) -> list[FusedNode]:
    """Return nodes in their order, but each behind those that make what it reads."""
    found: list[FusedNode] = []
    left = list(nodes)
    while left:
        made = {name for node in left for name in node.writes}
        found.append(next(node for node in left if made.isdisjoint(node.reads)))
        left.remove(found[-1])
    return found


def _with(ordered: OrderedStep, found: Iterable[Replacement], secret: int) -> Replaced:
    kernels: list[Kernel] = []
    new: dict[int, list[FusedNode]] = {}
    scratch: dict[str, Tensor] = {}
    gone: set[int] = set()
    op = DEVICE_OP if ordered.device else OP
    for each in found:
        if not gone.isdisjoint(each.members):
            continue
        gone.update(each.members)
        makes = list(each.makes)
        for dtype, shape in each.scratch_outputs:
            name = f"{makes[0]}/scratch"
            while name in ordered.tensors or name in scratch:
                name += "/scratch"
            scratch[name] = Tensor(dtype, shape, KINDS[dtype].nbytes * prod(shape), shape)
            makes.append(name)
        handle = len(kernels)
        name = f"kernel {handle}: {each.kind}"
        node = onnx.helper.make_node(op, each.reads, makes, name, domain=DOMAIN, secret=secret, handle=handle)
        new.setdefault(each.place, []).append(FusedNode(node, each.members, each.plain))
        kernels.append(each.kernel.reading(ordered.tensors[name] for name in each.reads))
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
        if isinstance(step, FusedNode):
            return any(step.node.input[slot] == old for slot in step.plain)
        return ordered.overwrites(places[at], made, old)

    def workspace(at: Sequence[int]) -> int:
        return ordered.workspace([places[i] for i in at if places[i] >= 0])

    tensors = {**ordered.tensors, **scratch}
    counted = {**ordered.counted, **{name: tensor.nbytes for name, tensor in scratch.items()}}
    made = replace(ordered, steps=steps, tensors=tensors, counted=counted, overwrites=overwrites, workspace=workspace)
    return Replaced(made, tuple(places), tuple(kernels), scratch)
