"""Groups as kernels of a CUDA device: a thread computes some elements, or several threads compute a row.

::

    void kernel(void *inputs[], void *outputs[], int64_t sizes[], int64_t size)

All but `size`, the number of elements or rows, are arrays that the launch copies. The text is that of `ir`, except for
loops. The threads of a block take turns over its elements, `AT_ONCE` each: a device's memory is slow, but serves many
requests at a time. Of a row, a few threads, a warp or a whole block take turns, and join what they have reduced: those
of a warp by exchanges, those of a block in shared memory besides. A block has a long row: most often one of several
runs, a channel of a batch of images. Values that a later stage needs are computed again: registers hold no row.

An output may overwrite an input here as well: a thread reads an element before it writes it, and values of a row are
written after all of its threads have read theirs. LLVM makes PTX of the text, for every device of capability 7.5
and newer, which the driver translates when it loads it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

from onnx_remat.fuse.code import Code, lines_of
from onnx_remat.fuse.groups import Group
from onnx_remat.fuse.ir import IN_LOOP, Writer, outputs_of
from onnx_remat.fuse.kernel import Kernel
from onnx_remat.fuse.members import MOST_REDUCTIONS, Member, row_length
from onnx_remat.fuse.rows import REDUCTIONS, STARTS, needs_block

WARP = 32

THREADS = 256
"""Threads of a block."""

BLOCK = 512
"""Threads of a block that computes one row."""

LEAST_LANES = 4
"""Least threads of a row."""

AT_ONCE = 4
"""Elements that a thread reads before it writes one."""

MOST_LINES = 150
"""Maximum number of instructions of an element for that."""

FEW = 1 << 18
"""Elements of a kernel below which a thread computes one: otherwise part of the device would idle."""

MOST_ELEMENTS = 1 << 31
"""Elements of a value from which on indices of 32 bits are too narrow, as `narrow` loads them."""

MOST_ARGUMENTS = 4000
"""Maximum bytes that a launch copies; devices take 4,096."""

_TARGET, _FEATURES = "sm_75", "+ptx63"

_JOINED = MOST_REDUCTIONS * BLOCK // WARP

DECLARATIONS: Final = f"""@joined = internal addrspace(3) global [{_JOINED} x float] undef, align 4
declare i32 @llvm.nvvm.read.ptx.sreg.tid.x()
declare i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()
declare i32 @llvm.nvvm.read.ptx.sreg.ntid.x()
declare float @llvm.nvvm.shfl.sync.bfly.f32(i32, float, i32, i32)
declare void @llvm.nvvm.bar.warp.sync(i32)
declare void @llvm.nvvm.barrier0()
"""


def why_not() -> str:
    """Return why this machine cannot have kernels for a CUDA device, or an empty text."""
    try:
        _machine()
    except ImportError:
        return "llvmlite is not installed: pip install llvmlite"
    except RuntimeError as error:
        return f"llvmlite cannot compile for CUDA devices: {error}"
    return ""


def arguments(kernel: Kernel) -> int:
    """Return the bytes that a launch of a kernel copies."""
    return 8 * (len(kernel.inputs) + len(kernel.outputs) + len(kernel.sizes) + 1)


def kernel_of(group: Group, dtypes: Sequence[int]) -> Kernel:
    """Return the kernel of a group; arguments as of `ir.kernel_of`."""
    writer = _Writer(group, dtypes)
    text = writer.text()
    sizes, threads = tuple(writer.sizes) or (0,), max(THREADS, writer.lanes)
    return Kernel(text, sizes, writer.count, writer.grain, outputs_of(group), threads=threads)


def lanes_of(columns: int, run: int, count: int) -> int:
    """Return the threads of each of `count` rows: fewer than a warp, if each still has no more than `AT_ONCE` elements.

    A warp has no row in part: all of its threads take part in an exchange.
    """
    if needs_block(columns, run):
        return BLOCK
    lanes = WARP
    while lanes > LEAST_LANES and columns <= lanes // 2 * AT_ONCE and count % (2 * WARP // lanes) == 0:
        lanes //= 2
    return lanes


def thread_of(
    name: str, inputs: int, outputs: int, sizes: int, lines: Sequence[str] = (), counted: str = "", each: int = 1
) -> str:
    """Return the start of a function: a thread has its number, in `name`, and goes on to ``work`` or ``done``.

    Parameters
    ----------
    name : str
    inputs, outputs, sizes : int
        Lengths of its arguments.
    lines : sequence of str
        Instructions that follow.
    counted : str, optional
        What is compared with `size`, if not `name`.
    each : int
        Elements of a thread: its number leaves out those of earlier blocks.
    """
    first = f"%blocks = mul nuw nsw i64 %b.wide, {each}", "%first = mul nuw nsw i64 %blocks, %n.wide"
    body = "\n  ".join([*_THREAD, *first, f"%{name} = add nuw nsw i64 %first, %t.wide", *lines])
    return f"""{head_of(inputs, outputs, max(sizes, 1))}
