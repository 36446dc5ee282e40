"""Large matrix products as kernels that call OpenBLAS, see `blas`.

A kernel computes a block of rows or of columns in each thread. It adds the bias by itself, while the block is in the
cache. Results are within rounding of ONNX Runtime's, and depend neither on the addresses of the operands nor on other
nodes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import onnx

from onnx_remat.fuse import blas
from onnx_remat.fuse.code import FLOAT
from onnx_remat.fuse.kernel import METADATA, Kernel, Replacement, loaded
from onnx_remat.fuse.members import MOST_RANK
from onnx_remat.fuse.ordered import OrderedStep
from onnx_remat.ir.graph import attributes
from onnx_remat.ir.opsets import is_op
from onnx_remat.ir.shapes import Tensor

LEAST_WORK = 1 << 27
"""Multiplications from which on a product gains more time than its scratch memory is worth."""

LEAST_SIZE = 16
"""Least rows, columns and terms of a sum: smaller ones have kernels of their own in ONNX Runtime."""

LEAST_BLOCK = 64
"""Least rows or columns of a block: packing the other operand takes a share of the time of one in so many."""

MOST_ROWS = 1024
"""Most rows of a block: OpenBLAS packs all rows of a call at a time."""


@dataclass(frozen=True, slots=True)
class Product:
    """A product of two matrices of float32, with a bias for each column or none.

    Attributes
    ----------
    rows, columns, terms : int
        Of the result; and of each sum.
    left, right : bool
        Whether an operand is transposed.
    bias : bool
    shape : tuple of int
        Of the result, whose first axes may be several.
    """

    rows: int
    columns: int
    terms: int
    left: bool
    right: bool
    bias: bool
    shape: tuple[int, ...]


def find(ordered: OrderedStep) -> list[Replacement]:
    """Return the products of a step that are worth a kernel, by place."""
    found: list[Replacement] = []
    for place, step in enumerate(ordered.steps):
        product = product_of(step.node, ordered.tensors)
        if product is not None:
            reads, kind = tuple(name for name in step.node.input if name), f"product, {step.node.op_type}"
            found.append(Replacement(place, (place,), reads, tuple(step.node.output), kind, kernel_of(product)))
    return found


def product_of(node: onnx.NodeProto, tensors: Mapping[str, Tensor]) -> Product | None:
    """Return the product that a node computes, None if it is none or better left to ONNX Runtime."""
    if not (is_op(node, "MatMul", "Gemm") or (node.domain, node.op_type) == ("com.microsoft", "FusedMatMul")):
        return None
    values = attributes(node)
    left, right = bool(values.pop("transA", 0)), bool(values.pop("transB", 0))
    inputs = [name for name in node.input if name]
    if not values.keys() <= {"alpha", "beta"} or any(value != 1.0 for value in values.values()):
        return None
    known = [tensors[name] for name in (*inputs, node.output[0])]
    a, b, *rest = known
    bias, result = rest[:-1], rest[-1]
    if any(each.dtype != FLOAT for each in known) or len(b.shape) != 2 or len(a.shape) < 2 or len(bias) > 1:
        return None
    if left and len(a.shape) != 2:
        return None
    outer, inner = prod(a.shape[:-1]), a.shape[-1]
    rows, terms = (inner, outer) if left else (outer, inner)
    columns = b.shape[0] if right else b.shape[1]
    if bias and (prod(bias[0].shape) != columns or bias[0].shape[-1:] != (columns,)):
        return None
    if min(rows, columns, terms) < LEAST_SIZE or rows * columns * terms < LEAST_WORK or len(result.shape) > MOST_RANK:
        return None
    return Product(rows, columns, terms, left, right, bool(bias), tuple(result.shape))


def kernel_of(product: Product) -> Kernel:
    """Return the kernel of a product."""
    by_rows = product.rows >= product.columns
    extent = product.rows if by_rows else product.columns
    threads = max(1, min(os.cpu_count() or 1, extent // LEAST_BLOCK))
    step = min(-(-extent // threads), MOST_ROWS if by_rows else extent)
    size = product.rows * product.columns
    grain = step * product.columns if by_rows else -(-size // -(-extent // step))
    sizes = (
        product.rows, product.columns, product.terms, product.rows if product.left else product.terms,
        product.terms if product.right else product.columns, step, grain,
    )  # fmt: skip
    text = _text(product.left, product.right, product.bias, by_rows)
    packed = blas.packed()
    scratch = 4 * min(product.terms, packed) * ((step if by_rows else product.rows) + min(product.columns, packed))
    outputs = ((FLOAT, product.shape),)
    return Kernel(text, (ADDRESS, *sizes), size, grain, outputs, scratch=threads * scratch, calls_blas=True)


def scratch_bytes(kernels: Iterable[Kernel]) -> int:
    """Return the bytes that OpenBLAS keeps for packed operands: those of the kernel that needs most."""
    return max((kernel.scratch for kernel in kernels), default=0)


ADDRESS = 0
"""Stands in a kernel's sizes for the address of the product, which differs between processes."""


