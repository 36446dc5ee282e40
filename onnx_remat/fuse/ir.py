"""LLVM text of a group: one function that computes elements [begin, end) of all its outputs.

::

    int kernel(void **inputs, void **outputs, const int64_t *sizes, int64_t begin, int64_t end)

It returns 0; other kernels return 1 if they fail. If a value is broadcast, the elements are divided into rows, the
innermost axis of `members.Space`. Loop-invariant values are computed once before the loops, or once per row. Extents
and strides are passed as `sizes`, and scalars as inputs, so that steps of any sizes and constants share their kernels.

All of an element's inputs are read before any of its outputs is written, and pointers are not declared as noalias: an
output may overwrite an input. No fast-math, no contraction: elementwise results are ONNX Runtime's to the bit, unless
they come from `functions`.

A group with nodes that work along rows (`rows`) is computed row by row, and `begin` and `end` count rows. A row has
stages: a loop over its elements, whose results lie on the stack, then the reductions of these, then the next loop.
Values that only a later stage needs are computed there. Outputs are written in the last stage. Of a long row, or one of
several runs, each stage computes and reduces a chunk at a time, and later stages compute values again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from onnx_remat.fuse import functions, loops, rows, spaces
from onnx_remat.fuse.code import FLOAT, KINDS, Code
from onnx_remat.fuse.groups import Group
from onnx_remat.fuse.kernel import DECLARATIONS, METADATA, ROUND_BFLOAT, Kernel
from onnx_remat.fuse.loops import Stage
from onnx_remat.fuse.members import Member, Read, row_length, steps_of
from onnx_remat.fuse.ops import OPS, Call
from onnx_remat.fuse.spaces import Position

PART_BYTES = 1 << 18
"""Approximate bytes of a thread's work item: they fit its cache."""

LEAST_PART = 2048
"""Minimum elements of a thread's work item."""

MOST_KEPT = 1 << 17
"""Maximum bytes of a row's values on the stack; those for which there is no room are computed again."""


