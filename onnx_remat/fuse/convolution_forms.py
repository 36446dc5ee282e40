"""The forms in which files compute convolutions and their gradients, found by what their nodes compute.

A convolution is a Conv; the gradient of its images is a ConvTranspose, or a Conv with the flipped kernel. The gradient
of its weights has two forms of many nodes (`converters.convolutions`): a Conv of the images by the output's gradient,
batch and channels swapped, and one matrix product for each entry of the window. Nothing marks them, so that files from
elsewhere are served as well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import onnx

from onnx_remat.fuse.code import FLOAT
from onnx_remat.fuse.layouts import Layout, Wanted, equal, flat, plain, reshaped
from onnx_remat.fuse.onednn import FORWARD, IMAGES, WEIGHTS, Convolution
from onnx_remat.fuse.ordered import OrderedStep
from onnx_remat.ir.opsets import is_op

_IN_ORDER = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"})
"""Ops that leave a value's elements in their order."""


@dataclass(frozen=True, slots=True)
class Found:
    """Nodes that compute a convolution.

    Attributes
    ----------
    convolution : Convolution
    reads : tuple of str
        In the order of the kernel's inputs.
    makes : str
    members : tuple of int
        Places of the nodes that nothing else needs.
    place : int
        Where the kernel runs: at the last member that reads one of `reads`, so that none of them lives longer, but
        behind the nodes that make them.
    """

    convolution: Convolution
    reads: tuple[str, ...]
    makes: str
    members: tuple[int, ...]
    place: int


class Steps:
    """A step's nodes by what they read and make."""

    def __init__(self, ordered: OrderedStep) -> None:
        self.ordered = ordered
        self.at = {name: i for i, step in enumerate(ordered.steps) for name in step.writes}
        self.users: dict[str, list[int]] = defaultdict(list)
        for i, step in enumerate(ordered.steps):
            for name in dict.fromkeys(step.reads):
                self.users[name].append(i)

    def maker(self, name: str, *ops: str) -> onnx.NodeProto | None:
        """Return the node that makes a value if it is one of `ops`."""
        if name not in self.at:
            return None
        node = self.ordered.steps[self.at[name]].node
        return node if is_op(node, *ops) else None

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.ordered.tensors[name].shape)

    def are_float(self, names: Sequence[str]) -> bool:
        return all(self.ordered.tensors[name].dtype == FLOAT for name in names)

    def ints(self, node: onnx.NodeProto, slot: int) -> tuple[int, ...] | None:
        """Return the integers of a constant input; None if it is absent or none."""
        return self.ordered.integers.get(node.input[slot]) if slot < len(node.input) else None

    def layout(self, name: str, origin: str) -> Layout | None:
        """Return how a value lies in another one, from which Transposes and Reshapes make it."""
        if name == origin:
            return plain(self.shape(name))
        node = self.ordered.steps[self.at[name]].node
        before = self.layout(node.input[0], origin)
        return None if before is None else self._moved(node, before)

    def _moved(self, node: onnx.NodeProto, before: Layout) -> Layout | None:
        if node.op_type != "Transpose":
            return reshaped(before, self.shape(node.output[0]))
        perm = _attributes(node).get("perm") or list(range(len(before)))[::-1]
        return tuple(before[axis] for axis in perm)

    def origins(self, name: str) -> Iterator[str]:
        """Yield a value and those that it is made of by Transposes and Reshapes, the nearest first."""
        yield name
        while (node := self.maker(name, "Transpose", *_IN_ORDER)) is not None:
            name = node.input[0]
            yield name

    def origin(self, name: str, rank: int, wanted: Wanted) -> str | None:
        """Return the value of this rank in which `name` lies as `wanted`."""
        for origin in self.origins(name):
            shape = self.shape(origin)
            if len(shape) == rank and equal(self.layout(name, origin), wanted(shape)):
                return origin
        return None

    def only_reader(self, name: str) -> onnx.NodeProto | None:
        if name in self.ordered.outputs or len(self.users[name]) != 1:
            return None
        return self.ordered.steps[self.users[name][0]].node

    def followed(self, name: str, wanted: Layout) -> str | None:
        """Return the first value that Transposes and Reshapes make of `name` with its elements as in `wanted`."""
        layout: Layout | None = plain(self.shape(name))
        while layout is not None:
            if flat(layout) == flat(wanted):
                return name
            node = self.only_reader(name)
            if node is None or not is_op(node, "Transpose", *_IN_ORDER):
                return None
            layout, name = self._moved(node, layout), node.output[0]
        return None

    def found(self, of: Convolution, reads: tuple[str, ...], makes: str) -> Found | None:
        """Return a convolution with the nodes that only it needs."""
        if not self.are_float((*reads, makes)) or makes in self.ordered.renewed:
            return None
        members: set[int] = set()
        rest = [makes]
        while rest:
            name = rest.pop()
            at = self.at.get(name, -1)
            if at < 0 or at in members or name in reads:
                continue
            step = self.ordered.steps[at]
            needed = [user for made in step.writes for user in self.users[made] if user not in members]
            if name != makes and (needed or any(made in self.ordered.outputs for made in step.writes)):
                continue
            members.add(at)
            rest += step.reads
        direct = [at for at in members if set(self.ordered.steps[at].reads).intersection(reads)]
        makers = [self.at[name] for name in reads if name in self.at]
        return Found(of, reads, makes, tuple(sorted(members)), max([*(direct or [self.at[makes]]), *makers]))


