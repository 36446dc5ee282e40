"""Compiling the kernels side by side, at a first use: one process takes half a minute for all of them.

Numba compiles in one thread, with the interpreter's lock held. So the slowest kernels are compiled in processes of
their own, while this one loads the model and simulates the original, and those of the end while it plans; all of it
comes off the disk from then on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from onnx_remat.memory import arena, buffers, layout, layout_ascending, layout_ledges, order
from onnx_remat.memory.problem import BACKWARD, FORWARD, Problem, Schedule
from onnx_remat.plan import cost_bounds
from onnx_remat.plan.search import anneal, candidates, orders
from onnx_remat.plan.search.core import liveness_model
from onnx_remat.plan.selectors.materialize import inserted, materialize
from onnx_remat.process.child import Child
from onnx_remat.process.compiled import is_compiled
from onnx_remat.write import private_buffers


@dataclass(frozen=True, slots=True)
class _Group:
    """Kernels that are compiled together; `last` is compiled only after the others."""

    call: Callable[[], object]
    last: Callable[..., object]


def _toy() -> Problem:
    """Return a problem of two forward ops and a backward op that reads both; its arrays have the usual types."""
    longs, ints = np.zeros(3, np.int64), np.empty(0, np.int32)
    return Problem(
        in_ptr=np.array([0, 0, 1, 3], np.int32), in_values=np.array([0, 0, 1], np.int32),
        out_ptr=np.arange(4, dtype=np.int32), out_values=np.arange(3, dtype=np.int32),
        nbytes=np.ones(3, np.int64), resident=np.zeros(3, np.bool_), is_output=np.arange(3) == 2,
        shape_class=np.zeros(3, np.int32), poolable=np.ones(3, np.bool_), alias_slot=np.full(3, -1, np.int32),
        inplace_ptr=np.zeros(4, np.int32), inplace_slots=ints, droppable=np.zeros(3, np.int8), workspace=longs,
        rerun_workspace=longs, cost=np.ones(3), recomputable=np.ones(3, np.bool_),
        phase=np.array([FORWARD, FORWARD, BACKWARD], np.int8), base_bytes=0,
    )  # fmt: skip


def _annealing() -> None:
    view = liveness_model(_toy())
    candidates.improved(view, view.ops, 2, 1, candidates.Heat(1.0, 0.1), 0, np.zeros(1, np.int64), True, False)


def _ordering() -> None:
    problem = _toy()
    steps = np.arange(problem.n_ops, dtype=np.int32)
    orders.list_schedules(problem, steps)
    materialize(problem, steps, np.ones(problem.n_ops, np.bool_), 2)


def _writing() -> None:
    problem = _toy()
    private_buffers.gap_tenants(problem, [0, 1, 2], buffers.simulate(problem, Schedule((0, 1, 2))), 0)


def _reporting() -> None:
    problem, schedule = _toy(), Schedule((0, 1, 2))
    cost_bounds.cost_lower_bound(problem, 3)
    arena.run(arena.requests(schedule, buffers.simulate(problem, schedule), [[], [], []], [False] * 3), doubling=True)


def _simulating() -> None:
    buffers.simulate(_toy(), Schedule(tuple(order.default_order([[], [0], [0, 1]]))))
    layout.load_greedy()


GROUPS = {
    "annealing": _Group(_annealing, anneal.anneal),
    "ordering": _Group(_ordering, inserted),
    "writing": _Group(_writing, private_buffers.flag_gaps),
    "reporting": _Group(_reporting, arena.replay),
    "simulating": _Group(_simulating, layout.place),
    "placing": _Group(layout.load_search, layout_ascending.search_ascending),
    "placing later": _Group(layout.load_later_searches, layout_ledges.search_ledges),
}

_SHARES = (("annealing", "placing later", "writing", "reporting"), ("ordering",))
"""Groups that each child process compiles, the more urgent first; the second child starts if cores allow."""

PLANNER = ("ordering", "annealing", "placing later")
"""Groups that must be compiled before the search for a plan begins, whose time may be limited."""

SIMULATOR = ("simulating", "placing")
"""Groups that must be compiled before the original is simulated."""

REPORTER = ("writing", "reporting")
"""Groups that only the file and the report need: there is time to compile them while a plan is searched for."""

_TICK = 0.02  # seconds between two checks of another process's compilation


class FirstUse:
    """Compile kernels that are not on the disk, in this process and in others at the same time."""

    def __init__(self) -> None:
        self.children: dict[str, Child] = {}

    def begin(self) -> None:
        """Compile groups in child processes, as many as there are other cores."""
        for share in _SHARES[: (os.cpu_count() or 1) - 1]:
            if missing := [name for name in share if not is_compiled(GROUPS[name].last)]:
                child = Child()
                child.begin("onnx_remat.rewrite.first_use:compile_groups", {"names": missing}, last=True)
                self.children |= dict.fromkeys(missing, child)

    def compile(self, names: tuple[str, ...]) -> float:
        """See to it that some groups are compiled, first those that no other process does; the seconds it took."""
        began = time.monotonic()
        missing = [name for name in names if not is_compiled(GROUPS[name].last)]
        for name in sorted(missing, key=self.children.__contains__):
            while name in self.children and not is_compiled(GROUPS[name].last) and not self.children[name].done():
                time.sleep(_TICK)
            if not is_compiled(GROUPS[name].last):  # no process did, or it failed, or its result cannot be stored
                GROUPS[name].call()
        return time.monotonic() - began if missing else 0.0

    def end(self) -> None:
        """End the processes that still compile."""
        for child in self.children.values():
            child.end(0)


@contextmanager
def first_use() -> Iterator[FirstUse]:
    """Begin to compile the search's kernels that are not on the disk; the block can wait for them."""
    use = FirstUse()
    try:
        use.begin()
        yield use
    finally:
        use.end()


def compile_groups(names: Sequence[str]) -> None:
    """Compile some groups, and leave them on the disk."""
    for name in names:
        GROUPS[name].call()
