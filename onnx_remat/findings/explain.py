"""Explain why a rewritten file recomputes its nodes: the memory they would keep live otherwise, by module."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import onnx

from onnx_remat.findings.planned_options import options_of
from onnx_remat.findings.show import modules, trace
from onnx_remat.ir import model_io
from onnx_remat.ir.graph import Graph, Op
from onnx_remat.ir.metadata import CONTROL_KEY, RECOMPUTE_KEY, TAG, entries
from onnx_remat.ir.shapes import UNSEEN
from onnx_remat.messages import Finding
from onnx_remat.ort import runtime
from onnx_remat.ort.executed import Executed, as_executed
from onnx_remat.ort.host_state import counted, is_copy, state_bytes
from onnx_remat.ort.kernels import costs
from onnx_remat.process import worker
from onnx_remat.rewrite.report import WORDING
from onnx_remat.session import prediction
from onnx_remat.session.slab_layout import SlabLayout
from onnx_remat.units import format_bytes, table
from onnx_remat.write.decided import Planned, planned

_MOST_ROWS = 20


@dataclass(frozen=True, slots=True)
class Recomputed:
    """Recomputed nodes of one module.

    Attributes
    ----------
    module : str
    times : int
        Number of nodes that run again.
    seconds : float
        Their time, by `Explanation.costs`.
    bytes : int
        Size of their outputs, which are dropped and recomputed.
    spared : int
        Bytes of these that are not live at the op where the step would peak without recomputation.
    ops : mapping of str to int
        Number of recomputed nodes by op.
    """

    module: str
    times: int
    seconds: float
    bytes: int
    spared: int
    ops: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Kernel:
    """Nodes that run as one fused kernel.

    Attributes
    ----------
    module : str
        Module of most of the nodes.
    nodes : tuple of str
        Their labels, in execution order.
    ops : mapping of str to int
        Number of nodes by op.
    unbuffered : int
        Bytes of the values produced and consumed inside the kernel, which have no buffer.
    """

    module: str
    nodes: tuple[str, ...]
    ops: Mapping[str, int]
    unbuffered: int


@dataclass(frozen=True, slots=True)
class Explanation(Finding):
    """Explanation of a rewritten file; sizes in bytes.

    Attributes
    ----------
    run_by : str
        The runner, which decides what the budget covers, see `Options.run_by`.
    budget, original_peak : int
        Budget of the file, and the default peak of the original's tensors.
    trained : int or None
        Predicted memory of training by a loop, where the budget covers that and a prediction is possible here.
    peak, peak_at : int, str
        Peak of the file's nodes in a plain session without optimisations, and the op that runs at the peak.
    kept_peak, kept_at : int, str
        The same in the same order if every recomputed value were kept instead.
    control_edges : int
        Edges that only enforce the order.
    extra_seconds : float
        Time of recomputation relative to the step without it, by `costs`.
    recomputed : tuple of Recomputed
        One entry per module, by descending `spared`.
    by_module : Frame
        The peak by module.
    costs : str
        Source of the seconds per op, as in `Options`.
    moved, moved_bytes : int
        Number of moves to the host and back, and their bytes in each direction.
    state_on_host : int
        Bytes of state that lies on the host but for its update.
    fused : tuple of Kernel
        Fused kernels with which a loop runs the file here, by descending `unbuffered`.
    not_fused : str
        Reason why a loop runs no fused kernel; empty where it does.
    """

    schema: ClassVar[str] = "onnx-remat/explain/1"

    run_by: str
    budget: int
    original_peak: int
    trained: int | None
    peak: int
    peak_at: str
    kept_peak: int
    kept_at: str
    control_edges: int
    extra_seconds: float
    recomputed: tuple[Recomputed, ...]
    by_module: modules.Frame
    costs: str
    moved: int = 0
    moved_bytes: int = 0
    state_on_host: int = 0
    fused: tuple[Kernel, ...] = ()
    not_fused: str = ""

    def lines(self) -> list[str]:
        """Return the effect of the order, that of recomputation by module, and the flame graph of the peak."""
        by_loop = self.run_by == "loop"
        peaks = [
            ("the original, as ONNX Runtime executes it", format_bytes(self.original_peak)),
            ("in this file's order, without recomputation", format_bytes(self.kept_peak)),
            ("in this file's order, with recomputation", format_bytes(self.peak)),
        ]
        budget, lines = format_bytes(self.budget), []
        if not by_loop:
            peaks.append(("its budget", budget))
        elif self.trained is not None:
            lines = [f"training by Loop takes {format_bytes(self.trained)}, budget {budget}", ""]
        else:
            lines = [f"budget {budget}, for all memory of training by Loop", ""]
        head = "tensors in a plain session, which this budget does not cover" if by_loop else "peak of tensors"
        lines += [*table([(head, ""), *((f"  {what}", size) for what, size in peaks)]), ""]
        if self.moved:
            size = format_bytes(self.moved_bytes)
            lines += [f"{self.moved} values are moved to the host and back, {size} in each direction", ""]
        if self.state_on_host:
            lines += [f"{format_bytes(self.state_on_host)} of state lies on the host but for its update", ""]
        if not self.recomputed:
            edges = f": {self.control_edges} control edges enforce" if self.control_edges else ", and no edge enforces"
            lines.append(f"no node is recomputed{edges} another order")
        else:
            times, spared = sum(r.times for r in self.recomputed), sum(r.spared for r in self.recomputed)
            lines += [
                f"{times} nodes are recomputed, +{self.extra_seconds:.1%} compute by the costs of {self.costs}.",
                f"If their outputs were kept instead, the peak would be {format_bytes(self.kept_peak)}, at "
                f"{self.kept_at}; {format_bytes(spared)} of that are these outputs:",
                *_recomputed_rows(self.recomputed),
                "",
                f"{self.control_edges} control edges enforce the order.",
            ]
        lines += _fused_rows(self.fused, self.not_fused)
        peak = f"the peak {WORDING['loop' if by_loop else 'session'].of_tensors}at {self.peak_at}:"
        return [*lines, "", peak, *modules.flame_text(self.by_module)]


def _recomputed_rows(recomputed: Sequence[Recomputed]) -> list[str]:
    rows = [("  module", "saved at peak", "outputs", "nodes", "most frequent ops")]
    for each in recomputed[:_MOST_ROWS]:
        sizes = format_bytes(each.spared), format_bytes(each.bytes)
        rows.append((f"  {each.module}", *sizes, str(each.times), _most_of(each.ops)))
    if rest := recomputed[_MOST_ROWS:]:
        spared, made = sum(r.spared for r in rest), sum(r.bytes for r in rest)
        times = str(sum(r.times for r in rest))
        rows.append((f"  {len(rest)} more", format_bytes(spared), format_bytes(made), times, ""))
    return table(rows)


def _most_of(ops: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {op}" for op, count in list(ops.items())[:3])


def _counted(ops: Iterable[str]) -> dict[str, int]:
    """Count each op, most frequent first."""
    return dict(sorted(Counter(ops).items(), key=lambda item: (-item[1], item[0])))


def _fused_rows(fused: Sequence[Kernel], not_fused: str) -> list[str]:
    """Return the rows of a loop's fused kernels, or why it has none; empty for files for plain sessions."""
    if not fused:
        return ["", f"a loop runs this file without fused kernels here: {not_fused}"] if not_fused else []
    total = format_bytes(sum(each.unbuffered for each in fused))
    rows = [("  module", "no buffer", "nodes", "first node", "most frequent ops")]
    for each in fused[:_MOST_ROWS]:
        counts = format_bytes(each.unbuffered), str(len(each.nodes))
        rows.append((f"  {each.module}", *counts, each.nodes[0], _most_of(each.ops)))
    if rest := fused[_MOST_ROWS:]:
        nodes, size = sum(len(each.nodes) for each in rest), sum(each.unbuffered for each in rest)
        rows.append((f"  {len(rest)} more", format_bytes(size), str(nodes), "", ""))
    nodes = sum(len(each.nodes) for each in fused)
    head = f"a loop runs {nodes} nodes as {len(fused)} fused kernels; {total} of values inside them need no buffer:"
    return ["", head, *table(rows)]