start:
  {body}
  %some = icmp slt i64 %{counted or name}, %size
  br i1 %some, label %work, label %done"""


def head_of(inputs: int, outputs: int, sizes: int) -> str:
    """Return the first line of a function with arguments of these lengths."""
    parts = {"in": f"[{inputs} x ptr]", "out": f"[{outputs} x ptr]", "sizes": f"[{sizes} x i64]"}
    arguments = ", ".join(f"ptr byval({kind}) align 8 %{part}" for part, kind in parts.items())
    return f"define ptx_kernel void @kernel({arguments}, i64 %size) #0 {{"


def narrow(name: str, at: int) -> list[str]:
    """Return the instructions that load a size of a kernel, with 32 bits, to a register of this name."""
    return [
        f"%p.{name} = getelementptr i64, ptr %sizes, i64 {at}", f"%w.{name} = load i64, ptr %p.{name}",
        f"%{name} = trunc i64 %w.{name} to i32",
    ]  # fmt: skip


OWN_BLOCK: Final = "%b = call i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()"
"""Instruction with the number of a thread's block, once in a function."""

_THREAD = (
    OWN_BLOCK, "%t = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()",
    "%n = call i32 @llvm.nvvm.read.ptx.sreg.ntid.x()", "%t.wide = zext i32 %t to i64",
    "%b.wide = zext i32 %b to i64", "%n.wide = zext i32 %n to i64",
)  # fmt: skip


