"""Operators that work along rows: sums, means and maxima over the last axes, softmax and its logarithm.

A row is the run of elements over which such a node sums or finds a maximum. A kernel computes a group with such nodes
row by row, in stages: `ir` says how. It states Softmax and LogSoftmax by simpler nodes, so that only three reductions
have code of their own, `TEXTS`. Sums are taken in one fixed order, as 32 partial sums of each chunk of a row: they
depend neither on the other nodes of a group nor on threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import onnx

from onnx_remat.fuse.code import FLOAT

LEAST_COLUMNS = 8
"""Least elements of a row: a row costs a few dozen instructions besides its elements'."""

LEAST_ROWS = 8
"""Least rows: a row is computed by one thread."""

CHUNK = 4096
"""Elements of a row that are reduced at a time; in the cache, and on a thread's stack."""

REDUCTIONS: Final[Mapping[str, str]] = {"ReduceSum": "sum", "ReduceMean": "sum", "ReduceMax": "max"}
"""Operators that make one element of a row, with the kind of function that computes it; of a mean, the sum."""

ROWS: Final = frozenset({*REDUCTIONS, "LogSoftmax", "Softmax"})
"""Operators that work along rows."""


@dataclass(frozen=True, slots=True)
class Row:
    """What a node does along rows: `columns` is the number of elements of one."""

    op: str
    columns: int


def row_of(
    node: onnx.NodeProto, dtype: int, shape: Sequence[int], integers: Mapping[str, tuple[int, ...]]
) -> Row | None:
    """Return what a node does along rows; None if it does not, or not in a way that kernels can compute.

    Parameters
    ----------
    node : onnx.NodeProto
    dtype, shape : int, sequence of int
        Of its first input.
    integers : mapping of str to tuple of int
        Known vectors of integers.
    """
    if node.op_type not in ROWS or node.domain or dtype != FLOAT or len(node.output) != 1 or not shape:
        return None
    values = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
    rank = len(shape)
    if node.op_type in REDUCTIONS:
        stated = values.get("axes")
        if len(node.input) > 1 and node.input[1]:
            stated = integers.get(node.input[1])
        if not stated:
            return None
        axes = sorted({int(axis) % rank for axis in stated})
        if axes != list(range(axes[0], rank)):
            return None
        columns = prod(shape[axes[0] :])
    elif int(values.get("axis", -1 if rank == 2 else 0)) % rank == rank - 1:  # unstated: 1 up to opset 12, then -1
        columns = shape[-1]
    else:
        return None
    if columns < LEAST_COLUMNS or prod(shape) < LEAST_ROWS * columns:
        return None
    return Row(node.op_type, columns)


_SUM = """define internal float @row_sum(ptr %x, i64 %n) alwaysinline nounwind {
entry:
  %blocks = and i64 %n, -32
  %any = icmp sgt i64 %blocks, 0
  br i1 %any, label %block, label %folded
block:
  %i = phi i64 [ 0, %entry ], [ %i.next, %block ]
  %a0 = phi <8 x float> [ zeroinitializer, %entry ], [ %b0, %block ]
  %a1 = phi <8 x float> [ zeroinitializer, %entry ], [ %b1, %block ]
  %a2 = phi <8 x float> [ zeroinitializer, %entry ], [ %b2, %block ]
  %a3 = phi <8 x float> [ zeroinitializer, %entry ], [ %b3, %block ]
  %p0 = getelementptr float, ptr %x, i64 %i
  %p1 = getelementptr float, ptr %p0, i64 8
  %p2 = getelementptr float, ptr %p0, i64 16
  %p3 = getelementptr float, ptr %p0, i64 24
  %x0 = load <8 x float>, ptr %p0, align 4
  %x1 = load <8 x float>, ptr %p1, align 4
  %x2 = load <8 x float>, ptr %p2, align 4
  %x3 = load <8 x float>, ptr %p3, align 4
  %b0 = fadd <8 x float> %a0, %x0
  %b1 = fadd <8 x float> %a1, %x1
  %b2 = fadd <8 x float> %a2, %x2
  %b3 = fadd <8 x float> %a3, %x3
  %i.next = add nuw nsw i64 %i, 32
  %i.more = icmp slt i64 %i.next, %blocks
  br i1 %i.more, label %block, label %folded
folded:
  %c0 = phi <8 x float> [ zeroinitializer, %entry ], [ %b0, %block ]
  %c1 = phi <8 x float> [ zeroinitializer, %entry ], [ %b1, %block ]
  %c2 = phi <8 x float> [ zeroinitializer, %entry ], [ %b2, %block ]
  %c3 = phi <8 x float> [ zeroinitializer, %entry ], [ %b3, %block ]
  %d0 = fadd <8 x float> %c0, %c1
  %d1 = fadd <8 x float> %c2, %c3
  %e = fadd <8 x float> %d0, %d1
  %e0 = shufflevector <8 x float> %e, <8 x float> poison, <4 x i32> <i32 0, i32 1, i32 2, i32 3>
  %e1 = shufflevector <8 x float> %e, <8 x float> poison, <4 x i32> <i32 4, i32 5, i32 6, i32 7>
  %f = fadd <4 x float> %e0, %e1
  %f0 = extractelement <4 x float> %f, i32 0
  %f1 = extractelement <4 x float> %f, i32 1
  %f2 = extractelement <4 x float> %f, i32 2
  %f3 = extractelement <4 x float> %f, i32 3
  %g0 = fadd float %f0, %f1
  %g1 = fadd float %f2, %f3
  %g = fadd float %g0, %g1
  %rest = icmp slt i64 %blocks, %n
  br i1 %rest, label %single, label %done
single:
  %j = phi i64 [ %blocks, %folded ], [ %j.next, %single ]
  %h = phi float [ %g, %folded ], [ %h.next, %single ]
  %q = getelementptr float, ptr %x, i64 %j
  %y = load float, ptr %q, align 4
  %h.next = fadd float %h, %y
  %j.next = add nuw nsw i64 %j, 1
  %j.more = icmp slt i64 %j.next, %n
  br i1 %j.more, label %single, label %done
done:
  %total = phi float [ %g, %folded ], [ %h.next, %single ]
  ret float %total
}
"""