def _kernels(arranged: SlabLayout) -> tuple[Kernel, ...]:
    """Return the fused kernels of a step that is laid out."""
    made_by = {step.node.output[0]: step for step in arranged.program.steps if step.plain is not None}
    found = []
    for name, members in arranged.members.items():
        outside = set(made_by[name].writes)
        inner = [value for member in members for value in member.writes if value not in outside]
        homes = [modules.module_of(member.node) or modules.NOWHERE for member in members]
        ops = _counted(member.node.op_type for member in members)
        size = sum(arranged.compiled.tensors[value].nbytes for value in inner)
        module = max(dict.fromkeys(homes), key=homes.count)
        found.append(Kernel(module, tuple(member.label for member in members), ops, size))
    return tuple(sorted(found, key=lambda each: (-each.unbuffered, -len(each.nodes), each.nodes)))


@worker.device_left()
def explain(path: model_io.Model, dims: Mapping[str, int] | None = None, costs: str = "") -> Explanation:
    """Explain a file that `rewrite_model` wrote.

    Parameters
    ----------
    path : path, bytes, onnx.ModelProto or model_io.Source
        The file, or the model read from it.
    dims : mapping of str to int, optional
        Sizes of symbolic dimensions; by default those of the plan.
    costs : str
        As in `Options`: a file does not say for which it was planned.

    Raises
    ------
    ModelError
        The file is not a model, or contains no plan: it was not rewritten, or a tool dropped its metadata.
    UsageError
        The model has no symbolic dimension of a name in `dims`; or `costs` is neither a preset nor a profile of it.
    """
    source = model_io.load(path)
    plan = planned(source.model, model_io.name_of(path))
    options = replace(options_of(source.model, plan, dims), verify="none")  # onnxruntime may lack the file's ops
    preparation = replace(options.preparation(), fixed=False)
    executed = as_executed(source.model, source.folder, "disable", preparation)
    state = state_bytes(executed.compiled)
    executed = replace(executed, compiled=counted(executed.compiled))
    trained, not_fused = None, ""
    kernels: tuple[Kernel, ...] = ()
    if plan.run_by == "loop" and runtime.available() and plan.provider == "cpu":
        optimized = as_executed(source.model, source.folder, "all", replace(preparation, fixed=True))
        arranged = prediction.laid_out(optimized, fuse=plan.fuse)
        trained, kernels = prediction.footprint(arranged).total, _kernels(arranged)
        not_fused = arranged.fused.why_not
    found = _explanation(source.model, executed, plan, trained, costs or executed.compiled.kernels.costs)
    tensors = executed.compiled.tensors
    back = [tensors[name].nbytes for name in plan.moved if name in tensors]
    return replace(
        found, moved=len(back), moved_bytes=sum(back), state_on_host=state, fused=kernels, not_fused=not_fused
    )


