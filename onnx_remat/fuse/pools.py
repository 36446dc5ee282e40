"""MaxPool with the indices of its maxima, and its gradient: a sum into zeros, at those indices.

ONNX Runtime computes the indices slowly, and adds gradients in a single thread, into zeros that an Expand has made
before. Kernels compute a plane of an image, or a row of the sum, in one thread. Results are ONNX Runtime's to the bit:
a maximum is the first element of its window until one is greater, so that only a NaN in the first place stays. Before
1.29 no NaN stays, and MaxPool is left to ONNX Runtime.
"""

from __future__ import annotations

from math import prod

import numpy as np

from onnx_remat.fuse.code import FLOAT, LONG
from onnx_remat.fuse.kernel import METADATA, Kernel, Replacement, grain, loaded
from onnx_remat.fuse.ordered import OrderedStep, Runs, Uses
from onnx_remat.ir.graph import attributes
from onnx_remat.ir.opsets import is_op

OLDEST_RUNTIME = (1, 29)
"""Oldest ONNX Runtime with the bits of the kernel of MaxPool."""

LEAST_ELEMENTS = 1 << 14
"""Least elements that are read or made: below, a kernel saves nothing."""


def find(ordered: OrderedStep) -> list[Replacement]:
    """Return the pools of a step, by place, then its sums."""
    uses = ordered.uses
    pools = [_pool(uses, i, step) for i, step in enumerate(ordered.steps)] if ordered.maxima else []
    sums = [_sum(uses, i, step) for i, step in enumerate(ordered.steps)]
    return [each for each in (*pools, *sums) if each is not None]


def _pool(uses: Uses, place: int, step: Runs) -> Replacement | None:
    node, tensors = step.node, uses.ordered.tensors
    if not is_op(node, "MaxPool") or len(step.writes) != 2:
        return None
    values = attributes(node)
    known = [tensors[name] for name in (node.input[0], *node.output)]
    if [each.dtype for each in known] != [FLOAT, FLOAT, LONG] or any(len(each.shape) != 4 for each in known):
        return None
    if values.get("auto_pad", b"NOTSET") != b"NOTSET" or values.get("storage_order", 0):
        return None
    shape, made = known[0].shape, known[1].shape
    if prod(shape) < LEAST_ELEMENTS or not prod(made) or not all(map(uses.is_own, (node.input[0], *node.output))):
        return None
    pads, kernel = tuple(values.get("pads", (0, 0, 0, 0))), values["kernel_shape"]
    strides, dilations = values.get("strides", (1, 1)), values.get("dilations", (1, 1))
    if any(map(_has_empty_window, shape[2:], made[2:], kernel, strides, dilations, pads[:2])):
        return None
    sizes = (
        *shape[2:], *made[2:], *kernel, *strides, *dilations, *pads[:2],
    )  # fmt: skip
    root = uses.root(node.input[0])
    if root in uses.ordered.renewed.values() or any(name in uses.ordered.renewed for name in node.output):
        return None
    kernel = _kernel_of_pool(prod(shape[:2]), sizes, made)
    return Replacement(place, (place,), (root,), tuple(node.output), "MaxPool", kernel)


def _has_empty_window(size: int, made: int, kernel: int, stride: int, dilation: int, pad: int) -> bool:
    """Return whether some window along an axis lies in the padding alone, where ONNX Runtime's result is another.

    >>> _has_empty_window(2, 1, kernel=2, stride=1, dilation=3, pad=1)
    True
    """
    starts = (i * stride - pad for i in range(made))
    return any(not any(0 <= start + i * dilation < size for i in range(kernel)) for start in starts)