def _attributes(node: onnx.NodeProto) -> dict[str, list[int]]:
    return {each.name: list(each.ints) for each in node.attribute if each.type == onnx.AttributeProto.INTS}


def _group(node: onnx.NodeProto) -> int:
    return next((each.i for each in node.attribute if each.name == "group"), 1)


def _activation(node: onnx.NodeProto) -> str:
    """Return what ONNX Runtime's own convolution computes of its result, if anything."""
    return next((each.s.decode() for each in node.attribute if each.name == "activation"), "")


def _has_pads(node: onnx.NodeProto) -> bool:
    """Return whether a node states its padding, rather than a rule for it."""
    return not any(each.name == "auto_pad" and each.s not in (b"", b"NOTSET") for each in node.attribute)


def _checked(of: Convolution) -> Convolution | None:
    """Return a convolution if its sizes are those of one: each output entry has a window, and none is left out."""
    axes = zip(of.images[2:], of.output[2:], of.kernel, of.strides, of.dilations, of.begin, of.end, strict=True)
    for size, out, kernel, stride, dilation, begin, end in axes:
        extent = dilation * (kernel - 1) + 1
        if min(begin, end) < 0 or size + begin + end < extent or out != (size + begin + end - extent) // stride + 1:
            return None
    if of.images[0] != of.output[0] or of.images[1] % of.group or of.output[1] % of.group:
        return None
    return of if min(of.images + of.output) > 0 and 1 <= len(of.kernel) <= 3 else None


def find(ordered: OrderedStep) -> list[Found]:
    """Return the convolutions of a step, gradients of weights first; these may have others among their nodes."""
    steps = Steps(ordered)
    return [*weight_gradients(steps), *single(steps)]


# ---- convolutions and gradients of images ----


def single(steps: Steps) -> Iterator[Found]:
    """Yield convolutions that are one node."""
    for step in steps.ordered.steps:
        node = step.node
        fused = node.op_type == "FusedConv" and node.domain == "com.microsoft"
        if not (fused or is_op(node, "Conv", "ConvTranspose")) or not _has_pads(node):
            continue
        reads = tuple(name for name in node.input if name)
        forward, activation = node.op_type != "ConvTranspose", _activation(node)
        if len(reads) < 2 or (not forward and len(reads) != 2) or activation not in ("", "Relu"):
            continue
        bias, added = (len(node.input) > slot and bool(node.input[slot]) for slot in (2, 3))
        if added and steps.shape(node.input[3]) != steps.shape(node.output[0]):
            continue
        kernel = steps.shape(reads[1])[2:]
        rank, how = len(kernel), _attributes(node)
        if how.get("output_shape"):  # pads follow from it, whatever is stated
            continue
        pads = how.get("pads") or [0] * 2 * rank
        given, made = steps.shape(reads[0]), steps.shape(node.output[0])
        images, output = (given, made) if forward else (made, given)
        one = [1] * rank
        of = _checked(Convolution(
            FORWARD if forward else IMAGES, images, output, kernel, tuple(how.get("strides") or one),
            tuple(how.get("dilations") or one), tuple(pads[:rank]), tuple(pads[rank:]), _group(node), bias, added,
            activation == "Relu",
        ))  # fmt: skip
        if of is not None and of.weights == steps.shape(reads[1]):
            found = steps.found(of, reads, node.output[0])
            if found is not None:
                yield found


