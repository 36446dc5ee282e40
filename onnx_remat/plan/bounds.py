"""Bytes that no schedule can peak below: what one op works on, and what it takes to bring that together.

References
----------
Sethi: Complete register allocation problems, SIAM J. Comput. 4 (1975): pebble games, in which values may be made again.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from onnx_remat.memory.problem import IN_RESIDENT, Problem

_OPS, _STATES = 4, 200  # ops whose inputs are traced back, and sets of values looked at for each


def lower_bound(problem: Problem) -> int:
    """Bytes below which no schedule of the problem peaks.

    Class: every valid schedule, any order, any number of recomputes, under the simulator's buffer rules. The larger of

    - the *working-set floor*: when an op runs for the first time, the buffers it reads and those it writes are all
      allocated; only an alias lets two live values share one, and only an in-place output joins an input. In the end
      all graph outputs are held;
    - the *pebbling bound*: what an op reads is allocated at one time. When the last of that was made, the rest was
      allocated, and so was what the maker reads; this set, too, was allocated at one time, and so on back to the
      residents. The way back that stays lowest is a bottleneck path over sets of values. The search for it is cut
      short, which leaves the bound valid.

    Parameters
    ----------
    problem : Problem
        The graph.

    Returns
    -------
    int
        Bytes, residents included.
    """
    needs = _needs(problem)
    floor = _floor(problem, needs)
    game = _Game.of(problem)
    traced = [op for op in range(problem.n_ops) if needs[op] >= 0]  # nothing is known of the others, see Goal.outside
    for op in sorted(traced, key=lambda op: (-needs[op], op))[:_OPS]:
        floor = max(floor, problem.base_bytes + game.lowest(op))
    return floor


def working_set(problem: Problem) -> int:
    """The working-set floor of `lower_bound` by itself: it holds for plans that move values to the host as well."""
    return _floor(problem, _needs(problem))


def _floor(problem: Problem, needs: list[int]) -> int:
    life = problem.lifetimes
    return problem.base_bytes + max([int(life.nbytes[life.kept].sum()), *needs])


def _needs(problem: Problem) -> list[int]:
    """Bytes surely allocated while each op runs for the first time."""
    return [_reads(problem, op) + writes(problem, op) + int(problem.workspace[op]) for op in range(problem.n_ops)]


@dataclass(frozen=True, slots=True)
class _Game:
    """What is needed to make values: buffers by their root values, residents and empty ones left out.

    Attributes
    ----------
    size : list of int
        Bytes each buffer surely takes.
    beside : list of int
        Bytes of it that are surely beside all that its maker reads: 0 where it may be made in place.
    maker : list of int
        Op that makes it.
    reads : list of frozenset of int
        Buffers each op reads.
    workspace : list of int
    """

    size: list[int]
    beside: list[int]
    maker: list[int]
    reads: list[frozenset[int]]
    workspace: list[int]

    @classmethod
    def of(cls, problem: Problem) -> _Game:
        life = problem.lifetimes
        beside = life.least.copy()
        beside[life.out_values[np.diff(life.take_ptr) > 0]] = 0
        counts = (life.maker[life.root] >= 0) & (life.least[life.root] > 0)
        reads = [frozenset(int(life.root[v]) for v in problem.inputs(op) if counts[v]) for op in range(problem.n_ops)]
        return cls(life.least.tolist(), beside.tolist(), life.maker.tolist(), reads, problem.workspace.tolist())

    def lowest(self, op: int) -> int:
        """Bytes that are surely allocated at some time before `op` has all it reads."""
        size, maker = self.size, self.maker
        start = self.reads[op]
        total, pushed = sum(size[v] for v in start), 0
        todo, done = [(total, total, pushed, start)], set[frozenset[int]]()
        while len(done) < _STATES:
            most, total, _, here = heapq.heappop(todo)
            if not here:
                return most
            if here in done:
                continue
            done.add(here)
            for last in sorted({maker[v] for v in here}):
                made = [v for v in here if maker[v] == last]
                read = self.reads[last] - here
                held = total + sum(size[v] for v in read) - sum(size[v] for v in made)
                step = held + self.workspace[last] + sum(self.beside[v] for v in made)
                pushed += 1
                heapq.heappush(todo, (max(most, step), held, pushed, here.difference(made) | read))
        return todo[0][0]


def _reads(problem: Problem, op: int) -> int:
    """Bytes surely allocated for what `op` reads."""
    life = problem.lifetimes
    held: dict[int, int] = {}
    for value in problem.inputs(op):
        shared = int(life.root[value])
        size = min(int(life.nbytes[shared]), int(life.nbytes[value]))
        held[shared] = min(held.get(shared, size), size)
    return sum(held.values())


def writes(problem: Problem, op: int) -> int:
    """Bytes surely allocated for what `op` writes the first time, beside what it reads."""
    life = problem.lifetimes
    total = 0
    for k in range(problem.out_ptr[op], problem.out_ptr[op + 1]):
        value = problem.out_values[k]
        joins = life.place[k] >= 0 or life.take_ptr[k] < life.take_ptr[k + 1]
        if life.place[k] != IN_RESIDENT and (life.kept[value] or not joins):
            total += int(life.nbytes[value])
    return total