def _sum(uses: Uses, place: int, step: Runs) -> Replacement | None:
    node, tensors, constants = step.node, uses.ordered.tensors, uses.ordered.constants
    if not is_op(node, "ScatterElements"):
        return None
    values = attributes(node)
    data, index, more, made = (tensors[name] for name in (*node.input, node.output[0]))
    if values.get("reduction") != b"add" or values.get("axis", 0) not in (1, -1) or len(made.shape) != 2:
        return None
    if [each.dtype for each in (data, index, more, made)] != [FLOAT, LONG, FLOAT, FLOAT]:
        return None
    rows, columns = made.shape
    if index.shape != more.shape or index.shape[0] != rows or not index.shape[1] or prod(made.shape) < LEAST_ELEMENTS:
        return None
    zeros = uses.made_by(node.input[0], "Expand")
    if zeros < 0 or not _is_zero(uses, uses.ordered.steps[zeros].node.input[0]):
        return None
    if not all(map(uses.is_own, (*node.input[1:], node.output[0]))):
        return None
    members, read = [place], uses.root(node.input[1])
    if uses.only_for(node.input[0], place):
        members.append(zeros)
    divided = uses.made_by(node.input[1], "Mod")
    divisor = uses.ordered.steps[divided].node if divided >= 0 else None
    remainder = (
        divisor is not None and constants.get(divisor.input[1]) == columns and not any(a.i for a in divisor.attribute)
        and uses.only_for(node.input[1], place) and uses.is_own(divisor.input[0])
        and tensors[divisor.input[0]].dtype == LONG and prod(tensors[divisor.input[0]].shape) == prod(index.shape)
    )  # fmt: skip
    if remainder and divisor is not None:
        members.append(divided)
        read = uses.root(divisor.input[0])
    reads = read, uses.root(node.input[2])
    renewed = uses.ordered.renewed
    if any(name in renewed.values() for name in reads) or node.output[0] in renewed:
        return None
    kernel = _kernel_of_sum(rows, columns, index.shape[1], remainder)
    return Replacement(place, tuple(sorted(members)), reads, (node.output[0],), "sum", kernel)


def _is_zero(uses: Uses, name: str) -> bool:
    """Whether a scalar is 0: a constant, or one that waits for another value, as ``converters`` write it."""
    known = uses.ordered.constants.get(name)
    if known is not None:
        return known == 0 and not np.signbit(known)
    cast = uses.made_by(name, "Cast")
    never = uses.made_by(uses.ordered.steps[cast].node.input[0], "Xor") if cast >= 0 else -1
    return never >= 0 and len(set(uses.ordered.steps[never].node.input)) == 1


def _kernel_of_pool(planes: int, sizes: tuple[int, ...], shape: tuple[int, ...]) -> Kernel:
    """Return the kernel of a MaxPool: some planes in each part.

    `planes` are the images times their channels; `sizes` the height and the width of a plane and of its result, then by
    axis: window, strides, dilations, first padding.
    """
    read = prod(sizes[:2])
    return Kernel(
        _POOL, sizes, planes, grain(planes, read, LEAST_ELEMENTS), ((FLOAT, shape), (LONG, shape))
    )  # fmt: skip


def _kernel_of_sum(rows: int, columns: int, added: int, remainder: bool) -> Kernel:
    """Return the kernel of a sum: some rows in each part.

    To each row so many elements are `added`; an index is the remainder of the one that is read, divided by `columns`,
    or the one itself.
    """
    return Kernel(
        _text_of_sum(remainder), (columns, added), rows, grain(rows, columns, LEAST_ELEMENTS),
        ((FLOAT, (rows, columns)),),
    )  # fmt: skip