# ---- gradients of weights ----


def weight_gradients(steps: Steps) -> Iterator[Found]:
    """Yield gradients of weights, whoever computes them best."""
    for step in steps.ordered.steps:
        node = step.node
        found = None
        if is_op(node, "Conv") and len(node.input) == 2 and _has_pads(node):
            found = _swapped(steps, node)
        elif is_op(node, "Concat"):
            found = _by_entry(steps, node)
        if found is not None:
            yield found


def _swapped(steps: Steps, node: onnx.NodeProto) -> Found | None:
    """Return the gradient that a Conv of the images by the output's gradient computes, batch and channels swapped."""
    group, how = _group(node), _attributes(node)
    swapped, other = steps.shape(node.input[0]), steps.shape(node.input[1])
    rank = len(other) - 2
    each, channels, batch = swapped[0], other[0], other[1]

    def stacked(shape: tuple[int, ...]) -> Layout:
        _, *spatial = plain(shape)[1:]
        return ((1, 1, each),), ((1, each, group), (0, 1, batch)), *spatial

    def turned(shape: tuple[int, ...]) -> Layout:
        first, second, *spatial = plain(shape)
        return second, first, *spatial

    x = steps.origin(node.input[0], 2 + rank, stacked)
    g = steps.origin(node.input[1], 2 + rank, turned)
    if x is None or g is None or steps.shape(x)[:2] != (batch, group * each):
        return None
    name = node.output[0]
    while (reader := steps.only_reader(name)) is not None and is_op(reader, "Slice"):
        name = reader.output[0]  # entries that no window reads
    kernel = steps.shape(name)[2:]
    if not _cropped(steps, node.output[0], name):
        return None
    makes = steps.followed(name, (((1, 1, channels),), ((0, 1, each),), *plain((1, 1, *kernel))[2:]))
    pads = how.get("pads") or [0] * 2 * rank
    one = [1] * rank
    of = _checked(Convolution(
        WEIGHTS, steps.shape(x), steps.shape(g), kernel, tuple(how.get("dilations") or one),
        tuple(how.get("strides") or one), tuple(pads[:rank]), tuple(pads[rank:]), group,
    ))  # fmt: skip
    return None if of is None or makes is None else steps.found(of, (x, g), makes)


def _cropped(steps: Steps, whole: str, name: str) -> bool:
    """Return whether Slices leave the first entries of each spatial axis."""
    while name != whole:
        node = steps.ordered.steps[steps.at[name]].node
        cut = _slice(steps, node)
        if cut is None or any(start or step != 1 or axis < 2 for axis, (start, step) in cut.items()):
            return False
        name = node.input[0]
    return True


def _slice(steps: Steps, node: onnx.NodeProto) -> dict[int, tuple[int, int]] | None:
    """Return start and step of a Slice by axis; None unless they are constants that go forwards."""
    rank = len(steps.shape(node.input[0]))
    starts, axes, by = (steps.ints(node, slot) for slot in (1, 3, 4))
    if starts is None or (axes is None and len(node.input) > 3 and node.input[3]):
        return None
    if by is None and len(node.input) > 4 and node.input[4]:
        return None
    axes = tuple(range(len(starts))) if axes is None else axes
    by = (1,) * len(starts) if by is None else by
    if min(starts, default=0) < 0 or min(by, default=1) < 1:
        return None
    return {axis % rank: (start, step) for axis, start, step in zip(axes, starts, by, strict=True)}


