"""Groups as kernels of a CUDA device: a thread computes one element, or a warp one row.

::

    void kernel(void *inputs[], void *outputs[], int64_t sizes[], int64_t size)

All but `size`, the number of elements or rows, are arrays that the launch copies. The text is that of `ir`, except for
loops: none over elements; over a row, the 32 threads of a warp take every 32nd element each, and join what they have
reduced by five exchanges. Values that a later stage needs are computed again: registers hold no row.

An output may overwrite an input here as well: a thread reads an element before it writes it, and values of a row are
written after all threads of the warp have read theirs. LLVM makes PTX of the text, for every device of capability 7.5
and newer, which the driver translates when it loads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Final

from onnx_remat.fuse.code import Code, lines_of
from onnx_remat.fuse.groups import Group
from onnx_remat.fuse.ir import Writer, outputs_of
from onnx_remat.fuse.kernel import Kernel
from onnx_remat.fuse.loops import Stage
from onnx_remat.fuse.members import Member
from onnx_remat.fuse.rows import REDUCTIONS, STARTS

WARP = 32

MOST_ARGUMENTS = 4000
"""Maximum bytes that a launch copies; devices take 4,096."""

_TARGET, _FEATURES = "sm_75", "+ptx63"

_DECLARATIONS: Final = """declare i32 @llvm.nvvm.read.ptx.sreg.tid.x()
declare i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()
declare i32 @llvm.nvvm.read.ptx.sreg.ntid.x()
declare float @llvm.nvvm.shfl.sync.bfly.f32(i32, float, i32, i32)
declare void @llvm.nvvm.bar.warp.sync(i32)
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


def kernel_of(group: Group, dtypes: Sequence[int], elements: Sequence[int]) -> Kernel:
    """Return the kernel of a group; arguments as of `ir.kernel_of`. Its `grain` is the threads of an element or row."""
    writer = _Writer(group, dtypes)
    text = writer.text()
    inputs, sizes = tuple(zip(dtypes, elements, strict=True)), tuple(writer.sizes) or (0,)
    count, grain = (group.size // group.columns, WARP) if group.columns else (group.size, 1)
    return Kernel(text, sizes, count, grain, inputs, outputs_of(group), device=True)


class _Writer(Writer):
    """Writer of the function of one group for a device."""

    before_row_is_stored = ("call void @llvm.nvvm.bar.warp.sync(i32 -1)",)

    def __init__(self, group: Group, dtypes: Sequence[int]) -> None:
        super().__init__(group, dtypes)
        self.room = 0
        self.entry = Code(self.numbering)  # in the first block, where LLVM turns variables into registers

    def _reduce(self, member: Member, stage: int) -> None:
        """Reduce what a thread has of a row in the loop of a stage, and then what the threads have."""
        (read,) = member.inputs
        kind, after, loop = REDUCTIONS[member.call.op], self.stages[stage + 1].row, self.stages[stage].loop
        total = self.entry.new("alloca float, align 4")
        self.stages[stage].row.lines.append(f"store float {STARTS[kind]}, ptr {total}")
        value = self._value(read.name, self.full, stage)
        before = loop.new(f"load float, ptr {total}")
        joined = loop.new(f"call float @join_{kind}(float {before}, float {value})")
        loop.lines.append(f"store float {joined}, ptr {total}")
        made = after.new(f"load float, ptr {total}")
        for distance in (16, 8, 4, 2, 1):
            other = after.new(
                f"call float @llvm.nvvm.shfl.sync.bfly.f32(i32 -1, float {made}, i32 {distance}, i32 {WARP - 1})"
            )
            made = after.new(f"call float @join_{kind}(float {made}, float {other})")
        self._reduced(member, made, after)

    def _function(self) -> str:
        parts = {
            "in": f"[{len(self.group.reads)} x ptr]", "out": f"[{len(self.group.makes)} x ptr]",
            "sizes": f"[{max(len(self.sizes), 1)} x i64]",
        }  # fmt: skip
        arguments = ", ".join(f"ptr byval({kind}) align 8 %{name}" for name, kind in parts.items())
        thread = (
            "%t = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()", "%b = call i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()",
            "%n = call i32 @llvm.nvvm.read.ptx.sreg.ntid.x()", "%t.wide = zext i32 %t to i64",
            "%b.wide = zext i32 %b to i64", "%n.wide = zext i32 %n to i64",
            "%first = mul nuw nsw i64 %b.wide, %n.wide",
            f"%{'thread' if self.columns else 'index'} = add nuw nsw i64 %first, %t.wide",
        )  # fmt: skip
        if self.columns:
            place = [f"%row = lshr i64 %thread, {WARP.bit_length() - 1}", f"%lane = and i64 %thread, {WARP - 1}"]
            own, stated = "%row", [f"%base = mul nsw i64 %row, {self.inner}"]
            work = "".join(f"\n  {lines_of(stage.row)}{self._loop(stage, i)}" for i, stage in enumerate(self.stages))
        else:
            place, own, stated = [], "%index", list[str]()
            if self.in_rows:
                stated += [
                    f"%row = udiv i64 %index, {self.inner}", f"%base = mul nuw nsw i64 %row, {self.inner}",
                    "%column = sub nuw nsw i64 %index, %base",
                ]  # fmt: skip
            work = f"\n  {lines_of(self.stages[0].row)}\n  {lines_of(self.stages[0].loop)}"
        body = "\n  ".join(stated)
        head = "\n  ".join([*self.entry.lines, *thread, *place])
        return f"""{_DECLARATIONS}define ptx_kernel void @kernel({arguments}, i64 %size) #0 {{
start:
  {head}
  %some = icmp slt i64 {own}, %size
  br i1 %some, label %work, label %done
work:
  {lines_of(self.before)}
  {body}{work}
  br label %done
done:
  ret void
}}
"""

    def _loop(self, stage: Stage, i: int) -> str:
        """Return the loop of a stage over a thread's elements of a row."""
        if not stage.loop.lines:
            return ""
        loop = lines_of(stage.loop)
        for name in ("column", "index"):
            loop = loop.replace(f"%{name}", f"%{name}{i}")
        return f"""
  br label %start{i}
start{i}:
  %any{i} = icmp slt i64 %lane, {self.inner}
  br i1 %any{i}, label %element{i}, label %done{i}
element{i}:
  %column{i} = phi i64 [ %lane, %start{i} ], [ %next{i}, %element{i} ]
  %index{i} = add nuw nsw i64 %base, %column{i}
  {loop}
  %next{i} = add nuw nsw i64 %column{i}, {WARP}
  %more{i} = icmp slt i64 %next{i}, {self.inner}
  br i1 %more{i}, label %element{i}, label %done{i}
done{i}:"""


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
        made = ptx(text)
        head, start, entry = made.partition(".visible .entry")
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
    return str(machine.emit_assembly(parsed))
