"""The report on a rewrite: one verdict line, a table before and after, JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from onnx_remat.measure.verify import Measured
from onnx_remat.messages import Finding, Message, Setting, Word, joined
from onnx_remat.ort.moves import Moved
from onnx_remat.ort.peaks import Peak, Reserves
from onnx_remat.session.prediction import Footprint, stated
from onnx_remat.units import format_bytes, table

TRAINING = (
    ("training by Loop takes", "total"), ("  inputs and state", "inputs"), ("  weights", "weights"), ("  slab", "slab"),
    ("  workspace", "workspace"), ("  ONNX Runtime's bookkeeping", "books"),
)  # fmt: skip
"""Rows of a table, and the fields of a `Footprint` that they show."""

NODES = (
    ("nodes that Loop runs", "nodes"), ("  of them fused kernels", "kernels"),
    ("  with nothing fused", "unfused_nodes"),
)  # fmt: skip
"""Rows of a `Footprint`'s counts, and their fields."""

TENSORS = (
    ("  inputs", "inputs"), ("  weights and constants", "weights"), ("  activations", "activations"),
    ("  outputs", "outputs"), ("  workspace", "workspace"),
)  # fmt: skip
"""Rows of a `Peak` without its total, and their fields."""


CUT_SHORT = Message(
    "note: the time limit cut planning short: another run may plan otherwise; {} repeats", Setting("effort", Word("N"))
)

_SHOWN = 5e-4  # smallest fraction that a verdict states

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Wording:
    """How findings name the memory that a budget covers, and the memory that it does not.

    Attributes
    ----------
    covered : str
        The memory that the budget covers.
    tensors : str
        Head of the table of tensors.
    of_tensors : str
        Says of a peak of tensors that the budget does not cover it; may be empty.
    loop_first : bool
        Do the rows of a loop come before those of tensors?
    """

    covered: str
    tensors: str
    of_tensors: str
    loop_first: bool

    def head(self) -> tuple[tuple[str, str], ...]:
        """Return `TENSORS` and their total."""
        return (self.tensors, "total"), *TENSORS

    def ordered(self, loop: Sequence[Row], tensors: Sequence[Row]) -> list[Row]:
        """Return all rows, those of the covered memory first."""
        return [*loop, *tensors] if self.loop_first else [*tensors, *loop]


WORDING = {
    "loop": Wording("training takes", "tensors in a plain session", "of a plain session's tensors, ", True),
    "session": Wording("peak", "peak", "", False),
}
"""By `Options.run_by`."""


