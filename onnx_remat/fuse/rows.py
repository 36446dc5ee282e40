"""Operators that work along rows: sums, means and maxima, softmax and its logarithm.

A row is the elements over which such a node sums or finds a maximum: a run of the last axes, or several runs at equal
distances, such as one channel of a batch of images. A kernel computes a group with such nodes row by row, in stages:
`ir` says how. It states Softmax and LogSoftmax by simpler nodes, so that only three reductions
have code of their own, `TEXTS`. Sums are taken in one fixed order, as 32 partial sums of each chunk of a row: they
depend neither on the other nodes of a group nor on threads. On a device each thread sums its part of a row, see `cuda`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import onnx

from onnx_remat.fuse.code import FLOAT
from onnx_remat.ir.graph import attributes
from onnx_remat.ir.opsets import is_op

LEAST_COLUMNS = 8
"""Least elements of a row: a row costs a few dozen instructions besides its elements'."""

LEAST_ROWS = 8
"""Least rows: a row is computed by one thread."""

LEAST_WARPS = 256
"""Least rows on a device: with fewer warps, most of it idles."""

LEAST_BLOCKS = 48
"""Least rows on a device of which each is long or of several runs, unless they are of few elements altogether."""

MOST_OF_FEW = 1 << 20
"""Most elements of fewer rows, for which launches take longer than elements."""

LONG = 2048
"""Least elements of a row that takes a block on a device."""

LONG_OF_RUNS = 512
"""The same of a row of several runs: there are fewer of these."""

CHUNK = 4096
"""Elements of a row that are reduced at a time; in the cache, and on a thread's stack."""

LEAST_OF_CHANNEL = 16
"""Least elements of a run, where a row has several: each costs a few dozen instructions."""

REDUCTIONS: Final[Mapping[str, str]] = {"ReduceSum": "sum", "ReduceMean": "sum", "ReduceMax": "max"}
"""Operators that make one element of a row, with the kind of function that computes it; of a mean, the sum."""

ROWS: Final = frozenset({*REDUCTIONS, "LogSoftmax", "Softmax"})
"""Operators that work along rows."""


@dataclass(frozen=True, slots=True)
class Row:
    """What a node does along rows: `columns` is the number of elements of one, `run` that of its runs."""

    op: str
    columns: int
    run: int


def needs_block(columns: int, run: int) -> bool:
    """Whether a row takes a block of threads on a device, not a warp or part of one."""
    return columns >= (LONG if run == columns else LONG_OF_RUNS)


def can_run_on_device(row: Row, size: int) -> bool:
    """Whether `size` elements are in so many rows that a device's kernel is not slower than a library's."""
    count = size // row.columns
    if row.run < row.columns or row.columns >= LONG:
        return count >= LEAST_BLOCKS or size <= MOST_OF_FEW
    return count >= LEAST_WARPS


def chunk_of(columns: int, run: int) -> int:
    """Return how many elements of a row are reduced at a time: whole runs or equal parts of them.

    It depends on the row alone, so that a sum has the same bits in every group. If a single run has no suitable parts,
    the last chunk is shorter; 0 if there are several such runs.
    """
    if columns <= CHUNK:
        return columns
    least = CHUNK // 4 if run == columns else LEAST_OF_CHANNEL
    part = next((each for each in range(min(run, CHUNK), least - 1, -1) if run % each == 0), 0)
    return CHUNK // part * part if part else CHUNK * (run == columns)


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
    if not is_op(node, *ROWS) or dtype != FLOAT or len(node.output) != 1 or not shape:
        return None
    values = attributes(node)
    rank = len(shape)
    if node.op_type in REDUCTIONS:
        stated = values.get("axes")
        if len(node.input) > 1 and node.input[1]:
            stated = integers.get(node.input[1])
        if not stated:
            return None
        reduced = {int(axis) % rank for axis in stated}
        kept = [axis for axis in range(rank) if axis not in reduced and shape[axis] > 1]
        if not kept or any(axis in reduced and shape[axis] > 1 for axis in range(kept[0], kept[-1])):
            return None
        run = prod(shape[kept[-1] + 1 :])
        columns = run * prod(shape[: kept[0]])
    elif int(values.get("axis", -1 if rank == 2 else 0)) % rank == rank - 1:  # unstated: 1 up to opset 12, then -1
        columns = run = shape[-1]
    else:
        return None
    if columns < LEAST_COLUMNS or prod(shape) < LEAST_ROWS * columns:
        return None
    if run < columns and (run < LEAST_OF_CHANNEL or not chunk_of(columns, run)):
        return None
    return Row(node.op_type, columns, run)


