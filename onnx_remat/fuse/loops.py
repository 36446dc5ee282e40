"""Loops of a CPU's kernel, as LLVM text: over elements, over rows, and over a row in stages."""

from __future__ import annotations

import re
from collections.abc import Sequence

from onnx_remat.fuse.code import Code, lines_of


class Stage:
    """Code of one stage: what runs once per row before its loop, the loop, and what runs after each chunk of a row.

    If rows consist of several runs, `run` runs before the loop over each, and `base` is the index of its first element.
    """

    base = "%base"

    def __init__(self, numbering: list[int]) -> None:
        self.row, self.run, self.loop, self.chunk = (Code(numbering) for _ in range(4))


def over_elements(before: Code, loop: Code) -> str:
    """Return the function of a kernel without broadcasts: one loop over elements."""
    return f"""define i32 @kernel(ptr %in, ptr %out, ptr %sizes, i64 %begin, i64 %end) #0 {{
start:
  {lines_of(before)}
  br label %element
element:
  %index = phi i64 [ %begin, %start ], [ %next, %element ]
  {lines_of(loop)}
  %next = add nuw nsw i64 %index, 1
  %more = icmp slt i64 %next, %end
  br i1 %more, label %element, label %done, !llvm.loop !1
done:
  ret i32 0
}}
"""


def over_rows(before: Code, row: Code, loop: Code, inner: str) -> str:
    """Return the function of a kernel with broadcasts: a loop over parts of rows of `inner` elements."""
    return f"""define i32 @kernel(ptr %in, ptr %out, ptr %sizes, i64 %begin, i64 %end) #0 {{
start:
  {lines_of(before)}
  %first = udiv i64 %begin, {inner}
  %skipped = mul i64 %first, {inner}
  %offset = sub i64 %begin, %skipped
  br label %next_row
next_row:
  %row = phi i64 [ %first, %start ], [ %after, %row_done ]
  %from = phi i64 [ %offset, %start ], [ 0, %row_done ]
  %base = mul i64 %row, {inner}
  %left = sub i64 %end, %base
  %short = icmp slt i64 %left, {inner}
  %to = select i1 %short, i64 %left, i64 {inner}
  {lines_of(row)}
  br label %element
element:
  %column = phi i64 [ %from, %next_row ], [ %next, %element ]
  %index = add nuw nsw i64 %base, %column
  {lines_of(loop)}
  %next = add nuw nsw i64 %column, 1
  %more = icmp slt i64 %next, %to
  br i1 %more, label %element, label %row_done, !llvm.loop !1
row_done:
  %after = add i64 %row, 1
  %reached = add i64 %base, %to
  %again = icmp slt i64 %reached, %end
  br i1 %again, label %next_row, label %done
done:
  ret i32 0
}}
"""


def over_whole_rows(before: Code, stages: Sequence[Stage], inner: str, chunk: str) -> str:
    """Return the function of a kernel along rows: a loop over rows, and in it those of the stages.

    Of a long row, `chunk` elements are reduced at a time.
    """
    body = "\n  ".join(f"{lines_of(stage.row)}{_over_row(stage, i, inner, chunk)}" for i, stage in enumerate(stages))
    return _of_rows(before, f"%base = mul i64 %row, {inner}\n  {body}")


def over_rows_of_runs(before: Code, stages: Sequence[Stage], inner: str, runs: str, most: str) -> str:
    """Return the function of a kernel along rows of `runs` runs each, of which a chunk has at most `most`."""
    parts = (f"{lines_of(stage.row)}{_over_runs(stage, i, inner, runs, most)}" for i, stage in enumerate(stages))
    return _of_rows(before, "\n  ".join(parts))


def _of_rows(before: Code, body: str) -> str:
    return f"""define i32 @kernel(ptr %in, ptr %out, ptr %sizes, i64 %begin, i64 %end) #0 {{
start:
  {lines_of(before)}
  br label %next_row
next_row:
  %row = phi i64 [ %begin, %start ], [ %after, %row_done ]
  {body}
  br label %row_done
row_done:
  %after = add i64 %row, 1
  %again = icmp slt i64 %after, %end
  br i1 %again, label %next_row, label %done
done:
  ret i32 0
}}
"""


