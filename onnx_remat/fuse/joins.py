"""Joins of kernels with equal code: on a device, one launch computes several of them.

Model
    Nodes run at places 0, 1, 2, ... Kernels of one text differ in pointers, sizes and numbers of elements only: they
    become segments of one kernel (`segments`), which runs at the place of one of them, after all makers of its inputs
    and before all readers of its outputs. What a segment reads, such as a gradient, stays live until then.
Algorithm
    For the kernels of each text, those of most elements first, from the last to the first: let a kernel run at the
    place of one of the nearest joined ones, or these at its own, if that place is valid for all, one launch can have
    their arguments, and **live bytes never exceed the step's peak**. Single nodes, such as slices of equal rank, take
    part with kernels of their own, and stay ONNX Runtime's where none joins them.
Complexity
    A few trials per kernel, each linear in the places of the step.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from math import prod

import onnx

from onnx_remat.fuse import segments
from onnx_remat.fuse.kernel import FusedNode, Kernel
from onnx_remat.fuse.live import LiveBytes
from onnx_remat.fuse.nodes import Fusion
from onnx_remat.fuse.ordered import OrderedStep

MOST_TRIED = 4
"""Maximum number of joined kernels that another one of their text is tried with."""


def joined(ordered: OrderedStep, found: Fusion, more: int = 0, waits: bool = True) -> Fusion:
    """Join kernels of equal code where no more bytes are live then.

    Parameters
    ----------
    ordered : OrderedStep
        The step that was fused.
    found : Fusion
    more : int
        Bytes by which the peak of small values may grow.
    waits : bool
        Whether large values may be live for longer, at places below the peak. A slab is harder to lay out then.
    """
    joining = _Joining(ordered, found, more, waits)
    joining.join()
    kernels: list[Kernel] = []
    order: list[int | FusedNode] = []
    for here in joining.here:
        if len(here) < 2 and not any(isinstance(found.order[i], FusedNode) for i in here):
            order += [found.order[i] for i in here]
            continue
        nodes, parts = zip(*(joining.fused[i] for i in here), strict=True)
        order.append(_joined_node(nodes, len(kernels)))
        kernels.append(segments.joined(parts) if len(parts) > 1 else parts[0])
    return Fusion(_without_unread_views(ordered, order), tuple(kernels), found.scratch)


def _without_unread_views(ordered: OrderedStep, order: Iterable[int | FusedNode]) -> tuple[int | FusedNode, ...]:
    """Leave out views that only single nodes read, whose kernels read the values themselves."""
    read, left = set(ordered.outputs), []
    for each in reversed(list(order)):
        if not isinstance(each, FusedNode):
            step = ordered.steps[each]
            if ordered.uses.is_view(step) and read.isdisjoint(step.writes):
                continue
            read.update(step.reads)
        left.append(each)
    return tuple(reversed(left))


def _fused(each: int | FusedNode, found: Fusion) -> tuple[FusedNode, Kernel] | None:
    """Return the node and the kernel of an entry of a step's order; None if it is a node that no kernel computes."""
    return (each, found.kernels[_handle_of(each.node).i]) if isinstance(each, FusedNode) else found.single.get(each)


def _handle_of(node: onnx.NodeProto) -> onnx.AttributeProto:
    found: onnx.AttributeProto = next(each for each in node.attribute if each.name == "handle")
    return found


def _joined_node(nodes: Sequence[FusedNode], handle: int) -> FusedNode:
    """Return the node of a joined kernel: the inputs and the outputs of some nodes, one after another."""
    node = onnx.NodeProto()
    node.CopyFrom(nodes[0].node)
    del node.input[:], node.output[:]
    node.input.extend(name for each in nodes for name in each.node.input)
    node.output.extend(name for each in nodes for name in each.node.output)
    _handle_of(node).i = handle
    node.name = re.sub(r"^kernel \d+", f"kernel {handle}", node.name)
    if len(nodes) > 1:
        node.name += f", {len(nodes)} times"
    width = len(nodes[0].node.input)
    plain = frozenset(slot + i * width for i, each in enumerate(nodes) for slot in each.plain)
    return FusedNode(node, tuple(at for each in nodes for at in each.members), plain, len(nodes))


