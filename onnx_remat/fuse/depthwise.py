"""Gradients of the weights of depthwise convolutions, of two spatial axes.

oneDNN has kernels of its own for windows of 3 x 3; larger ones it computes channel by channel as products of columns,
and ONNX Runtime does so with all windows. The kernel here sums, for each entry of the window, products of the output's
gradient and the images read there:

- An image is copied with its padding, and divided by strides: entries that windows read next to one another lie next to
  one another. The gradient is copied in lines of the same length.
- So each entry of the window reads one run of elements, from its own offset on. What lies between the gradient's lines
  is masked, so that no infinity of an image reaches a sum that does not read it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from onnx_remat.fuse import onednn
from onnx_remat.fuse.code import FLOAT
from onnx_remat.fuse.convolution_forms import Found
from onnx_remat.fuse.convolutions import LEAST_WORK_IN_GROUPS
from onnx_remat.fuse.kernel import METADATA, Kernel, grain, loaded
from onnx_remat.fuse.onednn import WEIGHTS, Convolution
from onnx_remat.fuse.ordered import OrderedStep

MOST_COPIED = 1 << 14
"""Elements of an image's and a gradient's copies, at most: they lie on a thread's stack, which may have 256 KiB."""

MOST_ENTRIES = 1 << 8
"""Entries of a window, at most: a sum of `LANES` numbers each lies on the stack."""

LEAST_READS = 4
"""Times that an element of an image is read, at least: to copy one takes as long as to add some products."""

LEAST_SHARE = 0.25
"""Of the products that are computed, those that count, at least."""

LANES = 16
"""Numbers that are added at a time."""

PART_WORK = 1 << 16
"""Least additions of a thread's work item."""


def find(every: Iterable[Found]) -> list[Found]:
    """Return the convolutions that the kernel computes faster than oneDNN, where that is installed, or ONNX Runtime."""
    return [found for found in every if is_possible(found.convolution) and worthwhile(found.convolution)]


def is_possible(of: Convolution) -> bool:
    """Whether the kernel here can compute a convolution: a gradient of weights."""
    if of.kind != WEIGHTS or len(of.kernel) != 2 or not of.group == of.images[1] == of.output[1]:
        return False
    return _Copies.of(of).count <= MOST_COPIED and prod(of.kernel) <= MOST_ENTRIES


def worthwhile(of: Convolution) -> bool:
    """Return whether the kernel here is the fastest, judged by sizes."""
    read, made = prod(of.images[2:]), prod(of.output[2:])
    if prod(of.kernel) * made < LEAST_READS * read or made < LEAST_SHARE * _Copies.of(of).gradient:
        return False
    return of.work >= LEAST_WORK_IN_GROUPS and (bool(onednn.why_not()) or not onednn.is_made_for(of))


