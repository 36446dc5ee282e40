"""A kernel: its LLVM text, its description for ``shim.c``, the nodes it replaces; and text that many kernels share."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import onnx

from onnx_remat.fuse.onednn import Convolution
from onnx_remat.ir.shapes import Tensor

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

METADATA = """attributes #0 = { nounwind "no-builtins" "prefer-vector-width"="512" }
!0 = distinct !{}
!1 = distinct !{!1, !2, !3}
!5 = distinct !{!5, !2, !3, !6}
!6 = !{!"llvm.loop.interleave.count", i32 1}
!2 = !{!"llvm.loop.parallel_accesses", !0}
!3 = !{!"llvm.loop.vectorize.enable", i1 true}
!4 = !{}
"""


def loaded(names: str) -> str:
    """Return the text that loads a kernel's sizes to registers of these names."""
    lines = (
        f"  %p.{name} = getelementptr i64, ptr %sizes, i64 {i}\n  %{name} = load i64, ptr %p.{name}"
        for i, name in enumerate(names.split())
    )
    return "\n".join(lines)


def grain(count: int, each: int, least: int) -> int:
    """Return how many of `count` rows, with `each` elements or more work, a thread's work item has: `least` elements.

    No thread is left without an item.
    """
    return max(1, min(-(-least // each), -(-count // (os.cpu_count() or 1))))


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
        Elements that it computes, and elements of a thread's work item, or of a device's block; rows, if it has nodes
        that work along them.
    outputs, inputs : tuple of (int, tuple of int)
        Element type and shape of each; of inputs as `reading` states them.
    scratch : int
        Bytes that it takes besides.
    calls_blas : bool
        Whether its first size stands for the address of a function that it calls, see `products`.
    convolution : Convolution or None
        What it computes if it has no text, see `convolutions`.
    threads : int
        Threads of a block, if a CUDA device runs it, see `cuda`; else 0.
    segments : int
        Number of kernels that it joins, see `segments`; its size is then that in blocks, and its grain 1.
    """

    text: str
    sizes: tuple[int, ...]
    size: int
    grain: int
    outputs: tuple[tuple[int, tuple[int, ...]], ...]
    inputs: tuple[tuple[int, tuple[int, ...]], ...] = ()
    scratch: int = 0
    calls_blas: bool = False
    convolution: Convolution | None = None
    threads: int = 0
    segments: int = 1

    @property
    def device(self) -> bool:
        """Whether a CUDA device runs it."""
        return self.threads > 0

    def reading(self, tensors: Iterable[Tensor]) -> Kernel:
        """Return the kernel with the inputs that its node gives it: it refuses any of another type or shape."""
        return replace(self, inputs=tuple((each.dtype, each.shape) for each in tensors))

    def numbers(self, offset: int) -> list[int]:
        """Return the arguments of ``fused_add`` of ``shim.c``.

        `offset` is that of its code, or -1 for a convolution; a kernel of a device has none. One that joins several has
        minus their number in place of its grain.
        """
        description = [
            -self.threads if self.device else offset,
            self.size,
            -self.segments if self.segments > 1 else self.grain,
            len(self.inputs),
            len(self.outputs),
        ]
        for dtype, shape in (*self.inputs, *self.outputs):
            description += [dtype, len(shape), *shape]
        return [*description, *self.sizes]


@dataclass(frozen=True, slots=True)
class Replacement:
    """Nodes that one kernel can replace, see `replacements`.

    Attributes
    ----------
    place : int
        Where the kernel runs.
    members : tuple of int
        Places of the nodes.
    reads, makes : tuple of str
    kind : str
        Of the kernel, for the name of its node.
    kernel : Kernel
        An output beyond `makes` is a scratch output: memory that only the kernel uses.
    plain : frozenset of int
        Input slots that its output may overwrite.
    """

    place: int
    members: tuple[int, ...]
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    kind: str
    kernel: Kernel
    plain: frozenset[int] = frozenset()

    @property
    def scratch_outputs(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Element type and shape of each."""
        return self.kernel.outputs[len(self.makes) :]


@dataclass(frozen=True)
class FusedNode:
    """A node that runs a kernel in place of others.

    Attributes
    ----------
    node : onnx.NodeProto
    members : tuple of int
        Places of the nodes that it replaces.
    plain : frozenset of int
        Input slots that the kernel reads elementwise only: an output may overwrite such an input.
    segments : int
        Number of kernels that it joins, each with an equal share of the inputs and outputs; see `joins`.
    captured : tuple of str
        None: it has no body.
    """

    node: onnx.NodeProto
    members: tuple[int, ...]
    plain: frozenset[int]
    segments: int = 1
    captured: tuple[str, ...] = ()

    @cached_property
    def reads(self) -> tuple[str, ...]:
        return tuple(self.node.input)

    @cached_property
    def writes(self) -> tuple[str, ...]:
        return tuple(self.node.output)