_POOL = f"""define i32 @kernel(ptr %in, ptr %out, ptr %sizes, i64 %begin, i64 %end) #0 {{
start:
  %x = load ptr, ptr %in
  %y = load ptr, ptr %out
  %p.where = getelementptr ptr, ptr %out, i64 1
  %where = load ptr, ptr %p.where
{loaded("h w oh ow kh kw sh sw dh dw top left")}
  %read = mul i64 %h, %w
  %made = mul i64 %oh, %ow
  %last = sub i64 %w, 1
  %round = sub i64 %sw, 1
  br label %plane
plane:
  %n = phi i64 [ %begin, %start ], [ %n.next, %plane.done ]
  %first = mul i64 %n, %read
  %plane.x = getelementptr float, ptr %x, i64 %first
  %plane.at = mul i64 %n, %made
  br label %line
line:
  %oy = phi i64 [ 0, %plane ], [ %oy.next, %line.done ]
  %oy.at = mul i64 %oy, %ow
  %line.at = add i64 %plane.at, %oy.at
  %line.y = getelementptr float, ptr %y, i64 %line.at
  %line.where = getelementptr i64, ptr %where, i64 %line.at
  br label %clear
clear:
  %c = phi i64 [ 0, %line ], [ %c.next, %clear ]
  %c.y = getelementptr float, ptr %line.y, i64 %c
  store float 0.0, ptr %c.y, !llvm.access.group !0
  %c.where = getelementptr i64, ptr %line.where, i64 %c
  store i64 -1, ptr %c.where, !llvm.access.group !0
  %c.next = add nuw nsw i64 %c, 1
  %c.more = icmp slt i64 %c.next, %ow
  br i1 %c.more, label %clear, label %cleared, !llvm.loop !1
cleared:
  %oy.step = mul i64 %oy, %sh
  %iy.first = sub i64 %oy.step, %top
  br label %row
row:
  %ky = phi i64 [ 0, %cleared ], [ %ky.next, %row.done ]
  %ky.step = mul i64 %ky, %dh
  %iy = add i64 %iy.first, %ky.step
  %inside = icmp ult i64 %iy, %h
  br i1 %inside, label %row.in, label %row.done
row.in:
  %row.at = mul i64 %iy, %w
  %row.x = getelementptr float, ptr %plane.x, i64 %row.at
  %row.first = add i64 %first, %row.at
  br label %column
column:
  %kx = phi i64 [ 0, %row.in ], [ %kx.next, %column.done ]
  %kx.step = mul i64 %kx, %dw
  %shift = sub i64 %kx.step, %left
  %outside = sub i64 0, %shift
  %some = icmp sgt i64 %outside, 0
  %rounded = add i64 %outside, %round
  %skipped = sdiv i64 %rounded, %sw
  %from = select i1 %some, i64 %skipped, i64 0
  %room = sub i64 %last, %shift
  %none = icmp slt i64 %room, 0
  %fitting = sdiv i64 %room, %sw
  %count = add i64 %fitting, 1
  %few = icmp slt i64 %count, %ow
  %most = select i1 %few, i64 %count, i64 %ow
  %to = select i1 %none, i64 0, i64 %most
  %any = icmp slt i64 %from, %to
  br i1 %any, label %entry, label %column.done
entry:
  %e = phi i64 [ %from, %column ], [ %e.next, %entry ]
  %e.step = mul nsw i64 %e, %sw
  %ix = add nsw i64 %e.step, %shift
  %p.x = getelementptr float, ptr %row.x, i64 %ix
  %new = load float, ptr %p.x, !llvm.access.group !0
  %p.y = getelementptr float, ptr %line.y, i64 %e
  %old = load float, ptr %p.y, !llvm.access.group !0
  %p.i = getelementptr i64, ptr %line.where, i64 %e
  %old.i = load i64, ptr %p.i, !llvm.access.group !0
  %greater = fcmp ogt float %new, %old
  %unset = icmp slt i64 %old.i, 0
  %above = or i1 %greater, %unset
  %new.i = add i64 %row.first, %ix
  %max = select i1 %above, float %new, float %old
  %max.i = select i1 %above, i64 %new.i, i64 %old.i
  store float %max, ptr %p.y, !llvm.access.group !0
  store i64 %max.i, ptr %p.i, !llvm.access.group !0
  %e.next = add nuw nsw i64 %e, 1
  %e.more = icmp slt i64 %e.next, %to
  br i1 %e.more, label %entry, label %column.done, !llvm.loop !1
column.done:
  %kx.next = add nuw nsw i64 %kx, 1
  %kx.more = icmp slt i64 %kx.next, %kw
  br i1 %kx.more, label %column, label %row.done
row.done:
  %ky.next = add nuw nsw i64 %ky, 1
  %ky.more = icmp slt i64 %ky.next, %kh
  br i1 %ky.more, label %row, label %line.done
line.done:
  %oy.next = add nuw nsw i64 %oy, 1
  %oy.more = icmp slt i64 %oy.next, %oh
  br i1 %oy.more, label %line, label %plane.done
plane.done:
  %n.next = add nuw nsw i64 %n, 1
  %n.more = icmp slt i64 %n.next, %end
  br i1 %n.more, label %plane, label %done
done:
  ret i32 0
}}
{METADATA}"""