def kernel_of(group: Group, dtypes: Sequence[int]) -> Kernel:
    """Return the kernel of a group, given the element type of each value in ``group.reads``."""
    writer = Writer(group, dtypes)
    text = writer.text()
    columns = max(group.columns, 1)
    outputs = outputs_of(group)
    width = sum(KINDS[dtype].nbytes for dtype in (*dtypes, *(dtype for dtype, _ in outputs)))
    grain = max(1, max(LEAST_PART, PART_BYTES // width) // columns)
    return Kernel(text, tuple(writer.sizes), group.size // columns, grain, outputs)


def outputs_of(group: Group) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Return element type and shape of each of a group's outputs."""
    made = {member.made: member for member in group.members}
    return tuple((made[name].call.made, made[name].result) for name in group.makes)


def _simple(member: Member, taken: Collection[str]) -> list[Member]:
    """Return a member as members that are elementwise or reductions: Softmax and LogSoftmax are neither.

    Names of values between them are none of those that are `taken`.
    """
    if member.call.op not in ("LogSoftmax", "Softmax"):
        return [member]
    whole, (read,) = member.shape, member.inputs
    once = (*whole[:-1], 1)
    made: list[Member] = []

    def add(op: str, reads: Sequence[Read], name: str, shape: tuple[int, ...] = whole) -> Read:
        while name != member.made and name in taken:
            name += " inside"
        columns = member.columns if op in rows.REDUCTIONS else 0
        result = once if columns else shape
        made.append(Member(member.at, Call(op, {}, FLOAT, FLOAT), tuple(reads), name, shape, result, columns))
        return Read(name, result, FLOAT)

    most = add("ReduceMax", [read], f"{member.made} max")
    below = add("Sub", [read, most], f"{member.made} below")
    grown = add("Exp", [below], f"{member.made} exp")
    total = add("ReduceSum", [grown], f"{member.made} sum")
    if member.call.op == "Softmax":
        share = add("Reciprocal", [total], f"{member.made} share", once)
        add("Mul", [grown, share], member.made)
    else:
        add("Sub", [below, add("Log", [total], f"{member.made} log", once)], member.made)
    return made


IN_LOOP = ", !llvm.access.group !0"
_FIXED = ", !invariant.load !4"


class Writer:
    """Writer of the function of one group.

    A value is computed at a position: that of all elements in their order, or another if it is broadcast or moved.
    """

    before_row_is_stored: tuple[str, ...] = ()

    def __init__(self, group: Group, dtypes: Sequence[int]) -> None:
        self.group = group
        taken = {*group.reads, *(member.made for member in group.members)}
        self.members = [part for member in group.members for part in _simple(member, taken)]
        assert group.space is not None, "no kernel computes this group"
        self.space, self.columns = group.space, group.columns
        self.axes, self.has_runs = self.space.axes, self.space.has_runs
        self.room = MOST_KEPT - 4 * min(self.columns, rows.CHUNK) * sum(member.reduces for member in self.members)
        self.chunk = rows.chunk_of(*row_length(group.members))
        self.in_rows = len(self.axes) > 1
        self.full, self.of_rows = Position(0, spaces.full(self.axes)), self.space.of_rows
        last = len(self.axes) - 1
        self.row_axes = range(self.space.outer, last + 1 - self.space.inner)
        self.run_axes = [*range(self.space.outer), *range(last + 1 - self.space.inner, last)]
        self.maker = {member.made: member for member in self.members}
        self.input = {name: (i, dtype) for i, (name, dtype) in enumerate(zip(group.reads, dtypes, strict=True))}
        self.ready = self._ready()
        self.numbering = [0]
        self.before = Code(self.numbering)
        self.stages = [Stage(self.numbering) for _ in range(max(self.ready.values(), default=0) + 1)]
        self.sizes: list[int] = []
        self.offsets: dict[Position, str] = {}
        self.run_offsets: dict[tuple[Position, int], str] = {}  # by stage, too
        self.found: dict[tuple[str, Position], str] = {}  # computed once per row or less often
        self.in_loop: dict[tuple[str, Position, int], str] = {}  # once per element, or per run
        self.kept: dict[str, str] = {}  # arrays of a row's values, for later stages
        self.within_row = "%place" if self.has_runs else "%column"  # index of an element of a row
        self.coordinates: list[tuple[int, str]] = []  # along axes of rows
        self.run_coordinates: list[list[tuple[int, str]]] = []  # along other axes but the last, by stage

    def _ready(self) -> dict[str, int]:
        """Return the first stage in which each member's value is known: that after its reduction, if it is one."""
        ready: dict[str, int] = {}
        for member in self.members:
            stage = max((ready.get(read.name, 0) for read in member.inputs), default=0)
            ready[member.made] = stage + member.reduces
        return ready

    def text(self) -> str:
        for i in range(len(self.group.reads)):
            self._argument("in", i)
        for i in range(len(self.group.makes)):
            self._argument("out", i)
        if self.in_rows:
            self._place_rows()
        for stage in range(len(self.stages) - 1):
            for member in self.members:
                if member.reduces and self.ready[member.made] == stage + 1:
                    self._reduce(member, stage)
        last = len(self.stages) - 1
        whole = [(i, n) for i, n in enumerate(self.group.makes) if self.maker[n].makes == self.group.size]
        at = self.space.positions
        where = {name: next(iter(at[name])) if name in at else self.full for _, name in whole}
        made = [self._value(name, where[name], last) for _, name in whole]
        for (i, name), value in zip(whole, made, strict=True):  # after all reads
            loop = self.stages[last].loop
            index = self._index(where[name], loop, last)
            loop.store(value, f"%out{i}", index, self.maker[name].call.made, IN_LOOP)
        of_rows = [(i, name) for i, name in enumerate(self.group.makes) if (i, name) not in whole]
        made = [self._value(name, self.of_rows, last) for _, name in of_rows]
        row = self.stages[last].row
        row.lines += self.before_row_is_stored if of_rows else ()
        for (i, name), value in zip(of_rows, made, strict=True):
            row.store(value, f"%out{i}", "%row", self.maker[name].call.made, "")
        lines = [line for code in self._codes() for line in code.lines]
        halves = any("_bfloat(" in line for line in lines)
        text = "\n".join(lines)
        called = [each for kind, each in rows.TEXTS.items() if f"@row_{kind}(" in text or f"@join_{kind}(" in text]
        used = f"{ROUND_BFLOAT if halves else ''}{functions.called(lines)}{''.join(called)}"
        return f"{DECLARATIONS}{used}{self._function()}{METADATA}"

    def _function(self) -> str:
        if self.has_runs:
            runs = self._size(self.columns // self.axes[-1])
            most = self._size(self.chunk // self.axes[-1])
            return loops.over_rows_of_runs(self.before, self.stages, self.inner, runs, most)
        if self.columns:
            return loops.over_whole_rows(self.before, self.stages, self.inner, self._size(self.chunk))
        (stage,) = self.stages
        if self.in_rows:
            return loops.over_rows(self.before, stage.row, stage.loop, self.inner)
        return loops.over_elements(self.before, stage.loop)

    def _codes(self) -> list[Code]:
        return [
            self.before,
            *(code for stage in self.stages for code in (stage.row, stage.run, stage.loop, stage.chunk)),
        ]  # fmt: skip

    def _argument(self, way: str, i: int) -> None:
        self.before.lines.append(f"%p{way}{i} = getelementptr ptr, ptr %{way}, i64 {i}")
        self.before.lines.append(f"%{way}{i} = load ptr, ptr %p{way}{i}{_FIXED}")

    def _size(self, number: int) -> str:
        """Append a number to the function's `sizes`, and return the register it is loaded to."""
        place = self.before.new(f"getelementptr i64, ptr %sizes, i64 {len(self.sizes)}")
        self.sizes.append(number)
        return self.before.new(f"load i64, ptr {place}{_FIXED}")

    def _place_rows(self) -> None:
        """Compute the row's coordinate along each axis except the innermost, and each run's."""
        self.inner = self._size(self.axes[-1])
        self.coordinates = self._divided(self.stages[0].row, "%row", self.row_axes)
        for i, stage in enumerate(self.stages if self.has_runs else ()):
            self.run_coordinates.append(self._divided(stage.run, "%run", self.run_axes))
            stage.base = self._offset(self.full, i)

    def _divided(self, code: Code, index: str, axes: Sequence[int]) -> list[tuple[int, str]]:
        """Divide the index of an element of some axes into its coordinates, each after its axis."""
        found: list[tuple[int, str]] = []
        for axis in reversed(axes[1:]):
            size = self._size(self.axes[axis])
            found.append((axis, code.new(f"urem i64 {index}, {size}")))
            index = code.new(f"udiv i64 {index}, {size}")
        return [(axes[0], index), *reversed(found)]

    def _offset(self, at: Position, stage: int) -> str:
        """Return the index of the first element of a row, or of a run, in a value at a position."""
        if at == self.full and not self.has_runs:
            return "%base"
        if at not in self.offsets:
            code = self.stages[0].row if any(at.strides[axis] for axis in self.row_axes) else self.before
            start = self._size(at.offset) if at.offset else "0"
            self.offsets[at] = self._moved(code, start, self.coordinates, at)
        if not any(at.strides[axis] for axis in self.run_axes):
            return self.offsets[at]
        if (at, stage) not in self.run_offsets:
            coordinates = self.run_coordinates[stage]
            self.run_offsets[at, stage] = self._moved(self.stages[stage].run, self.offsets[at], coordinates, at)
        return self.run_offsets[at, stage]

    def _moved(self, code: Code, index: str, coordinates: Sequence[tuple[int, str]], at: Position) -> str:
        """Add the distances along some axes to an index."""
        for axis, coordinate in coordinates:
            if at.strides[axis]:
                step = code.new(f"mul i64 {coordinate}, {self._size(at.strides[axis])}")
                index = code.new(f"add i64 {index}, {step}")
        return index

    def _index(self, at: Position, code: Code, stage: int) -> str:
        """Return the index of an element, in a loop over a row or a run, in a value at a position."""
        if at == self.full:
            return "%index"
        along, stride = "%column" if self.in_rows else "%index", at.strides[-1]
        if stride > 1:  # stated here: LLVM would vectorise a loop over an unknown stride for stride 1 only
            along = code.new(f"mul nsw i64 {along}, {stride}")
        return code.new(f"add i64 {self._offset(at, stage)}, {along}")

    def _position(self, read: Read, member: Member, own: Position) -> Position:
        """Return the position at which a member that is computed at a position reads an input."""
        steps = steps_of(read, member)
        if steps is None:
            return own
        found = spaces.composed(steps, read.offset, own, self.axes)
        assert found is not None
        return found

    def _reduce(self, member: Member, stage: int) -> None:
        """Compute a reduction after the loop of a stage, or of each chunk after its loop."""
        (read,) = member.inputs
        kind, after = rows.REDUCTIONS[member.call.op], self.stages[stage + 1].row
        if self.columns <= rows.CHUNK:
            if read.name in self.input and not self.has_runs:
                start = self.stages[0].row.new(f"getelementptr float, ptr %in{self.input[read.name][0]}, i64 %base")
            else:
                start = self._array(read.name, FLOAT, self._value(read.name, self.full, stage), stage)
            made = after.new(f"call float @row_{kind}(ptr {start}, i64 {self._row_size()})")
        else:
            total = self.before.new("alloca float, align 4")
            self.stages[stage].row.lines.append(f"store float {rows.STARTS[kind]}, ptr {total}")
            array = self.before.new(f"alloca float, i64 {rows.CHUNK}, align 64")
            value = self._value(read.name, self.full, stage)
            self.stages[stage].loop.store(value, array, "%within", FLOAT, IN_LOOP)
            chunk = self.stages[stage].chunk
            part = chunk.new(f"call float @row_{kind}(ptr {array}, i64 %count)")
            before = chunk.new(f"load float, ptr {total}")
            joined = chunk.new(f"call float @join_{kind}(float {before}, float {part})")
            chunk.lines.append(f"store float {joined}, ptr {total}")
            made = after.new(f"load float, ptr {total}")
        self._reduced(member, made, after)

    def _reduced(self, member: Member, made: str, after: Code) -> None:
        """Finish a reduction, of which a register has the sum or the maximum."""
        if member.call.op == "ReduceMean":
            count = after.new(f"sitofp i64 {self._row_size()} to float")
            made = after.new(f"fdiv float {made}, {count}")
        self.found[member.made, self.of_rows] = made

    def _row_size(self) -> str:
        """Return the register with the number of elements of a row."""
        return self._size(self.columns) if self.has_runs else self.inner

    def _array(self, name: str, dtype: int, value: str, stage: int) -> str:
        """Keep a row's values, computed in a stage, on the stack; return the array."""
        if name not in self.kept:
            self.kept[name] = self.before.new(f"alloca {KINDS[dtype].memory}, i64 {self._row_size()}, align 64")
            self.stages[stage].loop.store(value, self.kept[name], self.within_row, dtype, IN_LOOP)
        return self.kept[name]

    def _kept(self, name: str, at: Position, stage: int) -> str | None:
        """Return a register with a value that an earlier stage computed or read, if it is kept for this one."""
        earlier = next((i for i in range(stage) if (name, at, i) in self.in_loop), None)
        if earlier is None or at != self.full:
            return None
        if name in self.maker:
            dtype, cheap = self.maker[name].call.made, self._is_cheap(self.maker[name], at)
        else:  # a row of several runs may have no place in the cache as it lies
            dtype, cheap = self.input[name][1], not self.has_runs
        if name not in self.kept:
            nbytes = KINDS[dtype].nbytes * self.columns
            if cheap or nbytes > self.room:
                return None
            self.room -= nbytes
        array = self._array(name, dtype, self.in_loop[name, at, earlier], earlier)
        return self.stages[stage].loop.loaded(array, self.within_row, dtype, IN_LOOP)

    def _value(self, name: str, at: Position, stage: int) -> str:
        """Return the register of a value, computed in the outermost code in which it is invariant."""
        if not at.strides[-1] and at != self.full:
            return self._outside_loop(name, at, stage)
        if (name, at, stage) in self.in_loop:
            return self.in_loop[name, at, stage]
        code = self.stages[stage].loop
        kept = self._kept(name, at, stage)
        if kept is not None:
            made = kept
        elif name in self.maker:
            made = self._computed(code, self.maker[name], at, stage)
        else:
            i, dtype = self.input[name]
            made = code.loaded(f"%in{i}", self._index(at, code, stage), dtype, IN_LOOP)
        self.in_loop[name, at, stage] = made
        return made

    def _is_cheap(self, member: Member, at: Position) -> bool:
        """Whether it costs no more to compute a member again than to keep it."""
        if member.moves and self._position(member.inputs[0], member, at).strides[-1] > 1:
            return False
        varying = [read.name in self.input for read in member.inputs if read.size == member.size]
        return OPS[member.call.op].exact and all(varying) and not (self.has_runs and len(varying) > 1)

    def _outside_loop(self, name: str, at: Position, stage: int) -> str:
        """Return the register of a value that is the same for all elements of a row, or of a run."""
        if any(at.strides[axis] for axis in self.run_axes):
            if (name, at, stage) not in self.in_loop:
                self.in_loop[name, at, stage] = self._invariant(self.stages[stage].run, name, at, stage)
            return self.in_loop[name, at, stage]
        if (name, at) not in self.found:
            ready = self.ready.get(name, 0)
            code = self.stages[ready].row if any(at.strides) else self.before
            self.found[name, at] = self._invariant(code, name, at, ready)
        return self.found[name, at]

    def _invariant(self, code: Code, name: str, at: Position, stage: int) -> str:
        if name in self.maker:
            return self._computed(code, self.maker[name], at, stage)
        i, dtype = self.input[name]
        return code.loaded(f"%in{i}", self._offset(at, stage), dtype, "")

    def _computed(self, code: Code, member: Member, at: Position, stage: int) -> str:
        arguments = [
            self._value(read.name, self._position(read, member, at), stage) if read else ""
            for read in member.reads
        ]  # fmt: skip
        made = OPS[member.call.op].emit(code, KINDS[member.call.dtype].register, arguments, member.call)
        return code.rounded(made, member.call.made)
