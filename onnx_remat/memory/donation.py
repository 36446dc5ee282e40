"""Donation: which outputs may reuse the memory of the resident they replace, and the orders that allow it.

An updated weight that is written into the old one's memory costs nothing, provided that every op that reads the old
weight, or a view of it, runs earlier. If one must run later, because it also needs another updated value say, the
weight cannot be updated in place.

References
----------
JAX, ``jax.jit(donate_argnums=...)``: buffer donation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from onnx_remat.memory.order import topological
from onnx_remat.memory.problem import Ints, Lifetimes, Problem

Pair = tuple[int, int]
"""A value and the resident whose memory it would reuse."""


@dataclass(frozen=True, slots=True)
class Donations:
    """Donations that are possible together.

    Attributes
    ----------
    accepted : tuple of (int, int)
        Pairs, in the order given.
    reasons : dict of (int, int) to str
        Why each of the other pairs is impossible.
    """

    accepted: tuple[Pair, ...]
    reasons: dict[Pair, str]

    def apply(self, problem: Problem) -> Problem:
        """Return `problem` with the accepted pairs as its donations."""
        donates = np.full(problem.n_values, -1, np.int32)
        for value, resident in self.accepted:
            donates[value] = resident
        return replace(problem, donates=donates)


def donatable(problem: Problem, pairs: Sequence[Pair]) -> Donations:
    """Select, of the requested donations, those with which the ops still have a topological order.

    The largest are tried first. An accepted donation orders its op after the resident's readers; a donation is rejected
    if a reader already has to run after that op.

    Parameters
    ----------
    problem : Problem
        The graph; `donates` is ignored, `donee_may_read` is not.
    pairs : sequence of (int, int)
        Values and the residents whose memory they would reuse.
    """
    life = replace(problem, donates=np.empty(0, np.int32)).lifetimes
    later = [set(ops) for ops in _later(life)]
    taken: set[int] = set()
    accepted: set[Pair] = set()
    reasons: dict[Pair, str] = {}
    for pair in sorted(dict.fromkeys(pairs), key=lambda pair: (-int(problem.nbytes[pair[0]]), pair)):
        value, resident = pair
        reason = _rejection(problem, life, value, resident)
        readers = life.readers[life.reader_ptr[resident] : life.reader_ptr[resident + 1]].tolist()
        maker = int(life.maker[value])
        if not reason and (resident in taken or any(value == other for other, _ in accepted)):
            reason = "another value already replaces it, or this value already replaces another"
        if not reason and _must_precede(later, maker, {reader for reader in readers if reader != maker}):
            reason = "a reader of the old value must run after the op that makes the new one"
        if reason:
            reasons[pair] = reason
            continue
        for reader in readers:
            if reader != maker:
                later[reader].add(maker)
        taken.add(resident)
        accepted.add(pair)
    return Donations(tuple(pair for pair in dict.fromkeys(pairs) if pair in accepted), reasons)


def _rejection(problem: Problem, life: Lifetimes, value: int, resident: int) -> str:
    """Return why a donation is impossible in every order, empty if it is not."""
    maker = int(life.maker[value])
    if not problem.resident[resident] or problem.is_output[resident]:
        return "the replaced value is not resident, or is itself a graph output"
    if maker < 0 or life.root[value] != value:
        return "it has no memory of its own: it is an input or a view"
    if problem.nbytes[value] != problem.nbytes[resident]:
        return "sizes differ"
    readers = life.readers[life.reader_ptr[resident] : life.reader_ptr[resident + 1]]
    if any(_views_and_reads_aside(problem, life, int(reader), resident) for reader in readers):
        return "one of its readers only makes views of another value, and such an op has no fixed place in a schedule"
    may_read = len(problem.donee_may_read) > 0 and bool(problem.donee_may_read[value])
    return "" if may_read or maker not in readers else "its kernel reads the old value while it writes the new one"


def _views_and_reads_aside(problem: Problem, life: Lifetimes, op: int, resident: int) -> bool:
    """Whether all outputs of an op are views, and it reads a resident that none of them is a view of."""
    viewed = problem.alias_slot[problem.out_ptr[op] : problem.out_ptr[op + 1]].tolist()
    aside = (v for slot, v in enumerate(problem.inputs(op)) if slot not in viewed)
    return min(viewed, default=-1) >= 0 and any(life.root[v] == resident for v in aside)


def _must_precede(later: Sequence[set[int]], start: int, targets: set[int]) -> bool:
    """Whether one of `targets` must run after `start`."""
    seen, todo = {start}, [start]
    while todo:
        for op in sorted(later[todo.pop()] - seen):
            if op in targets:
                return True
            seen.add(op)
            todo.append(op)
    return False


def after_readers(problem: Problem, order: Sequence[int] | Ints) -> Ints:
    """Return `order`, once each op, changed only so that an op that updates a resident in place waits for its readers.

    Raises
    ------
    ValueError
        If the problem's donations leave no valid order, see `donatable`.
    """
    place = np.empty(problem.n_ops, np.int64)
    place[np.asarray(order, np.int64)] = np.arange(problem.n_ops)
    found = topological(_later(problem.lifetimes), place.tolist())
    if len(found) < problem.n_ops:
        raise ValueError("donations leave no valid order: an op would overwrite a value before another op reads it")
    return np.asarray(found, np.int32)


def _later(life: Lifetimes) -> list[list[int]]:
    """Return for each op the ops whose first occurrence must follow."""
    return [life.next_ops[start:end].tolist() for start, end in pairwise(life.next_ptr.tolist())]