_MAX = """define internal float @row_max(ptr %x, i64 %n) alwaysinline nounwind {
entry:
  %blocks = and i64 %n, -16
  %any = icmp sgt i64 %blocks, 0
  br i1 %any, label %block, label %folded
block:
  %i = phi i64 [ 0, %entry ], [ %i.next, %block ]
  %a0 = phi <8 x float> [ LOWEST, %entry ], [ %b0, %block ]
  %a1 = phi <8 x float> [ LOWEST, %entry ], [ %b1, %block ]
  %p0 = getelementptr float, ptr %x, i64 %i
  %p1 = getelementptr float, ptr %p0, i64 8
  %x0 = load <8 x float>, ptr %p0, align 4
  %x1 = load <8 x float>, ptr %p1, align 4
  %b0 = call <8 x float> @larger(<8 x float> %a0, <8 x float> %x0)
  %b1 = call <8 x float> @larger(<8 x float> %a1, <8 x float> %x1)
  %i.next = add nuw nsw i64 %i, 16
  %i.more = icmp slt i64 %i.next, %blocks
  br i1 %i.more, label %block, label %folded
folded:
  %c0 = phi <8 x float> [ LOWEST, %entry ], [ %b0, %block ]
  %c1 = phi <8 x float> [ LOWEST, %entry ], [ %b1, %block ]
  %d = call <8 x float> @larger(<8 x float> %c0, <8 x float> %c1)
  %e = shufflevector <8 x float> %d, <8 x float> poison, <8 x i32> EXCHANGED_4
  %f = call <8 x float> @larger(<8 x float> %d, <8 x float> %e)
  %g = shufflevector <8 x float> %f, <8 x float> poison, <8 x i32> EXCHANGED_2
  %h = call <8 x float> @larger(<8 x float> %f, <8 x float> %g)
  %k = shufflevector <8 x float> %h, <8 x float> poison, <8 x i32> EXCHANGED_1
  %l = call <8 x float> @larger(<8 x float> %h, <8 x float> %k)
  %m = extractelement <8 x float> %l, i32 0
  %rest = icmp slt i64 %blocks, %n
  br i1 %rest, label %single, label %done
single:
  %j = phi i64 [ %blocks, %folded ], [ %j.next, %single ]
  %s = phi float [ %m, %folded ], [ %s.next, %single ]
  %q = getelementptr float, ptr %x, i64 %j
  %y = load float, ptr %q, align 4
  %s.next = call float @join_max(float %s, float %y)
  %j.next = add nuw nsw i64 %j, 1
  %j.more = icmp slt i64 %j.next, %n
  br i1 %j.more, label %single, label %done
done:
  %largest = phi float [ %m, %folded ], [ %s.next, %single ]
  ret float %largest
}
define internal <8 x float> @larger(<8 x float> %a, <8 x float> %b) alwaysinline nounwind {
  %above = fcmp ugt <8 x float> %b, %a
  %taken = select <8 x i1> %above, <8 x float> %b, <8 x float> %a
  %odd = fcmp uno <8 x float> %a, %a
  %made = select <8 x i1> %odd, <8 x float> %a, <8 x float> %taken
  ret <8 x float> %made
}
"""
_JOIN_SUM = """define internal float @join_sum(float %a, float %b) alwaysinline nounwind {
  %made = fadd float %a, %b
  ret float %made
}
"""

_JOIN_MAX = """define internal float @join_max(float %a, float %b) alwaysinline nounwind {
  %above = fcmp ugt float %b, %a
  %taken = select i1 %above, float %b, float %a
  %odd = fcmp uno float %a, %a
  %made = select i1 %odd, float %a, float %taken
  ret float %made
}
"""

_LEAST = "0xFFF0000000000000"  # minus infinity
_MAX = _MAX.replace("LOWEST", f"<{', '.join([f'float {_LEAST}'] * 8)}>")
for _distance in (1, 2, 4):
    _lanes = ", ".join(f"i32 {lane ^ _distance}" for lane in range(8))
    _MAX = _MAX.replace(f"EXCHANGED_{_distance}", f"<{_lanes}>")

TEXTS: Final[Mapping[str, str]] = {"sum": _SUM + _JOIN_SUM, "max": _MAX + _JOIN_MAX}
"""LLVM text by kind: ``row_KIND`` reduces a chunk of floats, ``join_KIND`` two chunks' results. A maximum is NaN if one
element is."""

STARTS: Final[Mapping[str, str]] = {"sum": "0.0", "max": _LEAST}
"""What a kind of reduction starts from."""