_ROW_MAJOR, _PLAIN, _TRANSPOSED = 101, 111, 112
"""Numbers of ``cblas.h``."""


def _text(left: bool, right: bool, bias: bool, by_rows: bool) -> str:
    """Return the LLVM text of a kernel: part ``begin / grain`` computes `step` rows or columns."""
    loads = loaded("product rows columns terms lda ldb step grain")
    extent = "%rows" if by_rows else "%columns"
    of_a = "%start" if left else "%start.a"
    of_b = "%start.b" if right else "%start"
    begins = (
        f"""  %start.a = mul i64 %start, %lda
  %a = getelementptr float, ptr %a.all, i64 {of_a}
  %b = getelementptr float, ptr %b.all, i64 0
  %start.c = mul i64 %start, %columns
  %m = add i64 %count, 0
  %n = add i64 %columns, 0
  %first = add i64 0, 0"""
        if by_rows
        else f"""  %start.b = mul i64 %start, %ldb
  %a = getelementptr float, ptr %a.all, i64 0
  %b = getelementptr float, ptr %b.all, i64 {of_b}
  %start.c = add i64 %start, 0
  %m = add i64 %rows, 0
  %n = add i64 %count, 0
  %first = add i64 %start, 0"""
    )
    filled = """
  %p.bias = getelementptr ptr, ptr %in, i64 2
  %bias.all = load ptr, ptr %p.bias
  %bias = getelementptr float, ptr %bias.all, i64 %first
  br label %row
row:
  %i = phi i64 [ 0, %begun ], [ %i.next, %row.done ]
  %line = mul i64 %i, %columns
  %target = getelementptr float, ptr %c, i64 %line
  br label %column
column:
  %j = phi i64 [ 0, %row ], [ %j.next, %column ]
  %from = getelementptr float, ptr %bias, i64 %j
  %value = load float, ptr %from, !llvm.access.group !0
  %to = getelementptr float, ptr %target, i64 %j
  store float %value, ptr %to, !llvm.access.group !0
  %j.next = add nuw nsw i64 %j, 1
  %j.more = icmp slt i64 %j.next, %n
  br i1 %j.more, label %column, label %row.done, !llvm.loop !1
row.done:
  %i.next = add nuw nsw i64 %i, 1
  %i.more = icmp slt i64 %i.next, %m
  br i1 %i.more, label %row, label %call"""
    fill = filled if bias else "\n  br label %call"
    ta, tb = (_TRANSPOSED if transposed else _PLAIN for transposed in (left, right))
    return f"""define i32 @kernel(ptr %in, ptr %out, ptr %sizes, i64 %begin, i64 %end) #0 {{
entry:
  %a.all = load ptr, ptr %in
  %p.b = getelementptr ptr, ptr %in, i64 1
  %b.all = load ptr, ptr %p.b
  %c.all = load ptr, ptr %out
{loads}
  %part = udiv i64 %begin, %grain
  %start = mul i64 %part, %step
  %left = sub i64 {extent}, %start
  %short = icmp slt i64 %left, %step
  %count = select i1 %short, i64 %left, i64 %step
  %function = inttoptr i64 %product to ptr
  br label %begun
begun:
{begins}
  %c = getelementptr float, ptr %c.all, i64 %start.c{fill}
call:
  call void %function(i32 {_ROW_MAJOR}, i32 {ta}, i32 {tb}, i64 %m, i64 %n, i64 %terms, float 1.0, ptr %a, i64 %lda,
                      ptr %b, i64 %ldb, float {"1.0" if bias else "0.0"}, ptr %c, i64 %columns)
  ret i32 0
}}
{METADATA}"""
