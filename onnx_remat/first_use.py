"""Compiling the kernels side by side, at a first use: one process takes half a minute for all of them.

Numba compiles in one thread, with the interpreter's lock held. So the slowest kernels are compiled in processes of
their own, while this one loads the model and simulates the original; all of it comes off the disk from then on.
``python -m onnx_remat.first_use NAME...`` compiles some groups.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from onnx_remat import worker
from onnx_remat.compiled import is_compiled
from onnx_remat.ort.simulate import arena, buffers, layout, order
from onnx_remat.plan import cost_bounds
from onnx_remat.plan.request import Deadline
from onnx_remat.plan.search import anneal, orders, plans
from onnx_remat.plan.search.core import viewless
from onnx_remat.plan.selectors import materialize
from onnx_remat.problem import BACKWARD, FORWARD, Problem, Schedule
from onnx_remat.write import private_buffers


@dataclass(frozen=True, slots=True)
class _Group:
    """Kernels that are compiled together; `last` is compiled only after the others."""

    call: Callable[[], object]
    last: Callable[..., object]


def _toy() -> Problem:
    """Two ops forward, one backward that reads what both made: arrays of the types that kernels are called with."""
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
    view = viewless(_toy())
    plans.improved(view, view.ops, 2, 1, plans.Heat(1.0, 0.1), 0, True, False, Deadline())


def _planning() -> None:
    problem = _toy()
    steps = np.arange(problem.n_ops, dtype=np.int32)
    orders.list_schedules(problem, steps)
    materialize(problem, steps, np.ones(problem.n_ops, np.bool_), 2)
    cost_bounds.cost_lower_bound(problem, 3)
    private_buffers.gap_tenants(problem, [0, 1, 2], buffers.simulate(problem, Schedule((0, 1, 2))), 0)


def _simulating() -> None:
    problem = _toy()
    schedule = Schedule(tuple(order.default_order([[], [0], [0, 1]])))
    timeline = buffers.simulate(problem, schedule)
    arena.run(arena.requests(schedule, timeline, [[], [], []], [False] * 3), doubling=True)
    layout.load_compiled()


_GROUPS = {
    "annealing": _Group(_annealing, anneal.anneal),
    "planning": _Group(_planning, private_buffers.flag_gaps),
    "simulating": _Group(_simulating, layout.place),
}


class FirstUse:
    """Which kernels are compiled by whom; `compile` takes no time where they are on the disk."""

    def __init__(self) -> None:
        self.children: dict[str, subprocess.Popen[bytes]] = {}

    def begin(self, names: tuple[str, ...]) -> None:
        """Compile some groups in processes of their own, as many as there are cores beside this one's."""
        missing = [name for name in names if not is_compiled(_GROUPS[name].last)]
        cores = min((os.cpu_count() or 1) - 1, len(missing))
        for core in range(cores):
            share = missing[core::cores]
            child = worker.spawn("onnx_remat.first_use", *share, stdin=subprocess.DEVNULL)
            self.children |= dict.fromkeys(share, child)

    def compile(self, names: tuple[str, ...]) -> float:
        """See to it that some groups are compiled; the seconds it took."""
        began = time.monotonic()
        missing = [name for name in names if not is_compiled(_GROUPS[name].last)]
        for name in missing:
            if name not in self.children:
                _GROUPS[name].call()
        for name in missing:
            if name in self.children:
                self.children[name].wait()
                if not is_compiled(_GROUPS[name].last):  # it failed, or what it made cannot be kept
                    _GROUPS[name].call()
        return time.monotonic() - began if missing else 0.0

    def end(self) -> None:
        """End what is still compiling: it is not needed after all."""
        for child in self.children.values():
            child.kill()
            child.wait()


PLANNER = ("annealing", "planning")
"""Groups that only a search for a plan needs."""

SIMULATOR = ("simulating",)
"""Groups that every use needs."""


@contextmanager
def first_use() -> Iterator[FirstUse]:
    """Begin to compile what a search needs and is not on the disk; within the block it can be waited for."""
    use = FirstUse()
    try:
        use.begin(PLANNER)
        yield use
    finally:
        use.end()


if __name__ == "__main__":
    for _name in sys.argv[1:]:
        _GROUPS[_name].call()