def _explanation(
    model: onnx.ModelProto, executed: Executed, plan: Planned, trained: int | None, by: str
) -> Explanation:
    graph, tensors = executed.compiled.graph, executed.compiled.tensors
    timeline = executed.timeline
    seconds = costs.price(graph, tensors, executed.compiled.kernels, by)
    gaps = _gaps(graph, executed.order.order)
    dropped = _dropped(executed, gaps)
    sizes = {op: sum(tensors[n].nbytes for n in graph.ops[op].writes if n in dropped) for op in gaps}
    kept = timeline.step_bytes.astype(np.int64)
    for clone, (first, last) in gaps.items():
        kept[first:last] += sizes[clone]
    worst = int(np.argmax(kept))
    found: dict[str, list[int]] = {}
    for clone in gaps:
        found.setdefault(modules.module_of(graph.ops[clone].node) or modules.NOWHERE, []).append(clone)
    recomputed = []
    for module, ops in found.items():
        kinds = _counted(graph.ops[clone].node.op_type for clone in ops)
        spared = sum(sizes[clone] for clone in ops if gaps[clone][0] <= worst < gaps[clone][1])
        made, spent = sum(sizes[clone] for clone in ops), sum(float(seconds[clone]) for clone in ops)
        recomputed.append(Recomputed(module, len(ops), spent, made, spared, kinds))
    again = sum(each.seconds for each in recomputed)
    once = sum(float(seconds[op.index]) for op in graph.ops if not _is_helper(op.node) and not is_copy(op)) - again
    kept_at, peak_at = _label(executed, worst), _label(executed, timeline.peak_step)
    return Explanation(
        plan.run_by, plan.budget, plan.original_peak, trained, timeline.peak, peak_at, int(kept[worst]), kept_at,
        len(plan.control_edges), again / once if once else 0.0,
        tuple(sorted(recomputed, key=lambda r: (-r.spared, -r.bytes, r.module))), trace.peak_by_module(executed, model),
        by,
    )  # fmt: skip


def _is_helper(node: onnx.NodeProto) -> bool:
    """Is it part of a control edge or of a private buffer? The original, the base of all shares, has no such node."""
    named = node.name.startswith(TAG) or any(name.startswith(UNSEEN) for name in node.input)
    return named or CONTROL_KEY in entries(node)


def _gaps(graph: Graph, order: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Return for each recomputed op the half-open range of positions in which its outputs are not live.

    The range begins after the last reader of the op's previous run, and ends at the op itself.
    """
    step = {op: number for number, op in enumerate(order)}
    readers = graph.readers
    runs: dict[str, list[int]] = {}
    for op in graph.ops:
        runs.setdefault(entries(op.node).get(RECOMPUTE_KEY, op.label), []).append(op.index)
    gaps = {}
    for ops in runs.values():
        ops.sort(key=lambda op: step[op])
        for previous, clone in itertools.pairwise(ops):
            last = max((step[r] for name in graph.ops[previous].writes for r in readers[name]), default=step[previous])
            gaps[clone] = (last + 1, max(last + 1, step[clone]))
    return gaps


def _dropped(executed: Executed, clones: Collection[int]) -> set[str]:
    """Return the values with a buffer of their own that nodes other than clones read, directly or through a view.

    A clone's output that only other clones read would have no reader if their outputs were kept.
    """
    problem, graph = executed.compiled.problem, executed.compiled.graph
    life, root = problem.lifetimes, problem.lifetimes.root
    skipped = {op.index for op, value in _made(graph) if root[value] != value} | set(clones)
    return {
        name
        for number, name in enumerate(graph.values)
        if root[number] == number
        and not skipped.issuperset(life.readers[life.reader_ptr[number] : life.reader_ptr[number + 1]])
    }


def _made(graph: Graph) -> list[tuple[Op, int]]:
    """Return every pair of an op and the number of a value that it produces."""
    number = {name: i for i, name in enumerate(graph.values)}
    return [(op, number[name]) for op in graph.ops for name in op.writes]


def _label(executed: Executed, number: int) -> str:
    op = executed.compiled.graph.ops[executed.order.order[number]]
    return f"{op.node.op_type} {op.label}"
