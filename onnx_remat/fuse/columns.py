"""Slices of one value, concatenated, as one copy on a CUDA device: the columns that the windows of a convolution read.

Where slices begin at regular distances, as they do for the entries of a window, the result is the value read with other
strides: a thread copies an element. `session.windows` writes products of such columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from onnx_remat.fuse import spaces
from onnx_remat.fuse.code import KINDS
from onnx_remat.fuse.cuda import DECLARATIONS, MOST_ELEMENTS, THREADS, narrow, thread_of
from onnx_remat.fuse.kernel import METADATA, Kernel, Replacement
from onnx_remat.fuse.moves import slice_of
from onnx_remat.fuse.ordered import OrderedStep
from onnx_remat.fuse.spaces import Steps
from onnx_remat.ir.graph import attributes
from onnx_remat.ir.opsets import is_op

MOST_AXES = 10


@dataclass(frozen=True, slots=True)
class Columns:
    """Slices of one value, side by side.

    Attributes
    ----------
    source : str
    places : tuple of int
        Of the Slices.
    offset : int
        Where the first one begins in the value.
    outer, entries, inner : tuple of (int, int)
        Extents and strides, outermost first: of a slice's axes around the one along which slices lie side by side, of
        the slices, and of that axis and those inside it.
    """

    source: str
    places: tuple[int, ...]
    offset: int
    outer: Steps
    entries: Steps
    inner: Steps

    @property
    def axes(self) -> Steps:
        """Extents and strides of all."""
        return (*self.outer, *self.entries, *self.inner)


def columns_of(ordered: OrderedStep, names: Sequence[str], axis: int) -> Columns | None:
    """Return how slices, or views of them, lie side by side along an axis; None if a kernel cannot copy them so.

    It cannot copy those of an input that is renewed, perhaps before the kernel runs.
    """
    uses, tensors = ordered.uses, ordered.tensors
    found: list[tuple[str, Steps, Steps]] = []
    places, offsets = [], []
    for name in names:
        place = uses.made_by(name, "Slice")
        if place < 0 or not uses.is_own(name) or tensors[name].dtype not in KINDS or not prod(tensors[name].shape):
            return None
        node = ordered.steps[place].node
        cut = slice_of(node, tensors[node.input[0]].shape, tensors[node.output[0]].shape, ordered.integers)
        inside = None if cut is None else _inside(cut.axes, prod(tensors[name].shape[axis:]))
        if cut is None or inside is None or not uses.is_own(node.input[0]):
            return None
        found.append((uses.root(node.input[0]), spaces.merged(cut.axes[:inside]), spaces.merged(cut.axes[inside:])))
        places.append(place)
        offsets.append(cut.offset)
    entries = _progressions(offsets)
    if len(names) < 2 or len(set(found)) != 1 or entries is None or found[0][0] in ordered.renewed.values():
        return None
    source, outer, inside_axes = found[0]
    made = Columns(source, tuple(places), offsets[0], outer, entries, inside_axes)
    elements = prod(extent for extent, _ in made.axes)
    small = max(elements, prod(tensors[source].shape)) < MOST_ELEMENTS
    on_host = not ordered.on_host.isdisjoint([source, *names])
    return made if small and not on_host and len(made.axes) <= MOST_AXES else None


def _inside(axes: Steps, elements: int) -> int | None:
    """Return the first of the innermost axes that have so many elements together; None if there is none."""
    return next((i for i in range(len(axes) + 1) if prod(extent for extent, _ in axes[i:]) == elements), None)


def _progressions(offsets: Sequence[int]) -> Steps | None:
    """Return numbers as sums of arithmetic progressions, outermost first; None if they are none, or fall.

    Examples
    --------
    >>> _progressions([0, 2, 4, 10, 12, 14]), _progressions([0, 2, 3])
    (((2, 10), (3, 2)), None)
    """
    if len(offsets) == 1:
        return ()
    step = offsets[1] - offsets[0]
    count = next((i for i, (one, other) in enumerate(pairwise(offsets), 1) if other - one != step), len(offsets))
    if len(offsets) % count or step < 0:
        return None
    runs = [offsets[i : i + count] for i in range(0, len(offsets), count)]
    if any(at - run[0] != i * step for run in runs for i, at in enumerate(run)):
        return None
    outer = _progressions([run[0] for run in runs])
    return None if outer is None else (*outer, (count, step))


def find(ordered: OrderedStep) -> list[Replacement]:
    """Return the Concats of slices in a step, by place: of slices that are read there alone.

    Until the copy, the value lives instead of the slices. These stay if they are smaller, other nodes run in between,
    and nothing reads the value later.
    """
    found: list[Replacement] = []
    for place, step in enumerate(ordered.steps):
        node = step.node
        if not is_op(node, "Concat") or not all(ordered.uses.only_for(name, place) for name in node.input):
            continue
        made = ordered.tensors[node.output[0]]
        axis = int(attributes(node).get("axis", 1)) % max(len(made.shape), 1)
        columns = columns_of(ordered, node.input, axis)
        if columns is None or not ordered.uses.is_own(node.output[0]):
            continue
        source = ordered.tensors[columns.source]
        at_once = all(map(ordered.uses.is_view, ordered.steps[max(columns.places) + 1 : place]))
        if made.nbytes < source.nbytes and max(ordered.uses.users[columns.source]) < place and not at_once:
            continue
        kernel = _kernel(made.dtype, columns, made.shape)
        members = (*sorted(columns.places), place)
        found.append(Replacement(place, members, (columns.source,), (node.output[0],), "columns", kernel))
    return found


def _kernel(dtype: int, columns: Columns, shape: tuple[int, ...]) -> Kernel:
    """Return the kernel that copies columns of a value to a result of this shape."""
    sizes = columns.offset, *(number for axis in columns.axes for number in axis)
    text = _text(8 * KINDS[dtype].nbytes, len(columns.axes))
    return Kernel(text, sizes, prod(shape), THREADS, ((dtype, shape),), threads=THREADS)


def _text(bits: int, rank: int) -> str:
    """Return the text of the kernel of all columns of so many axes, and of elements of so many bits."""
    lines = ["%rest.0 = trunc i64 %index to i32", *narrow("offset.0", 0)]
    for i, axis in enumerate(reversed(range(rank))):
        lines += [*narrow(f"extent.{i}", 1 + 2 * axis), *narrow(f"stride.{i}", 2 + 2 * axis)]
        here = f"%rest.{i}"
        if axis:
            here = f"%at.{i}"
            lines += [f"{here} = urem i32 %rest.{i}, %extent.{i}", f"%rest.{i + 1} = udiv i32 %rest.{i}, %extent.{i}"]
        lines += [f"%step.{i} = mul i32 {here}, %stride.{i}", f"%offset.{i + 1} = add i32 %offset.{i}, %step.{i}"]
    body = "\n  ".join(lines)
    return f"""{DECLARATIONS}{thread_of("index", 1, 1, 1 + 2 * rank)}
work:
  %x = load ptr, ptr %in
  %y = load ptr, ptr %out
  {body}
  %wide = zext i32 %offset.{rank} to i64
  %p.x = getelementptr i{bits}, ptr %x, i64 %wide
  %element = load i{bits}, ptr %p.x
  %p.y = getelementptr i{bits}, ptr %y, i64 %index
  store i{bits} %element, ptr %p.y
  br label %done
done:
  ret void
}}
{METADATA}"""
