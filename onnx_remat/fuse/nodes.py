"""Steps whose groups are replaced by nodes that name kernels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import onnx

from onnx_remat.fuse import cuda, moves, recompute, replacements
from onnx_remat.fuse.code import KINDS
from onnx_remat.fuse.groups import Group, Grouping
from onnx_remat.fuse.ir import kernel_of
from onnx_remat.fuse.kernel import FusedNode, Kernel
from onnx_remat.fuse.members import MOST_RANK, can_read, is_on_host, reads_far_apart
from onnx_remat.fuse.moves import Piece
from onnx_remat.fuse.ops import may_fuse
from onnx_remat.fuse.ordered import OrderedStep, Runs
from onnx_remat.fuse.shim import DEVICE_OP, DOMAIN, OP
from onnx_remat.ir.opsets import is_op
from onnx_remat.ir.shapes import Tensor


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
    single : mapping of int to (FusedNode, Kernel)
        By place, kernels that a device could run in place of a single node that stays: worth it for several in one
        launch only, see `joins`.
    """

    order: tuple[int | FusedNode, ...]
    kernels: tuple[Kernel, ...]
    scratch: Mapping[str, Tensor]
    single: Mapping[int, tuple[FusedNode, Kernel]] = field(default_factory=dict)


def fuse(ordered: OrderedStep, secret: int) -> Fusion:
    """Fuse all groups, see `groups` and `recompute`; nodes name their kernels by `secret` and handle."""
    with_libraries = replacements.replaced(ordered, secret)
    kernels = list(with_libraries.kernels)
    ordered, places = _in_pieces(with_libraries.ordered, with_libraries.places)
    grouping = Grouping(ordered)
    grouping.grow()
    recompute.recompute(grouping)
    found = grouping.kernels()
    by_place = {group.place: group for group in found}
    inside = {member.at for group in found for member in group.members if not member.again} | grouping.unneeded
    steps = ordered.steps
    viewed = ordered.uses.viewed
    viewing = {step.writes[0]: i for i, step in enumerate(steps) if step.writes and step.writes[0] in viewed}
    order: list[int | FusedNode] = []
    done: set[str] = set()

    def view(names: Iterable[str]) -> None:
        for name in names:
            if name in viewing and name not in done:
                done.add(name)
                view(steps[viewing[name]].reads)
                order.append(places[viewing[name]])

    def fused(group: Group, handle: int) -> tuple[FusedNode, Kernel]:
        dtypes = [ordered.tensors[name].dtype for name in group.reads]
        members = tuple(places[member.at] for member in group.members)
        node = _node(DEVICE_OP if ordered.device else OP, group, members, handle, secret)
        kernel = (cuda.kernel_of if ordered.device else kernel_of)(group, dtypes)
        return node, kernel.reading(ordered.tensors[name] for name in group.reads)

    for i, step in enumerate(steps):
        if i in by_place:
            node, kernel = fused(by_place[i], len(kernels))
            order.append(node)
            kernels.append(kernel)
        elif i not in inside and not (step.writes and step.writes[0] in viewed):
            view(step.reads)
            order.append(step if isinstance(step, FusedNode) else places[i])
    singles = grouping.singles() if ordered.device else ()
    single = {
        places[group.place]: fused(group, 0)
        for group in singles
        if group.place not in by_place and group.place not in inside
    }
    return Fusion(tuple(order), tuple(kernels), with_libraries.scratch, single)


def _in_pieces(ordered: OrderedStep, places: Sequence[int]) -> tuple[OrderedStep, tuple[int, ...]]:
    """Replace Splits, of which kernels may compute a reader, by their pieces; also return the nodes' places before."""
    uses = ordered.uses

    def pieces(step: Runs) -> list[str]:
        """Return the outputs of a Split that nodes read; none if it stays as it is."""
        node, tensors = step.node, ordered.tensors
        if not is_op(node, "Split"):
            return []
        read = [name for name in step.writes if uses.users[name] or name in ordered.outputs]
        names = [node.input[0], *read]
        known = all(prod(tensors[n].shape) and tensors[n].dtype in KINDS for n in names)
        if not known or not all(map(uses.is_own, names)) or len(tensors[names[0]].shape) > MOST_RANK:
            return []
        if uses.kept & ({*step.writes} - {*read}):
            return []
        found = [moves.move_of(node, name, tensors, ordered.integers) for name in read]
        readers = [ordered.steps[at].node for name in read for at in uses.users[name]]
        can = all(m is not None and can_read(m.steps) and not reads_far_apart(ordered, m) for m in found)
        can = can and not is_on_host(ordered, [*node.input, *read])
        return read if can and any(may_fuse(each) for each in readers) else []

    steps: list[Runs] = []
    old: list[int] = []
    for i, step in enumerate(ordered.steps):
        new: list[Runs] = [Piece(step.node, (name,)) for name in pieces(step)] or [step]
        steps += new
        old += [i] * len(new)

    def overwrites(at: int, made: str, read: str) -> bool:
        return not isinstance(steps[at], Piece) and ordered.overwrites(old[at], made, read)

    def workspace(at: Sequence[int]) -> int:
        return ordered.workspace(sorted({old[i] for i in at}))

    in_pieces = replace(ordered, steps=steps, overwrites=overwrites, workspace=workspace)
    return in_pieces, tuple(places[i] for i in old)


def _node(op: str, group: Group, members: tuple[int, ...], handle: int, secret: int) -> FusedNode:
    ops = list(dict.fromkeys(member.call.op for member in group.members))
    name = f"kernel {handle} of {len(group.members)}: {', '.join(ops[:6])}{', ...' if len(ops) > 6 else ''}"
    node = onnx.helper.make_node(
        op, group.reads, group.makes, name, domain=DOMAIN, secret=secret, handle=handle
    )  # fmt: skip
    plain = frozenset(slot for slot, name in enumerate(group.reads) if name in group.plain)
    return FusedNode(node, members, plain)
