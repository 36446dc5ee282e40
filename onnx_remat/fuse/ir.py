"""LLVM text of a group: one function that computes elements [begin, end) of all its outputs.

::

    void kernel(void **inputs, void **outputs, const int64_t *sizes, int64_t begin, int64_t end)

If a value is broadcast, the elements are divided into rows, the innermost axis of `groups.loops`. Loop-invariant values
are computed once before the loops, or once per row. Extents and strides are passed as `sizes` and scalars as inputs, so
that steps of any size and with any constants share their kernels.

All of an element's inputs are read before any of its outputs is written, and pointers are not declared as noalias: an
output may overwrite an input. No fast-math, no contraction: results are ONNX Runtime's to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onnx_remat.fuse import spaces
from onnx_remat.fuse.code import KINDS, Code
from onnx_remat.fuse.groups import Group, Member, Read, loops
from onnx_remat.fuse.onednn import Convolution
from onnx_remat.fuse.ops import OPS
from onnx_remat.fuse.spaces import Strides

PART_BYTES = 1 << 18
"""Approximate bytes of a thread's work item: they fit its cache."""

LEAST_PART = 2048
"""Minimum elements of a thread's work item."""

DECLARATIONS = "".join(
    f"declare {kind} @llvm.{name}.{suffix}({kind}{more})\n"
    for kinds, names, more in (
        ((("float", "f32"), ("double", "f64")), ("sqrt", "fabs", "floor", "ceil", "roundeven"), ""),
        ((("i32", "i32"), ("i64", "i64")), ("abs",), ", i1"),
    )
    for kind, suffix in kinds
    for name in names
)

ROUND_BFLOAT = """define internal i16 @to_bfloat(float %x) alwaysinline nounwind {
  %bits = bitcast float %x to i32
  %above = lshr i32 %bits, 16
  %odd = and i32 %above, 1
  %half = add i32 %odd, 32767
  %near = add i32 %bits, %half
  %cut = lshr i32 %near, 16
  %nan = fcmp uno float %x, 0.0
  %made = select i1 %nan, i32 32705, i32 %cut
  %stored = trunc i32 %made to i16
  ret i16 %stored
}
define internal float @of_bfloat(i16 %x) alwaysinline nounwind {
  %wide = zext i16 %x to i32
  %bits = shl i32 %wide, 16
  %made = bitcast i32 %bits to float
  ret float %made
}
"""
"""Conversions of bfloat16: rounds to nearest, ties to even; every NaN becomes ONNX Runtime's."""