@dataclass(frozen=True, slots=True)
class Report(Finding):
    """The result of a rewrite in figures.

    Attributes
    ----------
    selector : str
    budget : int
        The budget in bytes.
    before, after : Peak
        Simulated peaks of the original and of the rewritten model as ONNX Runtime executes them by default.
    peaks_by_level : mapping
        Simulated peak of the rewritten model per graph optimisation level; of some where the time limit left no time.
    lower_bound : int
        No schedule of this graph peaks below this many bytes of tensors.
    impossible_below : int
        No budget below this can be kept, by any plan.
    extra_compute : float
        Recomputed work as a fraction of one plain step: 0.25 means 25 % more.
    extra_compute_bound : float
        No schedule of this graph's nodes within the budget recomputes less: in any order, with any number of
        recomputes. (Values that ONNX Runtime fuses away are in no schedule.)
    extra_compute_in_kernels : float
        The part of `extra_compute` that kernels of a loop can compute where they read its results: of elementwise
        nodes, and nodes along rows. The bound takes these as free.
    recomputed, control_edges, private_values, nodes_before, nodes_after : int
        Nodes recomputed, edges added to pin the order (a node each), values given a buffer of their own, node counts.
    state_copies : int
        Nodes added that copy state to the device and back.
    seconds : mapping
        Time each stage took.
    arena_before, arena_after : Reserves
        Memory that the arena adds to either peak.
    measured : Measured or None
    notes : tuple of str
        Further facts.
    warnings : tuple of str
        Nodes of the original whose results may differ from run to run.
    run_by : str
        The runner, which decides what the budget covers, see `Options.run_by`.
    cut_short : bool
        Whether the clock cut planning or its bound short (`Options.time_limit`): another run may find another plan.
    moved : Moved or None
        Moves to the host and back, which `extra_compute` includes; None where there are none. Bounds know no
        moves: where they were allowed, `extra_compute_bound` is 0.
    loop_before, loop_after : Footprint or None
        Memory of training with `session.training.Loop`; None where it cannot open the step.
    covered_before, covered_after : int
        Bytes that count against the budget: training by `Loop`; or a session's peak, the worst of the levels that the
        budget is for, with the arena where the budget covers that.
    """

    schema: ClassVar[str] = "onnx-remat/report/1"

    selector: str
    budget: int
    before: Peak
    after: Peak
    peaks_by_level: Mapping[str, int]
    lower_bound: int
    impossible_below: int
    extra_compute: float
    extra_compute_bound: float
    extra_compute_in_kernels: float
    recomputed: int
    control_edges: int
    private_values: int
    nodes_before: int
    nodes_after: int
    seconds: Mapping[str, float]
    arena_before: Reserves
    arena_after: Reserves
    measured: Measured | None = None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    run_by: str = "session"
    cut_short: bool = False
    moved: Moved | None = None
    loop_before: Footprint | None = None
    loop_after: Footprint | None = None
    covered_before: int = 0
    covered_after: int = 0
    state_copies: int = 0

    def to_dict(self) -> dict[str, Any]:
        """As `Finding.to_dict`, without the bytes in use at every node, of which there are as many as values."""
        data = Finding.to_dict(self)
        return data | {name: stated(data[name]) for name in ("loop_before", "loop_after")}

    def covered(self) -> tuple[int, int]:
        """Return the covered memory of the original and of the result, in bytes."""
        return self.covered_before, self.covered_after

    def loops(self) -> tuple[Footprint, Footprint] | None:
        """Return the memory of a loop before and after; None where the budget does not cover it."""
        if self.run_by == "loop" and self.loop_before and self.loop_after:
            return self.loop_before, self.loop_after
        return None

    def extra_time(self) -> float | None:
        """Return the predicted time of a step over that of the original, less 1; None where a session runs them."""
        loops = self.loops()
        return loops[1].slower_than(loops[0]) if loops else None

    def books(self) -> int:
        """Return the covered bytes that no plan changes, estimated for the original."""
        return self.loop_before.books if self.run_by == "loop" and self.loop_before else 0

    def helpers(self) -> int:
        """Return the number of helper nodes: those that edges wait through, and those of private buffers."""
        copies = self.state_copies + (2 * len(self.moved.values) if self.moved else 0)
        return self.nodes_after - self.nodes_before - self.recomputed - self.control_edges - copies

    def verdict(self) -> str:
        """Return one line: the memory reached and its cost."""
        room, state = self._room(), self.loop_after.state_on_host if self.loop_after else 0
        if self.moved:
            both = f" and {format_bytes(state)} of state" if state else ""
            room = (
                f"+{self.moved.share:.1%} of it to wait for {format_bytes(self.moved.nbytes)}{both} to the host and "
                f"back, {self.moved.covered:.0%} of whose time kernels run"
            )
        elif state:
            room += f", {format_bytes(state)} of state on the host"
        before, after = self.covered()
        saved = 1 - after / before if before else 0.0
        change = f"{-saved:+.1%}" if after != before else "unchanged"
        covered = WORDING[self.run_by].covered
        unresolved = self.measured.unresolved if self.measured and self.run_by != "loop" else 0
        kept = f"kept by simulation, measured {format_bytes(unresolved)} above it" if unresolved else "kept"
        time = self.extra_time() or 0.0
        slower = f" ({time:+.1%} predicted step time)" if abs(time) >= _SHOWN else ""
        return (
            f"{covered} {format_bytes(before)} -> {format_bytes(after)} ({change}), "
            f"budget {format_bytes(self.budget)} {kept}, +{self.extra_compute:.1%} compute{slower}, {room}"
        )

    def _room(self) -> str:
        """Return how far the extra compute may be above that of any plan; no bound knows the part in kernels."""
        gap = max(0.0, self.extra_compute - self.extra_compute_in_kernels - self.extra_compute_bound)
        if gap >= _SHOWN:
            return f"at most {100 * gap:.1f} points above any possible plan"
        if self.extra_compute - self.extra_compute_bound < _SHOWN:
            return "the least possible"
        return "above any possible plan only by what kernels can recompute"

    def lines(self) -> list[str]:
        """Return the verdict and the table before and after."""
        lines = [self.verdict(), "", *table(self._rows())]
        if self.measured:
            lines += ["", *self._measured_lines(self.measured)]
        lines += [Message("note: {}", note) for note in self.notes]
        if self.cut_short:
            lines.append(CUT_SHORT)
        return lines

    def to_text(self, verbose: bool = False) -> str:
        """Return the verdict and the table before and after; with `verbose` also values at the peaks and timings."""
        return joined("\n", [*self.lines(), *(self._details() if verbose else ())])

    def _details(self) -> list[str]:
        lines = []
        for title, peak in (("before", self.before), ("after", self.after)):
            lines += ["", f"largest values at the peak {title} (at {peak.at}):"]
            lines += [f"  {format_bytes(h.bytes):>9}  {h.value} ({h.op_type})" for h in peak.top]
        return [*lines, "", "seconds: " + ", ".join(f"{stage} {s:.2f}" for stage, s in self.seconds.items())]

    def _rows(self) -> list[tuple[str, str, str]]:
        wording = WORDING[self.run_by]
        session = self._sides(self.before, self.after, wording.head())
        if self.run_by == "session" and self.covered() != (self.before.total, self.after.total):
            before, after = map(format_bytes, self.covered())
            session.append(("  that the budget covers", before, after))
        session += self._sides(
            self.arena_before,
            self.arena_after,
            (("  with ONNX Runtime's arena", "held"), ("    outputs fed back", "held_fed_back")),
        )
        unfused = (("  the same with nothing fused", "unfused"),)
        training = self._sides(self.loop_before, self.loop_after, (*TRAINING, *unfused))
        rows = [("", "before", "after")]
        rows += wording.ordered(training, session)
        rows += [
            ("extra compute", "", f"+{self.extra_compute:.2%}"),
            *([("  that kernels can compute", "", f"+{free:.2%}")] if (free := self.extra_compute_in_kernels) else []),
            ("  of any plan, at least", "", f"+{self.extra_compute_bound:.2%}"),
            *([("predicted step time", "", f"{extra:+.2%}")] if (extra := self.extra_time()) is not None else []),
            ("nodes", str(self.nodes_before), str(self.nodes_after)),
            ("  recomputed", "", str(self.recomputed)),
            *self._move_rows(),
            ("  control edges", "", str(self.control_edges)),
            ("  helpers of edges and buffers", "", str(self.helpers())),
            *self._sides(self.loop_before, self.loop_after, NODES, str),
            ("values with own buffers", "", str(self.private_values)),
            ("smallest possible budget", "", f">= {format_bytes(self.impossible_below)}"),
        ]
        return rows

    def _move_rows(self) -> list[tuple[str, str, str]]:
        loop, rows = self.loop_after, list[tuple[str, str, str]]()
        if self.moved:
            rows += [("  copies to the host and back", "", str(2 * len(self.moved.values)))]
            rows += [("    bytes moved, each way", "", format_bytes(self.moved.nbytes))]
        if self.state_copies:
            rows += [("  copies of state", "", str(self.state_copies))]
        if loop and loop.state_on_host:
            rows += self._sides(self.loop_before, loop, (("  state on the host", "state_on_host"),))
        if rows and loop:
            rows += [("  kernels wait for copies", "", f"{1e3 * loop.waited:.3f} ms")]
            rows += [("    of their time, kernels run", "", f"{1 - loop.waited / (loop.copies or 1.0):.0%}")]
            rows += [("  the host keeps at most", "", format_bytes(loop.on_host))]
        return rows

    @staticmethod
    def _sides(
        before: object, after: object, fields: tuple[tuple[str, str], ...], write: Callable[[int], str] = format_bytes
    ) -> list[tuple[str, str, str]]:
        """Return one row per field, as `write` formats it; none where a side is missing."""
        if before is None or after is None:
            return []
        return [(label, write(getattr(before, field)), write(getattr(after, field))) for label, field in fields]

    def _measured_lines(self, m: Measured) -> list[str]:
        rows = [("measured", "before", "after")]
        if m.trained_before is not None and m.trained_after is not None:
            rows.append(("training takes", format_bytes(m.trained_before), format_bytes(m.trained_after)))
        rows += [
            ("tensors in a plain session", format_bytes(m.before), format_bytes(m.after)),
            ("  pages and bookkeeping besides", format_bytes(m.before_beyond), format_bytes(m.after_beyond)),
            ("held with allocator reserves", format_bytes(m.before_default), format_bytes(m.after_default)),
            *([("with session_options()", "", format_bytes(m.after_arena))] if m.after_arena is not None else []),
            ("step", f"{m.before_seconds * 1e3:.1f} ms", f"{m.after_seconds * 1e3:.1f} ms"),
        ]
        order = "as planned" if m.order_kept else "NOT as planned"
        if m.unresolved:
            rows.append(("over the budget, within what can be measured", "", format_bytes(m.unresolved)))
        return [*table(rows), f"outputs {m.outputs_equal}; executed order {order}"]