@dataclass(frozen=True, slots=True)
class _Copies:
    """Sizes of the copies: lines, and elements of a line, of each part of an image; elements of the gradient's."""

    lines: int
    line: int
    parts: int
    gradient: int

    @classmethod
    def of(cls, convolution: Convolution) -> _Copies:
        spans = zip(convolution.output[2:], convolution.kernel, convolution.dilations, convolution.strides, strict=True)
        lines, line = (out + (kernel - 1) * dilation // stride for out, kernel, dilation, stride in spans)
        return cls(lines, line, prod(convolution.strides), -(-convolution.output[2] * line // LANES) * LANES)

    @property
    def image(self) -> int:
        """Elements of an image's copy; the last entry of a window reads up to a line and `LANES` beyond."""
        return self.parts * self.lines * self.line + self.line + LANES

    @property
    def count(self) -> int:
        return self.image + 2 * self.gradient


def kernel_of(found: Found, ordered: OrderedStep) -> Kernel:
    """Return the kernel of a gradient: some channels in each part."""
    of = found.convolution
    batch, channels = of.images[:2]
    copies, entries = _Copies.of(of), prod(of.kernel)
    sizes = (
        batch, channels, *of.images[2:], *of.output[2:], *of.kernel, *of.strides, *of.dilations, *of.begin,
        copies.lines, copies.line, copies.image, copies.gradient, entries,
    )  # fmt: skip
    each = batch * entries * copies.gradient
    outputs = ((FLOAT, ordered.tensors[found.makes].shape),)
    return Kernel(_TEXT, sizes, channels, grain(channels, each, PART_WORK), outputs)


_SIZES = "batch channels h w oh ow kh kw sh sw dh dw top left lines line image gradient entries"
_VECTOR, _MASK = f"<{LANES} x float>", f"<{LANES} x i32>"


def _loop(name: str, count: str, body: str, before: str, how: str = "") -> str:
    """Return a loop over %NAME from 0 to `count`, at least once, after block `before`; what follows is NAME.done."""
    return f"""  br label %{name}.begin
{name}.begin:
  %{name} = phi i64 [ 0, %{before} ], [ %{name}.next, %{name}.end ]
{body}
  br label %{name}.end
{name}.end:
  %{name}.next = add nuw nsw i64 %{name}, 1
  %{name}.more = icmp slt i64 %{name}.next, {count}
  br i1 %{name}.more, label %{name}.begin, label %{name}.done{how}
{name}.done:"""


def _fill(name: str, kind: str, value: str, to: str, count: str, before: str) -> str:
    """Return a loop that stores a value in `count` places."""
    store = f"""  %{name}.to = getelementptr {kind}, ptr {to}, i64 %{name}
  store {kind} {value}, ptr %{name}.to, !llvm.access.group !0"""
    return _loop(name, count, store, before, ", !llvm.loop !1")


def _copy(name: str, of: str, stride: str, to: str, count: str, before: str) -> str:
    """Return a loop that copies `count` numbers."""
    copied = f"""  %{name}.at = mul nsw i64 %{name}, {stride}
  %{name}.of = getelementptr float, ptr {of}, i64 %{name}.at
  %{name}.value = load float, ptr %{name}.of, !llvm.access.group !0
  %{name}.to = getelementptr float, ptr {to}, i64 %{name}
  store float %{name}.value, ptr %{name}.to, !llvm.access.group !0"""
    return _loop(name, count, copied, before, ", !llvm.loop !1")


_MASKED = f"""  %masked.first = mul i64 %masked, %line
  %masked.line = getelementptr i32, ptr %mask, i64 %masked.first
{_fill("set", "i32", "-1", "%masked.line", "%ow", "masked.begin")}"""
"""The lanes of a line of the gradient."""

_OFFSET = """  %ky = udiv i64 %offset, %kw
  %kx = urem i64 %offset, %kw
  %down = mul i64 %ky, %dh
  %across = mul i64 %kx, %dw
  %down.part = urem i64 %down, %sh
  %across.part = urem i64 %across, %sw
  %down.line = udiv i64 %down, %sh
  %across.column = udiv i64 %across, %sw
  %offset.row = mul i64 %down.part, %sw
  %offset.part = add i64 %offset.row, %across.part
  %offset.first = mul i64 %offset.part, %part
  %offset.lines = mul i64 %down.line, %line
  %offset.line = add i64 %offset.first, %offset.lines
  %offset.at = add i64 %offset.line, %across.column
  %offset.to = getelementptr i64, ptr %from, i64 %offset
  store i64 %offset.at, ptr %offset.to"""
"""Where an entry of the window begins to read an image's copy."""

_PHASE = f"""  %phase.next.part = add i64 %phase, %sw
  %phase.shift = sub i64 %phase.next.part, %left.part
  %first = urem i64 %phase.shift, %sw
  %first.padded = add i64 %first, %left
  %column = udiv i64 %first.padded, %sw
  %rest = sub i64 %w, %first
  %rest.up = add i64 %rest, %sw
  %rest.most = sub i64 %rest.up, 1
  %all = sdiv i64 %rest.most, %sw
  %room = sub i64 %line, %column
  %few = icmp slt i64 %all, %room
  %count = select i1 %few, i64 %all, i64 %room
  %some = icmp sgt i64 %count, 0
  %to.part = add i64 %row.parts, %phase
  %to.first = mul i64 %to.part, %part
  %to.line = add i64 %to.first, %row.to
  %to.at = add i64 %to.line, %column
  %to = getelementptr float, ptr %copy, i64 %to.at
  %of = getelementptr float, ptr %row.x, i64 %first
  br i1 %some, label %phase.some, label %phase.end
phase.some:
{_copy("element", "%of", "%sw", "%to", "%count", "phase.some")}"""
"""Every so many elements of a row of an image lie next to one another."""

_ROW = f"""  %row.padded = add i64 %row, %top
  %row.part = urem i64 %row.padded, %sh
  %row.line = udiv i64 %row.padded, %sh
  %row.read = icmp ult i64 %row.line, %lines
  %row.at = mul i64 %row, %w
  %row.x = getelementptr float, ptr %plane.x, i64 %row.at
  %row.parts = mul i64 %row.part, %sw
  %row.to = mul i64 %row.line, %line
  br i1 %row.read, label %row.some, label %row.end
row.some:
{_loop("phase", "%sw", _PHASE, "row.some")}"""

_GIVEN = f"""  %given.at = mul i64 %given, %ow
  %given.first = mul i64 %given, %line
  %given.of = getelementptr float, ptr %plane.g, i64 %given.at
  %given.to = getelementptr float, ptr %grad, i64 %given.first
{_copy("number", "%given.of", "1", "%given.to", "%ow", "given.begin")}"""

_ENTRY = f"""  %entry.from = getelementptr i64, ptr %from, i64 %entry
  %entry.at = load i64, ptr %entry.from
  %entry.x = getelementptr float, ptr %copy, i64 %entry.at
  %entry.sums = getelementptr {_VECTOR}, ptr %sums, i64 %entry
  %before = load {_VECTOR}, ptr %entry.sums, align 64
  br label %lane
lane:
  %l = phi i64 [ 0, %entry.begin ], [ %l.next, %lane ]
  %sum = phi {_VECTOR} [ %before, %entry.begin ], [ %more, %lane ]
  %l.x = getelementptr float, ptr %entry.x, i64 %l
  %read = load {_MASK}, ptr %l.x, align 4
  %l.mask = getelementptr i32, ptr %mask, i64 %l
  %valid = load {_MASK}, ptr %l.mask, align 64
  %within = and {_MASK} %read, %valid
  %pixels = bitcast {_MASK} %within to {_VECTOR}
  %l.g = getelementptr float, ptr %grad, i64 %l
  %slopes = load {_VECTOR}, ptr %l.g, align 64
  %more = call {_VECTOR} @llvm.fmuladd.v{LANES}f32({_VECTOR} %pixels, {_VECTOR} %slopes, {_VECTOR} %sum)
  %l.next = add nuw nsw i64 %l, {LANES}
  %l.more = icmp slt i64 %l.next, %gradient
  br i1 %l.more, label %lane, label %summed
summed:
  store {_VECTOR} %more, ptr %entry.sums, align 64"""

_IMAGE = f"""  %image.first = mul i64 %n, %channels
  %image.plane = add i64 %image.first, %c
  %x.at = mul i64 %image.plane, %plane
  %plane.x = getelementptr float, ptr %x, i64 %x.at
  %g.at = mul i64 %image.plane, %made
  %plane.g = getelementptr float, ptr %g, i64 %g.at
{_loop("row", "%h", _ROW, "n.begin")}
{_loop("given", "%oh", _GIVEN, "row.done")}
{_loop("entry", "%entries", _ENTRY, "given.done")}"""

_RESULT = f"""  %result.sums = getelementptr {_VECTOR}, ptr %sums, i64 %result
  %parts = load {_VECTOR}, ptr %result.sums, align 64
  %total = call float @llvm.vector.reduce.fadd.v{LANES}f32(float 0.0, {_VECTOR} %parts)
  %result.at = add i64 %result.first, %result
  %result.to = getelementptr float, ptr %y, i64 %result.at
  store float %total, ptr %result.to"""

_TEXT = f"""declare {_VECTOR} @llvm.fmuladd.v{LANES}f32({_VECTOR}, {_VECTOR}, {_VECTOR})
declare float @llvm.vector.reduce.fadd.v{LANES}f32(float, {_VECTOR})
define i32 @kernel(ptr %in, ptr %out, ptr %sizes, i64 %begin, i64 %end) #0 {{
start:
  %x = load ptr, ptr %in
  %p.g = getelementptr ptr, ptr %in, i64 1
  %g = load ptr, ptr %p.g
  %y = load ptr, ptr %out
{loaded(_SIZES)}
  %copy = alloca float, i64 %image, align 64
  %grad = alloca float, i64 %gradient, align 64
  %mask = alloca i32, i64 %gradient, align 64
  %sums = alloca {_VECTOR}, i64 %entries, align 64
  %from = alloca i64, i64 %entries
  %numbers = mul i64 %entries, {LANES}
  %plane = mul i64 %h, %w
  %made = mul i64 %oh, %ow
  %part = mul i64 %lines, %line
  %left.part = urem i64 %left, %sw
{_fill("border", "float", "0.0", "%copy", "%image", "start")}
{_fill("gap", "float", "0.0", "%grad", "%gradient", "border.done")}
{_fill("clear", "i32", "0", "%mask", "%gradient", "gap.done")}
{_loop("masked", "%oh", _MASKED, "clear.done")}
{_loop("offset", "%entries", _OFFSET, "masked.done")}
  br label %channel
channel:
  %c = phi i64 [ %begin, %offset.done ], [ %c.next, %result.done ]
  %result.first = mul i64 %c, %entries
{_fill("zero", "float", "0.0", "%sums", "%numbers", "channel")}
{_loop("n", "%batch", _IMAGE, "zero.done")}
{_loop("result", "%entries", _RESULT, "n.done")}
  %c.next = add nuw nsw i64 %c, 1
  %c.more = icmp slt i64 %c.next, %end
  br i1 %c.more, label %channel, label %finished
finished:
  ret i32 0
}}
{METADATA}"""
