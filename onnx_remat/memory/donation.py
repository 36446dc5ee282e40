"""State in place: which outputs may take over the memory of the resident they replace, and orders that let them.

A renewed weight that is written into the old one's memory costs nothing, provided that everybody who reads the old
weight, or a view of it, runs before. Where somebody must run after, for want of another renewed value say, the weight
cannot be renewed in place.

References
----------
JAX, ``jax.jit(donate_argnums=...)``: buffer donation.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from onnx_remat.memory.problem import Ints, Lifetimes, Problem

Pair = tuple[int, int]
"""A value and the resident whose memory it would take over."""


@dataclass(frozen=True, slots=True)
class Donations:
    """Which pairs can all be had at the same time.

    Attributes
    ----------
    accepted : tuple of (int, int)
        In the order given.
    reasons : dict of (int, int) to str
        Why each of the others cannot.
    """

    accepted: tuple[Pair, ...]
    reasons: dict[Pair, str]

    def apply(self, problem: Problem) -> Problem:
        """`problem` with the accepted pairs."""
        donates = np.full(problem.n_values, -1, np.int32)
        for value, resident in self.accepted:
            donates[value] = resident
        return replace(problem, donates=donates)


def donatable(problem: Problem, pairs: Sequence[Pair]) -> Donations:
    """Of some wanted donations those that leave an order of the ops.

    The largest come first; each then orders its op after the resident's readers, and is left out if the readers must
    run after the op already.

    Parameters
    ----------
    problem : Problem
        The graph; its own `donates` are not looked at, its `donee_may_read` are.
    pairs : sequence of (int, int)
        Values and the residents they would take over.
    """
    life = replace(problem, donates=np.empty(0, np.int32)).lifetimes
    later = [set(life.next_ops[life.next_ptr[op] : life.next_ptr[op + 1]].tolist()) for op in range(problem.n_ops)]
    taken: set[int] = set()
    accepted: set[Pair] = set()
    reasons: dict[Pair, str] = {}
    for pair in sorted(dict.fromkeys(pairs), key=lambda pair: (-int(problem.nbytes[pair[0]]), pair)):
        value, resident = pair
        reason = _unfit(problem, life, value, resident)
        readers = life.readers[life.reader_ptr[resident] : life.reader_ptr[resident + 1]].tolist()
        maker = int(life.maker[value])
        if not reason and (resident in taken or any(value == other for other, _ in accepted)):
            reason = "another value takes it over, or this one takes over another"
        if not reason and _reaches(later, maker, {reader for reader in readers if reader != maker}):
            reason = "somebody who reads the old value must run after its op"
        if reason:
            reasons[pair] = reason
            continue
        for reader in readers:
            if reader != maker:
                later[reader].add(maker)
        taken.add(resident)
        accepted.add(pair)
    return Donations(tuple(pair for pair in dict.fromkeys(pairs) if pair in accepted), reasons)


def _unfit(problem: Problem, life: Lifetimes, value: int, resident: int) -> str:
    """Why a pair cannot be, whatever the order; empty where it can."""
    maker = int(life.maker[value])
    if not problem.resident[resident] or problem.is_output[resident]:
        return "what it would take over is no resident, or is put out itself"
    if maker < 0 or life.root[value] != value:
        return "it has no memory of its own: it is an input or a view"
    if problem.nbytes[value] != problem.nbytes[resident]:
        return "sizes differ"
    readers = life.readers[life.reader_ptr[resident] : life.reader_ptr[resident + 1]]
    if any(_takes_aside(problem, life, int(reader), resident) for reader in readers):
        return "an op reads it that only gives a view of something else, and such an op has no place of its own"
    may_read = len(problem.donee_may_read) > 0 and bool(problem.donee_may_read[value])
    return "" if may_read or maker not in readers else "its kernel reads the old value while it writes the new one"


def _takes_aside(problem: Problem, life: Lifetimes, op: int, resident: int) -> bool:
    """Whether all that an op makes are views, and it reads a resident that they are no views of."""
    viewed = problem.alias_slot[problem.out_ptr[op] : problem.out_ptr[op + 1]].tolist()
    aside = (v for slot, v in enumerate(problem.inputs(op)) if slot not in viewed)
    return min(viewed, default=-1) >= 0 and any(life.root[v] == resident for v in aside)


def _reaches(later: Sequence[set[int]], start: int, targets: set[int]) -> bool:
    """Whether one of `targets` comes after `start`."""
    seen, todo = {start}, [start]
    while todo:
        for op in sorted(later[todo.pop()] - seen):
            if op in targets:
                return True
            seen.add(op)
            todo.append(op)
    return False


def after_readers(problem: Problem, order: Sequence[int] | Ints) -> Ints:
    """An order of all ops, once each, changed only where an op renews what others read later: it waits for them.

    Raises
    ------
    ValueError
        Where the problem's donations leave no order at all, see `donatable`.
    """
    life = problem.lifetimes
    place = np.empty(problem.n_ops, np.int64)
    place[np.asarray(order, np.int64)] = np.arange(problem.n_ops)
    waiting = np.bincount(life.next_ops, minlength=problem.n_ops)
    ready = sorted((int(place[op]), int(op)) for op in np.flatnonzero(waiting == 0))
    found: list[int] = []
    while ready:
        op = heapq.heappop(ready)[1]
        found.append(op)
        for other in life.next_ops[life.next_ptr[op] : life.next_ptr[op + 1]].tolist():
            waiting[other] -= 1
            if not waiting[other]:
                heapq.heappush(ready, (int(place[other]), other))
    if len(found) < problem.n_ops:
        raise ValueError("donations leave no order: an op that renews a value must run before one that reads it")
    return np.asarray(found, np.int32)