class _Writer(Writer):
    """Writer of the function of one group for a device."""

    def __init__(self, group: Group, dtypes: Sequence[int]) -> None:
        super().__init__(group, dtypes)
        self.room = 0
        self.entry = Code(self.numbering)  # in the first block, where LLVM turns variables into registers
        self.joined = 0  # elements of shared memory
        self.count = group.size // max(self.columns, 1)
        self.lanes, self.each = 0, AT_ONCE if group.size >= FEW else 1
        self.grain = THREADS * self.each
        if self.columns:
            self.lanes = lanes_of(*row_length(group.members), self.count)
            self.grain = max(1, THREADS // self.lanes)
        barrier = "bar.warp.sync(i32 -1)" if self.lanes <= WARP else "barrier0()"
        self.before_row_is_stored = (f"call void @llvm.nvvm.{barrier}",)

    def _reduce(self, member: Member, stage: int) -> None:
        """Reduce a row: each thread its own part in the loop of a stage, and then across threads."""
        (read,) = member.inputs
        kind, after, loop = REDUCTIONS[member.call.op], self.stages[stage + 1].row, self.stages[stage].loop
        total = self.entry.new("alloca float, align 4")
        self.stages[stage].row.lines.append(f"store float {STARTS[kind]}, ptr {total}")
        value = self._value(read.name, self.full, stage)
        before = loop.new(f"load float, ptr {total}")
        joined = loop.new(f"call float @join_{kind}(float {before}, float {value})")
        loop.lines.append(f"store float {joined}, ptr {total}")
        made = self._exchanged(kind, after.new(f"load float, ptr {total}"), min(self.lanes, WARP), after)
        if self.lanes > WARP:
            warps, at = self.lanes // WARP, "getelementptr float, ptr addrspace(3)"
            array = after.new(f"{at} @joined, i64 {self.joined}")
            self.joined += warps
            own = after.new(f"{at} {array}, i64 %warp")  # all lanes of a warp store the same number
            after.lines += [f"store float {made}, ptr addrspace(3) {own}", "call void @llvm.nvvm.barrier0()"]
            other = after.new(f"{at} {array}, i64 %other.warp")
            made = self._exchanged(kind, after.new(f"load float, ptr addrspace(3) {other}"), warps, after)
        self._reduced(member, made, after)

    def _exchanged(self, kind: str, made: str, lanes: int, code: Code) -> str:
        """Return the register with what so many adjacent threads of a warp have, joined."""
        while lanes > 1:
            lanes //= 2
            other = code.new(
                f"call float @llvm.nvvm.shfl.sync.bfly.f32(i32 -1, float {made}, i32 {lanes}, i32 {WARP - 1})"
            )
            made = code.new(f"call float @join_{kind}(float {made}, float {other})")
        return made

    def _function(self) -> str:
        if self.columns:
            count = self._row_size()
            place = [f"%row = udiv i64 %thread, {self.lanes}", f"%lane = urem i64 %thread, {self.lanes}"]
            if self.lanes > WARP:
                place += [f"%warp = udiv i64 %lane, {WARP}", f"%other.warp = urem i64 %lane, {self.lanes // WARP}"]
            work = self._over_rows(count)
        else:
            place, work = [], self._over_elements()
        head = thread_of(
            "thread", len(self.group.reads), len(self.group.makes), len(self.sizes), [*self.entry.lines, *place],
            "row" if self.columns else "thread", 1 if self.columns else self.each,
        )  # fmt: skip
        return f"""{DECLARATIONS}{head}
work:
  {lines_of(self.before)}
  {work}
  br label %done
done:
  ret void
}}
"""

    def _over_elements(self) -> str:
        """Return the loops over a thread's elements."""
        lines = []
        if self.in_rows:
            lines += [
                f"%row = udiv i64 %index, {self.inner}", f"%base = mul nuw nsw i64 %row, {self.inner}",
                "%column = sub nuw nsw i64 %index, %base",
            ]  # fmt: skip
        (stage,) = self.stages
        lines += [*stage.row.lines, *stage.loop.lines]
        end = (
            f"%beyond = add nuw nsw i64 %first, {self.grain}\n  %whole = icmp slt i64 %beyond, %size\n  "
            "%end = select i1 %whole, i64 %beyond, i64 %size"
        )
        return f"{end}{self._loops(0, lines, {'index': '%thread'}, THREADS, '%end')}"

    def _over_rows(self, count: str) -> str:
        """Return the loops of all stages over a thread's elements of a row of `count`."""
        first = {"place": "%lane"}
        if self.has_runs:
            first |= {"run": "%first.run", "column": "%first.column"}
            head = [
                f"%first.run = udiv i64 %lane, {self.inner}", f"%first.column = urem i64 %lane, {self.inner}",
                f"%more.runs = udiv i64 {self.lanes}, {self.inner}",
                f"%more.columns = urem i64 {self.lanes}, {self.inner}",
            ]  # fmt: skip
        else:
            head = [f"%base = mul nsw i64 %row, {self.inner}"]
        text = "\n  ".join(head)
        for i, stage in enumerate(self.stages):
            index = f"%index = add nsw i64 {stage.base}, %column"
            lines = [*(stage.run.lines if self.has_runs else ()), index, *stage.loop.lines]
            loops = self._loops(i, lines, first, self.lanes, count) if stage.loop.lines else ""
            text += f"\n  {lines_of(stage.row)}{loops}"
        return text

    def _loops(self, i: int, lines: Sequence[str], first: Mapping[str, str], step: int, end: str) -> str:
        """Return the loops over a thread's elements: `AT_ONCE` in each turn, and then the rest one by one.

        `first` has a register for the first number of each loop variable; the first one grows by `step` up to `end`.
        """
        text, before = f"\n  br label %start{i}\nstart{i}:", f"start{i}"
        for name, times in (("many", AT_ONCE), ("one", 1)):
            if times == 1 or len(lines) <= MOST_LINES:
                text += self._turns(f"{name}{i}", times, lines, first, before, step, end)
                first, before = {each: f"%{each}.{name}{i}.0" for each in first}, f"{name}{i}.done"
        return text

    def _turns(
        self, name: str, times: int, lines: Sequence[str], first: Mapping[str, str], before: str, step: int, end: str
    ) -> str:
        """Return a loop that computes several elements in each turn, while a thread has so many left."""
        own = {line.partition(" = ")[0] for line in lines if line.startswith("%")}
        place = next(iter(first))
        head = [
            f"%{each}.{name}.0 = phi i64 [ {value}, %{before} ], [ %{each}.{name}.{times}, %{name}.turn ]"
            for each, value in first.items()
        ]
        turn: list[str] = []
        stores: list[str] = []
        for at in range(times):
            now, then = f"{name}.{at}", f"{name}.{at + 1}"
            names = {f"%{each}": f"%{each}.{now}" for each in first} | {each: f"{each}.{now}" for each in own}
            if self.columns and not self.has_runs:
                names["%column"] = f"%{place}.{now}"
            for line in lines:
                renamed = re.sub(r"%[\w.]+", lambda found, names=names: names.get(found[0], found[0]), line)  # type: ignore[misc]
                (stores if line.startswith("store") and line.endswith(IN_LOOP) else turn).append(renamed)
            turn.append(f"%{place}.{then} = add nuw nsw i64 %{place}.{now}, {step}")
            if self.has_runs:
                turn += [
                    f"%beyond.{then} = add nuw nsw i64 %column.{now}, %more.columns",
                    f"%over.{then} = icmp sge i64 %beyond.{then}, {self.inner}",
                    f"%back.{then} = select i1 %over.{then}, i64 {self.inner}, i64 0",
                    f"%column.{then} = sub nsw i64 %beyond.{then}, %back.{then}",
                    f"%carry.{then} = zext i1 %over.{then} to i64",
                    f"%later.{then} = add nuw nsw i64 %run.{now}, %more.runs",
                    f"%run.{then} = add nuw nsw i64 %later.{then}, %carry.{then}",
                ]  # fmt: skip
        inner = "\n  ".join([*turn, *stores])
        head.append(f"%last.{name} = add nuw nsw i64 %{place}.{name}.0, {(times - 1) * step}")
        head.append(f"%some.{name} = icmp slt i64 %last.{name}, {end}")
        start = "\n  ".join(head)
        return f"""
  br label %{name}
{name}:
  {start}
  br i1 %some.{name}, label %{name}.turn, label %{name}.done
{name}.turn:
  {inner}
  br label %{name}
{name}.done:"""


@cache
def _machine() -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple("nvptx64-nvidia-cuda")
    return target.create_target_machine(cpu=_TARGET, features=_FEATURES, opt=3)


def name_of(i: int) -> str:
    """Return the name of a kernel in a module, see `module`."""
    return f"kernel_{i}"


def module(texts: Sequence[str]) -> bytes:
    """Compile kernels to the PTX of one module, which ends in a zero byte: a driver takes memory for each module."""
    head, entries = "", []
    for i, text in enumerate(texts):
        head, start, entry = ptx(text).partition(".visible .entry")
        entries.append(f"{start}{entry}".replace("kernel", name_of(i)))
    return f"{head}{''.join(entries)}".encode() + b"\0"


def ptx(text: str) -> str:
    """Compile a kernel's text to PTX, whose entry is ``kernel``."""
    import llvmlite.binding as llvm

    machine = _machine()
    parsed = llvm.parse_assembly(text)
    parsed.triple, parsed.data_layout = "nvptx64-nvidia-cuda", str(machine.target_data)
    parsed.verify()
    tuning = llvm.create_pipeline_tuning_options(speed_level=3)
    tuning.loop_vectorization = tuning.slp_vectorization = False
    builder = llvm.create_pass_builder(machine, tuning)
    builder.getModulePassManager().run(parsed, builder)
    made = str(machine.emit_assembly(parsed))
    # Without this an assembler may give a thread more registers than a block of so many can have.
    return made.replace("\n)\n{", f"\n)\n.maxntid {BLOCK}, 1, 1\n{{") if "bar.sync" in made else made
