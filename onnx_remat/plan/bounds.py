"""Lower bounds on the peak of any schedule: the working set of one op, and the memory needed to assemble it.

References
----------
Sethi: Complete register allocation problems, SIAM J. Comput. 4 (1975): pebble games, in which values may be recomputed.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from onnx_remat.memory.problem import IN_RESIDENT, Problem

_TRACED_OPS, _MOST_STATES = 4, 200  # ops whose inputs are traced back, and sets of values explored for each
_MOST_WORK = 2_000_000  # values and ops looked at for each, a second or two: an op may read thousands of values


def lower_bound(problem: Problem) -> int:
    """Return a lower bound on the peak of every schedule of the problem.

    Class: every valid schedule, any order, any number of recomputes, under the simulator's buffer rules. The larger of

    - the *working-set floor*: when an op runs for the first time, its input and output buffers are all allocated; only
      an alias lets two live values share a buffer, and only an in-place output reuses an input's. At the end of the
      step all graph outputs are allocated;
    - the *pebbling bound*: all inputs of an op are allocated at the same time. When the last of them was made, the
      others were allocated, and so were the inputs of its maker; this set was allocated at one time, too, and so on
      back to the residents. The path back with the lowest peak is a bottleneck path over sets of values. The search
      for it stops early, which leaves the bound valid.

    Parameters
    ----------
    problem : Problem
        The graph.

    Returns
    -------
    int
        Bytes, residents included.
    """
    needs = _working_sets(problem)
    floor = _floor(problem, needs)
    pebbles = _PebbleState.of(problem)
    # Nothing is known of ops with negative needs: part of their memory is not tensors (`relaxed.outside_kernels`).
    traced = [op for op in range(problem.n_ops) if needs[op] >= 0]
    for op in sorted(traced, key=lambda op: (-needs[op], op))[:_TRACED_OPS]:
        floor = max(floor, problem.base_bytes + pebbles.lowest(op))
    return floor


def working_set(problem: Problem) -> int:
    """Return only the working-set floor of `lower_bound`: it also holds for plans that move values to the host."""
    return _floor(problem, _working_sets(problem))


def _floor(problem: Problem, needs: list[int]) -> int:
    life = problem.lifetimes
    return problem.base_bytes + max([int(life.nbytes[life.kept].sum()), *needs])


def _working_sets(problem: Problem) -> list[int]:
    """Return a lower bound on the bytes allocated while each op runs for the first time."""
    return [_reads(problem, op) + writes(problem, op) + int(problem.workspace[op]) for op in range(problem.n_ops)]


@dataclass(frozen=True, slots=True)
class _PebbleState:
    """Pebble game over buffers, named by their root values; residents and empty buffers are left out.

    Attributes
    ----------
    size : list of int
        Lower bound on the bytes of each buffer.
    additional : list of int
        Lower bound on its bytes in addition to its maker's inputs: 0 if the output may be computed in place.
    maker : list of int
        Op that makes it.
    reads, makes : list of frozenset of int
        Buffers each op reads, and those it makes.
    workspace : list of int
    """

    size: list[int]
    additional: list[int]
    maker: list[int]
    reads: list[frozenset[int]]
    makes: list[frozenset[int]]
    workspace: list[int]

    @classmethod
    def of(cls, problem: Problem) -> _PebbleState:
        life = problem.lifetimes
        additional = life.least.copy()
        additional[life.out_values[np.diff(life.take_ptr) > 0]] = 0
        counts = (life.maker[life.root] >= 0) & (life.least[life.root] > 0)
        reads = [frozenset(int(life.root[v]) for v in problem.inputs(op) if counts[v]) for op in range(problem.n_ops)]
        size, makes = life.least.tolist(), [list[int]() for _ in range(problem.n_ops)]
        for value in np.flatnonzero(counts & (life.root == np.arange(problem.n_values))).tolist():
            makes[life.maker[value]].append(value)
        return cls(
            size, additional.tolist(), life.maker.tolist(), reads, list(map(frozenset, makes)),
            problem.workspace.tolist(),
        )  # fmt: skip

    def lowest(self, op: int) -> int:
        """Return a lower bound on the peak up to the moment when all inputs of `op` are allocated."""
        size, start = self.size, self.reads[op]
        total, pushed, work = sum(size[v] for v in start), 0, 0
        # A set is that of its parent without the values that one op makes, and with those that the op reads.
        todo, done = [(total, total, pushed, start, -1)], set[frozenset[int]]()
        while len(done) < _MOST_STATES and work < _MOST_WORK:
            most, total, _, parent, last = heapq.heappop(todo)
            here = parent if last < 0 else parent - self.makes[last] | self.reads[last]
            work += 1 + len(here)
            if not here:
                return most
            if here in done:
                continue
            done.add(here)
            by_maker: dict[int, list[int]] = {}
            for value in here:
                by_maker.setdefault(self.maker[value], []).append(value)
            for last in sorted(by_maker):
                made = by_maker[last]
                live = total + sum(size[v] for v in self.reads[last] - here) - sum(size[v] for v in made)
                step = live + self.workspace[last] + sum(self.additional[v] for v in made)
                pushed += 1
                work += len(made) + len(self.reads[last])
                heapq.heappush(todo, (max(most, step), live, pushed, here, last))
        return todo[0][0]


def _reads(problem: Problem, op: int) -> int:
    """Return a lower bound on the bytes of the buffers that `op` reads."""
    life = problem.lifetimes
    least: dict[int, int] = {}
    for value in problem.inputs(op):
        shared = int(life.root[value])
        size = min(int(life.nbytes[shared]), int(life.nbytes[value]))
        least[shared] = min(least.get(shared, size), size)
    return sum(least.values())


def writes(problem: Problem, op: int) -> int:
    """Return a lower bound on the bytes of the outputs of the first run of `op`, in addition to its inputs."""
    life = problem.lifetimes
    total = 0
    for k in range(problem.out_ptr[op], problem.out_ptr[op + 1]):
        value = problem.out_values[k]
        joins = life.place[k] >= 0 or life.take_ptr[k] < life.take_ptr[k + 1]
        apart = life.kept[value] and not problem.outputs_join
        if life.place[k] != IN_RESIDENT and (apart or not joins):
            total += int(life.nbytes[value])
    return total