def _text_of_sum(remainder: bool) -> str:
    """Return the LLVM text of a sum; indices mostly lie in the row, so that a division is rarely needed."""
    other = """  %rest = srem i64 %given, %columns
  %below = icmp slt i64 %rest, 0
  %lifted = add i64 %rest, %columns
  %within = select i1 %below, i64 %lifted, i64 %rest
  br label %add"""
    checked = """  %lifted = add i64 %given, %columns
  %valid = icmp ult i64 %lifted, %columns
  %within = add i64 %lifted, 0
  br i1 %valid, label %add, label %failed"""
    base = "%row.at" if remainder else "0"
    return f"""define i32 @kernel(ptr %in, ptr %out, ptr %sizes, i64 %begin, i64 %end) #0 {{
start:
  %index = load ptr, ptr %in
  %p.elements = getelementptr ptr, ptr %in, i64 1
  %elements = load ptr, ptr %p.elements
  %y = load ptr, ptr %out
{loaded("columns added")}
  br label %row
row:
  %r = phi i64 [ %begin, %start ], [ %r.next, %row.done ]
  %row.at = mul i64 %r, %columns
  %row.y = getelementptr float, ptr %y, i64 %row.at
  %added.at = mul i64 %r, %added
  %row.index = getelementptr i64, ptr %index, i64 %added.at
  %row.elements = getelementptr float, ptr %elements, i64 %added.at
  br label %clear
clear:
  %c = phi i64 [ 0, %row ], [ %c.next, %clear ]
  %p.c = getelementptr float, ptr %row.y, i64 %c
  store float 0.0, ptr %p.c, !llvm.access.group !0
  %c.next = add nuw nsw i64 %c, 1
  %c.more = icmp slt i64 %c.next, %columns
  br i1 %c.more, label %clear, label %entry, !llvm.loop !1
entry:
  %k = phi i64 [ 0, %clear ], [ %k.next, %add ]
  %p.k = getelementptr i64, ptr %row.index, i64 %k
  %given = load i64, ptr %p.k
  %near = sub i64 %given, {base}
  %inside = icmp ult i64 %near, %columns
  br i1 %inside, label %add, label %other
other:
{other if remainder else checked}
add:
  %place = phi i64 [ %near, %entry ], [ %within, %other ]
  %p.y = getelementptr float, ptr %row.y, i64 %place
  %old = load float, ptr %p.y
  %p.e = getelementptr float, ptr %row.elements, i64 %k
  %more = load float, ptr %p.e
  %sum = fadd float %old, %more
  store float %sum, ptr %p.y
  %k.next = add nuw nsw i64 %k, 1
  %k.more = icmp slt i64 %k.next, %added
  br i1 %k.more, label %entry, label %row.done
row.done:
  %r.next = add nuw nsw i64 %r, 1
  %r.more = icmp slt i64 %r.next, %end
  br i1 %r.more, label %row, label %done
done:
  ret i32 0
failed:
  ret i32 1
}}
{METADATA}"""
