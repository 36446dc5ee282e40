"""Kernels of one text as one kernel of a CUDA device: its segments, each computed by some of its blocks.

A block finds its segment by its number, and then runs the text with that segment's part of the arguments. `sizes` are
the first block of each segment, the number of elements or rows of each, and then the sizes of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from onnx_remat.fuse.cuda import MOST_ARGUMENTS, OWN_BLOCK, arguments, head_of
from onnx_remat.fuse.kernel import Kernel

_MOST_BLOCKS = (1 << 31) - 1


def can_join(kernels: Sequence[Kernel]) -> bool:
    """Whether one launch can copy the arguments of kernels, and have as many blocks."""
    copied = 8 + sum(arguments(each) + 8 for each in kernels)
    return copied <= MOST_ARGUMENTS and sum(map(_blocks, kernels)) <= _MOST_BLOCKS


def _blocks(kernel: Kernel) -> int:
    return -(-kernel.size // kernel.grain)


def joined(kernels: Sequence[Kernel]) -> Kernel:
    """Return the kernel that computes what several kernels of one text do."""
    first, *starts, blocks = 0, *accumulate(map(_blocks, kernels))
    sizes = (first, *starts, *(each.size for each in kernels), *(size for each in kernels for size in each.sizes))
    inputs = tuple(each for kernel in kernels for each in kernel.inputs)
    outputs = tuple(each for kernel in kernels for each in kernel.outputs)
    text, threads = _text(kernels[0], len(kernels)), kernels[0].threads
    return Kernel(text, sizes, blocks, 1, outputs, inputs, threads=threads, segments=len(kernels))


def _text(kernel: Kernel, count: int) -> str:
    """Return the text of `count` kernels: theirs as a function, and one that calls it for a block's segment."""
    reads, writes, sizes = len(kernel.inputs), len(kernel.outputs), len(kernel.sizes)
    head = head_of(reads, writes, sizes)
    assert kernel.text.count(head) == kernel.text.count(OWN_BLOCK) == 1, "a kernel does not begin as others do"
    function = "define internal void @segment(ptr %in, ptr %out, ptr %sizes, i64 %size, i32 %b) alwaysinline #0 {"
    search, at, left = [], "0", count
    while left > 1:  # the segment is one of `left`, of which `at` is the first
        half = left // 2
        search += [
            f"%middle.{left} = add i32 {at}, {half}",
            f"%p.{left} = getelementptr i64, ptr %sizes, i32 %middle.{left}",
            f"%first.{left} = load i64, ptr %p.{left}",
            f"%start.{left} = trunc i64 %first.{left} to i32",
            f"%after.{left} = icmp uge i32 %b, %start.{left}",
            f"%at.{left} = select i1 %after.{left}, i32 %middle.{left}, i32 {at}",
        ]
        at, left = f"%at.{left}", left - half
    lines = "\n  ".join(search)
    return f"""{kernel.text.replace(OWN_BLOCK, "").replace(head, function)}
{head_of(count * reads, count * writes, count * (2 + sizes))}
  {OWN_BLOCK}
  {lines}
  %at.in = mul i32 {at}, {reads}
  %own.in = getelementptr ptr, ptr %in, i32 %at.in
  %at.out = mul i32 {at}, {writes}
  %own.out = getelementptr ptr, ptr %out, i32 %at.out
  %p.start = getelementptr i64, ptr %sizes, i32 {at}
  %start = load i64, ptr %p.start
  %before = trunc i64 %start to i32
  %own.block = sub i32 %b, %before
  %at.size = add i32 {at}, {count}
  %p.size = getelementptr i64, ptr %sizes, i32 %at.size
  %own.size = load i64, ptr %p.size
  %more.sizes = mul i32 {at}, {sizes}
  %at.sizes = add i32 %more.sizes, {2 * count}
  %own.sizes = getelementptr i64, ptr %sizes, i32 %at.sizes
  call void @segment(ptr %own.in, ptr %own.out, ptr %own.sizes, i64 %own.size, i32 %own.block)
  ret void
}}
"""
