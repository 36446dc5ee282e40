"""Pad on a CUDA device: a thread writes one element, a zero or one that it reads.

ONNX Runtime's own kernel takes far longer than a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import copysign, prod

import onnx

from onnx_remat.fuse.code import KINDS
from onnx_remat.fuse.cuda import DECLARATIONS, MOST_ELEMENTS, THREADS, narrow, thread_of
from onnx_remat.fuse.kernel import METADATA, Kernel, Replacement
from onnx_remat.fuse.ordered import OrderedStep
from onnx_remat.ir.opsets import is_op

MOST_AXES = 8

Axis = tuple[int, int, int]
"""Extent in the input, in the output, and zeros before the first element, which may be negative."""


def find(ordered: OrderedStep) -> list[Replacement]:
    """Return the Pads with zeros in a step, by place."""
    found = (_pad_of(ordered, place, step.node) for place, step in enumerate(ordered.steps))
    return [each for each in found if each is not None]


def _pad_of(ordered: OrderedStep, place: int, node: onnx.NodeProto) -> Replacement | None:
    if not is_op(node, "Pad") or len(node.input) < 2:
        return None
    if any(each.name == "mode" and each.s != b"constant" for each in node.attribute) or any(node.input[3:]):
        return None
    value = node.input[2] if len(node.input) > 2 else ""
    pads, names = ordered.integers.get(node.input[1]), (node.input[0], node.output[0])
    old, new = (ordered.tensors[name] for name in names)
    zero = ordered.constants.get(value, 1.0) if value else 0.0
    if pads is None or zero or copysign(1, zero) < 0 or not all(map(ordered.uses.is_own, names)):
        return None
    if old.dtype not in KINDS or not prod(old.shape) or not 0 < prod(new.shape) < MOST_ELEMENTS:
        return None
    if not ordered.on_host.isdisjoint(names) or prod(old.shape) >= MOST_ELEMENTS:
        return None
    axes = _merged(zip(old.shape, new.shape, pads[: len(old.shape)], strict=True))
    if len(axes) > MOST_AXES:
        return None
    kernel = _kernel(old.dtype, axes, new.shape)
    return Replacement(place, (place,), (ordered.uses.root(node.input[0]),), (node.output[0],), "Pad", kernel)


def _merged(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """Return axes, each that is not padded together with the one around it, if there is one."""
    found: list[Axis] = []
    for extent, result, before in axes:
        if found and extent == result and not before:
            outer = found[-1]
            found[-1] = outer[0] * extent, outer[1] * extent, outer[2] * extent
        else:
            found.append((extent, result, before))
    return tuple(found)


def _kernel(dtype: int, axes: Sequence[Axis], shape: tuple[int, ...]) -> Kernel:
    """Return the kernel of a Pad of axes, the outermost first, to a shape."""
    sizes = tuple(number for axis in axes for number in axis) or (0,)
    text = _text(8 * KINDS[dtype].nbytes, len(axes))
    return Kernel(text, sizes, prod(shape), THREADS, ((dtype, shape),), threads=THREADS)


def _text(bits: int, rank: int) -> str:
    """Return the text of the kernel of all Pads of so many axes, and of elements of so many bits."""
    lines = ["%rest.0 = trunc i64 %index to i32"]
    stride, offset, inside, last = "1", "0", "true", rank - 1
    for i, axis in enumerate(reversed(range(rank))):
        for at, name in enumerate(("extent", "result", "before")):
            lines += narrow(f"{name}.{i}", 3 * axis + at)
        here = f"%rest.{i}"
        if i < last:
            here = f"%at.{i}"
            lines += [f"{here} = urem i32 %rest.{i}, %result.{i}", f"%rest.{i + 1} = udiv i32 %rest.{i}, %result.{i}"]
        lines += [
            f"%from.{i} = sub i32 {here}, %before.{i}", f"%within.{i} = icmp ult i32 %from.{i}, %extent.{i}",
            f"%inside.{i} = and i1 {inside}, %within.{i}", f"%step.{i} = mul i32 %from.{i}, {stride}",
            f"%offset.{i} = add i32 {offset}, %step.{i}", f"%stride.{i} = mul i32 %extent.{i}, {stride}",
        ]  # fmt: skip
        inside, offset, stride = f"%inside.{i}", f"%offset.{i}", f"%stride.{i}"
    body = "\n  ".join(lines)
    return f"""{DECLARATIONS}{thread_of("index", 1, 1, 3 * rank)}
work:
  %x = load ptr, ptr %in
  %y = load ptr, ptr %out
  {body}
  br i1 {inside}, label %read, label %write
read:
  %wide = zext i32 {offset} to i64
  %p.x = getelementptr i{bits}, ptr %x, i64 %wide
  %element = load i{bits}, ptr %p.x
  br label %write
write:
  %made = phi i{bits} [ 0, %work ], [ %element, %read ]
  %p.y = getelementptr i{bits}, ptr %y, i64 %index
  store i{bits} %made, ptr %p.y
  br label %done
done:
  ret void
}}
{METADATA}"""