def _over_row(stage: Stage, i: int, inner: str, most: str) -> str:
    """Return the loop of a stage over a row, or over its chunks and their elements."""
    if not stage.loop.lines:
        return ""
    names = ("column", "index", "within", "count")
    loop, chunk = lines_of(stage.loop), lines_of(stage.chunk)
    for name in names:
        loop, chunk = (text.replace(f"%{name}", f"%{name}{i}") for text in (loop, chunk))
    first, last, head, tail = "0", inner, "", ""
    if stage.chunk.lines:
        first, last = f"%first{i}", f"%last{i}"
        head, tail = _by_chunks(i, inner, most, chunk, "count")
    within = f"\n  %within{i} = sub nuw nsw i64 %column{i}, {first}" if stage.chunk.lines else ""
    return f"""
  br label %start{i}
start{i}:{head}
  br label %body{i}
body{i}:
  br label %element{i}
element{i}:
  %column{i} = phi i64 [ {first}, %body{i} ], [ %next{i}, %element{i} ]
  %index{i} = add nuw nsw i64 %base, %column{i}{within}
  {loop}
  %next{i} = add nuw nsw i64 %column{i}, 1
  %more{i} = icmp slt i64 %next{i}, {last}
  br i1 %more{i}, label %element{i}, label %done{i}, !llvm.loop !5
done{i}:{tail}"""


def _by_chunks(i: int, extent: str, most: str, chunk: str, taken: str) -> tuple[str, str]:
    """Return the start and the end of a loop over chunks of at most `most` of `extent`; `taken` names their size."""
    head = f"""
  br label %chunk{i}
chunk{i}:
  %first{i} = phi i64 [ 0, %start{i} ], [ %last{i}, %reduced{i} ]
  %left{i} = sub i64 {extent}, %first{i}
  %whole{i} = icmp sgt i64 %left{i}, {most}
  %{taken}{i} = select i1 %whole{i}, i64 {most}, i64 %left{i}
  %last{i} = add nuw nsw i64 %first{i}, %{taken}{i}"""
    tail = f"""
  {chunk}
  br label %reduced{i}
reduced{i}:
  %further{i} = icmp slt i64 %last{i}, {extent}
  br i1 %further{i}, label %chunk{i}, label %stage{i}
stage{i}:"""
    return head, tail


def _over_runs(stage: Stage, i: int, inner: str, runs: str, most: str) -> str:
    """Return the loops of a stage over a row's chunks, their runs and their elements."""
    if not stage.loop.lines:
        return ""
    run, loop, chunk = lines_of(stage.run), lines_of(stage.loop), lines_of(stage.chunk)
    for name in ("run", "column", "index", "within", "place", "count"):
        run, loop, chunk = (re.sub(rf"%{name}\b", f"%{name}{i}", text) for text in (run, loop, chunk))
    head, tail = _by_chunks(i, runs, most, chunk, "taken")
    return f"""
  br label %start{i}
start{i}:{head}
  %count{i} = mul nuw nsw i64 %taken{i}, {inner}
  br label %next_run{i}
next_run{i}:
  %run{i} = phi i64 [ %first{i}, %chunk{i} ], [ %following{i}, %ran{i} ]
  %before{i} = sub nuw nsw i64 %run{i}, %first{i}
  %offset{i} = mul nuw nsw i64 %before{i}, {inner}
  %start_of_run{i} = mul nuw nsw i64 %run{i}, {inner}
  {run}
  br label %element{i}
element{i}:
  %column{i} = phi i64 [ 0, %next_run{i} ], [ %next{i}, %element{i} ]
  %index{i} = add nuw nsw i64 {stage.base}, %column{i}
  %within{i} = add nuw nsw i64 %offset{i}, %column{i}
  %place{i} = add nuw nsw i64 %start_of_run{i}, %column{i}
  {loop}
  %next{i} = add nuw nsw i64 %column{i}, 1
  %more{i} = icmp slt i64 %next{i}, {inner}
  br i1 %more{i}, label %element{i}, label %ran{i}, !llvm.loop !5
ran{i}:
  %following{i} = add nuw nsw i64 %run{i}, 1
  %onward{i} = icmp slt i64 %following{i}, %last{i}
  br i1 %onward{i}, label %next_run{i}, label %done{i}
done{i}:{tail}"""
