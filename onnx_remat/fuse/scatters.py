"""Sums of rows into the rows of a matrix: gradients of embeddings, as the converters write them.

ONNX Runtime adds rows in order with ScatterElements only, which wants an index for every element: an Expand of each
row's index, twice the bytes of the rows in int64. A kernel reads the indices as they are. Each thread adds all rows in
some of the columns, in order: results are ScatterElements' to the bit. It checks all indices before it writes.
"""

from __future__ import annotations

import os
from math import prod

import onnx

from onnx_remat.fuse.code import FLOAT, LONG
from onnx_remat.fuse.kernel import METADATA, Kernel, Replacement, loaded
from onnx_remat.fuse.ordered import OrderedStep
from onnx_remat.ir.graph import attributes
from onnx_remat.ir.opsets import is_op

LEAST_COLUMNS = 8
"""Least elements of a row: below, its index is no burden."""

LEAST_ELEMENTS = 1 << 12
"""Least elements to be added."""


def find(ordered: OrderedStep) -> list[Replacement]:
    """Return the sums of rows in a step, by place."""
    uses = ordered.uses
    found: list[Replacement] = []
    for place, step in enumerate(ordered.steps):
        node = step.node
        expand = uses.made_by(node.input[1], "Expand") if _adds_rows(node) else -1
        if expand < 0 or node.input[1] in ordered.root or not uses.only_for(node.input[1], place):
            continue
        wide = ordered.steps[expand].node
        names = (node.input[0], wide.input[0], node.input[2], node.output[0])
        matrix, indices, rows, made = (ordered.tensors[name] for name in names)
        if [each.dtype for each in (matrix, indices, rows, made)] != [FLOAT, LONG, FLOAT, FLOAT]:
            continue
        count, columns = rows.shape if len(rows.shape) == len(matrix.shape) == 2 else (0, 0)
        if columns < LEAST_COLUMNS or count * columns < LEAST_ELEMENTS or matrix.shape[1:] != (columns,):
            continue
        if indices.shape != (count, 1) or not matrix.shape[0]:
            continue
        if not all(map(uses.is_own, names)):
            continue
        reads = tuple(map(uses.root, names[:3]))
        index = reads[1]
        renewed = index in ordered.renewed.values()  # perhaps before the kernel reads it, later than the Expand did
        if prod(ordered.tensors[index].shape) == count and not renewed:
            kernel = _kernel(matrix.shape[0], columns, count)
            found.append(
                Replacement(place, (expand, place), reads, names[3:], "sum of rows", kernel, plain=frozenset({0}))
            )
    return found


def _adds_rows(node: onnx.NodeProto) -> bool:
    if not is_op(node, "ScatterElements"):
        return False
    values = attributes(node)
    return values == {"axis": 0, "reduction": b"add"} or values == {"reduction": b"add"}


def _kernel(rows: int, columns: int, added: int) -> Kernel:
    """Return the kernel that adds rows to those of a matrix: part of the columns in each thread."""
    grain = max(LEAST_COLUMNS, -(-columns // (os.cpu_count() or 1)))
    return Kernel(_TEXT, (rows, columns, added), columns, grain, ((FLOAT, (rows, columns)),))


_TEXT = f"""define i32 @kernel(ptr %in, ptr %out, ptr %sizes, i64 %begin, i64 %end) #0 {{
start:
  %matrix = load ptr, ptr %in
  %p.index = getelementptr ptr, ptr %in, i64 1
  %index = load ptr, ptr %p.index
  %p.added = getelementptr ptr, ptr %in, i64 2
  %added = load ptr, ptr %p.added
  %made = load ptr, ptr %out
{loaded("rows columns count")}
  br label %check
check:
  %k = phi i64 [ 0, %start ], [ %k.next, %valid ]
  %p.k = getelementptr i64, ptr %index, i64 %k
  %stated = load i64, ptr %p.k
  %shifted = add i64 %stated, %rows
  %limit = shl i64 %rows, 1
  %inside = icmp ult i64 %shifted, %limit
  br i1 %inside, label %valid, label %outside
valid:
  %k.next = add nuw nsw i64 %k, 1
  %k.more = icmp slt i64 %k.next, %count
  br i1 %k.more, label %check, label %checked
checked:
  %in.place = icmp eq ptr %matrix, %made
  br i1 %in.place, label %add, label %copy
copy:
  %r = phi i64 [ 0, %checked ], [ %r.next, %copied ]
  %r.start = mul i64 %r, %columns
  %from = getelementptr float, ptr %matrix, i64 %r.start
  %to = getelementptr float, ptr %made, i64 %r.start
  br label %copy.element
copy.element:
  %c = phi i64 [ %begin, %copy ], [ %c.next, %copy.element ]
  %p.from = getelementptr float, ptr %from, i64 %c
  %value = load float, ptr %p.from, !llvm.access.group !0
  %p.to = getelementptr float, ptr %to, i64 %c
  store float %value, ptr %p.to, !llvm.access.group !0
  %c.next = add nuw nsw i64 %c, 1
  %c.more = icmp slt i64 %c.next, %end
  br i1 %c.more, label %copy.element, label %copied, !llvm.loop !1
copied:
  %r.next = add nuw nsw i64 %r, 1
  %r.more = icmp slt i64 %r.next, %rows
  br i1 %r.more, label %copy, label %add
add:
  %n = phi i64 [ 0, %checked ], [ 0, %copied ], [ %n.next, %summed ]
  %p.n = getelementptr i64, ptr %index, i64 %n
  %given = load i64, ptr %p.n
  %negative = icmp slt i64 %given, 0
  %above = add i64 %given, %rows
  %row = select i1 %negative, i64 %above, i64 %given
  %row.start = mul i64 %row, %columns
  %target = getelementptr float, ptr %made, i64 %row.start
  %n.start = mul i64 %n, %columns
  %more = getelementptr float, ptr %added, i64 %n.start
  br label %element
element:
  %e = phi i64 [ %begin, %add ], [ %e.next, %element ]
  %p.old = getelementptr float, ptr %target, i64 %e
  %old = load float, ptr %p.old, !llvm.access.group !0
  %p.more = getelementptr float, ptr %more, i64 %e
  %extra = load float, ptr %p.more, !llvm.access.group !0
  %sum.value = fadd float %old, %extra
  store float %sum.value, ptr %p.old, !llvm.access.group !0
  %e.next = add nuw nsw i64 %e, 1
  %e.more = icmp slt i64 %e.next, %end
  br i1 %e.more, label %element, label %summed, !llvm.loop !1
summed:
  %n.next = add nuw nsw i64 %n, 1
  %n.more = icmp slt i64 %n.next, %count
  br i1 %n.more, label %add, label %done
done:
  ret i32 0
outside:
  ret i32 1
}}
{METADATA}"""