class _Joining(LiveBytes):
    """Mutable state of the algorithm: which nodes run at each place, and the live bytes there."""

    def __init__(self, ordered: OrderedStep, found: Fusion, more: int, waits: bool) -> None:
        self.order, self.waits, count = found.order, waits, len(found.order)
        self.fused = {i: made for i, each in enumerate(found.order) if (made := _fused(each, found)) is not None}
        steps = [each if isinstance(each, FusedNode) else ordered.steps[each] for each in found.order]
        self.reads = [tuple(dict.fromkeys(map(ordered.uses.root, step.reads))) for step in steps]
        self.writes = [step.writes for step in steps]
        self.here: list[tuple[int, ...]] = [(i,) for i in range(count)]
        maker = {name: i for i, names in enumerate(self.writes) for name in names if name not in ordered.root}
        users: defaultdict[str, list[int]] = defaultdict(list)
        for i, names in enumerate(self.reads):
            for name in names:
                users[name].append(i)
        self.renewer = {name: maker[made] for made, name in ordered.renewed.items() if made in maker}
        self.renews = [[ordered.renewed[name] for name in names if name in ordered.renewed] for names in self.writes]
        super().__init__(ordered, maker, users, count, more)

    # ---- liveness ----

    def running(self, place: int) -> Sequence[tuple[int, Iterable[str], Iterable[str]]]:
        return [(i, self.reads[i], self.writes[i]) for i in self.here[place]]

    def may_overwrite(self, node: int, made: str, read: str) -> bool:
        each, tensors = self.order[node], self.ordered.tensors
        if not isinstance(each, FusedNode):
            if len(self.here[self.at[node]]) < 2:
                return self.ordered.overwrites(each, made, read)
            each, _ = self.fused[node]
        new, old = tensors[made], tensors[read]
        alike = (new.dtype, prod(new.shape)) == (old.dtype, prod(old.shape))
        return alike and each.plain.issuperset(slot for slot, name in enumerate(each.node.input) if name == read)

    # ---- joins ----

    def join(self) -> None:
        """Join the kernels of each text."""
        by_text: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        for i, (_, kernel) in self.fused.items():
            by_text[kernel.text, kernel.grain].append(i)
        for alike in sorted(by_text.values(), key=lambda alike: -sum(self.fused[i][1].size for i in alike)):
            found: list[list[int]] = []
            for i in reversed(alike):
                near = found[: -MOST_TRIED - 1 : -1]
                taken = next((together for together in near if self._join(together, i)), None)
                if taken is None:
                    found.append([i])
                else:
                    taken.append(i)

    def _join(self, together: Sequence[int], i: int) -> bool:
        """Let a node run at one place with some others, if possible; return whether it does."""
        kernels = [self.fused[each][1] for each in (*together, i)]
        if not segments.can_join(kernels):
            return False
        after, before = self._between([*together, i])
        return any(
            after < place < before and self._try_place(moved, place)
            for place, moved in ((self.at[together[0]], [i]), (self.at[i], together))
        )

    def _between(self, nodes: Iterable[int]) -> tuple[int, int]:
        """Return the two places that nodes must lie strictly between to run at one place."""
        after, before = [-1], [len(self.at)]
        for i in nodes:
            after += [self.at[self.maker[name]] for name in self.reads[i] if name in self.maker]
            before += [self.at[each] for name in self.writes[i] for each in self.users[name]]
            # The new value overwrites the old one: no node may read that afterwards, nor at the same time.
            before += [self.at[self.renewer[n]] for n in self.reads[i] if self.renewer.get(n, i) != i]
            after += [self.at[each] for name in self.renews[i] for each in self.users[name] if each != i]
        return max(after), min(before)

    def _try_place(self, nodes: Collection[int], place: int) -> bool:
        """Place nodes; undo that and return False if more bytes are live then."""
        live_bytes, saved, old = self.live_bytes.copy(), list(self.saved), self.at[next(iter(nodes))]
        names = {name for i in nodes for name in (*self.reads[i], *self.writes[i]) if name in self.sizes}
        here = self.here[place]
        touched = {old, place, *(self.span(name)[1] for name in names)}
        for name in names:
            self.add_bytes(name, -1)
        self._move(nodes, old, place, tuple(sorted((*here, *nodes))), ())
        for name in names:
            self.add_bytes(name, 1)
        self.update_savings(touched | {self.span(name)[1] for name in names})
        longer = not self.waits and bool((self.live_bytes[1] > live_bytes[1]).any())
        if not longer and self.keeps_peak():
            return True
        self.live_bytes, self.saved = live_bytes, saved
        self._move(nodes, place, old, tuple(sorted(nodes)), here)
        return False

    def _move(self, nodes: Iterable[int], old: int, new: int, there: tuple[int, ...], left: tuple[int, ...]) -> None:
        """Move nodes from one place to another; say which nodes are there and are left at the old place then."""
        for i in nodes:
            self.at[i] = new
        self.here[new], self.here[old] = there, left