METADATA = """attributes #0 = { nounwind "no-builtins" }
!0 = distinct !{}
!1 = distinct !{!1, !2, !3}
!2 = !{!"llvm.loop.parallel_accesses", !0}
!3 = !{!"llvm.loop.vectorize.enable", i1 true}
!4 = !{}
"""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A group's kernel.

    Attributes
    ----------
    text : str
        LLVM text; the function is called ``kernel``.
    sizes : tuple of int
        The function's argument `sizes`.
    size, grain : int
        Elements that it computes, and elements of a thread's work item.
    inputs : tuple of (int, int)
        Element type and number of elements of each.
    outputs : tuple of (int, tuple of int)
        Element type and shape of each.
    scratch : int
        Bytes that it takes besides; not 0 if it calls the function whose address its first size stands for, see
        `products`.
    convolution : Convolution or None
        What it computes if it has no text, see `convolutions`.
    """

    text: str
    sizes: tuple[int, ...]
    size: int
    grain: int
    inputs: tuple[tuple[int, int], ...]
    outputs: tuple[tuple[int, tuple[int, ...]], ...]
    scratch: int = 0
    convolution: Convolution | None = None

    def numbers(self, offset: int) -> list[int]:
        """Return the arguments of ``fused_add`` of ``shim.c``; `offset` is that of its code, -1 without any."""
        description = [offset, self.size, self.grain, len(self.inputs), len(self.outputs)]
        description += [number for each in self.inputs for number in each]
        for dtype, shape in self.outputs:
            description += [dtype, len(shape), *shape]
        return [*description, *self.sizes]


def kernel_of(group: Group, dtypes: Sequence[int], elements: Sequence[int]) -> Kernel:
    """Return the kernel of a group.

    Parameters
    ----------
    group : Group
    dtypes, elements : sequence of int
        Element type and number of elements of each value in ``group.reads``.
    """
    writer = _Writer(group, dtypes)
    text = writer.text()
    made = {member.made: member for member in group.members}
    outputs = tuple((made[name].call.made, made[name].shape) for name in group.makes)
    width = sum(KINDS[dtype].nbytes for dtype in (*dtypes, *(dtype for dtype, _ in outputs)))
    grain = max(LEAST_PART, PART_BYTES // width)
    inputs = tuple(zip(dtypes, elements, strict=True))
    return Kernel(text, tuple(writer.sizes), group.size, grain, inputs, outputs)


_IN_LOOP = ", !llvm.access.group !0"
_FIXED = ", !invariant.load !4"


class _Writer:
    """Writer of the function of one group.

    A value is computed for given strides over the axes: those of all elements, or fewer if it is broadcast.
    """

    def __init__(self, group: Group, dtypes: Sequence[int]) -> None:
        self.group = group
        self.axes = loops(group.members)
        self.full = spaces.full(self.axes)
        self.once: Strides = (0,) * len(self.axes)
        self.maker = {member.made: member for member in group.members}
        self.input = {name: (i, dtype) for i, (name, dtype) in enumerate(zip(group.reads, dtypes, strict=True))}
        numbering = [0]
        self.before, self.row, self.loop = (Code(numbering) for _ in range(3))
        self.sizes: list[int] = []
        self.offsets: dict[Strides, str] = {}
        self.found: dict[tuple[str, Strides], str] = {}
        self.coordinates: list[str] = []

    def text(self) -> str:
        by_rows = len(self.axes) > 1
        for i in range(len(self.group.reads)):
            self._argument("in", i)
        for i in range(len(self.group.makes)):
            self._argument("out", i)
        if by_rows:
            self._place_rows()
        made = [self._value(name, self.full) for name in self.group.makes]
        for i, (name, value) in enumerate(zip(self.group.makes, made, strict=True)):  # after all reads
            self.loop.store(value, f"%out{i}", "%index", self.maker[name].call.made, _IN_LOOP)
        halves = any("_bfloat(" in line for code in (self.before, self.row, self.loop) for line in code.lines)
        function = self._in_rows() if by_rows else self._in_one_loop()
        return f"{DECLARATIONS}{ROUND_BFLOAT if halves else ''}{function}{METADATA}"

    def _argument(self, way: str, i: int) -> None:
        self.before.lines.append(f"%p{way}{i} = getelementptr ptr, ptr %{way}, i64 {i}")
        self.before.lines.append(f"%{way}{i} = load ptr, ptr %p{way}{i}{_FIXED}")

    def _size(self, number: int) -> str:
        """Append a number to the function's `sizes`, and return the register it is loaded to."""
        place = self.before.new(f"getelementptr i64, ptr %sizes, i64 {len(self.sizes)}")
        self.sizes.append(number)
        return self.before.new(f"load i64, ptr {place}{_FIXED}")

    def _place_rows(self) -> None:
        """Compute the row's coordinate along each axis except the innermost."""
        self.inner = self._size(self.axes[-1])
        left, found = "%row", []
        for extent in reversed(self.axes[1:-1]):
            size = self._size(extent)
            found.append(self.row.new(f"urem i64 {left}, {size}"))
            left = self.row.new(f"udiv i64 {left}, {size}")
        self.coordinates = [left, *reversed(found)]

    def _offset(self, strides: Strides) -> str:
        """Return the index of a row's first element in a value with these strides."""
        if strides == self.full:
            return "%base"
        if strides not in self.offsets:
            total = "0"
            for coordinate, stride in zip(self.coordinates, strides[:-1], strict=True):
                if stride:
                    step = self.row.new(f"mul i64 {coordinate}, {self._size(stride)}")
                    total = self.row.new(f"add i64 {total}, {step}")
            self.offsets[strides] = total
        return self.offsets[strides]

    def _strides(self, read: Read, member: Member, own: Strides) -> Strides:
        """Return the strides at which a member that is computed at strides `own` reads an input."""
        if read.size == member.size:
            return own
        if read.size == 1:
            return self.once
        return spaces.strides(read.shape, member.shape, self.axes)

    def _value(self, name: str, strides: Strides) -> str:
        """Return the register of a value, computed in the outermost code in which it is invariant."""
        if (name, strides) in self.found:
            return self.found[name, strides]
        code = self.loop if strides[-1] or strides == self.full else self.row if any(strides) else self.before
        if name in self.maker:
            member = self.maker[name]
            arguments = [
                self._value(read.name, self._strides(read, member, strides)) if read else "" for read in member.reads
            ]
            made = OPS[member.call.op].emit(code, KINDS[member.call.dtype].register, arguments, member.call)
            made = code.rounded(made, member.call.made)
        else:
            i, dtype = self.input[name]
            if code is self.before:
                index, note = "0", ""
            elif code is self.row:
                index, note = self._offset(strides), ""
            elif strides == self.full:
                index, note = "%index", _IN_LOOP
            else:
                index, note = code.new(f"add i64 {self._offset(strides)}, %column"), _IN_LOOP
            made = code.loaded(f"%in{i}", index, dtype, note)
        self.found[name, strides] = made
        return made

    def _in_one_loop(self) -> str:
        return f"""define void @kernel(ptr %in, ptr %out, ptr %sizes, i64 %begin, i64 %end) #0 {{
start:
  {_lines(self.before)}
  br label %element
element:
  %index = phi i64 [ %begin, %start ], [ %next, %element ]
  {_lines(self.loop)}
  %next = add nuw nsw i64 %index, 1
  %more = icmp slt i64 %next, %end
  br i1 %more, label %element, label %done, !llvm.loop !1
done:
  ret void
}}
"""

    def _in_rows(self) -> str:
        return f"""define void @kernel(ptr %in, ptr %out, ptr %sizes, i64 %begin, i64 %end) #0 {{
start:
  {_lines(self.before)}
  %first = udiv i64 %begin, {self.inner}
  %skipped = mul i64 %first, {self.inner}
  %offset = sub i64 %begin, %skipped
  br label %next_row
next_row:
  %row = phi i64 [ %first, %start ], [ %after, %row_done ]
  %from = phi i64 [ %offset, %start ], [ 0, %row_done ]
  %base = mul i64 %row, {self.inner}
  %left = sub i64 %end, %base
  %short = icmp slt i64 %left, {self.inner}
  %to = select i1 %short, i64 %left, i64 {self.inner}
  {_lines(self.row)}
  br label %element
element:
  %column = phi i64 [ %from, %next_row ], [ %next, %element ]
  %index = add nuw nsw i64 %base, %column
  {_lines(self.loop)}
  %next = add nuw nsw i64 %column, 1
  %more = icmp slt i64 %next, %to
  br i1 %more, label %element, label %row_done, !llvm.loop !1
row_done:
  %after = add i64 %row, 1
  %reached = add i64 %base, %to
  %again = icmp slt i64 %reached, %end
  br i1 %again, label %next_row, label %done
done:
  ret void
}}
"""


def _lines(code: Code) -> str:
    return "\n  ".join(code.lines)