_ROW = """define internal float @row_KIND(ptr %x, i64 %n) alwaysinline nounwind {
entry:
  %blocks = and i64 %n, -32
  %any = icmp sgt i64 %blocks, 0
  br i1 %any, label %block, label %folded
block:
  %i = phi i64 [ 0, %entry ], [ %i.next, %block ]
PHI_A
  %p0 = getelementptr float, ptr %x, i64 %i
  %p1 = getelementptr float, ptr %p0, i64 8
  %p2 = getelementptr float, ptr %p0, i64 16
  %p3 = getelementptr float, ptr %p0, i64 24
BLOCK
  %i.next = add nuw nsw i64 %i, 32
  %i.more = icmp slt i64 %i.next, %blocks
  br i1 %i.more, label %block, label %folded
folded:
PHI_C
  %d0 = call <8 x float> @join_KIND_8(<8 x float> %c0, <8 x float> %c1)
  %d1 = call <8 x float> @join_KIND_8(<8 x float> %c2, <8 x float> %c3)
  %e = call <8 x float> @join_KIND_8(<8 x float> %d0, <8 x float> %d1)
FOLD
  %m = extractelement <8 x float> %e2, i32 0
  %rest = icmp slt i64 %blocks, %n
  br i1 %rest, label %single, label %done
single:
  %j = phi i64 [ %blocks, %folded ], [ %j.next, %single ]
  %s = phi float [ %m, %folded ], [ %s.next, %single ]
  %q = getelementptr float, ptr %x, i64 %j
  %y = load float, ptr %q, align 4
  %s.next = call float @join_KIND(float %s, float %y)
  %j.next = add nuw nsw i64 %j, 1
  %j.more = icmp slt i64 %j.next, %n
  br i1 %j.more, label %single, label %done
done:
  %made = phi float [ %m, %folded ], [ %s.next, %single ]
  ret float %made
}
"""

_JOINED: Final = {
    "sum": ["%made = fadd TYPE %a, %b"],
    "max": [
        "%above = fcmp ugt TYPE %b, %a",
        "%taken = select MASK %above, TYPE %b, TYPE %a",
        "%odd = fcmp uno TYPE %a, %a",
        "%made = select MASK %odd, TYPE %a, TYPE %taken",
    ],
}  # of two results; of a NaN and a number, the maximum is NaN

STARTS: Final[Mapping[str, str]] = {"sum": "0.0", "max": "0xFFF0000000000000"}
"""What a kind of reduction starts from: 0, or minus infinity."""


def _join(kind: str, name: str, scalar: bool) -> str:
    whole, mask = ("float", "i1") if scalar else ("<8 x float>", "<8 x i1>")
    lines = "\n  ".join(_JOINED[kind]).replace("TYPE", whole).replace("MASK", mask)
    head = f"define internal {whole} @{name}({whole} %a, {whole} %b) alwaysinline nounwind"
    return f"{head} {{\n  {lines}\n  ret {whole} %made\n}}\n"


def _text(kind: str) -> str:
    """Return ``row_KIND``, which folds eight lanes at distances 4, 1 and 2, and ``join_KIND``."""
    start = f"<{', '.join([f'float {STARTS[kind]}'] * 8)}>"
    vector = f"call <8 x float> @join_{kind}_8(<8 x float>"
    first, block, last, fold = [], [], [], []
    for i in range(4):
        first.append(f"  %a{i} = phi <8 x float> [ {start}, %entry ], [ %b{i}, %block ]")
        block.append(f"  %x{i} = load <8 x float>, ptr %p{i}, align 4")
        block.append(f"  %b{i} = {vector} %a{i}, <8 x float> %x{i})")
        last.append(f"  %c{i} = phi <8 x float> [ {start}, %entry ], [ %b{i}, %block ]")
    before = "%e"
    for distance in (4, 1, 2):
        lanes = ", ".join(f"i32 {lane ^ distance}" for lane in range(8))
        fold.append(
            f"  %f{distance} = shufflevector <8 x float> {before}, <8 x float> poison, <8 x i32> <{lanes}>\n"
            f"  %e{distance} = {vector} {before}, <8 x float> %f{distance})"
        )
        before = f"%e{distance}"
    text = _ROW.replace("KIND", kind)
    for name, lines in (("PHI_A", first), ("BLOCK", block), ("PHI_C", last), ("FOLD", fold)):
        text = text.replace(name, "\n".join(lines))
    return text + _join(kind, f"join_{kind}", scalar=True) + _join(kind, f"join_{kind}_8", scalar=False)


TEXTS: Final[Mapping[str, str]] = {kind: _text(kind) for kind in STARTS}
"""LLVM text by kind: ``row_KIND`` reduces a chunk of floats, ``join_KIND`` two chunks' results. A maximum is NaN if one
element is."""
