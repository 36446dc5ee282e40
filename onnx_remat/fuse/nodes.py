"""Steps whose groups are replaced by nodes that name kernels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import onnx

from onnx_remat.fuse import groups, libraries, recompute
from onnx_remat.fuse.groups import Group, Schedule
from onnx_remat.fuse.ir import Kernel, kernel_of
from onnx_remat.fuse.libraries import LibraryNode
from onnx_remat.fuse.library import DOMAIN, OP
from onnx_remat.ir.shapes import Tensor


@dataclass(frozen=True, slots=True)
class FusedNode:
    """A node that replaces a group.

    Attributes
    ----------
    node : onnx.NodeProto
    members : tuple of int
        Places of the nodes that it replaces.
    plain : frozenset of int
        Input slots that the kernel reads elementwise only: an output may overwrite such an input.
    """

    node: onnx.NodeProto
    members: tuple[int, ...]
    plain: frozenset[int]


@dataclass(frozen=True, slots=True)
class Fusion:
    """A step with fused nodes.

    Attributes
    ----------
    order : tuple of int or FusedNode
        Places of nodes that stay, and fused nodes that replace the others, in execution order. Views come right before
        their readers; views without readers are omitted.
    kernels : tuple of Kernel
        Indexed by the fused nodes' handles.
    scratch : mapping of str to Tensor
        Values that only a kernel uses, while it runs.
    """

    order: tuple[int | FusedNode, ...]
    kernels: tuple[Kernel, ...]
    scratch: Mapping[str, Tensor]


def fuse(schedule: Schedule, secret: int) -> Fusion:
    """Fuse all groups, see `groups` and `recompute`; nodes name their kernels by `secret` and handle."""
    with_libraries = libraries.replaced(schedule, secret)
    schedule, places, kernels = with_libraries.schedule, with_libraries.places, list(with_libraries.kernels)
    grouping = groups.Grouping(schedule)
    grouping.grow()
    recompute.recompute(grouping)
    found = grouping.kernels()
    by_place = {group.place: group for group in found}
    inside = {member.at for group in found for member in group.members if not member.again} | grouping.unneeded
    steps = schedule.steps
    views = groups.views(schedule)
    viewing = {step.writes[0]: i for i, step in enumerate(steps) if step.writes and step.writes[0] in views}
    order: list[int | FusedNode] = []
    done: set[str] = set()

    def view(names: Iterable[str]) -> None:
        for name in names:
            if name in viewing and name not in done:
                done.add(name)
                view(steps[viewing[name]].reads)
                order.append(places[viewing[name]])

    for i, step in enumerate(steps):
        if i in by_place:
            group = by_place[i]
            dtypes = [schedule.tensors[name].dtype for name in group.reads]
            elements = [prod(schedule.tensors[name].shape) for name in group.reads]
            members = tuple(places[member.at] for member in group.members)
            order.append(_node(group, members, len(kernels), secret))
            kernels.append(kernel_of(group, dtypes, elements))
        elif i not in inside and not (step.writes and step.writes[0] in views):
            view(step.reads)
            if isinstance(step, LibraryNode):
                order.append(FusedNode(step.node, step.members, step.plain))
            else:
                order.append(places[i])
    return Fusion(tuple(order), tuple(kernels), with_libraries.scratch)


def _node(group: Group, members: tuple[int, ...], handle: int, secret: int) -> FusedNode:
    ops = list(dict.fromkeys(member.call.op for member in group.members))
    name = f"kernel {handle} of {len(group.members)}: {', '.join(ops[:6])}{', ...' if len(ops) > 6 else ''}"
    node = onnx.helper.make_node(
        OP, group.reads, group.makes, name, domain=DOMAIN, secret=secret, handle=handle
    )  # fmt: skip
    slots = enumerate(group.reads)
    plain = frozenset(slot for slot, n in slots if groups.plainly_read(group.members, n))
    return FusedNode(node, members, plain)