def _by_entry(steps: Steps, node: onnx.NodeProto) -> Found | None:
    """Return the gradient whose entries are products of the output's gradient and the images read there."""
    products = [steps.maker(name, "MatMul") for name in node.input]
    pairs = {(each.input[0], each.input[1]): None for each in products if each is not None}
    lefts, rights = {left for left, _ in pairs}, [right for _, right in pairs]
    if len(rights) < 2 or len(rights) != len(products) or len(lefts) != 1:
        return None
    (left,) = lefts
    if len(steps.shape(left)) != 2 or len(steps.shape(rights[0])) != 2:
        return None
    out, one = steps.shape(left)[0], steps.shape(rights[0])[1]
    slices, starts = [], []
    for right in rights:
        origin = next((name for name in steps.origins(right) if steps.maker(name, "Slice") is not None), None)
        if origin is None:
            return None
        shape = steps.shape(origin)
        rank = len(shape) - 2
        first = plain(shape)
        if not equal(steps.layout(right, origin), (tuple(atom for axis in first[:-1] for atom in axis), first[-1])):
            return None
        made = steps.maker(origin, "Slice")
        cut = None if made is None else _slice(steps, made)
        if made is None or cut is None or not set(cut) <= set(range(1, 1 + rank)):
            return None
        slices.append((made.input[0], tuple(cut.get(axis, (0, 1))[1] for axis in range(1, 1 + rank)), shape))
        starts.append(tuple(cut.get(axis, (0, 1))[0] for axis in range(1, 1 + rank)))
    if len(set(slices)) != 1:
        return None
    ((source, strides, shape),) = set(slices)
    entries = _entries(starts)
    if entries is None:
        return None
    kernel, dilations = entries
    rank = len(kernel)
    begin = end = (0,) * rank
    if (pad := steps.maker(source, "Pad")) is not None:
        pads = _pads(steps, pad, rank)
        if pads is None:
            return None
        (begin, end), source = pads, pad.input[0]

    def last(of: tuple[int, ...]) -> Layout:
        first, second, *spatial = plain(of)
        return first, *spatial, second

    def rows(of: tuple[int, ...]) -> Layout:
        first, second, *spatial = plain(of)
        return second, (*first, *(atom for axis in spatial for atom in axis))

    x, g = steps.origin(source, 2 + rank, last), steps.origin(left, 2 + rank, rows)
    if x is None or g is None:
        return None
    wanted = (((0, 1, out),), ((1, 1, one),), *(((1, one * prod(kernel[i + 1 :]), k),) for i, k in enumerate(kernel)))
    if next((each.i for each in node.attribute if each.name == "axis"), 0) not in (1, -1):
        return None
    makes = steps.followed(node.output[0], wanted)
    of = _checked(Convolution(WEIGHTS, steps.shape(x), steps.shape(g), kernel, strides, dilations, begin, end))
    if of is None or makes is None or of.output[2:] != shape[1:-1] or of.weights[:2] != (out, one):
        return None
    return steps.found(of, (x, g), makes)


def _entries(starts: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the window and its dilations, from where the products of its entries begin to read, in order."""
    along = [sorted(set(axis)) for axis in zip(*starts, strict=True)]
    kernel = tuple(len(axis) for axis in along)
    dilations = tuple(axis[1] if len(axis) > 1 else 1 for axis in along)
    wanted = [tuple(at * d for at, d in zip(entry, dilations, strict=True)) for entry in np.ndindex(*kernel)]
    return (kernel, dilations) if wanted == list(starts) else None


def _pads(steps: Steps, node: onnx.NodeProto, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the padding of a Pad by zeros of spatial axes, channels last."""
    mode = next((each.s for each in node.attribute if each.name == "mode"), b"constant")
    pads = steps.ints(node, 1)
    filled = node.input[2] if len(node.input) > 2 else ""
    if mode != b"constant" or pads is None or len(pads) != 2 * (2 + rank) or (len(node.input) > 3 and node.input[3]):
        return None
    if filled and steps.ordered.constants.get(filled) != 0:
        return None
    before, after = pads[: 2 + rank], pads[2 + rank :]
    if before[0] or before[-1] or after[0] or after[-1]:
        return None
    return before[1:-1], after[1:-1]
